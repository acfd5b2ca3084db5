"""Streams and events: an order that holds trivially, real times, and cuda's errors for wrong uses."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bridge.device import extension

_native = extension.loaded()
needs_extension = pytest.mark.skipif(_native is None, reason="torch.Stream needs the C++ extension")


def test_streams_have_identity() -> None:
    default = torch.tpu.default_stream()
    assert default == torch.tpu.current_stream() == torch.tpu.Stream(stream_id=0)
    first, second = torch.tpu.Stream(), torch.tpu.Stream("tpu:0", priority=-1)
    assert len({default, first, second}) == 3
    assert isinstance(first, torch.Stream) and first.device == torch.device("tpu:0")
    assert first == torch.tpu.Stream(stream_id=first.stream_id)
    assert repr(first) == f"<torch.tpu.Stream device=tpu:0 stream_id={first.stream_id}>"


def test_stream_contexts_nest_and_restore() -> None:
    default, first, second = torch.tpu.current_stream(), torch.tpu.Stream(), torch.tpu.Stream()
    with torch.tpu.stream(first):
        assert torch.tpu.current_stream() == first
        with second, second:
            assert torch.tpu.current_stream() == second
        with torch.tpu.stream(None):
            assert torch.tpu.current_stream() == first
        with pytest.raises(KeyError), second:
            raise KeyError
        assert torch.tpu.current_stream() == first == torch.accelerator.current_stream()
    torch.tpu.set_stream(second)
    torch.tpu.set_stream(None)
    assert torch.tpu.current_stream() == second
    torch.accelerator.set_stream(default)
    assert torch.tpu.current_stream() == default


def test_each_thread_has_its_own_current_stream() -> None:
    seen = []
    with torch.tpu.Stream():
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.tpu.default_stream()]


def test_work_on_two_streams_is_in_order() -> None:
    producer, consumer = torch.tpu.Stream(), torch.tpu.Stream()
    with torch.tpu.stream(producer):
        x = torch.ones(1000, device="tpu").cumsum(0)
        done = producer.record_event()
    consumer.wait_event(done)
    consumer.wait_stream(producer)
    with torch.tpu.stream(consumer):
        y = x * 2
    consumer.synchronize()
    assert producer.query() and consumer.query() and done.query()
    assert y[-1] == 2000


def test_a_tensor_may_be_recorded_on_a_stream() -> None:
    torch.ones(1, device="tpu").record_stream(torch.tpu.Stream())


def test_events_tell_host_time() -> None:
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(True)
    before = time.perf_counter()
    assert start.record() is start
    time.sleep(0.02)
    end.record(torch.tpu.Stream())
    end.wait()
    end.synchronize()
    longest = (time.perf_counter() - before) * 1e3
    assert 20 <= start.elapsed_time(end) <= longest
    assert -longest <= end.elapsed_time(start) <= -20
    start.record()  # again: the last time counts
    assert end.elapsed_time(start) >= 0


def test_recording_makes_an_event_of_the_stream() -> None:
    event = torch.tpu.current_stream().record_event()
    assert isinstance(event, torch.tpu.Event) and event.query()
    assert torch.tpu.Event().query()  # never recorded: nothing to wait for
    given = torch.tpu.Event()
    assert torch.tpu.Stream().record_event(given) is given


def test_wrong_uses_of_events_are_refused() -> None:
    plain, timed = torch.tpu.Event(), torch.tpu.Event(enable_timing=True)
    recorded = torch.tpu.Event(enable_timing=True).record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(recorded)
    with pytest.raises(ValueError, match="must be recorded"):
        recorded.elapsed_time(timed)
    with pytest.raises(TypeError, match="expected a torch.tpu.Event, got float"):
        recorded.elapsed_time(1.0)
    with pytest.raises(TypeError, match="expected a torch.Stream, got str"):
        plain.record("main")
    with pytest.raises(NotImplementedError, match="between processes"):
        torch.tpu.Event(interprocess=True)
    with pytest.raises(NotImplementedError, match="between processes"):
        plain.ipc_handle()


def test_wrong_uses_of_streams_are_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device index 99"):
        torch.tpu.Stream(99)
    with pytest.raises(TypeError, match="expected a torch.Stream, got int"):
        torch.tpu.set_stream(3)
    with pytest.raises(TypeError, match="expected a torch.Stream, got int"):
        torch.tpu.stream(3)
    with pytest.raises(ValueError, match="pinned is 'gpu'.*'tensorcore'"):
        torch.tpu.Stream(pinned="gpu")


def test_streams_remember_the_core_they_are_meant_for() -> None:
    assert torch.tpu.Stream(pinned="tensorcore").is_dense
    assert torch.tpu.Stream(pinned="SC").is_sparse
    plain = torch.tpu.Stream()
    assert not plain.is_dense and not plain.is_sparse


@needs_extension
def test_streams_of_two_devices() -> None:
    assert _native is not None
    before = _native.device_count()
    _native.set_device_count(2)
    try:
        there = torch.tpu.Stream(1)
        with torch.tpu.stream(there):
            assert torch.tpu.current_device() == 1 and torch.tpu.current_stream() == there
            assert torch.tpu.current_stream(0) == torch.tpu.default_stream(0)
        assert torch.tpu.current_device() == 0
        torch.tpu.set_stream(there)  # chooses the stream of device 1, and not device 1
        assert torch.tpu.current_device() == 0 and torch.tpu.current_stream(1) == there
        torch.tpu.set_stream(torch.tpu.default_stream(1))
        event = torch.tpu.Event(device=0, enable_timing=True)
        with pytest.raises(RuntimeError, match="event of tpu:0 cannot be recorded on a stream of tpu:1"):
            event.record(there)
        with pytest.raises(ValueError, match="one device, got tpu:0 and tpu:1"):
            event.record().elapsed_time(torch.tpu.Event(True).record(there))
    finally:
        _native.set_device_count(before)


@needs_extension
def test_torch_streams_and_events_work() -> None:
    stream, start, end = (
        torch.Stream(device="tpu"),
        torch.Event("tpu", enable_timing=True),
        torch.Event("tpu", enable_timing=True),
    )
    with stream:
        assert torch.tpu.current_stream() == stream
        start.record()
        stream.wait_event(start)
        stream.record_event(end)
    end.synchronize()
    assert end.query() and stream.query() and start.elapsed_time(end) >= 0
    torch.tpu.Stream().wait_stream(stream)
    torch.tpu.Stream().record_event(end)
