"""Splash attention: problems, tile space, default tiling and cost."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from autotune.problem import ArraySpec, Problem, numpy_dtype
from autotune.spec import Candidate, Cost
from bridge.chips import Chip
from tpu_kernels._vmem import excess_reasons, vmem_allowed
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import loads, parse
from tpu_kernels.expressions.hoist import Hoisted, hoist
from tpu_kernels.splash_attention.backward import WRITTEN_BYTES
from tpu_kernels.splash_attention.tiling import LANES, SplashTiling, Tiles

KERNEL_DTYPES = ("bfloat16", "float32")
"""Dtypes that the TPU compiler loads into vector registers and the kernels compute with."""

PREFERRED = (
    Tiles(2048, 2048, 512, 512),
    Tiles(1024, 2048, 512, 512),
    Tiles(1024, 1024, 512, 512),
    Tiles(512, 1024, 512, 512),
    Tiles(512, 512, 512, 512),
    Tiles(256, 512, 256, 512),
    Tiles(256, 256, 256, 256),
    Tiles(128, 256, 128, 256),
    Tiles(128, 128, 128, 128),
)
"""Defaults of the forward, the best one that fits: large sub-blocks keep the matrix units busy, large tiles
hide a visit's start."""

PREFERRED_BACKWARD = (
    Tiles(1024, 1024, 256, 256),
    Tiles(512, 1024, 256, 256),
    Tiles(512, 512, 256, 256),
    Tiles(256, 256, 256, 256),
    Tiles(128, 256, 128, 256),
    Tiles(128, 128, 128, 128),
)
"""Those of the backward. Tiles of 2048 are up to 8% faster, with four times the code to compile."""

_TILES = (128, 256, 512, 1024, 2048, 4096)
_SUBS = (128, 256, 512, 1024)
_SUBLANES = 8
_FLOAT32_BYTES = 4
_AHEAD = {"forward": 4, "backward": 6}
"""Sub-blocks of scores in float32 that are alive at once: those computed ahead, p, and what is made of it."""


# Problems -----------------------------------------------------------------------------------------


def make_problem(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Problem:
    """Causal attention for `shapes["q"]`, [B, Hq, L, D], with keys and values of the same shape.

    `shapes` may also have k [B, Hkv, S, D] and v [B, Hkv, S, Dv]. Raises `ValueError` for other shapes.
    """
    if not {"q"} <= set(shapes) <= {"q", "k", "v"} or any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(
            f"splash_attention takes shapes of q, and of k and v if they differ, each [batch, heads, length, "
            f"head dimension], got {dict(shapes)}"
        )
    q = shapes["q"]
    k = shapes.get("k", q)
    v = shapes.get("v", k)
    if k[:3] != v[:3] or (q[0], q[3]) != (k[0], k[3]) or not k[1] or q[1] % k[1]:
        raise ValueError(
            f"splash_attention: q [B, Hq, L, D], k [B, Hkv, S, D] and v [B, Hkv, S, Dv], Hq a multiple of "
            f"Hkv, don't belong together: got {q}, {k} and {v}"
        )
    arrays = {name: ArraySpec(shape, dtype) for name, shape in (("q", q), ("k", k), ("v", v))}
    return problem_of(arrays, mask="ge(q,kv)")


def problem_of(
    arrays: Mapping[str, ArraySpec | None],
    *,
    mask: str = "",
    score: str = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
    sums: bool = False,
) -> Problem:
    """The problem of q, k and v; what masks and scores load from is known by their texts.

    With `sums` the kernels begin with float32 sums over other keys, and give such.
    """
    params = {"mask": mask, "score": score, "scale": scale, "dropout_p": dropout_p}
    if sums:
        params = {**params, "sums": True}
    return Problem.of("splash_attention", arrays, params)


def visible_share(problem: Problem) -> float:
    """The share of the scores that the mask leaves, from 0 to 1; of a mask that loads arrays, all of it."""
    q, k = problem.required("q"), problem.required("k")
    return _visible_share(problem.param("mask"), q.shape[1], q.shape[2], k.shape[2])


@functools.lru_cache(maxsize=256)
def _visible_share(mask: str, heads: int, q_len: int, kv_len: int) -> float:
    if not mask or loads(parse(mask)) or not q_len * kv_len:
        return 1.0
    # A sample of 512 queries is exact for short ones, and close for masks that change slowly with q.
    rows = np.unique(np.linspace(0, q_len - 1, min(q_len, 512)).round().astype(np.int32))
    env = {
        "b": np.int32(0),
        "h": np.arange(heads, dtype=np.int32)[:, None, None],
        "q": rows[:, None],
        "kv": np.arange(kv_len, dtype=np.int32),
        "q_len": np.int32(q_len),
        "kv_len": np.int32(kv_len),
    }
    seen = np.asarray(evaluate(parse(mask), env, _no_loads))
    return float(np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (len(rows), kv_len))).mean())


def _no_loads(load: object) -> object:
    raise AssertionError(f"{load!r} in a mask without loads")


# The space ----------------------------------------------------------------------------------------


def space(problem: Problem, chip: Chip) -> tuple[Candidate, ...]:
    """Tilings worth considering, legal and not, those that need the least VMEM first.

    Forward and backward don't depend on each other's sizes: each is varied with the other's default.
    """
    default = default_tiling(problem, chip)
    q_len, kv_len = problem.required("q").shape[2], problem.required("k").shape[2]
    found = {default}
    for tiles in _grids(q_len, kv_len):
        found.add(tiling_of(tiles, default.backward, scores_stay=default.backward_scores_stay))
        for scores_stay in (False, True):
            found.add(tiling_of(default.forward, tiles, scores_stay=scores_stay))
    candidates = [
        Candidate(
            tiling,
            max(vmem_bytes(problem, tiling, chip).values()),
            unsupported_dtypes(problem) + illegal_reasons(problem, tiling, chip),
        )
        for tiling in found
    ]
    return tuple(sorted(candidates, key=lambda c: (c.vmem_bytes, str(c.tiling))))


def tiling_of(forward: Tiles, backward: Tiles, *, scores_stay: bool = False) -> SplashTiling:
    """The tiling with these sizes."""
    return SplashTiling(
        forward.tile_q,
        forward.tile_kv,
        forward.sub_q,
        forward.sub_kv,
        backward.tile_q,
        backward.tile_kv,
        backward.sub_q,
        backward.sub_kv,
        scores_stay,
    )


def default_tiling(problem: Problem, chip: Chip) -> SplashTiling:
    """The first of `PREFERRED` and of `PREFERRED_BACKWARD` that fits."""
    smallest = PREFERRED[-1]
    allowed = vmem_allowed(chip)
    forward = (t for t in PREFERRED if _forward_bytes(problem, t) <= allowed)
    backward = (t for t in PREFERRED_BACKWARD if _backward_bytes(problem, t, chip) <= allowed)
    # Where the heads are narrower than a matrix unit, scores fill it and they do not.
    widest = max(problem.required("q").shape[3], problem.required("v").shape[3])
    return tiling_of(next(forward, smallest), next(backward, smallest), scores_stay=widest < chip.mxu_size)


def unsupported_reasons(problem: Problem, chip: Chip) -> tuple[str, ...]:
    """Why no tiling computes `problem` on `chip`; empty if one does."""
    smallest = PREFERRED[-1]
    return unsupported_dtypes(problem) + illegal_reasons(problem, tiling_of(smallest, smallest), chip)


def unsupported_dtypes(problem: Problem) -> tuple[str, ...]:
    """Which arguments have a dtype the kernels don't compute with, or not the same one."""
    dtypes = {name: spec.dtype for name, spec in problem.arrays if spec is not None}
    reasons = tuple(
        f"{name} is {dtype} and the kernel computes with {' and '.join(KERNEL_DTYPES)}"
        for name, dtype in dtypes.items()
        if dtype not in KERNEL_DTYPES
    )
    if not reasons and len(set(dtypes.values())) > 1:
        reasons = (f"q, k and v must have the same dtype, got {', '.join(dtypes.values())}",)
    return reasons


def illegal_reasons(problem: Problem, tiling: SplashTiling, chip: Chip) -> tuple[str, ...]:
    """Why the kernels cannot run with `tiling` on `chip`; empty if they can."""
    return excess_reasons(vmem_bytes(problem, tiling, chip), chip)


def _grids(q_len: int, kv_len: int) -> list[Tiles]:
    """Tiles up to the size of the arrays, in whole sub-blocks."""
    return list(
        dict.fromkeys(
            tiles
            for tile_q in _TILES
            for tile_kv in _TILES
            for sub_q in _SUBS
            for sub_kv in _SUBS
            if tile_q % sub_q == 0 and tile_kv % sub_kv == 0
            for tiles in [Tiles(tile_q, tile_kv, sub_q, sub_kv)]
            if tiles.clipped(q_len, kv_len) == tiles
        )
    )


# VMEM ---------------------------------------------------------------------------------------------


def resident_bytes(chip: Chip) -> int:
    """What dk and dv may take of VMEM in float32 while all queries are seen."""
    return chip.vmem_bytes // 2


def vmem_bytes(problem: Problem, tiling: SplashTiling, chip: Chip) -> dict[str, int]:
    """VMEM that each phase needs, estimated."""
    return {
        "forward": _forward_bytes(problem, tiling.forward),
        "backward": _backward_bytes(problem, tiling.backward, chip),
    }


def _forward_bytes(problem: Problem, tiles: Tiles) -> int:
    q, k, v = (problem.required(name) for name in ("q", "k", "v"))
    tiles = tiles.clipped(q.shape[2], k.shape[2])
    item = numpy_dtype(q.dtype).itemsize
    dim, value_dim = (_round_up(array.shape[3], LANES) for array in (q, v))
    blocks = tiles.tile_q * (dim + value_dim) * item + tiles.tile_kv * (dim + value_dim) * item
    rows = _SUBLANES * tiles.tile_q * _FLOAT32_BYTES
    # The sums so far, as scratch and as values on their way through a visit.
    sums = 2 * tiles.tile_q * (value_dim + 2 * LANES) * _FLOAT32_BYTES
    scaled = 0 if problem.param("score") else tiles.tile_q * dim * item
    if _has_sums(problem):  # they come in and go out, in place of o and lse
        blocks += tiles.tile_q * value_dim * (2 * _FLOAT32_BYTES - item)
        rows *= 2
    return 2 * (blocks + rows + _load_bytes(problem, tiles)) + sums + scaled + _score_bytes("forward", tiles)


def _backward_bytes(problem: Problem, tiles: Tiles, chip: Chip) -> int:
    q, k, v = (problem.required(name) for name in ("q", "k", "v"))
    tiles = tiles.clipped(q.shape[2], k.shape[2])
    item = numpy_dtype(q.dtype).itemsize
    dim, value_dim = (_round_up(array.shape[3], LANES) for array in (q, v))
    # q, dq, o and do; k and v.
    blocks = 2 * tiles.tile_q * (dim + value_dim) * item + tiles.tile_kv * (dim + value_dim) * item
    rows = _SUBLANES * tiles.tile_q * _FLOAT32_BYTES
    keys = _round_up(k.shape[2], tiles.tile_kv)
    key_bytes = (dim + value_dim) * _FLOAT32_BYTES
    resident = min(keys * key_bytes, max(resident_bytes(chip), tiles.tile_kv * key_bytes))
    if _has_sums(problem):  # dq comes in and goes out, and dk and dv go out, in float32
        blocks += tiles.tile_q * dim * (2 * _FLOAT32_BYTES - item)
        item = _FLOAT32_BYTES
    written = 2 * max(WRITTEN_BYTES, tiles.tile_kv * max(dim, value_dim) * item)
    # dq so far, as scratch and once more on its way out.
    sums = 2 * tiles.tile_q * dim * _FLOAT32_BYTES
    return (
        2 * (blocks + rows + min(written, keys * (dim + value_dim) * item) + _load_bytes(problem, tiles))
        + resident
        + sums
        + _score_bytes("backward", tiles)
    )


def _has_sums(problem: Problem) -> bool:
    return ("sums", True) in problem.params


def _score_bytes(phase: str, tiles: Tiles) -> int:
    return _AHEAD[phase] * tiles.sub_q * tiles.sub_kv * _FLOAT32_BYTES


def _load_bytes(problem: Problem, tiles: Tiles) -> int:
    """The blocks of arrays that mask and score load from."""
    total = 0
    for axes, is_bool in _loaded(problem.param("mask"), problem.param("score")):
        if "q" in axes and "kv" in axes:
            total += tiles.tile_q * tiles.tile_kv * (1 if is_bool else _FLOAT32_BYTES)
        elif "q" in axes or "kv" in axes:
            # A column takes a register's width, a row its height; the backward has them the other way round.
            total += (tiles.tile_q if "q" in axes else tiles.tile_kv) * LANES * _FLOAT32_BYTES
    return total


@functools.lru_cache(maxsize=256)
def _loaded(mask: str, score: str) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """The axes of each array that is loaded, and whether it is of bools."""
    hoisted: tuple[Hoisted, ...] = ()
    for source in (mask, score):
        if source:
            _, hoisted = hoist(parse(source), hoisted)
    return tuple((array.axes, array.kind == "bool") for array in hoisted)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# Cost ---------------------------------------------------------------------------------------------


def costs(problem: Problem) -> dict[str, Cost]:
    """Unavoidable work: every array moved once; the products of visible scores, and some vector operations.

    Per visible score the forward multiplies q k and p v; the backward computes q k again, and g v, and from
    them dv, dq and dk.
    """
    q, k, v = (problem.required(name) for name in ("q", "k", "v"))
    batch, heads, q_len, dim = q.shape
    value_dim = v.shape[3]
    scores = round(batch * heads * q_len * k.shape[2] * visible_share(problem))
    output_bytes = q.nbytes // max(dim, 1) * value_dim
    lse_bytes = batch * heads * q_len * _FLOAT32_BYTES
    forward = 2 * scores * (dim + value_dim)
    backward = 2 * scores * (3 * dim + 2 * value_dim)
    return {
        "forward": Cost(
            flops=forward + 4 * scores,  # scale, maximum, exp, sum
            matmul_flops=forward,
            bytes_read=q.nbytes + k.nbytes + v.nbytes,
            bytes_written=output_bytes + lse_bytes,
        ),
        "backward": Cost(
            flops=backward + 5 * scores,  # scale, exp, dp - delta, times p, times scale
            matmul_flops=backward,
            bytes_read=q.nbytes + k.nbytes + v.nbytes + 2 * output_bytes + lse_bytes,
            bytes_written=q.nbytes + k.nbytes + v.nbytes,
        ),
    }
