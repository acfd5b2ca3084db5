"""Random calls of grouped matmul: `make_call(seed)` is the same call every time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels import GroupedTiling

from ..draws import Draws
from .fused import Call

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
ACTIVATIONS = (None, None, "relu", "silu", "gelu", "gelu_tanh", "sigmoid")


@dataclass(frozen=True)
class Limits:
    """How large calls may get: the rows, the sides of matrices, and the groups."""

    rows: int
    side: int
    groups: int


SMALL = Limits(300, 200, 6)
LARGE = Limits(1500, 600, 20)


class Draw(Draws):
    """Sizes, as many small ones as large ones."""

    def size(self, limit: int) -> int:
        if self.chance(0.3):
            return self.choice([n for n in (1, 8, 32, 127, 128, 129, 256, 384, 512) if n <= limit])
        return round(math.exp(self.uniform(0, math.log(limit))))


def make_call(seed: int, limits: Limits, **options: Any) -> Call:
    """The call of this seed."""
    draw = Draw(seed)
    m, k, n = draw.size(limits.rows), draw.size(limits.side), draw.size(limits.side)
    all_groups = draw.randint(1, limits.groups)
    offset = draw.randint(0, all_groups) if draw.chance(0.2) else None
    groups = all_groups if offset is None else draw.randint(0, all_groups - offset)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    transpose, form = draw.chance(0.5), draw.choice(["one", "one", "pair", "gated"])

    lhs_dtype = draw.choice(EIGHT_BITS) if draw.chance(0.15) else dtype
    rhs_dtype = draw.choice(EIGHT_BITS) if draw.chance(0.3) else dtype
    blocks = draw.choice([d for d in (1, 1, 2, 3, 4) if k % d == 0])
    wide = 2 * n if form == "gated" else n

    def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, generator=draw.torch).to(dtype)
        return draw.normal(*shape).to(dtype)

    def factors(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw.torch) / (64 if torch.int8 in (lhs_dtype, rhs_dtype) else 1)

    def scale_of_columns() -> torch.Tensor:
        return factors(groups, wide) if blocks == 1 else factors(groups, blocks, wide)

    count = 2 if form == "pair" else 1
    shape = (groups, wide, k) if transpose else (groups, k, wide)
    scaled_rhs = rhs_dtype in EIGHT_BITS and draw.chance(0.8)
    scaled_lhs = lhs_dtype in EIGHT_BITS and draw.chance(0.8)
    out_dtype = draw.choice([None, None, torch.float32, torch.bfloat16])
    if draw.chance(0.3) and "impl" not in options:
        options["tiling"] = GroupedTiling(*(draw.choice([128, 256]) for _ in range(9)))
        if blocks > 1 and (scaled_rhs or scaled_lhs):
            options.pop("tiling")
    return Call(
        lhs=values(lhs_dtype, m, k),
        rhs=tuple(values(rhs_dtype, *shape) for _ in range(count)),
        sizes=torch.tensor(_sizes(draw, m, all_groups)),
        cotangent=draw.normal(m, n).bfloat16().to(dtype),
        bias=tuple(draw.normal(groups, wide).to(dtype) for _ in range(count)) if draw.chance(0.3) else (),
        lhs_scale=None if not scaled_lhs else factors(m) if blocks == 1 else factors(m, blocks),
        rhs_scale=tuple(scale_of_columns() for _ in range(count)) if scaled_rhs else (),
        existing_out=draw.normal(m, n).to(draw.choice([dtype, torch.float32])) if draw.chance(0.2) else None,
        gated=form == "gated",
        activation=draw.choice(ACTIVATIONS),
        transpose_rhs=transpose,
        group_offset=offset,
        out_dtype=out_dtype,
        options=options,
        note=f"seed {seed}",
    )


def _sizes(draw: Draw, rows: int, groups: int) -> list[int]:
    """Equal, of few large groups and many small ones, many of them empty, or all rows in one."""
    kind = draw.choice(["cuts", "cuts", "zipf", "one", "equal", "none"])
    used = rows if draw.chance(0.5) else draw.randint(0, rows)
    if kind == "none":
        return [0] * groups
    if kind == "one":
        sizes = [0] * groups
        sizes[draw.randrange(groups)] = used
        return sizes
    if kind == "equal":
        return [used // groups] * groups
    if kind == "zipf":
        shares = [1 / (place + 1) for place in range(groups)]
        draw.shuffle(shares)
        return [int(used * share / sum(shares)) for share in shares]
    cuts = sorted(draw.randint(0, used) for _ in range(groups - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, used], strict=True)]
