"""The torch ops of ring attention: a forward and a backward for each mesh and its axes.

Two ops, so that the backward gets what the forward has computed. Arguments are each rank's own: they are
parts of arrays that are as large as all ranks' together, so nobody checks that ranks agree.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, PartitionSpec

import bridge
from bridge import JaxOp, device, jax_op
from bridge.chips import chip
from bridge.interpretation import current_mode, target_chip
from bridge.sanitizer.report import current_report
from tpu_kernels._constant import constant
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.ops import digest
from tpu_kernels.ring_attention import vjp
from tpu_kernels.ring_attention.formula import local_texts
from tpu_kernels.ring_attention.layouts import positions
from tpu_kernels.ring_attention.reference import ring_attention_reference
from tpu_kernels.ring_attention.ring import Ring, cut_of
from tpu_kernels.splash_attention import select, space
from tpu_kernels.splash_attention.reference import default_scale
from tpu_kernels.splash_attention.tiling import SplashTiling


@dataclass(frozen=True)
class RingCall:
    """The arguments of a call that are no tensors; see `api.ring_attention`.

    Ops take them as text, which torch.compile has as a constant.

    Attributes:
        mask, score: expressions of positions in the whole sequence, "" for none.
        length: of the whole sequence, where it ends with padding.
        fused: whether keys travel inside of the kernels; None for wherever that is possible.
        scalars: which captures are numbers. They come as arrays of one element, which can be divided.
    """

    mask: str
    score: str
    layout: Literal["contiguous", "zigzag"]
    length: int | None
    scale: float | None
    bidirectional: bool | None
    fused: bool | None
    tiling: SplashTiling | None
    impl: str
    scalars: tuple[int, ...]

    @property
    def text(self) -> str:
        """For `of`."""
        fields = {**vars(self), "tiling": self.tiling and vars(self.tiling)}
        return repr(fields)

    @classmethod
    def of(cls, text: str) -> RingCall:
        """The call of a text."""
        fields = ast.literal_eval(text)
        tiling = fields.pop("tiling")
        return cls(**fields, tiling=tiling and SplashTiling(**tiling))

    def numbers(self, captures: Sequence[jax.Array]) -> list[jax.Array]:
        """The captures as the expressions load from them."""
        return [array.reshape(()) if i in self.scalars else array for i, array in enumerate(captures)]


@constant
def call_text(
    mask: str,
    score: str,
    layout: Literal["contiguous", "zigzag"],
    length: int | None,
    scale: float | None,
    bidirectional: bool | None,
    fused: bool | None,
    tiling: tuple[Any, ...] | None,
    impl: str,
    scalars: tuple[int, ...],
) -> str:
    """The text of a call, with the fields of the tiling."""
    sizes = None if tiling is None else SplashTiling(*tiling)
    call = RingCall(mask, score, layout, length, scale, bidirectional, fused, sizes, impl, scalars)
    return call.text


class Ops(NamedTuple):
    """Names of a ring's two ops in `torch.ops.tpu_kernels`, and how many ranks it has."""

    forward: str
    backward: str
    ranks: int


_making = threading.Lock()
_known: dict[tuple[Mesh, tuple[str, ...]], Ops] = {}
_ops: dict[str, JaxOp] = {}


def ops_for(mesh: Mesh, axes: tuple[str, ...]) -> Ops:
    """The ops of the ring along these axes, the inner one last: one for all calls, and all ranks here."""
    key = mesh, axes
    with _making:
        if key not in _known:
            _known[key] = _make(mesh, axes)
        return _known[key]


def op(name: str) -> Callable[..., Any]:
    """The op of this name."""
    if torch.compiler.is_compiling():  # torch.compile would look for a new op in the old `_ops`
        return getattr(torch.ops.tpu_kernels, name)
    return _ops[name]


def _make(mesh: Mesh, axes: tuple[str, ...]) -> Ops:
    own = PartitionSpec(mesh.axis_names)
    lines = tuple(Line(name, mesh.shape[name]) for name in axes)
    name = digest(mesh, axes)

    def mapped(fn: Callable[..., Any], *arrays: Any) -> Any:
        return jax.shard_map(fn, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)(*arrays)

    def forward(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        captures: Sequence[jax.Array],
        q_ids: jax.Array | None,
        kv_ids: jax.Array | None,
        call: str,
    ) -> tuple[jax.Array, jax.Array]:
        given = RingCall.of(call)

        def local(q: Any, k: Any, v: Any, captures: Any, *ids: Any) -> Any:
            arrays = given.numbers(captures)
            return attention(lines, q, k, v, arrays, given).forward(q, k, v, arrays, *ids)

        return mapped(local, q, k, v, list(captures), q_ids, kv_ids)

    def backward(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        captures: Sequence[jax.Array],
        q_ids: jax.Array | None,
        kv_ids: jax.Array | None,
        o: jax.Array,
        rows: jax.Array,
        d_o: jax.Array,
        d_rows: jax.Array,
        call: str,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        given = RingCall.of(call)

        def local(q: Any, k: Any, v: Any, captures: Any, *others: Any) -> Any:
            arrays = given.numbers(captures)
            return attention(lines, q, k, v, arrays, given).gradient(q, k, v, arrays, *others)

        return mapped(local, q, k, v, list(captures), q_ids, kv_ids, o, rows, d_o, d_rows)

    ranks = math.prod(line.size for line in lines)
    names = Ops(f"ring_attention_{name}", f"ring_attention_backward_{name}", ranks)
    for name, fn in zip(names[:2], (forward, backward), strict=True):
        _ops[name] = jax_op(
            f"tpu_kernels::{name}",
            fn,
            mesh=mesh,
            input_partition_specs=own,
            output_partition_specs=own,
            reference=_by_reference(fn),
        )
    _register_autograd(names)
    return names


def _by_reference(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same op by the reference."""

    def reference(*args: Any) -> Any:
        call = RingCall.of(args[-1])
        return fn(*args[:-1], dataclasses.replace(call, impl="reference", tiling=None).text)

    return reference


def _register_autograd(names: Ops) -> None:
    """The backward op as the gradient of the forward op."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, captures, q_ids, kv_ids, ctx.ring_call = inputs
        ctx.captures, ctx.segments = len(captures), q_ids is not None
        ctx.mode = current_mode()
        ids = [q_ids, kv_ids] if q_ids is not None else []
        ctx.save_for_backward(q, k, v, *captures, *ids, *output)

    def backward(ctx: Any, d_o: torch.Tensor | None, d_rows: torch.Tensor | None) -> Any:
        q, k, v, *rest = ctx.saved_tensors
        captures, rest = rest[: ctx.captures], rest[ctx.captures :]
        q_ids, kv_ids = rest[:2] if ctx.segments else (None, None)
        o, rows = rest[-2:]
        d_o = torch.zeros_like(o) if d_o is None else d_o
        d_rows = torch.zeros_like(rows) if d_rows is None else d_rows
        # A thread of torch's own has no mode set.
        same = current_mode() == ctx.mode
        with contextlib.nullcontext() if same else bridge.interpret(ctx.mode):
            found = op(names.backward)(
                q, k, v, captures, q_ids, kv_ids, o, rows, d_o.contiguous(), d_rows, ctx.ring_call
            )
        return *found, [None] * ctx.captures, None, None, None

    _ops[names.forward].register_autograd(backward, setup_context=setup_context)


# What a rank computes -----------------------------------------------------------------------------


def is_possible() -> bool:
    """Whether keys can travel inside of kernels: not in JAX's plain interpretation, which has no ranks."""
    return not device.is_simulated() or current_mode() == "tpu" or current_report() is not None


class Attention(NamedTuple):
    """Attention over a ring, and its gradient, as functions of a rank's arrays: those of the two ops."""

    forward: Callable[..., Any]
    gradient: Callable[..., Any]


def attention(
    lines: tuple[Line, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: Sequence[jax.Array],
    call: RingCall,
) -> Attention:
    """What each rank of these lines computes, for arrays as these, in a shard_map."""
    scale = default_scale(q.shape[-1]) if call.scale is None else call.scale
    ranks = math.prod(line.size for line in lines)
    q_count, kv_count = q.shape[2], k.shape[2]
    ring = Ring(lines, call.layout, q_count, kv_count, cut_of(kv_count, ranks, call.bidirectional))
    lengths = ranks * q_count, ranks * kv_count
    if call.length is not None:
        lengths = call.length if q_count == kv_count else lengths[0], call.length
    mask, score = call.mask, call.score
    texts = local_texts(
        mask, score, ring, captures=len(captures), lengths=lengths, segments=True, own_keys=False
    )
    chosen = select.tiling_for(q, k, v, *texts, scale, 0.0, call.tiling, call.impl, sums=True)
    if chosen is None:
        return _cleared(_of_reference(ring, mask, score, lengths, scale), ring, lengths)
    present = chip(target_chip())
    problem = vjp.RingProblem(
        ring=ring,
        batch=q.shape[0],
        heads=q.shape[1],
        mask=mask,
        score=score,
        lengths=lengths,
        scale=scale,
        tiling=chosen,
        vmem_limit_bytes=vmem_allowed(present),
        resident_bytes=space.resident_bytes(present),
        fused=is_possible() if call.fused is None else call.fused,
    )

    def gradient(*arrays: Any) -> Any:
        *others, d_rows = arrays
        found: Any = vjp.gradient(problem, *others, d_rows[:, :, 0])
        return found

    return _cleared(Attention(functools.partial(vjp.attend, problem), gradient), ring, lengths)


def _cleared(of: Attention, ring: Ring, lengths: tuple[int, int]) -> Attention:
    """The same where padding counts as zeros, whatever is in it, and results for it are zeros.

    Masks alone do not do that: 0 * NaN is NaN.
    """
    if lengths == (ring.size * ring.q_count, ring.size * ring.kv_count):
        return of

    def inside(count: int, length: int) -> jax.Array:
        return jnp.asarray(positions(ring.place(), ring.size, count, ring.layout)) < length

    def along_rows(count: int, length: int, *arrays: Any) -> list[Any]:
        return [jnp.where(inside(count, length)[:, None], array, 0) for array in arrays]

    of_queries = functools.partial(along_rows, ring.q_count, lengths[0])
    of_keys = functools.partial(along_rows, ring.kv_count, lengths[1])

    def by_query(rows: Any) -> Any:
        return jnp.where(inside(ring.q_count, lengths[0]), rows, 0)

    def forward(q: Any, k: Any, v: Any, *others: Any) -> Any:
        o, rows = of.forward(*of_queries(q), *of_keys(k, v), *others)
        return *of_queries(o), by_query(rows)

    def gradient(q: Any, k: Any, v: Any, captures: Any, q_ids: Any, kv_ids: Any, *results: Any) -> Any:
        o, rows, d_o, d_rows = results
        given = *of_queries(q), *of_keys(k, v), captures, q_ids, kv_ids
        dq, dk, dv = of.gradient(*given, *of_queries(o), by_query(rows), *of_queries(d_o), by_query(d_rows))
        return *of_queries(dq), *of_keys(dk, dv)

    return Attention(forward, gradient)


def _of_reference(ring: Ring, mask: str, score: str, lengths: tuple[int, int], scale: float) -> Attention:
    def forward(q: Any, k: Any, v: Any, captures: Any, q_ids: Any, kv_ids: Any) -> Any:
        o, lse = ring_attention_reference(ring, q, k, v, captures, q_ids, kv_ids, mask, score, lengths, scale)
        return o, lse[:, :, None]

    def gradient(
        q: Any, k: Any, v: Any, captures: Any, q_ids: Any, kv_ids: Any, o: Any, rows: Any, *d: Any
    ) -> Any:
        del o, rows
        _, pull_back = jax.vjp(lambda q, k, v: forward(q, k, v, captures, q_ids, kv_ids), q, k, v)
        return pull_back(d)

    return Attention(forward, gradient)
