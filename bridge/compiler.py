"""`torch.compile` for tpu tensors: the backend "tpu".

torch's default backend, inductor, generates no code for this device. Graphs with a tensor on it go to
the backend here instead, whether it was asked for by name or not; graphs of other devices stay with
inductor. Forward and backward graphs are captured whole by AOTAutograd and run as graphs.

Nothing of torch's compiler is imported until a graph is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from bridge.device.imports import after_import

_DEVICE_TYPE = "tpu"
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_TORCH_TPU_OPTIONS = frozenset(
    ["async_compile", "bucket_size", "custom_module_name", "debug_callback", "name", "num_dynamic_buckets"]
    + ["serializable"]
)
"""The options of the backend "tpu" of torch_tpu 0.2.0: how it compiles, not what is computed."""
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
            _check_inductor_options(self.config)
            return compile_graph(graph, inputs)
        return inductor(self, graph, inputs, **kwargs)

    wrapper.__call__ = compile_for_device
    after_import("torch._inductor.codegen.common", _refuse_in_inductor)
    _save_random_state_of_device()
    _installed = True


def compile_graph(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The dynamo backend "tpu": `torch.compile(f, backend="tpu")`.

    Args:
        graph: the captured graph of torch ops.
        inputs: example inputs (fake tensors and symbolic sizes).
        mode: one of torch.compile's modes. They say how hard to optimise, which changes nothing here.
        options: those of the backend "tpu" of torch_tpu 0.2.0 are accepted, and change nothing here.

    Raises:
        ValueError: an unknown mode.
        TypeError: an unknown option.
    """
    if mode is not None and mode not in _MODES:
        raise ValueError(
            f"the backend {_DEVICE_TYPE!r} knows the modes {', '.join(map(repr, _MODES))}; got {mode!r}"
        )
    unknown = sorted(set(options or ()) - _TORCH_TPU_OPTIONS)
    if unknown:
        raise TypeError(
            f"the backend {_DEVICE_TYPE!r} has no option {', '.join(map(repr, unknown))}; it has those of "
            f"torch_tpu: {', '.join(sorted(_TORCH_TPU_OPTIONS))}"
        )
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=_run_as_graph)(graph, inputs)


def _run_as_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run an ATen graph (forward, backward or inference) op by op."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(graph.forward)


def _check_inductor_options(config: Mapping[str, Any]) -> None:
    """Accept what `mode=` sets (settings of inductor that say how hard to optimise), refuse `options=`."""
    if not config:
        return
    from torch._inductor import list_mode_options

    if config not in list_mode_options().values():
        raise TypeError(
            f"torch.compile(options={dict(config)}): these are options of torch's backend inductor, which "
            f"does not compile graphs on {_DEVICE_TYPE!r}. Leave them out, or use backend={_DEVICE_TYPE!r} "
            "with its own options."
        )


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


# -- inductor, called past torch.compile -----------------------------------------------------------


class _NoGenerator:
    """Stands where inductor looks for what makes code for the device, and says that there is none."""

    supports_caching = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.create()

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"inductor (and AOTInductor) generates no code for the simulated {_DEVICE_TYPE!r} device; "
            f"use torch.compile(..., backend={_DEVICE_TYPE!r}), or torch.export without it"
        )


def _refuse_in_inductor(common: ModuleType) -> None:
    """Without this, inductor's generator for TPUs would run, and fail to import torch_tpu."""
    common.register_backend_for_device(_DEVICE_TYPE, _NoGenerator, _NoGenerator, _NoGenerator, _NoGenerator)


# -- random numbers ------------------------------------------------------------------------------


def _save_random_state_of_device() -> None:
    """Let compiled graphs draw the same random numbers again in backward (activation checkpointing).

    torch's two operators for that know the devices it has itself and no way to add one.
    """
    from torch._prims import rng_prims

    def run_and_save(others: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of(args, kwargs)
        if device is None:
            return others(op, *args, **kwargs)
        state = torch.get_device_module(device).get_rng_state(device)
        return state, op(*args, **kwargs)

    def run_with(others: Callable[..., Any], state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of(args, kwargs)
        if device is None:
            return others(state, op, *args, **kwargs)
        module = torch.get_device_module(device)
        current = module.get_rng_state(device)
        module.set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            module.set_rng_state(current, device)

    key = torch._C.DispatchKey.BackendSelect
    for operator, kernel in (
        (rng_prims.run_and_save_rng_state, run_and_save),
        (rng_prims.run_with_rng_state, run_with),
    ):
        operator.py_kernels[key] = functools.partial(kernel, operator.py_kernels[key])
        operator._dispatch_cache.clear()


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The tpu device an op draws on: the one it is given, or that of its first tensor."""
    given = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), None)
    device = torch.device(given) if given is not None else None
    return device if device is not None and device.type == _DEVICE_TYPE else None


# -- kernels in Python ---------------------------------------------------------------------------


def run_as_is(*modules: ModuleType, and_what_they_call: bool = True) -> None:
    """Keep `torch.compile` out of the functions of these modules.

    A compiled function runs ops eagerly after a graph break. The kernels that torch then calls are Python
    functions, and it would set out to compile each of them, frame by frame.
    """
    # Private. The public torch.compiler.disable would import the compiler, and cost time at each call.
    eval_frame = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    action = eval_frame._FrameAction
    inside = action.SKIP if and_what_they_call else action.DEFAULT
    strategy = eval_frame._FrameExecStrategy(action.SKIP, inside)
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                for code in _with_nested(function.__code__):
                    eval_frame.set_code_exec_strategy(code, strategy)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
