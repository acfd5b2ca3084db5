"""Checks for a process in which the device "tpu" is that of `torch_tpu`; test_beside_torch_tpu.py runs it.

python with_torch_tpu.py stub   every kernel of the catalog goes through the stand-in, values and gradients
python with_torch_tpu.py wheel  the same with the real package, which can trace and export without a TPU,
                                but not run: results are shapes and dtypes
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bridge
from autotune import KernelSpec, Problem
from bridge import device, graph, platforms
from bridge.interpretation import target_chip
from bridge.op import JaxOp, _registered
from bridge.program import Program
from tpu_kernels.catalog import CATALOG

Tensors = Sequence[torch.Tensor | None]


def main(which: str) -> None:
    if which == "stub":
        check_ours_stepped_aside()
        check_the_chip_is_known()
        check_kernels_run_through(made_by_stub())
    elif which == "wheel":
        register_real_device()
        check_ours_stepped_aside()
        check_signatures_and_fakes()
        check_hand_over()


def check_ours_stepped_aside() -> None:
    assert torch.device("tpu").type == "tpu"
    assert device.register() is False and not device.is_simulated()
    assert not hasattr(torch.tpu, "is_simulated")  # pyright: ignore[reportAttributeAccessIssue]


def check_the_chip_is_known() -> None:
    """Tiles are chosen, and kernels lowered, for the chip that is here, also where JAX is on the CPU."""
    assert platforms.present_chip() == target_chip() == "v5e"
    seen = []

    @bridge.jax_op("checked::chip")
    def rounded_down(x: jax.Array) -> jax.Array:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            seen.append((target_chip(), pltpu.get_tpu_info().generation))
            o_ref[...] = x_ref[...] // 7  # its sign is lowered for a generation of chips

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = torch.arange(-512, 512, dtype=torch.int32).view(8, 128)
    torch.testing.assert_close(rounded_down(x.to("tpu")).cpu(), x // 7)
    assert seen and set(seen) == {("v5e", 5)}


def problems(spec: KernelSpec) -> list[Problem]:
    """The small problems of the catalog."""
    small = [e.problem for e in spec.examples if not e.benchmark]
    return [p for p in small if all(a is None or a.size < 100_000 for _, a in p.arrays)]


def tensors_of(problem: Problem, where: str, requires_grad: bool = False) -> list[torch.Tensor | None]:
    def make(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if where == "meta" or torch._C._len_torch_dispatch_stack():
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=where)
        else:
            value = torch.randn(shape).to(getattr(torch, dtype)).to(where)
        return value.requires_grad_(requires_grad)

    (values,) = (spec.values(problem) for spec in CATALOG if spec.name == problem.kernel)
    return [
        torch.from_numpy(values[name]).to(where)
        if name in values
        else None
        if a is None
        else make(a.shape, a.dtype)
        for name, a in problem.arrays
    ]


# ------------------------------------------------------------------------------------ with the stand-in


def made_by_stub() -> list[str]:
    from torch_tpu._internal.pallas import pallas  # pyright: ignore[reportMissingImports]

    return pallas.made


def check_kernels_run_through(made: list[str]) -> None:
    """Forward and backward on tpu give what they give on the CPU, and nothing but the stand-in ran them."""
    for spec in CATALOG:
        for problem in problems(spec)[2:4]:
            torch.manual_seed(0)
            on_cpu = tensors_of(problem, "cpu", requires_grad=True)
            on_tpu = [
                None if t is None else t.detach().to("tpu").requires_grad_(t.requires_grad) for t in on_cpu
            ]
            bridge.reset_stats()
            got = value_and_gradients(spec, problem, on_tpu)
            assert bridge.stats().calls == 0, "a program ran in the bridge, on the CPU"
            for ours, expected in zip(got, value_and_gradients(spec, problem, on_cpu), strict=True):
                torch.testing.assert_close(ours, expected)
        for kind in ("|fwd(", "|bwd("):
            assert any(spec.name in name and kind in name for name in made), (spec.name, kind, made)


def value_and_gradients(spec: KernelSpec, problem: Problem, tensors: Tensors) -> list[torch.Tensor]:
    out = spec.torch_call(problem, *tensors)
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    gradients = torch.autograd.grad(out, leaves, cotangent)
    return [t.detach().cpu() for t in (out, *gradients)]


# ------------------------------------------------------------------------------------ with the real package


def register_real_device() -> None:
    """What `torch_tpu` does when torch loads it where there is a TPU. The TPU is looked for at first use."""
    from torch_tpu import _loader  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    _loader._init_device("tpu")


def check_signatures_and_fakes() -> None:
    """torch_tpu's own `jax_op` takes the function of every kernel, and gives the results ours gives.

    Its static arguments cannot be dataclasses: `tiling` is bound.
    """
    from torch_tpu._internal.pallas.pallas import jax_op  # pyright: ignore[reportMissingImports]

    for spec in CATALOG:
        theirs = jax_op(f"checked::{spec.name}", functools.partial(spec.fn, tiling=None))
        print(f"{spec.name}: torch_tpu's schema is {theirs._opoverload._schema}")
        for where in ("cpu", "meta", "tpu"):
            for problem in problems(spec):
                with FakeTensorMode():
                    tensors = tensors_of(problem, where)
                    found = theirs(*tensors, *(value for _, value in problem.params))
                    assert_alike(found, spec.torch_call(problem, *tensors))


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    description = lambda t: (t.shape, t.dtype, t.device, t.stride())
    assert description(found) == description(expected), (found, expected)


def check_hand_over() -> None:
    """Calls, gradients, second gradients and vmap of every kernel reach torch_tpu's compiled-kernel call.

    The tensors are fake ones on the CPU: torch's autograd asks the device for streams, and there is none.
    """
    for spec in CATALOG:
        for problem in [p for p in problems(spec) if all(a is None or a.size for _, a in p.arrays)][:4]:
            with stand_in_for_hardware() as calls, FakeTensorMode(), HandOver() as handed:
                use_in_every_way(functools.partial(spec.torch_call, problem), tensors_of(problem, "cpu"))
            for kind in ("fwd", "bwd", "vjp", "vmap"):
                assert any(f"|{kind}(" in name for name in handed.names), (kind, handed.names)
            assert any("|" not in name for name in handed.names), handed.names
            assert calls == handed.names, (calls, handed.names)
        print(f"{spec.name}: handed over to torch_tpu, exported for the TPU by it")


def use_in_every_way(function: Callable[..., torch.Tensor], tensors: Tensors) -> None:
    function(*tensors)
    x, *rest = tensors
    assert x is not None
    torch.vmap(lambda x: function(x, *rest))(torch.stack([x, x]))
    leaves = [None if t is None else t.requires_grad_(t.is_floating_point()) for t in tensors]
    present = [t for t in leaves if t is not None and t.requires_grad]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, present, torch.empty_like(out), create_graph=True)
    torch.autograd.grad(gradients[0], present, torch.empty_like(gradients[0]), allow_unused=True)


class HandOver(TorchDispatchMode):
    """Runs the bridge's programs as `execute` does where `torch_tpu` serves, on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        expected = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "bridge::run":
            self._check(graph.resolve(args[1]), args[0], expected)
        elif name.startswith("tpu_kernels::"):
            op: JaxOp = _registered(name)
            bound = op._signature.bind(args, kwargs or {})
            self._check(op._program(bound), bound.tensors, [expected])
        return expected

    def _check(
        self, program: Program, tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> None:
        self.names.append(program.name)
        found = platforms.run_on_tpu(program, tensors, program.is_wide(tensors))
        for f, e in zip(found, expected, strict=True):
            assert f.device.type == "tpu"
            assert_alike(f, e.to("tpu"))


@contextlib.contextmanager
def stand_in_for_hardware() -> Iterator[list[str]]:
    """torch_tpu's last step, running a kernel that it has exported and registered, gives empty results."""
    from torch_tpu._internal.pallas import pallas  # pyright: ignore[reportMissingImports]

    extension, calls = pallas.tpu_torch_pallas, []

    class Extension:
        lookup_custom_kernel = staticmethod(extension.lookup_custom_kernel)
        register_custom_kernel = staticmethod(extension.register_custom_kernel)

        @staticmethod
        def call_custom_kernel(
            name: str, fingerprint: str, *, inputs: Sequence[torch.Tensor], output_shapes: Any, **options: Any
        ) -> list[torch.Tensor]:
            assert extension.lookup_custom_kernel(name, fingerprint)
            calls.append(name)
            return [torch.empty_like(o) for o in output_shapes]

    pallas.tpu_torch_pallas = Extension
    try:
        yield calls
    finally:
        pallas.tpu_torch_pallas = extension


if __name__ == "__main__":
    main(sys.argv[1])
