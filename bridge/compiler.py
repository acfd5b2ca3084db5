"""`torch.compile` for tpu tensors: the backend "tpu".

torch's default backend, inductor, generates no code for this device. Graphs with a tensor on it go to
the backend here instead, whether it was asked for by name or not; graphs of other devices stay with
inductor. Forward and backward graphs are captured whole by AOTAutograd and run as graphs.

Nothing of torch's compiler is imported until a graph is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_DEVICE_TYPE = "tpu"
_installed = False


def install() -> None:
    """Make `torch.compile(f)` (default backend) send graphs with tpu tensors to `compile_graph`.

    The name "tpu" (`torch.compile(f, backend="tpu")`) is an entry point of the package, in torch's
    group "torch_dynamo_backends". Safe to call again.
    """
    global _installed
    if _installed:
        return
    # The object torch.compile makes for its default backend (private): called with each graph.
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None:
        raise ImportError(
            f"torch {torch.__version__} has no torch._TorchCompileInductorWrapper, which bridge.compiler "
            f"uses to compile for {_DEVICE_TYPE!r}; versions known to work are 2.11 to 2.13"
        )
    inductor = wrapper.__call__

    @functools.wraps(inductor)
    def compile_for_device(
        self: Any, graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        if uses_tpu(graph, inputs):
            return compile_graph(graph, inputs)
        return inductor(self, graph, inputs, **kwargs)

    wrapper.__call__ = compile_for_device
    _installed = True


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The dynamo backend "tpu": `torch.compile(f, backend="tpu")`.

    Args:
        graph: the captured graph of torch ops.
        inputs: example inputs (fake tensors and symbolic sizes).
        options: none are known yet.

    Raises:
        TypeError: an option was given.
    """
    if options:
        raise TypeError(f"the backend {_DEVICE_TYPE!r} has no options, got {', '.join(sorted(options))}")
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=_run_as_graph)(graph, inputs)


def _run_as_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run an ATen graph (forward, backward or inference) op by op."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(graph.forward)


def uses_tpu(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether any input, parameter, buffer or intermediate result of a graph is on the tpu device."""
    tensors = [*inputs, *graph.parameters(), *graph.buffers()]
    if any(_on_tpu(t) for t in tensors):
        return True
    return any(_on_tpu(node.meta.get("example_value")) for node in graph.graph.nodes)


def _on_tpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == _DEVICE_TYPE
    return isinstance(value, list | tuple) and any(_on_tpu(v) for v in value)
