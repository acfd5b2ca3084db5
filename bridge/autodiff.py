"""Gradients of an op: programs derived by `jax.vjp` and `jax.jvp`, and the torch Functions that run them.

For a program f and the inputs `wrt` that need gradients:

- `f|fwd(wrt)` gives f's results and the residuals that `jax.vjp` keeps;
- `f|bwd(n,wrt)` takes the n inputs, kept results, residuals and cotangents, and gives gradients;
- `f|vjp(n,wrt)` gives gradients from inputs and cotangents alone. It is differentiable in both, so
  double backward uses it: residuals alone would hide their dependence on the inputs;
- `f|jvp(wrt)` gives tangents of the results from inputs and their tangents.

A residual that is an input or a result is not returned a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.core import eval_jaxpr
from jax.extend.core import Var

from bridge import fake
from bridge.avals import Avals
from bridge.batching import apply_given, batched, given_rule, vmapped
from bridge.dtypes import DIFFERENTIABLE, FLOAT4
from bridge.execute import run
from bridge.interpretation import current_mode, interpret
from bridge.program import NotDifferentiable, Program
from bridge.roots import Flat
from bridge.shapes import shapes_only

# ---------------------------------------------------------------------------------- programs


def step(program: Program, kind: str, numbers: Sequence[int]) -> Program:
    """One derivation by its name: "fwd", "bwd", "vjp" or "jvp", with the numbers in its brackets."""
    if kind == "fwd":
        return forward(program, tuple(numbers))
    if kind == "jvp":
        return jacobian_vector(program, tuple(numbers))
    if kind == "bwd":
        return backward(program, numbers[0], tuple(numbers[1:]))
    if kind == "vjp":
        return vector_jacobian(program, numbers[0], tuple(numbers[1:]))
    raise ValueError(f"not a derivation: {kind!r}")


def forward(program: Program, wrt: tuple[int, ...]) -> Program:
    """inputs -> (*results, *residuals)"""

    def derived(fn: Flat) -> Flat:
        return lambda *arrays: _linearize(fn, arrays, wrt)[1]

    return program.derive(f"fwd({_text(wrt)})", derived, differentiates=True)


def backward(program: Program, count: int, wrt: tuple[int, ...]) -> Program:
    """(*inputs, *kept results, *residuals, *cotangents of float results) -> gradients of `wrt`"""

    def derived(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            inputs, rest = arrays[:count], list(arrays[count:])
            linear, outs = _abstract_linearization(fn, inputs, wrt)
            kept = {i: rest.pop(0) for i in linear.kept_outs}
            residuals, cotangents = rest[: linear.num_residuals], rest[linear.num_residuals :]
            sources: dict[str, Any] = {"in": inputs, "out": kept, "res": residuals}
            leaves = [sources[kind][i] for kind, i in linear.leaves]
            return _torch_gradients(jax.tree.unflatten(linear.tree, leaves)(_cotangents(outs, cotangents)))

        return call

    return program.derive(f"bwd({_text((count, *wrt))})", derived, differentiates=True)


def vector_jacobian(program: Program, count: int, wrt: tuple[int, ...]) -> Program:
    """(*inputs, *cotangents of float results) -> gradients of `wrt`"""

    def derived(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            inputs, cotangents = arrays[:count], arrays[count:]
            outs, pull = jax.vjp(_of(fn, inputs, wrt), *[inputs[i] for i in wrt])
            return _torch_gradients(pull(_cotangents(outs, cotangents)))

        return lambda *arrays: _needed_only(call, arrays)

    return program.derive(f"vjp({_text((count, *wrt))})", derived, differentiates=True)


def jacobian_vector(program: Program, wrt: tuple[int, ...]) -> Program:
    """(*inputs, *tangents of `wrt`) -> tangents of the float results"""

    def derived(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            inputs, tangents = arrays[: -len(wrt)], arrays[-len(wrt) :]
            outs, pushed = jax.jvp(_of(fn, inputs, wrt), tuple(inputs[i] for i in wrt), tangents)
            return tuple(t for out, t in zip(outs, pushed, strict=True) if _is_float(out))

        return call

    return program.derive(f"jvp({_text(wrt)})", derived, differentiates=True)


def _needed_only(fn: Flat, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """`fn(*arrays)` without the operations whose results nothing reads.

    The gradient of a custom rule often does not read the function's value. A kernel that computes it would
    stop a further derivative, having none itself, and JAX never drops a kernel.
    """
    traced = jax.make_jaxpr(fn)(*arrays)
    needed = {v for v in traced.jaxpr.outvars if isinstance(v, Var)}
    kept = []
    for equation in reversed(traced.jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(v for v in equation.invars if isinstance(v, Var))
    return tuple(eval_jaxpr(traced.jaxpr.replace(eqns=kept[::-1]), traced.consts, *arrays))


def _text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


# ---------------------------------------------------------------------------------- linearization


class Linearization(NamedTuple):
    """What `jax.vjp` keeps of a program.

    Attributes:
        num_outs: how many results the program has.
        float_outs: which of them have cotangents.
        kept_outs: which of them the backward reads.
        num_residuals: how many further arrays it reads.
        tree: the structure of the backward function's data.
        leaves: where each piece of that data comes from: ("in", i), ("out", j) or ("res", k).
    """

    num_outs: int
    float_outs: tuple[int, ...]
    kept_outs: tuple[int, ...]
    num_residuals: int
    tree: Any
    leaves: tuple[tuple[str, int], ...]


def linearization(program: Program, wrt: tuple[int, ...], avals: Avals) -> Linearization:
    """What `f|fwd(wrt)` returns and `f|bwd(n,wrt)` reads.

    Raises:
        NotDifferentiable: no root of the program has a gradient.
    """

    def kept(fn: Flat, structs: Sequence[Any]) -> Linearization:
        with shapes_only():
            return _abstract_linearization(fn, structs, wrt)[0]

    return program.abstract(kept, avals, differentiates=True)


def _linearize(
    fn: Flat, arrays: Sequence[Any], wrt: tuple[int, ...]
) -> tuple[Linearization, tuple[Any, ...], Any]:
    """(what is kept, (*results, *residuals), results)"""
    outs, pull = jax.vjp(_of(fn, arrays, wrt), *[arrays[i] for i in wrt])
    float_outs = tuple(i for i, out in enumerate(outs) if _is_float(out))
    # JAX notices only when it transposes that a kernel can't be: try it now, before forward has run.
    jax.eval_shape(lambda *cts: pull(_cotangents(outs, cts)), *[outs[i] for i in float_outs])
    data, tree = jax.tree.flatten(pull)
    places = {id(out): ("out", i) for i, out in enumerate(outs)}
    places |= {id(array): ("in", i) for i, array in enumerate(arrays)}
    residuals: list[Any] = []
    leaves: list[tuple[str, int]] = []
    for leaf in data:
        place = places.get(id(leaf))
        if place is None:
            place = ("res", len(residuals))
            residuals.append(leaf)
        leaves.append(place)
    kept = tuple(sorted({i for kind, i in leaves if kind == "out"}))
    linear = Linearization(len(outs), float_outs, kept, len(residuals), tree, tuple(leaves))
    return linear, (*outs, *map(jax.numpy.asarray, residuals)), outs


def _abstract_linearization(
    fn: Flat, arrays: Sequence[Any], wrt: tuple[int, ...]
) -> tuple[Linearization, Sequence[Any]]:
    """`_linearize` from shapes alone: (what is kept, results as shapes)."""
    found: list[Linearization] = []

    def results(*traced: Any) -> Any:
        linear, _, outs = _linearize(fn, traced, wrt)
        found.append(linear)
        return outs

    outs = jax.eval_shape(results, *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
    return found[-1], outs


def _of(fn: Flat, arrays: Sequence[Any], wrt: tuple[int, ...]) -> Any:
    """fn as a function of the inputs `wrt` alone."""

    def partial(*chosen: Any) -> tuple[Any, ...]:
        inputs = list(arrays)
        for i, value in zip(wrt, chosen, strict=True):
            inputs[i] = value
        return tuple(fn(*inputs))

    return partial


def _cotangents(outs: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """One cotangent per result: the given ones for float results, JAX's float0 zeros for the others."""
    rest = iter(given)
    return tuple(
        _conjugate(next(rest)) if _is_float(out) else np.zeros(out.shape, jax.dtypes.float0) for out in outs
    )


def _torch_gradients(cotangents: Iterable[Any]) -> tuple[Any, ...]:
    """torch's gradient of a complex tensor is the conjugate of JAX's cotangent; of a real one, the same."""
    return tuple(map(_conjugate, cotangents))


def _conjugate(array: Any) -> Any:
    return jax.numpy.conj(array) if jax.numpy.iscomplexobj(array) else array


def _is_float(array: Any) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)) and array.dtype != FLOAT4


# ---------------------------------------------------------------------------------- torch


Runner = Callable[[Program, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def call(program: Program, tensors: Sequence[torch.Tensor], below: Runner = run) -> Sequence[torch.Tensor]:
    """Run a program so that whatever is watching (autograd, torch.func, forward AD) sees it.

    Args:
        below: how to run it below autograd; `execute` where the caller knows that nothing else watches.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad_active():
        return _Transformed.apply(program, *tensors)
    if program.definition.sharding is not None and torch.is_grad_enabled():
        # What JAX keeps for the backward has no partition specs: it computes that again.
        if any(tensor.requires_grad for tensor in tensors):
            return _Transformed.apply(program, *tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                break
        else:
            return below(program, tensors)
        wrt = tuple(i for i, t in enumerate(tensors) if t.requires_grad and t.dtype in DIFFERENTIABLE)
        if wrt:
            return _Recorded.apply(program, wrt, below, *tensors)
    return below(program, tensors)


def forward_ad_active() -> bool:
    """Whether dual tensors may be about (inside a Function's forward they count as plain ones)."""
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


class _Plan(NamedTuple):
    """What a recorded call needs at its shapes: what is kept, and the forward and backward programs."""

    linear: Linearization
    forward: Program
    backward: Program
    silent: tuple[int, ...]  # the results that have no gradient


def _plan(program: Program, wrt: tuple[int, ...], avals: Avals) -> _Plan:
    linear = linearization(program, wrt, avals)
    silent = tuple(i for i in range(linear.num_outs) if i not in linear.float_outs)
    return _Plan(linear, forward(program, wrt), backward(program, len(avals.shapes), wrt), silent)


class _Recorded(torch.autograd.Function):
    """A call recorded for backward, with the residuals that JAX keeps."""

    @staticmethod
    def forward(
        ctx: Any, program: Program, wrt: tuple[int, ...], below: Runner, *tensors: torch.Tensor
    ) -> Any:
        ctx.call = (program, wrt, len(tensors), current_mode())
        ctx.set_materialize_grads(False)
        try:
            plan: _Plan = fake.of_tensors(program, "recorded", tensors, lambda a: _plan(program, wrt, a), wrt)
        except NotDifferentiable as error:
            ctx.plan, ctx.error = None, error
            outs = below(program, tensors)
            ctx.mark_non_differentiable(*(o for o in outs if o.dtype not in DIFFERENTIABLE))
            return tuple(outs)
        ctx.plan, linear = plan, plan.linear
        flat = below(plan.forward, tensors)
        count = linear.num_outs
        if len(flat) != count + linear.num_residuals:
            raise RuntimeError(
                f"{program.definition.name}: its gradient keeps {linear.num_residuals} arrays at some "
                f"sizes and {len(flat) - count} at these; mark the sizes static (dynamic=False)"
            )
        outs = flat[:count]
        if len(linear.float_outs) > 1:  # a gradient may be missing then, and zeros must stand for it
            ctx.like = [(o.shape, o.dtype, o.device) for o in (outs[i] for i in linear.float_outs)]
        ctx.save_for_backward(*tensors, *[outs[i] for i in linear.kept_outs], *flat[count:])
        if plan.silent:
            ctx.mark_non_differentiable(*[outs[i] for i in plan.silent])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        plan: _Plan | None = ctx.plan
        if plan is None:
            raise NotDifferentiable(str(ctx.error)) from ctx.error
        program, wrt, count, mode = ctx.call
        given = [grads[i] for i in plan.linear.float_outs]
        cotangents = [grad for grad in given if grad is not None]
        if len(cotangents) < len(given):
            if not cotangents:
                return (None,) * (3 + count)
            cotangents = [
                torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                for grad, (shape, dtype, device) in zip(given, ctx.like, strict=True)
            ]
        saved = ctx.saved_tensors
        # A thread of torch's own has no mode set.
        with _SAME if current_mode() == mode else interpret(mode):
            if torch.is_grad_enabled():
                pull = vector_jacobian(program, count, wrt)
                found = batched(call, pull, [*saved[:count], *cotangents])
            else:
                found = batched(run, plan.backward, [*saved, *cotangents])
        if len(wrt) == count:
            return None, None, None, *found
        return None, None, None, *_spread(found, wrt, count)


_SAME = contextlib.nullcontext()


class _Transformed(torch.autograd.Function):
    """A call under torch.func transforms or forward AD, each of which sees the program at its own level.

    It keeps no residuals: an outer transform must be able to differentiate the backward, too.
    """

    @staticmethod
    def forward(program: Program, *tensors: torch.Tensor) -> Any:
        return tuple(run(program, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        program, *tensors = inputs
        ctx.program, ctx.mode = program, current_mode()
        ctx.num_outs = len(output)
        ctx.float_outs = tuple(i for i, o in enumerate(output) if o.dtype in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*(o for o in output if o.dtype not in DIFFERENTIABLE))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors
        wrt = tuple(
            i
            for i, (needed, t) in enumerate(zip(ctx.needs_input_grad[1:], inputs, strict=True))
            if needed and t.dtype in DIFFERENTIABLE
        )
        cotangents = [grads[i] for i in ctx.float_outs]
        # A thread of torch's own has no mode set.
        with _SAME if current_mode() == ctx.mode else interpret(ctx.mode):
            found = call(vector_jacobian(ctx.program, len(inputs), wrt), [*inputs, *cotangents])
        return None, *_spread(found, wrt, len(inputs))

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        tangents = given[1:]  # the first stands for the program
        inputs = ctx.saved_tensors
        wrt = tuple(i for i, t in enumerate(tangents) if t is not None and inputs[i].dtype in DIFFERENTIABLE)
        pushed = iter(
            batched(call, jacobian_vector(ctx.program, wrt), [*inputs, *(tangents[i] for i in wrt)])
        )  # type: ignore[list-item]
        return tuple(next(pushed) if i in ctx.float_outs else None for i in range(ctx.num_outs))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        program, *tensors = args
        rule = given_rule(program)
        if rule is not None:
            return apply_given(rule, info, in_dims[1:], program, tensors)
        outs = call(vmapped(program, in_dims[1:]), tensors)
        return tuple(outs), (0,) * len(outs)


def _spread(found: Sequence[Any], wrt: tuple[int, ...], count: int) -> list[Any]:
    """Gradients of the inputs `wrt` as one entry per input."""
    spread: list[Any] = [None] * count
    for i, grad in zip(wrt, found, strict=True):
        spread[i] = grad
    return spread
