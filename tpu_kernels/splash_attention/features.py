"""What splash attention can do, each feature as a call, and which of it compiles for which chip.

`python -m tpu_kernels.splash_attention.features --markdown` compiles every one, forward and gradient, with
the TPU compiler and prints a table. No TPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpu_kernels import _features, masks
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import terms
from tpu_kernels.splash_attention.terms import Part
from tpu_kernels.splash_attention.tiling import SplashTiling
from tpu_kernels.splash_attention.vjp import splash_attention

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 2, 4, 2, 640, 128
TILING = SplashTiling(512, 512, 256, 256, 512, 512, 256, 256)
"""Several tiles, several sub-blocks, and a last tile that is part full, at a length that compiles quickly."""


@dataclass(frozen=True)
class Feature:
    """A call of the JAX function.

    Attributes:
        name: what it shows, in a few words.
        group: the part of the table it is in.
        shapes: of q, k and v.
        captures: shapes and dtypes of the arrays that mask and score load from.
        mask, score: texts of expressions.
        sinks, dropout: whether there are any.
    """

    name: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    captures: tuple[jax.ShapeDtypeStruct, ...] = ()
    mask: str = ""
    score: str = ""
    sinks: bool = False
    dropout: bool = False

    def function(self, *, gradient: bool, tiling: SplashTiling = TILING) -> Callable[..., Any]:
        """The call, of `avals`: its results, or the gradients of q, k, v, float captures and sinks."""

        def attend(q, k, v, captures, sinks, seed):
            dropout_p = 0.1 if self.dropout else 0.0
            return splash_attention(
                q, k, v, captures, sinks, seed, self.mask, self.score, None, dropout_p, tiling, "pallas"
            )

        def gradients(q, k, v, captures, sinks, seed, d_o, d_lse):
            def of(q, k, v, floats, sinks):
                given = iter(floats)
                arrays = [next(given) if _is_float(c) else c for c in captures]
                return attend(q, k, v, arrays, sinks, seed)

            floats = [c for c in captures if _is_float(c)]
            _, pull_back = jax.vjp(of, q, k, v, floats, sinks)
            return pull_back((d_o, d_lse))

        return gradients if gradient else attend

    def avals(self, dtype: Any, *, gradient: bool) -> tuple[Any, ...]:
        """The arguments of `function`."""
        q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in self.shapes)
        sinks = jax.ShapeDtypeStruct((q.shape[1],), jnp.float32) if self.sinks else None
        seed = jax.ShapeDtypeStruct((2,), jnp.int32) if self.dropout else None
        arguments = (q, k, v, list(self.captures), sinks, seed)
        if not gradient:
            return arguments
        d_o = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), dtype)
        return (*arguments, d_o, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


# The list -------------------------------------------------------------------------------------------


def _shapes(
    length: int = LENGTH,
    kv_length: int | None = None,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    value_dim: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    kv_length = length if kv_length is None else kv_length
    value_dim = head_dim if value_dim is None else value_dim
    return (
        (BATCH, heads, length, head_dim),
        (BATCH, kv_heads, kv_length, head_dim),
        (BATCH, kv_heads, kv_length, value_dim),
    )


def _masks() -> Iterator[tuple[str, Mask]]:
    """Masks of every kind."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    visible = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    yield "causal", masks.causal()
    yield "causal, bottom right", masks.causal("bottom_right", offset=-100)
    yield "sliding window", masks.sliding_window(200, 0)
    yield "chunks", masks.causal() & masks.chunked(300)
    yield "prefix LM", masks.prefix_lm(100)
    yield "prefix LM, lengths in a tensor", masks.prefix_lm(lengths)
    yield "segments", masks.segments(ids)
    yield "key lengths", masks.lengths(lengths)
    yield "bool tensor", masks.tensor(visible)
    yield "function", masks.function(lambda b, h, q, kv: (q // 32 >= kv // 32) | (kv % 7 == h))
    yield "causal and segments", masks.causal() & masks.segments(ids)
    yield "not window, or lengths", ~masks.sliding_window(100, 100) | masks.lengths(lengths)


def _scores() -> Iterator[tuple[str, str, tuple[jax.ShapeDtypeStruct, ...]]]:
    """Changes of the scores of every kind."""

    def array(*shape: int, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(shape, dtype),)

    def bias(*varies: bool) -> str:
        return terms.added((varies[0], varies[1], varies[2], varies[3]))

    full = (BATCH, HEADS, LENGTH, LENGTH)
    yield "soft cap", terms.soft_cap(50.0), ()
    yield "ALiBi", terms.alibi(False), array(HEADS)
    yield "bias [B, H, L, S]", bias(True, True, True, True), array(*full)
    yield "bias [B, H, L, S], bfloat16", bias(True, True, True, True), array(*full, dtype=jnp.bfloat16)
    yield "bias [1, H, L, S]", bias(False, True, True, True), array(1, *full[1:])
    yield "bias [B, 1, 1, S]", bias(True, False, False, True), array(BATCH, 1, 1, LENGTH)
    yield "bias [1, 1, L, 1]", bias(False, False, True, False), array(1, 1, LENGTH, 1)
    capped = terms.score_text((Part(terms.soft_cap(50.0)), Part(bias(True, True, True, True))))
    yield "soft cap and bias", capped, array(*full)


def features() -> tuple[Feature, ...]:
    """All of them."""
    found = [Feature("no mask", "masks", _shapes())]
    for name, mask in _masks():
        captures = tuple(
            jax.ShapeDtypeStruct(tuple(c.shape), jnp.dtype(str(c.dtype).removeprefix("torch.")))
            for c in mask.captures
        )
        found.append(Feature(name, "masks", _shapes(), captures, mask.text))
    causal = masks.causal().text
    for name, score, captures in _scores():
        found.append(Feature(name, "scores", _shapes(), captures, "", score))
        found.append(Feature(f"{name}, causal", "scores", _shapes(), captures, causal, score))
    found += [
        Feature("sinks", "scores", _shapes(), mask=causal, sinks=True),
        Feature("dropout", "scores", _shapes(), mask=causal, dropout=True),
        Feature(
            "sinks and dropout and soft cap",
            "scores",
            _shapes(),
            (),
            causal,
            terms.soft_cap(30.0),
            True,
            True,
        ),
    ]
    shapes = {
        "multi-head": _shapes(kv_heads=HEADS),
        "multi-query": _shapes(kv_heads=1),
        "fewer queries than keys": _shapes(130, 700),
        "fewer keys than queries": _shapes(700, 130),
        "one query": _shapes(1, 700),
        "one query, multi-head": _shapes(1, 700, kv_heads=HEADS),
        "one of each": _shapes(1, 1),
    }
    shapes |= {f"head dim {d}": _shapes(head_dim=d) for d in (1, 8, 32, 64, 72, 80, 96, 112, 192, 256)}
    shapes |= {"head dims 192 and 128": _shapes(head_dim=192, value_dim=128)}
    bottom = masks.causal("bottom_right").text
    found += [Feature(name, "shapes", shape, mask=bottom) for name, shape in shapes.items()]
    return tuple(found)


# The table ------------------------------------------------------------------------------------------

SIZES = f"{BATCH} sequences of {LENGTH} tokens, {HEADS} heads on {KV_HEADS} key heads of {HEAD_DIM}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the names of the features, or the table."""
    _features.main("splash_attention", "splash attention", SIZES, features(), arguments)


if __name__ == "__main__":
    main()
