"""Streams and events of the simulated TPU. Everything is synchronous: what they order has happened already.

An op has finished when it returns, whichever stream is current: work is ordered across all streams by the
order of the calls. So `wait_stream`, `wait_event` and `synchronize` return at once and `query()` is True.
What is real: which stream is current (for each thread and device), and the host time at which an event was
recorded. Parameters have the names that cuda and `torch_tpu` give them.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Literal

import torch

from bridge.device import extension
from bridge.device.devices import DEVICE_TYPE, DeviceLike, current_device, device, index_of
from bridge.device.tracing import untraced

_DEVICE_KIND = 20  # c10::DeviceType::PrivateUse1, by which torch.Stream is made from its parts
_DEFAULT_STREAM = 0
_CORES: dict[str, Literal["tensor", "sparse"] | None] = {
    **dict.fromkeys(["none", "unpinned"]),
    **dict.fromkeys(["tensorcore", "tensor_core", "tc", "tensor", "dense"], "tensor"),
    **dict.fromkeys(["sparse", "sparse_core", "sparsecore", "sc", "sparseoffload"], "sparse"),
}


class Stream(torch.Stream):
    """A stream of a device: a name under which work is submitted.

    Args:
        device: where; None is the device in use.
        priority: accepted; nothing competes here.
        stream_id: the id of a stream that exists. None makes a new one.
        pinned: the core the stream is meant for, as in `torch_tpu`: "tensorcore", "sparsecore" or None. It is
            kept (`is_dense`, `is_sparse`) and changes nothing here.

    Raises:
        ValueError: `pinned` names no kind of core.
    """

    _core: Literal["tensor", "sparse"] | None

    @untraced
    def __new__(
        cls,
        device: DeviceLike = None,
        priority: int = 0,
        stream_id: int | None = None,
        *,
        pinned: str | None = None,
        **kwargs: Any,
    ) -> Stream:
        index = index_of(device)
        if stream_id is None:
            stream_id = _new_stream_id(index)
        stream = super().__new__(
            cls, stream_id=stream_id, device_index=index, device_type=_DEVICE_KIND, priority=priority
        )
        stream._core = _core(pinned)
        return stream

    @property
    def is_dense(self) -> bool:
        """Whether the stream is meant for the TensorCore."""
        return self._core == "tensor"

    @property
    def is_sparse(self) -> bool:
        """Whether the stream is meant for the SparseCore."""
        return self._core == "sparse"

    def wait_event(self, event: torch.Event) -> None:
        """Later work of this stream comes after the event: it does, since what is recorded has happened."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Later work of this stream comes after the present work of another: it does."""
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event, a new one if none is given, and return it."""
        if event is None:
            event = Event(device=self.device)
        event.record(self)
        return event

    def query(self) -> bool:
        """True: all work submitted has been done."""
        return True

    def synchronize(self) -> None:
        """Returns at once: all work submitted has been done."""

    def __enter__(self) -> Stream:
        entered = StreamContext(self)
        entered.__enter__()
        _contexts().append(entered)
        return self

    def __exit__(self, *exception: object) -> None:
        _contexts().pop().__exit__(*exception)

    def __repr__(self) -> str:
        return f"<torch.{DEVICE_TYPE}.Stream device={self.device} stream_id={self.stream_id}>"


def _core(pinned: str | None) -> Literal["tensor", "sparse"] | None:
    if pinned is None:
        return None
    if not isinstance(pinned, str) or pinned.lower() not in _CORES:
        raise ValueError(
            f"Stream: pinned is {pinned!r}; expected one of {', '.join(map(repr, _CORES))}, or None"
        )
    return _CORES[pinned.lower()]


class Event(torch.Event):
    """A point in the order of work, and the host time at which it was recorded.

    Args:
        enable_timing: whether `elapsed_time` may be asked.
        blocking: accepted; nothing is waited for.
        interprocess: must be False, see `ipc_handle`.
        external: accepted, as cuda has it.
        device: where; None is the device of the first stream the event is recorded on.

    Raises:
        NotImplementedError: `interprocess=True`.
    """

    _timed: bool
    _index: int | None  # the device; None until it is known
    _nanoseconds: int | None  # when it was recorded

    @untraced
    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: DeviceLike = None,
    ) -> Event:
        if interprocess:
            raise NotImplementedError(_NO_SHARING)
        where = torch.device(DEVICE_TYPE, index_of(device))
        event = super().__new__(cls, device=where, enable_timing=enable_timing, blocking=blocking)
        event._timed = bool(enable_timing)
        event._index = None if device is None else where.index
        event._nanoseconds = None
        return event

    @untraced
    def record(self, stream: torch.Stream | None = None) -> Event:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record the event on a stream (None: the current one of the event's device) and return it.

        Raises:
            TypeError: not a stream.
            RuntimeError: a stream of another device than the event's.
        """
        stream = _stream_or_current(stream, self._index)
        if self._index is None:
            self._index = stream.device_index
        if stream.device_index != self._index:
            raise RuntimeError(
                f"an event of {DEVICE_TYPE}:{self._index} cannot be recorded on a stream of {stream.device}"
            )
        self._nanoseconds = time.perf_counter_ns()
        return self

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Later work of a stream (None: the current one) comes after the event: it does."""
        _stream_or_current(stream, None)

    def query(self) -> bool:
        """True: what was recorded has happened. True for an event that was never recorded, as on cuda."""
        return True

    def synchronize(self) -> None:
        """Returns at once: what was recorded has happened."""

    def elapsed_time(self, end_event: torch.Event) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Milliseconds of host time from the recording of this event to that of `end_event`.

        Ops are done when they return, so this is the time the host took for the work between them. It says
        nothing of a TPU's speed.

        Raises:
            TypeError: not a `torch.tpu.Event`.
            ValueError: an event without `enable_timing=True`, one that was never recorded, or two devices.
        """
        if not isinstance(end_event, Event):
            raise TypeError(f"expected a torch.{DEVICE_TYPE}.Event, got {type(end_event).__name__}")
        if not (self._timed and end_event._timed):
            raise ValueError("both events must be created with enable_timing=True")
        if self._nanoseconds is None or end_event._nanoseconds is None:
            raise ValueError("both events must be recorded before the time between them can be asked for")
        if self._index != end_event._index:
            raise ValueError(
                f"both events must be of one device, got {DEVICE_TYPE}:{self._index} and "
                f"{DEVICE_TYPE}:{end_event._index}"
            )
        return (end_event._nanoseconds - self._nanoseconds) / 1e6

    def ipc_handle(self) -> bytes:
        """Not here. Raises NotImplementedError."""
        raise NotImplementedError(_NO_SHARING)

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Not here. Raises NotImplementedError."""
        raise NotImplementedError(_NO_SHARING)

    def __repr__(self) -> str:
        state = "not recorded" if self._nanoseconds is None else f"device={DEVICE_TYPE}:{self._index}"
        return f"<torch.{DEVICE_TYPE}.Event {state}>"


_NO_SHARING = (
    f"events of the simulated {DEVICE_TYPE} device cannot be shared between processes; use a "
    "multiprocessing.Event"
)


def _stream_or_current(stream: torch.Stream | None, index: int | None) -> torch.Stream:
    if stream is None:
        return current_stream(index)
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"expected a torch.Stream, got {type(stream).__name__}")
    if stream.device.type != DEVICE_TYPE:
        raise RuntimeError(f"expected a stream of {DEVICE_TYPE!r}, got one of {stream.device}")
    return stream


# -- the current stream --------------------------------------------------------------------------


class _Thread(threading.local):
    """In pure Python: the ids of the current streams, by device. And the contexts of `with stream:`."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}
        self.contexts: list[StreamContext] = []


_thread = _Thread()
_ids = itertools.count(1)


def _contexts() -> list[StreamContext]:
    return _thread.contexts


def _new_stream_id(index: int) -> int:
    if extension.loaded() is None:
        return next(_ids)
    return torch.Stream(device=torch.device(DEVICE_TYPE, index)).stream_id


@untraced
def current_stream(device: DeviceLike = None) -> Stream:
    """The current stream of a device in this thread."""
    index = index_of(device)
    if extension.loaded() is None:
        return Stream(index, stream_id=_thread.current.get(index, _DEFAULT_STREAM))
    return Stream(index, stream_id=torch.accelerator.current_stream(index).stream_id)


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream of a device that is current before any is chosen."""
    return Stream(device, stream_id=_DEFAULT_STREAM)


@untraced
def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current one of its device, in this thread. None changes nothing, as on cuda.

    Raises:
        TypeError: not a stream.
        RuntimeError: a stream of another kind of device.
    """
    if stream is None:
        return
    _stream_or_current(stream, None)
    if extension.loaded() is None:
        _thread.current[stream.device_index] = stream.stream_id
        return
    with device(current_device()):  # torch changes the device in use as well; cuda's set_stream does not
        torch.accelerator.set_stream(stream)


class StreamContext:
    """What `torch.tpu.stream(...)` returns: within it, a stream is current and its device in use."""

    def __init__(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            _stream_or_current(stream, None)
        self.stream = stream
        self._before: Stream | None = None
        self._device = device(None)

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = device(self.stream.device_index)
        self._device.__enter__()
        self._before = current_stream(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        if self.stream is None:
            return
        set_stream(self._before)
        self._device.__exit__(*exception)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Context manager within which a stream is current. None changes nothing."""
    return StreamContext(stream)
