"""Two thousand random tensors through an identity and a reduction: the right value or a clear error.

Shapes and dtypes come from a small set, since each new pair compiles; strides, offsets, alignment,
devices, gradients and lazy bits are free. The first batches are quick, and the others slow tests.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import device as simulated
from bridge import jax_op, to_jax
from bridge.dtypes import SHAREABLE, WIDE

simulated.register()

TENSORS, BATCHES, QUICK_BATCHES = 2000, 10, 4
SHAPES = [(), (7,), (3, 5), (0, 3), (2, 1, 4)]
DTYPES = sorted(SHAREABLE, key=str)
REFUSED = ["int4", "complex32", "quantised", "sparse", "nested", "freed", "shrunk", "numpy", "none"]


def _identity(x: jax.Array) -> jax.Array:
    return x


def _total(x: jax.Array) -> jax.Array:
    """The sum in the widest type of its kind, so that the oracle is easily exact or nearly so."""
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.sum(x.astype(jnp.int64))
    return jnp.sum(x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64))


IDENTITY = jax_op("test_fuzz::identity", _identity)
TOTAL = jax_op("test_fuzz::total", _total, x64=True)


def _values(rng: random.Random, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Small exact values, and now and then all bit patterns the dtype has."""
    if dtype is torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)])
    if rng.random() < 0.2:
        raw = torch.tensor([rng.randrange(256) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
        return raw.view(dtype)
    low = -8 if dtype.is_signed and dtype is not torch.float8_e8m0fnu else 1
    numbers = [2.0 ** rng.randrange(4) if low == 1 else float(rng.randrange(low, 9)) for _ in range(count)]
    return torch.tensor(numbers).to(dtype)


def _draw(rng: random.Random) -> torch.Tensor:
    """A tensor of one of the shapes, with any layout, device and flags."""
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    order = list(range(len(shape)))
    rng.shuffle(order)
    steps = [rng.choice([0, 1, 1, 1, 2, 3]) for _ in shape]
    strides, reach = [0] * len(shape), 1
    for axis in order:  # rows in any order, with gaps, or repeated (step 0)
        strides[axis] = reach * steps[axis]
        reach *= max(1, 1 + (shape[axis] - 1) * steps[axis]) if shape[axis] else 1
    offset = rng.choice([0, 0, 0, 1, 16, 17])
    needed = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)
    storage = _values(rng, dtype, max(needed, 1)).to(rng.choice(["cpu", "tpu"]))
    if (dtype.is_floating_point or dtype.is_complex) and rng.random() < 0.3:
        storage.requires_grad_()
        if rng.random() < 0.3:
            storage = torch.nn.Parameter(storage.detach())
    tensor = storage.as_strided(shape, strides, offset)
    if dtype.is_complex and rng.random() < 0.5:
        tensor = rng.choice([torch.conj, torch._neg_view, lambda t: t.mH if t.dim() == 2 else t])(tensor)
    elif dtype in (torch.float32, torch.float64) and rng.random() < 0.2:
        tensor = torch._neg_view(tensor)
    return tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order on the CPU, by torch alone."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return _plain(tensor).reshape(-1).view(torch.uint8).numpy()


def _sum(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The sum in the widest type of its kind, and how far a sum in another order may be from it."""
    if not (values.is_floating_point() or values.is_complex()):
        return values.to(torch.int64).sum(), 0.0  # wraps around, in any order alike
    if values.itemsize == 1:
        values = values.float()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    size = values.nan_to_num(posinf=0, neginf=0).abs().sum().item()
    return values.sum(), values.numel() * np.finfo(np.float64).eps * (size if math.isfinite(size) else 0.0)


def _check(tensor: torch.Tensor) -> str:
    before = _bytes(tensor)
    same = IDENTITY(tensor)
    assert same.dtype is tensor.dtype and same.shape == tensor.shape and same.device == tensor.device
    assert same.is_contiguous() and same.requires_grad == tensor.requires_grad
    np.testing.assert_array_equal(_bytes(same), before)
    total = TOTAL(tensor)
    np.testing.assert_array_equal(_bytes(tensor), before)  # never written to
    assert total.shape == () and total.device == tensor.device
    exact, tolerance = _sum(_plain(tensor))
    torch.testing.assert_close(total.detach().cpu(), exact, rtol=0, atol=tolerance, equal_nan=True)
    if tensor.requires_grad:
        (gradient,) = torch.autograd.grad(IDENTITY(tensor), tensor, torch.ones_like(same).expand(same.shape))
        assert gradient.dtype is tensor.dtype and gradient.shape == tensor.shape
        assert (gradient.detach().cpu().to(torch.complex64) == 1).all()
        return "gradient"
    if tensor.dtype in WIDE:
        with pytest.raises(TypeError, match="to_jax.*32 bits"):
            to_jax(tensor)
    else:
        np.testing.assert_array_equal(np.asarray(to_jax(tensor)).reshape(-1).view(np.uint8), before)
    return "value"


def _refused(rng: random.Random) -> str:
    """Something no op can read: every try must end in an error that names the op."""
    kind = rng.choice(REFUSED)
    made: Any = torch.ones(rng.randrange(2, 50))
    if kind in ("freed", "shrunk"):
        made.untyped_storage().resize_(0 if kind == "freed" else 4)
    made = {
        "int4": lambda: torch.empty(3, dtype=torch.int4),
        "complex32": lambda: torch.zeros(3, dtype=torch.complex32),
        "quantised": lambda: torch.quantize_per_tensor(made, 0.1, 0, torch.qint8),
        "sparse": lambda: made.to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([made, made[1:]]),
        "numpy": lambda: made.numpy(),
        "none": lambda: None,
    }.get(kind, lambda: made)()
    for op in (IDENTITY, TOTAL):
        with pytest.raises((TypeError, RuntimeError), match=op._qualname):
            op(made)
    return kind


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about prototypes
@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=() if n < QUICK_BATCHES else pytest.mark.slow) for n in range(BATCHES)]
)
def test_random_tensors(batch: int) -> None:
    rng = random.Random(batch)
    seen: Counter[str] = Counter()
    for _ in range(TENSORS // BATCHES):
        if rng.random() < 0.05:
            seen[_refused(rng)] += 1
            continue
        tensor = _draw(rng)
        try:
            seen[_check(tensor)] += 1
        except AssertionError as error:
            described = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            raise AssertionError(
                f"{described} on {tensor.device}, requires_grad={tensor.requires_grad}, "
                f"conj={tensor.is_conj()}, neg={tensor.is_neg()}: {tensor}"
            ) from error
    assert seen["value"] > 100 and seen["gradient"] > 10


@pytest.mark.parametrize("batch", range(2))
def test_random_devices_that_differ(batch: int) -> None:
    """Two operands: one device each, or a clear error; a 0-d cpu tensor may go along."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    op = jax_op(f"test_fuzz::add_{batch}", add)
    rng = random.Random(batch)
    for _ in range(50):
        x, y = (torch.ones(rng.choice([(), (3,)]), device=rng.choice(["cpu", "tpu", "meta"])) for _ in "xy")
        where = {t.device.type for t in (x, y) if t.dim() or t.device.type != "cpu"} or {"cpu"}
        if len(where) > 1:
            with pytest.raises(RuntimeError, match=f"{op._qualname}: expected all tensors on one device"):
                op(x, y)
        else:
            out = op(x, y)
            assert {out.device.type} == where and (out.is_meta or out.eq(2).all().item())
