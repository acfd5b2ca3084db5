"""A hop in pieces: splash attention over the keys that are here, and XLA's operations for all else.

It computes what `fused` computes, for interpreters that have no remote copies: the sums of each hop are
added outside of the kernel, and `jax.lax.ppermute` moves keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.collectives.shipment import Shipment
from tpu_kernels.splash_attention.backward import Gradients, partial_backward
from tpu_kernels.splash_attention.blocks import AlignedLoad
from tpu_kernels.splash_attention.kernel import Forward, Sums, finished, partial_forward
from tpu_kernels.splash_attention.tiles import Formula


def advance(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    *,
    formula: Formula,
    before: Sums | None,
    shipment: Shipment | None,
    **sizes: Any,
) -> tuple[Sums, list[jax.Array]]:
    """See `kernel.partial_forward`."""
    sums, _ = partial_forward(q, k, v, aligned, formula=formula, before=None, shipment=None, **sizes)
    if before is not None:
        sums = _added(before, sums, formula)
    return sums, [] if shipment is None else move(shipment)


def finish(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    seed: None,
    *,
    formula: Formula,
    before: Sums | None,
    out_dtype: Any,
    **sizes: Any,
) -> Forward:
    """See `kernel.forward`."""
    del seed
    sums, _ = advance(q, k, v, aligned, formula=formula, before=before, shipment=None, **sizes)
    return finished(sums, formula, out_dtype, q.shape[2])


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    *given: jax.Array,
    dq_before: jax.Array | None,
    shipment: Shipment | None,
    **options: Any,
) -> Gradients:
    """See `backward.partial_backward`."""
    found = partial_backward(q, k, v, aligned, *given, dq_before=None, shipment=None, **options)
    dq = found.dq if dq_before is None else dq_before + found.dq
    return Gradients(dq, found.dk, found.dv, [] if shipment is None else move(shipment))


def move(shipment: Shipment) -> list[jax.Array]:
    """What arrives."""
    line = shipment.route.line
    arrived = list(shipment.arrays)
    for parcel in shipment.route.parcels:
        pairs = [(i, (i + parcel.step) % line.size) for i in range(line.size)]
        array = shipment.arrays[parcel.slot]
        rows = jax.lax.slice_in_dim(array, parcel.begin, parcel.begin + parcel.rows, axis=-2)
        came = jax.lax.ppermute(rows, line.name, pairs)
        arrived[parcel.slot] = jax.lax.dynamic_update_slice_in_dim(
            arrived[parcel.slot], came, parcel.begin, axis=-2
        )
    return arrived


def _added(a: Sums, b: Sums, formula: Formula) -> Sums:
    """The sums over both keys."""
    power = jnp.exp2 if formula.score is None else jnp.exp
    m = jnp.maximum(a.rows[:, :, 0], b.rows[:, :, 0])
    decay_a, decay_b = (power(sums.rows[:, :, 0] - m) for sums in (a, b))
    total = a.rows[:, :, 1] * decay_a + b.rows[:, :, 1] * decay_b
    acc = a.acc * decay_a[..., None] + b.acc * decay_b[..., None]
    return Sums(acc, jnp.stack([m, total], axis=2))
