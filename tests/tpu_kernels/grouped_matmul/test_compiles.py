"""The kernels compile for TPUs, forward and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from bridge.topology import compile_for
from tpu_kernels.grouped_matmul.vjp import grouped_matmul


@pytest.mark.parametrize(
    ("chip", "dtype", "transpose_rhs"),
    [
        ("tpu7x", jnp.bfloat16, False),
        pytest.param("v5e", jnp.bfloat16, False, marks=pytest.mark.slow),
        pytest.param("v5e", jnp.float32, True, marks=pytest.mark.slow),
        pytest.param("v6e", jnp.bfloat16, True, marks=pytest.mark.slow),
        pytest.param("v6e", jnp.float32, False, marks=pytest.mark.slow),
        pytest.param("tpu7x", jnp.float32, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sizes", [(1000, 200, 300, 5)])
def test_kernels_compile(chip: str, dtype: type, transpose_rhs: bool, sizes: tuple[int, ...]) -> None:
    m, k, n, groups = sizes

    def both(lhs, rhs, group_sizes, cotangent):
        def call(lhs, rhs):
            return grouped_matmul(lhs, rhs, group_sizes, None, transpose_rhs, impl="pallas")

        output, pull_back = jax.vjp(call, lhs, rhs)
        return output, pull_back(cotangent)

    matrix = (n, k) if transpose_rhs else (k, n)
    avals = (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((groups, *matrix), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
        jax.ShapeDtypeStruct((m, n), dtype),
    )
    assert len(compile_for(both, avals, chip).kernels) == 3
