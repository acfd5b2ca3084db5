"""The matrix products of a program in passes over bfloat16 parts (`bridge.precision`), in kernels too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core

from bridge.interpretation.walk import Walk
from bridge.precision import Arithmetic, multiply

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")

# XLA may remove a conversion to bfloat16 and back, to be more exact; reduce_precision it keeps.
_JAX = Arithmetic(
    round=functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7),
    finite_or_zero=lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
)

_PASSES_OF = {
    jax.lax.Precision.HIGH: 3,
    jax.lax.Precision.HIGHEST: 6,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32: 1,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3: 3,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6: 6,
}
"""The precisions in a program that say in how many passes."""

_UNSPECIFIED = (None, jax.lax.Precision.DEFAULT)


def in_passes(jaxpr: core.ClosedJaxpr, passes: int) -> core.ClosedJaxpr:
    """`jaxpr` with its float32 matrix products and convolutions computed in passes.

    Args:
        jaxpr: a program. Its derivatives are taken already: the derivative of passes is not what a TPU
            computes, which is the derivative of the product, in passes.
        passes: 1, 3 or 6, for products that do not say it themselves by `precision=`.
    """
    return _InPasses(passes).value(jaxpr)


class _InPasses(Walk):
    def __init__(self, passes: int) -> None:
        super().__init__()
        self._passes = passes

    def eqn(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if eqn.primitive.name not in _PRODUCTS:
            return self.nested(eqn)
        passes = self._passes_of(eqn)
        return eqn if passes is None else _emulated(eqn, passes)

    def _passes_of(self, eqn: core.JaxprEqn) -> int | None:
        """None where the product is not one of float32 numbers, or asks for an algorithm of its own."""
        dtypes = [_dtype(var) for var in eqn.invars[:2]]
        if jnp.float32 not in dtypes or not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            return None
        if any(d.itemsize > 4 for d in dtypes):
            return None
        asked = eqn.params["precision"]
        each = asked if type(asked) is tuple else (asked,)  # one for each operand, or an algorithm
        found = [self._passes if p in _UNSPECIFIED else _PASSES_OF.get(p, 0) for p in each]
        return max(found) if all(found) else None


def _emulated(eqn: core.JaxprEqn, passes: int) -> core.JaxprEqn:
    """One equation that computes the product in passes: a call of a jitted function."""
    params = {**eqn.params, "precision": None, "preferred_element_type": jnp.dtype("float32")}

    def in_passes(lhs: Any, rhs: Any, *rest: Any) -> Any:
        def product(left: Any, right: Any) -> Any:
            return eqn.primitive.bind(left, right, *rest, **params)

        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return multiply(product, lhs, rhs, passes, _JAX).astype(_dtype(eqn.outvars[0]))

    in_passes.__name__ = f"{eqn.primitive.name}_in_{passes}_passes"
    traced = jax.make_jaxpr(jax.jit(in_passes))(*[var.aval for var in eqn.invars])
    (call,) = traced.jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _dtype(var: Any) -> Any:
    return var.aval.dtype
