"""Memory of the device: true figures, a limit that binds, and nothing leaked."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import bridge
from bridge.device import extension, memory

_native = extension.loaded()
needs_extension = pytest.mark.skipif(_native is None, reason="pure Python does not count memory")
MIB = 1024**2


@bridge.jax_op("test_memory::double")
def double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture
def held() -> Iterator[Callable[[], int]]:
    """A function that tells how many bytes tensors hold beyond those at the start of the test."""
    gc.collect()  # of this file's tests: conftest.py freezes what was before
    before = torch.tpu.memory_allocated()
    yield lambda: torch.tpu.memory_allocated() - before


def _mebibytes(count: int) -> torch.Tensor:
    return torch.zeros(count * MIB, dtype=torch.uint8, device="tpu")


# -- figures -------------------------------------------------------------------------------------


@needs_extension
def test_counts_each_storage_once_and_until_its_last_view_dies(held: Callable[[], int]) -> None:
    x = _mebibytes(3)
    assert held() == 3 * MIB
    view = x[: MIB // 2].view(torch.int32).reshape(2, -1)
    assert held() == 3 * MIB
    del x
    assert held() == 3 * MIB
    del view
    assert held() == 0


_MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a CPU kernel": lambda x: x + 1,
    "a copy": lambda x: x.clone(),
    "a transfer": lambda x: x.cpu().to("tpu"),
    "empty": lambda x: torch.empty_like(x),
    "a kernel of JAX": double,
    "another dtype": lambda x: x.to(torch.float16).repeat(2),
    "random numbers": lambda x: torch.rand_like(x),
    "an in-place op": lambda x: x.clone().mul_(2),
    "a list of tensors": lambda x: torch.cat(torch._foreach_add([x[: x.numel() // 2]] * 2, 1)),
}


@needs_extension
@pytest.mark.parametrize("maker", _MAKERS)
def test_counts_memory_whoever_made_it(maker: str, held: Callable[[], int]) -> None:
    x = torch.ones(MIB, device="tpu")
    assert held() == 4 * MIB
    y = _MAKERS[maker](x)
    assert held() == 8 * MIB
    del x
    assert held() == 4 * MIB
    del y
    assert held() == 0


@needs_extension
def test_counts_what_grows(held: Callable[[], int]) -> None:
    x = _mebibytes(1)
    x.resize_(3 * MIB)
    assert held() == 3 * MIB
    x.untyped_storage().resize_(0)
    assert held() == 0
    x.untyped_storage().resize_(2 * MIB)
    assert held() == 2 * MIB


@needs_extension
def test_counts_what_autograd_keeps(held: Callable[[], int]) -> None:
    x = torch.ones(MIB, device="tpu", requires_grad=True)
    y = x.exp().sum()  # keeps exp(x)
    assert 8 * MIB <= held() < 9 * MIB
    y.backward()
    assert x.grad is not None
    del y, x
    assert held() == 0


@needs_extension
def test_peaks_and_sums_can_be_reset(held: Callable[[], int]) -> None:
    torch.tpu.reset_peak_memory_stats()
    torch.tpu.reset_accumulated_memory_stats()
    start = torch.tpu.memory_allocated()
    assert torch.tpu.max_memory_allocated() == start
    x = _mebibytes(5)
    del x
    y = _mebibytes(1)
    assert torch.tpu.max_memory_allocated() == torch.tpu.max_memory_reserved() == start + 5 * MIB
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == 6 * MIB and stats["allocated_bytes.all.freed"] == 5 * MIB
    assert stats["allocation.all.allocated"] == 2 and stats["allocation.all.freed"] == 1
    torch.tpu.reset_peak_memory_stats(0)
    assert torch.tpu.max_memory_allocated() == start + MIB
    torch.tpu.reset_accumulated_memory_stats("tpu")
    assert torch.tpu.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert y.numel() == MIB


@needs_extension
def test_torch_accelerator_gives_the_same_figures() -> None:
    x = _mebibytes(2)
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() >= 2 * MIB
    assert torch.accelerator.memory_reserved() == torch.tpu.memory_reserved() == torch.tpu.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_allocated()
    assert torch.accelerator.memory_stats() == torch.tpu.memory_stats()
    assert torch.accelerator.get_memory_info() == torch.tpu.mem_get_info()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == torch.tpu.memory_allocated()
    assert x.numel() == 2 * MIB


@needs_extension
def test_each_device_has_its_own_figures() -> None:
    assert _native is not None
    before = _native.device_count()
    _native.set_device_count(2)
    try:
        here = torch.tpu.memory_allocated(0)
        x = torch.zeros(MIB, dtype=torch.uint8, device="tpu:1")
        assert torch.tpu.memory_allocated(1) == MIB and torch.tpu.memory_allocated("tpu:0") == here
        with torch.tpu.device(1):
            assert torch.tpu.memory_allocated() == MIB
        with torch.tpu.memory_limit(MIB, 1):
            assert torch.tpu.get_memory_limit(0) is None
            assert x.to("tpu:0").device.index == 0
            with pytest.raises(torch.OutOfMemoryError, match="tpu:1"):
                x.add(1)
    finally:
        _native.set_device_count(before)


# -- the limit -----------------------------------------------------------------------------------


_ALLOCATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "a CPU kernel": lambda x: x + x,
    "a kernel of JAX": double,
    "a transfer": lambda x: x.cpu().to("tpu"),
    "an allocation": lambda x: torch.empty(x.shape, device="tpu"),
    "a storage": lambda x: torch.UntypedStorage(x.untyped_storage().nbytes(), device="tpu"),
    "a resize": lambda x: torch.empty(0, device="tpu").resize_(x.shape),
}


@needs_extension
@pytest.mark.parametrize("allocation", _ALLOCATIONS)
def test_beyond_the_limit_is_out_of_memory(allocation: str, held: Callable[[], int]) -> None:
    x = torch.ones(MIB, device="tpu")
    allocate = _ALLOCATIONS[allocation]
    with torch.tpu.memory_limit(torch.tpu.memory_allocated() + 6 * MIB):
        for _ in range(3):  # each fits, and is freed
            allocate(x)
        kept = allocate(x)
        with pytest.raises(torch.OutOfMemoryError):
            allocate(x)
        del kept
        allocate(x)
    assert held() == 4 * MIB
    assert torch.equal(x.cpu(), torch.ones(MIB))


@needs_extension
def test_the_error_says_what_was_asked_held_and_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CHIP", "v5e")
    x = _mebibytes(3)
    held = torch.tpu.memory_allocated()
    ooms = torch.tpu.memory_stats()["num_ooms"]
    with torch.tpu.memory_limit(held + MIB), pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2 * MIB, dtype=torch.uint8, device="tpu")
    assert re.search(
        rf"^tpu:0 is out of memory: {2 * MIB} bytes asked for, {held} of {held + MIB} bytes held by \d+ "
        r"storages\. "
        r"The limit is set by torch\.tpu\.set_memory_limit \(a TPU v5e \(simulated\) has 16\.00 GiB\)\. "
        r"torch\.tpu\.memory_summary\(\) lists what holds memory",
        str(error.value),
    )
    with pytest.raises(torch.OutOfMemoryError, match=r"limit is the HBM of a TPU v5e \(simulated\), set by"):
        with torch.tpu.memory_limit("chip"):
            torch.empty(17 * 1024**3, dtype=torch.uint8, device="tpu")
    assert torch.tpu.memory_stats()["num_ooms"] == ooms + 2
    assert x.numel() == 3 * MIB


@needs_extension
@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        (123, 123),
        ("456", 456),
        ("16GiB", 16 * 1024**3),
        ("1.5 gib", 1536 * MIB),
        ("500MB", 500_000_000),
        ("chip", 32 * 1024**3),
        (0, 0),
        (None, None),
    ],
)
def test_limits_are_read(
    limit: int | str | None, nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BRIDGE_CHIP", raising=False)
    before = torch.tpu.get_memory_limit()
    with torch.tpu.memory_limit(limit):
        assert torch.tpu.get_memory_limit() == nbytes
    assert torch.tpu.get_memory_limit() == before


@needs_extension
def test_wrong_limits_are_refused() -> None:
    for wrong, error in (
        (-1, ValueError),
        ("", ValueError),
        ("2k", ValueError),
        ("lots", ValueError),
        (1.5, TypeError),
    ):
        with pytest.raises(error, match="set_memory_limit"):
            torch.tpu.set_memory_limit(wrong)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 2"):
        torch.tpu.set_per_process_memory_fraction(2)
    with pytest.raises(TypeError, match="got str"):
        torch.tpu.set_per_process_memory_fraction("half")
    with pytest.raises(RuntimeError, match="invalid device index 99"):
        torch.tpu.set_memory_limit(1, 99)
    assert torch.tpu.get_memory_limit() is None


@needs_extension
def test_a_fraction_of_the_chip_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CHIP", "v5e")
    chip = 16 * 1024**3
    free, total = torch.tpu.mem_get_info()
    assert total == chip and free == chip - torch.tpu.memory_allocated()
    assert torch.tpu.get_per_process_memory_fraction() == 1.0
    torch.tpu.set_per_process_memory_fraction(0.25)
    try:
        assert torch.tpu.get_memory_limit() == chip // 4 == torch.tpu.mem_get_info()[1]
        assert torch.tpu.get_per_process_memory_fraction() == 0.25
    finally:
        torch.tpu.set_memory_limit(None)
    with torch.tpu.memory_limit(0):
        assert torch.tpu.mem_get_info() == (0, 0)


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_extension
def test_the_environment_sets_the_limit() -> None:
    limits = "import torch; print(torch.tpu.get_memory_limit(0), torch.tpu.get_memory_limit(1))"
    done = _python(limits, BRIDGE_HBM_LIMIT="chip", BRIDGE_CHIP="tpu7x", BRIDGE_DEVICE_COUNT="2")
    assert done.stdout.split() == [str(96 * 1024**3)] * 2, done.stderr
    done = _python(limits, BRIDGE_HBM_LIMIT="much")
    assert done.returncode and "the environment variable BRIDGE_HBM_LIMIT is 'much'" in done.stderr


def test_pure_python_names_the_extension() -> None:
    code = """
import torch
for ask in (torch.tpu.memory_allocated, torch.tpu.memory_summary, torch.tpu.mem_get_info,
            lambda: torch.tpu.set_memory_limit("chip"), torch.accelerator.memory_stats):
    try:
        ask()
    except NotImplementedError as error:
        assert "memory" in str(error) and "python -m bridge.device.build" in str(error), error
    else:
        raise AssertionError(ask)
torch.tpu.empty_cache()
torch.accelerator.synchronize()
"""
    done = _python(code, BRIDGE_DEVICE_EXTENSION="0")
    assert not done.returncode, done.stderr
    done = _python("import torch", BRIDGE_DEVICE_EXTENSION="0", BRIDGE_HBM_LIMIT="chip")
    assert done.returncode and "python -m bridge.device.build" in done.stderr


# -- what holds memory ---------------------------------------------------------------------------


@needs_extension
def test_the_summary_lists_what_holds_most() -> None:
    weight = torch.nn.Parameter(torch.zeros(7, MIB, device="tpu"))
    view = weight.detach()[1:]
    text = torch.tpu.memory_summary()
    assert "tpu:0, TPU v6e (simulated)" in text
    assert "28.00 MiB  parameter (7, 1048576) float32" in text or "28.00 MiB  tensor (6, 1048576)" in text
    assert text.count("28.00 MiB  ") == 1 and view.shape[0] == 6
    assert "parameter" not in torch.tpu.memory_summary(abbreviated=True)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 1024**4, "5120.00 GiB")]
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert memory.format_bytes(nbytes) == text


# -- nothing leaks -------------------------------------------------------------------------------


def test_storages_are_freed_at_once() -> None:
    gc.disable()
    try:
        x = torch.ones(1000, device="tpu", requires_grad=True)
        made = [x + 1, x.exp(), double(x), x.detach().clone().add_(1), x.detach().cpu().to("tpu")]
        refs = [StorageWeakRef(t.untyped_storage()) for t in made]
        assert not any(ref.expired() for ref in refs)
        del made
        assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


def _resident() -> int:
    """Bytes of this process that lie in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _calls(count: int) -> None:
    """About `count` op calls of many kinds, most of them with results of 256 KiB."""
    x = torch.rand(256, 256, device="tpu")
    weight = torch.rand(256, 256, device="tpu", requires_grad=True)
    host = torch.rand(256, 256)
    for _ in range(count // 20):
        y = torch.nn.functional.layer_norm(x @ weight, (256,)).relu()  # 3
        y.sum().backward()  # 8
        weight.grad = None
        z = torch.cat([x, y.detach()[:1]])  # 3
        z[0] = host[0]  # 3
        z.add_(1).t().contiguous()  # 3
        double(x)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_nothing_leaks_over_many_calls(count: int) -> None:
    _calls(2_000)
    gc.collect()
    before, objects = _resident(), len(gc.get_objects())
    _calls(count)
    gc.collect()
    assert len(gc.get_objects()) - objects < count // 100
    assert _resident() - before < 32 * MIB  # one result leaked in every 20 calls is 125 MiB and more


@needs_extension
def test_many_calls_leave_nothing_held(held: Callable[[], int]) -> None:
    _calls(1_000)
    gc.collect()
    assert held() == 0


@needs_extension
def test_threads_are_counted_together(held: Callable[[], int]) -> None:
    def work() -> None:
        for _ in range(200):
            torch.ones(1000, device="tpu").add_(1).sum()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held() == 0
