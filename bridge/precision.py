"""float32 matrix products with the numbers of a TPU: in 1, 3 or 6 passes over bfloat16 parts.

A TPU multiplies bfloat16 numbers and adds the products up in float32. A float32 operand is the sum of three
bfloat16 parts, x = hi + mid + lo, and a product of two operands takes some of the nine products of parts:

    passes  precision          products
    1       DEFAULT, "medium"  hi*hi
    3       HIGH, "high"       hi*hi + (hi*mid + mid*hi)
    6       HIGHEST, "highest" hi*hi + (hi*mid + mid*hi + hi*lo + lo*hi + mid*mid)

The simulated device computes exactly (in float32) unless told otherwise:

- `with precision("medium"):` chooses for this thread, while it lasts;
- `emulate_precision()`, or the environment variable BRIDGE_TPU_PRECISION=on, has the whole process follow
  `torch.set_float32_matmul_precision`, as a TPU does.

A product is computed in the setting of the moment and thread in which it runs; that of a backward formula,
in the setting of the call of `backward()`.

`multiply` serves torch and JAX alike. This module imports neither: torch, which registers the device as it is
imported, would import it again half-way.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_VARIABLE = "BRIDGE_TPU_PRECISION"
_KEY = "bridge_precision"


class Precision(enum.Enum):
    """How exactly float32 matrix products are computed; each value is torch's name for it."""

    DEFAULT = "medium"
    HIGH = "high"
    HIGHEST = "highest"

    @property
    def passes(self) -> int:
        """How many products of bfloat16 parts make up one product: 1, 3 or 6."""
        return _PASSES[self]


_PASSES = {Precision.DEFAULT: 1, Precision.HIGH: 3, Precision.HIGHEST: 6}


# The setting ------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(mode: Precision | str) -> Iterator[None]:
    """Within this context, this thread computes float32 matrix products as a TPU does in `mode`.

    It holds for ops on tpu tensors, and for every op made by `jax_op`, inside of its kernels too. It comes
    before `torch.set_float32_matmul_precision`, nests, and other threads are not affected. (Tasks of asyncio
    that take turns in one thread are, if the context is held over an await.)

    Args:
        mode: `Precision.DEFAULT`, `HIGH` or `HIGHEST`, or torch's names "medium", "high" and "highest".

    Raises:
        ValueError: `mode` is none of these.
    """
    import torch

    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(  # a thread's setting can't be part of a graph
            msg="torch.tpu.precision is not part of a graph: what it encloses runs op by op. To have both, "
            "call the compiled function inside of the context."
        )
    chosen = _check_mode(mode)
    _start()
    with _in_this_thread(chosen.passes):
        yield


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Within this context, this thread computes products exactly: the products of parts are."""
    with _in_this_thread(0):
        yield


@contextlib.contextmanager
def _in_this_thread(passes: int) -> Iterator[None]:
    before = _local_passes()
    _set_local_passes(passes)
    try:
        yield
    finally:
        _set_local_passes(before)


# torch's own thread-local objects (private): those of the thread that calls `backward()` are seen in the
# threads in which autograd runs it, which is not so for Python's.


def _local_passes() -> int | None:
    local = _torch_c()
    return local._get_obj_in_tls(_KEY) if local._is_key_in_tls(_KEY) else None


def _set_local_passes(passes: int | None) -> None:
    _torch_c()._stash_obj_in_tls(_KEY, passes)


@functools.cache
def _torch_c() -> Any:
    from torch import _C

    return _C


def emulate_precision(enabled: bool = True) -> None:
    """Whether this process computes float32 matrix products as a TPU does, in `precision` contexts or not.

    If so, `torch.set_float32_matmul_precision` chooses the passes: "medium" 1, "high" 3, "highest" (torch's
    default) 6. If not, which is the default, products outside of a `precision` context are exact. The
    environment variable BRIDGE_TPU_PRECISION ("on" or "off") gives the value that a process starts with.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"emulate_precision() takes True or False, got {enabled!r}; choose how exactly with "
            f"torch.set_float32_matmul_precision or torch.tpu.precision"
        )
    global _emulated
    _emulated = enabled
    if enabled:
        _start()


def current_passes() -> int:
    """In how many passes this thread computes float32 matrix products now: 1, 3 or 6; 0 for exactly."""
    if not _started:  # the quick answer: this is asked at every call
        return 0
    passes = _local_passes()
    if passes is not None:
        return passes
    if not _emulated:
        return 0
    import torch

    return Precision(torch.get_float32_matmul_precision()).passes


def when_started(action: Callable[[], None]) -> None:
    """Call `action` before the first emulated product: now, if this process emulates already.

    The simulated device registers its kernels so; until then they know nothing of precision.
    """
    with _starting:
        _when_started.append(action)
        started = _started
    if started:
        action()


def _check_mode(mode: Precision | str) -> Precision:
    try:
        return Precision(mode)
    except ValueError:
        known = ", ".join(f"Precision.{p.name} ({p.value!r})" for p in Precision)
        raise ValueError(f"the precision given is {mode!r}; it must be one of {known}.") from None


def _read_variable() -> bool:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "on", "off"):
        raise ValueError(f"the environment variable {_VARIABLE} is {value!r}; it must be 'on' or 'off'.")
    return value == "on"


_emulated = _read_variable()
_started = _emulated
_starting = threading.Lock()
_when_started: list[Callable[[], None]] = []


def _start() -> None:
    """Before the first emulated product."""
    global _started
    with _starting:
        if not _started:
            for action in _when_started:
                action()
            _started = True


# The products -----------------------------------------------------------------------------------


class Arithmetic(NamedTuple):
    """What `multiply` needs of an array library.

    Attributes:
        round: float32 -> the nearest bfloat16 values, ties to even, as float32.
        finite_or_zero: float32 -> the same with 0 in place of NaN and infinities.
    """

    round: Callable[[Any], Any]
    finite_or_zero: Callable[[Any], Any]


# The products of parts besides hi*hi, in the order in which they are summed: small ones first.
_CORRECTIONS: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    3: ((1, 0), (0, 1)),
    6: ((1, 1), (0, 2), (2, 0), (0, 1), (1, 0)),
}


def multiply(
    product: Callable[[Any, Any], Any], lhs: Any, rhs: Any, passes: int, arithmetic: Arithmetic
) -> Any:
    """`product(lhs, rhs)` in passes over bfloat16 parts, which are added in float32.

    Products of parts are exact in float32, so what `product` rounds is its sums, as on a TPU.

    The parts of an infinity or NaN are worth nothing but for hi: where a sum of corrections is not finite it
    counts as 0, so that inf * 1 is inf and not inf * 1 + inf * 0. A finite operand that rounds to a bfloat16
    infinity (from 3.396e38 on) counts as infinite.

    Args:
        product: linear in each operand, and summing in float32: a matrix product, a convolution.
        lhs: float32.
        rhs: float32.
        passes: 1, 3 or 6.
        arithmetic: of the library that `product` belongs to.
    """
    corrections = _CORRECTIONS[passes]
    count = 1 + max((i for pair in corrections for i in pair), default=0)
    left, right = _parts(lhs, count, arithmetic), _parts(rhs, count, arithmetic)
    leading = product(left[0], right[0])
    if not corrections:
        return leading
    small = functools.reduce(
        lambda total, term: total + term, [product(left[i], right[j]) for i, j in corrections]
    )
    return leading + arithmetic.finite_or_zero(small)


def _parts(x: Any, count: int, arithmetic: Arithmetic) -> list[Any]:
    """hi, mid and lo, as many as asked for; what a part leaves is exact in float32."""
    parts = []
    for _ in range(count):
        part = arithmetic.round(x)
        parts.append(part)
        x = x - part
    return parts
