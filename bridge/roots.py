"""Roots: functions of flat arrays that may stand at the base of an op's programs.

The op's JAX function is one. It may lack a gradient; `with_reference_gradient` and `with_vjp` give it one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bridge.dtypes import torch_dtype
from bridge.schema import ONE, OpSignature, Structure

Flat = Callable[..., tuple[Any, ...]]
"""A function of flat arrays that returns a flat tuple of arrays."""

Rule = tuple[Callable[..., Any], Callable[..., Any]]
"""A gradient rule `(fwd, bwd)`, as for `jax.custom_vjp`."""


def flat_root(
    fn: Callable[..., Any], signature: OpSignature, structure: Structure, statics: tuple[Any, ...]
) -> Flat:
    """`fn`, which has this signature, as a function of flat arrays."""

    def root(*arrays: Any) -> tuple[Any, ...]:
        args, kwargs = signature.arguments(arrays, structure, statics)
        return _flat_results(fn(*args, **kwargs), signature)

    return root


def _flat_results(result: Any, signature: OpSignature) -> tuple[Any, ...]:
    results = tuple(jax.numpy.asarray(r) for r in signature.flatten_result(result))
    for index, array in enumerate(results):
        try:
            torch_dtype(array.dtype)
        except TypeError as error:
            raise TypeError(f"{signature.op}: result {index}: {error}") from None
    return results


class WrongReference(ValueError):
    """The `reference=` of an op does not stand in for its function."""


def checked_reference(kernel: Flat, reference: Flat, op: str) -> Flat:
    """The reference; `WrongReference` where it raises, or gives other shapes or dtypes than the kernel."""

    def root(*arrays: Any) -> tuple[Any, ...]:
        # From shapes alone, outside of any derivative: a reference that has none is not a wrong one.
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        try:
            found = jax.eval_shape(reference, *structs)
        except Exception as error:
            raise WrongReference(f"{op}: its reference raised {type(error).__name__}: {error}") from error
        expected = jax.eval_shape(kernel, *structs)
        if len(found) != len(expected):
            raise WrongReference(f"{op}: its reference returns {len(found)} arrays, the op {len(expected)}")
        for index, (got, want) in enumerate(zip(found, expected, strict=True)):
            if got.shape != want.shape or got.dtype != want.dtype:
                raise WrongReference(
                    f"{op}: its reference returns {got.dtype}{list(got.shape)} as result {index}, the op "
                    f"{want.dtype}{list(want.shape)}; they must have the same shapes and dtypes"
                )
        return reference(*arrays)

    return root


def with_reference_gradient(kernel: Flat, reference: Flat) -> Flat:
    """The kernel's values with the reference's derivatives."""
    combined = jax.custom_vjp(lambda *arrays: kernel(*arrays))
    combined.defvjp(
        # combined, not kernel: a second derivative differentiates this, too
        lambda *arrays: (combined(*arrays), arrays),
        lambda arrays, cotangents: jax.vjp(reference, *arrays)[1](cotangents),
    )
    return combined


def with_vjp(
    kernel: Flat, rule: Rule, signature: OpSignature, structure: Structure, statics: tuple[Any, ...]
) -> Flat:
    """The kernel with the gradient rule that was given to `jax_op`, in flat form."""
    forward, backward = rule

    def fwd(*arrays: Any) -> tuple[tuple[Any, ...], Any]:
        args, kwargs = signature.arguments(arrays, structure, statics)
        out, residuals = forward(*args, **kwargs)
        return _flat_results(out, signature), (residuals, arrays)

    def bwd(saved: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        residuals, arrays = saved
        kind = signature.returns.kind
        packed = cotangents[0] if kind == "tensor" else list(cotangents) if kind == "list" else cotangents
        grads = backward(residuals, packed)
        return _flat_gradients(signature.op, grads, structure, arrays)

    combined = jax.custom_vjp(lambda *arrays: kernel(*arrays))
    combined.defvjp(fwd, bwd)
    return combined


def _flat_gradients(op: str, grads: Any, structure: Structure, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A given rule's gradients, one per tensor argument, as one per array; None means zero."""
    if not isinstance(grads, tuple | list):
        grads = (grads,)
    if len(grads) != len(structure):
        raise TypeError(
            f"{op}: the bwd of vjp=(fwd, bwd) must return one gradient per tensor argument "
            f"({len(structure)}), got {len(grads)}"
        )
    flat: list[Any] = []
    for entry, grad in zip(structure, grads, strict=True):
        if entry is None:
            continue
        if entry == ONE:
            flat.append(grad)
        else:
            flat.extend([None] * entry if grad is None else grad)
    if len(flat) != len(arrays):
        raise TypeError(f"{op}: bwd returned {len(flat)} gradients for {len(arrays)} arrays")
    return tuple(_cotangent(g, a) for g, a in zip(flat, arrays, strict=True))


def _cotangent(grad: Any, array: Any) -> Any:
    """A gradient as JAX wants it for this array: zeros for None, float0 where there is none to have."""
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.inexact):
        return np.zeros(array.shape, jax.dtypes.float0)
    return jax.numpy.zeros(array.shape, array.dtype) if grad is None else jax.numpy.asarray(grad, array.dtype)
