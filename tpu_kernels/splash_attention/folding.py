"""Few queries, many heads: the query heads of a group become rows of one tile.

In decoding there are one or a few queries per head, and a tile of the kernel would be almost empty. The heads
that read the same keys are independent rows just as the queries are, so `[B, Hkv * group, L, D]` is seen as
`[B, Hkv, group * L, D]`: keys and values are read once for the group, and its rows fill the tile. Masks and
scores ask for the head and the query; they are told where these have gone.
"""

from __future__ import annotations

import jax

from tpu_kernels.expressions.expression import Expression, Variable, apply, substitute, variables
from tpu_kernels.splash_attention.tiling import LANES


def folds(q: jax.Array, k: jax.Array, dropout_p: float) -> bool:
    """Whether a call is worth it. Dropout hashes heads and queries as they are, so it is not for that."""
    return k.shape[1] < q.shape[1] and q.shape[2] <= LANES // 2 and not dropout_p


def fold(q: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, Hkv * group, L, D]` to `[B, Hkv, group * L, D]`."""
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[3])


def fold_expression(e: Expression | None, group: int, q_len: int) -> Expression | None:
    """`e` of the folded positions: its h is the head of keys, its q the row in the group."""
    if e is None:
        return None
    row, head = Variable("q"), Variable("h")
    values = {
        "q": apply("mod", row, q_len) if q_len > 1 else 0 * row,
        "h": head * group + (row // q_len if q_len > 1 else row),
        "q_len": q_len,
    }
    return substitute(e, {name: value for name, value in values.items() if name in variables(e)})
