"""All to all for torch with as many rows for each rank as data says, as tokens have that go to experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import torch

from tpu_kernels._integers import check_integers, int32
from tpu_kernels.collectives import api, ops, ragged_vjp, reference
from tpu_kernels.collectives.kernel import DTYPES
from tpu_kernels.collectives.ops import AnyMesh
from tpu_kernels.grouped_matmul.arguments import values_at_hand

_KIND = "ragged_all_to_all"


def ragged_all_to_all(
    x: torch.Tensor, send_counts: torch.Tensor, mesh: AnyMesh, axis: str, output_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank along an axis gives every rank some of its rows, and gets some from each.

    The counts are data: other ones, with every step, compile nothing again, and nobody waits for them. The
    gradient of a row comes back from where it went; rows that went nowhere get zeros.

    Args:
        x: [rows, ...]: first the rows for rank 0 along the axis, then those for rank 1, ...; rows behind the
            last ones are not sent. float32, bfloat16 or int32, of the same shape on all ranks.
        send_counts: integers [ranks], how many rows go to each rank: at least 0, and `rows` together at most.
            On `cpu` and on the simulated device that is checked; elsewhere, and in compiled functions, a
            negative count is 0, and rows from `rows` on do not exist.
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names. All of its ranks make the call.
        axis: which of the mesh's axes; ranks that differ in others have nothing to do with each other.
        output_rows: how many rows this rank has room for, the same number on all ranks. `ranks * rows` are
            always enough. Rows that find no room are not sent and get a gradient of zero; where counts are
            checked, they raise.

    Returns:
        [output_rows, ...]: the rows from rank 0, those from rank 1, ..., then zeros. And int32 [ranks]: how
        many rows there were from each rank; with a sum above `output_rows`, the last ones found no room.

    Raises:
        TypeError: other dtypes, or arguments of other types.
        ValueError: shapes or devices that don't belong together, an axis that the mesh has not; counts out of
            range, or more rows for this rank than `output_rows`, where the values can be read.
    """
    ops.check_tensor(_KIND, "x", x, DTYPES)
    check_integers(_KIND, "send_counts", send_counts)
    op, size = ops.prepared(_KIND, mesh, axis)
    if x.dim() == 0:
        raise ValueError(f"{_KIND}: x must have rows, got a number; pass x[None]")
    if send_counts.dim() != 1 or send_counts.shape[0] != size:
        raise ValueError(
            f"{_KIND}: send_counts must be [{size}], a count for each rank along {axis!r}, got "
            f"{list(send_counts.shape)}"
        )
    if x.device != send_counts.device:
        raise ValueError(
            f"{_KIND}: x and send_counts must be on one device, got {x.device} and {send_counts.device}"
        )
    if isinstance(output_rows, bool) or not isinstance(output_rows, int):
        raise TypeError(f"{_KIND}: output_rows must be an int, the same on all ranks, got {output_rows!r}")
    if output_rows < 0:
        raise ValueError(f"{_KIND}: output_rows must not be negative, got {output_rows}")
    _check_sent(send_counts, x.shape[0])
    counts = int32(send_counts)
    if x.numel() and output_rows:
        y, received = op(x, counts, output_rows)
    else:
        y = x.new_zeros(output_rows, *x.shape[1:]) + x.sum(dtype=x.dtype)  # a function of x, to autograd
        received = api.all_to_all(_limited(counts, x.shape[0]), mesh, axis)
    _check_received(received, output_rows)
    return y, received


def _limited(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """What there is of each count in the first `rows` rows."""
    ends = counts.clamp(min=0).cumsum(0).clamp(max=rows)  # in int64
    return ends.diff(prepend=ends.new_zeros(1)).to(torch.int32)


def _check_sent(counts: torch.Tensor, rows: int) -> None:
    if not values_at_hand(counts):
        return
    values = counts.tolist()
    if any(value < 0 for value in values):
        raise ValueError(f"{_KIND}: send_counts must not be negative, got {values}")
    if sum(values) > rows:
        raise ValueError(
            f"{_KIND}: send_counts must sum to at most the {rows} rows of x, got {sum(values)}: {values}. "
            f"Offsets are no counts: offsets.diff() makes counts of offsets that begin with 0"
        )


def _check_received(counts: torch.Tensor, output_rows: int) -> None:
    if not values_at_hand(counts):
        return
    values = counts.tolist()
    if sum(values) > output_rows:
        raise ValueError(
            f"{_KIND}: there are {sum(values)} rows for this rank, {values} from each, and output_rows is "
            f"{output_rows}; make it larger, on all ranks, or send fewer"
        )


def _form(local: ops.Local) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def moved(x: jax.Array, send_counts: jax.Array, output_rows: int) -> tuple[jax.Array, jax.Array]:
        return local(x, send_counts, statics=(output_rows,))

    return moved


ops.define(_KIND, ragged_vjp.ragged_all_to_all, reference.ragged_all_to_all_reference, _form)
