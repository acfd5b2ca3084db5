"""The dtype table: both ways for every dtype torch and JAX share, and a refusal by name for the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from bridge import dlpack
from bridge.dtypes import DIFFERENTIABLE, FLOAT4, FLOAT4_PACKED, SHAREABLE, WIDE, jax_dtype, torch_dtype

ALL = [*sorted(SHAREABLE, key=str), FLOAT4_PACKED]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_translates_both_ways(dtype: torch.dtype) -> None:
    assert torch_dtype(jax_dtype(dtype)) is dtype


@pytest.mark.parametrize("dtype", sorted(SHAREABLE, key=str), ids=str)
def test_names_and_sizes_agree(dtype: torch.dtype) -> None:
    theirs = jax_dtype(dtype)
    assert str(theirs) == str(dtype).removeprefix("torch.")
    assert theirs.itemsize == dtype.itemsize
    assert dlpack.DTYPE_CODES[dtype][1] == 8 * dtype.itemsize


def test_every_shareable_dtype_has_a_dlpack_code_of_its_own() -> None:
    assert dlpack.DTYPE_CODES.keys() == SHAREABLE
    assert len(set(dlpack.DTYPE_CODES.values())) == len(SHAREABLE)


def test_every_torch_dtype_is_known_or_refused_by_its_name() -> None:
    dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    for dtype in dtypes:
        if dtype in SHAREABLE or dtype is FLOAT4_PACKED:
            jax_dtype(dtype)
        else:
            with pytest.raises(TypeError, match=str(dtype)):
                jax_dtype(dtype)


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_jax_dtypes_torch_lacks_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"torch has no dtype for JAX's {name}"):
        torch_dtype(np.dtype(getattr(ml_dtypes, name)))


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint4, torch.int1], ids=str)
def test_torchs_sub_byte_integers_are_refused_with_a_remedy(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"{dtype}.*torch\.int8"):
        jax_dtype(dtype)


@pytest.mark.parametrize(
    "given", [jnp.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16, "bfloat16"]
)
def test_anything_that_names_a_dtype(given: object) -> None:
    assert torch_dtype(given) is torch.bfloat16


@pytest.mark.parametrize("given", ["no such dtype", object(), str, np.dtype("datetime64[ns]")])
def test_nonsense_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match="torch has no dtype"):
        torch_dtype(given)


def test_packed_float4_is_two_values_per_byte() -> None:
    assert jax_dtype(FLOAT4_PACKED) == FLOAT4
    assert FLOAT4_PACKED not in SHAREABLE


def test_wide_dtypes_are_those_jax_narrows() -> None:
    for dtype in SHAREABLE:
        narrowed = jax.dtypes.canonicalize_dtype(jax_dtype(dtype)) != jax_dtype(dtype)
        assert (dtype in WIDE) == narrowed, dtype


def test_gradients_are_for_floating_and_complex_dtypes() -> None:
    for dtype in SHAREABLE:
        assert (dtype in DIFFERENTIABLE) == (dtype.is_floating_point or dtype.is_complex)
    assert FLOAT4_PACKED not in DIFFERENTIABLE
