"""Which attention probabilities dropout keeps: a hash of the seed and the position.

Nothing is stored and nothing depends on tiles or on the order of work: forward, backward and reference ask
again and get the same answer. All arithmetic is int32 that wraps, which a TPU's vector unit has; unsigned
numbers it has only in part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_BITS = 31
"""Bits of the hash that are compared with the rate: the rate is exact to 2**-31, none is negative."""


def threshold(p: float) -> int:
    """The hash values below this are dropped: `p` of `2**31`, rounded. `p` is in [0, 1)."""
    return min(round(p * 2**_BITS), 2**_BITS - 1)


def keep(seed: Any, b: Any, h: Any, q: Any, kv: Any, p: float) -> jax.Array:
    """Whether the probability of query `q` for key `kv`, in head `h` of batch entry `b`, is kept.

    Each is kept with probability `1 - p`, as if independent of all others and of other seeds.

    The position is hashed in two steps, so that the work for each element of a tile is small: two words of
    32 bits from the seed, `b`, `h` and `q` (a column of the tile), which are then mixed with `kv`. Two rows
    agree in more than chance says only if both of their words do.

    Args:
        seed: two int32 numbers, `seed[0]` and `seed[1]`: an array, a tuple or a ref in SMEM.
        b, h, q, kv: int32, of shapes that broadcast together; `q` a column and `kv` a row of a tile.
        p: the probability of dropping, in [0, 1).

    Returns:
        bool, in the shape that `b`, `h`, `q` and `kv` broadcast to.
    """
    word = _mix(_mix(_mix(seed[0]) ^ seed[1]) + b)
    first = _mix(_mix(word + h) + q)
    second = _mix(first ^ _signed(0x9E3779B9))
    # kv times an odd number: neighbouring keys differ in high bits as well.
    x = (kv * _signed(0x85EBCA6B)) ^ first
    x = _xor_shift(x, 16) * _signed(0x7FEB352D)
    x = (_xor_shift(x, 15) + second) * _signed(0x846CA68B)
    x = _xor_shift(x, 16)
    return jax.lax.shift_right_logical(x, jnp.full_like(x, 32 - _BITS)) >= threshold(p)


def _mix(x: Any) -> jax.Array:
    """A permutation of the 32-bit numbers in which each bit of the result depends on all bits of `x`.

    The constants are those of `lowbias32` (Chris Wellons, Hash Prospector, public domain).
    """
    x = _xor_shift(jnp.asarray(x, jnp.int32), 16) * _signed(0x7FEB352D)
    x = _xor_shift(x, 15) * _signed(0x846CA68B)
    return _xor_shift(x, 16)


def _xor_shift(x: jax.Array, by: int) -> jax.Array:
    return x ^ jax.lax.shift_right_logical(x, jnp.full_like(x, by))


def _signed(word: int) -> int:
    """The int32 with the bits of this unsigned number."""
    return word - 2**32 if word >= 2**31 else word
