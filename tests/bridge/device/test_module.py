"""`torch.tpu`, and who may be the "tpu" device."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge import device, precedence
from bridge.device import extension

_native = extension.loaded()
needs_extension = pytest.mark.skipif(_native is None, reason="pure Python has one device")
_DOCS = Path(__file__).parents[3] / "docs/device.md"


@pytest.fixture
def two_devices() -> Iterator[None]:
    assert _native is not None
    before = _native.device_count()
    _native.set_device_count(2)
    yield
    _native.set_device(0)
    _native.set_device_count(before)


# -- names ---------------------------------------------------------------------------------------

TORCH_TPU = """
    EagerMode Event Precision Stream allow_excess_precision current_device current_stream default_generators
    default_stream device device_count device_of eager_mode get_amp_supported_dtype get_device_name
    get_device_properties get_rng_state initial_seed is_available is_initialized manual_seed manual_seed_all
    precision set_device set_eager_mode set_rng_state set_stream stream synchronize
""".split()
"""The names of torch_tpu 0.2.0's public torch.tpu that have a meaning here."""


def test_has_the_names_of_torch_tpu() -> None:
    missing = [name for name in TORCH_TPU if not hasattr(torch.tpu, name)]
    assert not missing


def test_docs_list_every_name() -> None:
    listed = set(re.findall(r"`(\w+)[`(]", _section()))
    public = {*torch.tpu.__all__, *TORCH_TPU}
    assert public <= listed, f"not in docs/device.md: {sorted(public - listed)}"


@needs_extension
def test_code_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```py\n(.*?)```", _section(), re.DOTALL):  # not "python": needs the extension
        exec(code, {"torch": torch})
    assert "134217728 bytes asked for" in capsys.readouterr().out
    assert torch.tpu.get_memory_limit() is None


def _section() -> str:
    return _DOCS.read_text(encoding="utf-8").partition("## The torch.tpu module")[2].partition("\n## ")[0]


def test_is_the_module_torch_knows() -> None:
    assert torch.get_device_module("tpu") is torch.tpu is sys.modules["torch.tpu"]
    assert torch.tpu.is_available() and torch.tpu.is_initialized() and torch.tpu.is_simulated()
    assert device.is_simulated()


# -- the chip ------------------------------------------------------------------------------------


def test_names_the_chip_and_that_it_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIDGE_CHIP", raising=False)
    assert torch.tpu.get_device_name() == "TPU v6e (simulated)"
    properties = torch.tpu.get_device_properties("tpu:0")
    assert properties.simulated and properties.chip == "v6e" and properties.total_memory == 32 * 1024**3
    monkeypatch.setenv("BRIDGE_CHIP", "v99")
    with pytest.raises(ValueError, match="'v99'.*v5e, v5p, v6e, tpu7x"):
        torch.tpu.get_device_name()


def test_a_tpu7x_is_two_devices_with_half_of_the_chip_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CHIP", "tpu7x")
    assert torch.tpu.get_device_name(0) == "tpu7x (simulated)"
    half = torch.tpu.get_device_properties()
    assert (half.devices_per_chip, half.cores, half.total_memory) == (2, 1, 96 * 1024**3)
    monkeypatch.setenv("BRIDGE_CHIP", "v5p")
    whole = torch.tpu.get_device_properties()
    assert (whole.devices_per_chip, whole.cores, whole.total_memory) == (1, 2, 95 * 1024**3)


def test_tells_the_dtypes_it_has() -> None:
    dtypes = torch.tpu.get_device_capability()["supported_dtypes"]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64):
        assert dtype in dtypes
        assert torch.zeros(1, dtype=dtype, device="tpu").dtype is dtype
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype() and torch.tpu.is_bf16_supported()


# -- which device --------------------------------------------------------------------------------


def test_device_zero_is_in_use_from_the_start() -> None:
    assert torch.tpu.current_device() == 0
    torch.tpu.set_device("tpu:0")
    torch.tpu.set_device(-1)  # changes nothing, as on cuda
    torch.tpu.synchronize()
    with torch.tpu.device(0), torch.tpu.device(None), torch.tpu.device("tpu"):
        assert torch.zeros(1, device="tpu").device.index == 0


@pytest.mark.parametrize("call", [torch.tpu.set_device, torch.tpu.synchronize, torch.tpu.device])
def test_wrong_devices_are_refused(call: Any) -> None:
    with pytest.raises(RuntimeError, match=r"invalid device index 99: torch.tpu.device_count.. is \d"):
        call(99)
    with pytest.raises(ValueError, match="expected a tpu device, got cpu"):
        call("cpu")
    with pytest.raises(TypeError, match="got float"):
        call(0.0)
    with pytest.raises(TypeError, match="got bool"):
        call(True)


@needs_extension
def test_device_contexts_switch_and_restore(two_devices: None) -> None:
    assert torch.tpu.device_count() == 2
    with torch.tpu.device(1):
        assert torch.tpu.current_device() == 1
        assert torch.zeros(1, device="tpu").device == torch.device("tpu:1")
        with torch.tpu.device("tpu:0"):
            assert torch.tpu.current_device() == 0
        with torch.tpu.device(None), torch.tpu.device(-1):
            assert torch.tpu.current_device() == 1
        with pytest.raises(KeyError), torch.tpu.device(0):
            raise KeyError
        assert torch.tpu.current_device() == 1
    assert torch.tpu.current_device() == 0
    torch.tpu.set_device(1)
    assert torch.ones(1, device="tpu").add_(1).get_device() == 1
    assert torch.tpu.can_device_access_peer(0, 1) and not torch.tpu.can_device_access_peer(1, 1)


@needs_extension
def test_device_of_follows_a_tensor(two_devices: None) -> None:
    there = torch.zeros(1, device="tpu:1")
    for obj in (there, there.untyped_storage()):
        with torch.tpu.device_of(obj):
            assert torch.tpu.current_device() == 1
    with torch.tpu.device_of(torch.zeros(1)), torch.tpu.device_of("tpu:1"):
        assert torch.tpu.current_device() == 0


@needs_extension
def test_each_thread_has_its_own_device(two_devices: None) -> None:
    seen = []

    def work() -> None:
        seen.append(torch.tpu.current_device())
        torch.tpu.set_device(1)
        seen.append(torch.tpu.current_device())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 1] and torch.tpu.current_device() == 0


@needs_extension
def test_tensors_of_two_devices_do_not_mix(two_devices: None) -> None:
    here, there = torch.ones(2, device="tpu:0"), torch.ones(2, device="tpu:1")
    with pytest.raises(RuntimeError, match="same device.*tpu:0.*tpu:1|same device.*tpu:1.*tpu:0"):
        here.add(there)
    assert torch.equal((here + there.to("tpu:0")).cpu(), torch.full((2,), 2.0))


# -- torch.accelerator ---------------------------------------------------------------------------


def test_torch_accelerator_is_this_device() -> None:
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("tpu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count()
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index("tpu:0")
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_stream() == torch.tpu.current_stream()
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    with pytest.raises(RuntimeError, match="invalid device.*99"):
        torch.accelerator.set_device_index(99)


@needs_extension
def test_torch_accelerator_chooses_the_same_device(two_devices: None) -> None:
    with torch.accelerator.device_index(1):
        assert torch.tpu.current_device() == 1
    torch.accelerator.set_device_index(1)
    assert torch.tpu.current_device() == 1
    torch.tpu.set_device(0)
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.skipif(_native is not None, reason="the extension counts memory")
def test_torch_accelerator_tells_what_pure_python_does_not_count() -> None:
    with pytest.raises(NotImplementedError, match="memory.*bridge.device.build"):
        torch.accelerator.memory_allocated()


# -- torch.compile -------------------------------------------------------------------------------


def _waits(x: torch.Tensor) -> torch.Tensor:
    torch.tpu.synchronize()
    return x + torch.tpu.device_count()


def _asks(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tpu.current_device()


def _switches(x: torch.Tensor) -> torch.Tensor:
    with torch.tpu.device(0):
        return x * 2


def _uses_streams(x: torch.Tensor) -> torch.Tensor:
    stream, event = torch.tpu.Stream(), torch.tpu.Event(enable_timing=True)
    with torch.tpu.stream(stream):
        y = x + 1
        event.record()
    torch.tpu.current_stream().wait_event(event)
    return y


def _seeds(x: torch.Tensor) -> torch.Tensor:
    torch.tpu.manual_seed(3)
    return x + torch.rand(2, device="tpu")


@pytest.mark.parametrize("function", [_waits, _asks, _switches, _uses_streams, _seeds])
def test_calls_can_stand_in_compiled_code(function: Any) -> None:  # and make no warnings
    x = torch.ones(2, device="tpu")
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="aot_eager")(x), function(x))
    torch._dynamo.reset()


def test_what_never_changes_is_a_constant_of_the_graph() -> None:
    x = torch.ones(2, device="tpu")
    torch._dynamo.reset()
    assert torch.equal(torch.compile(_waits, backend="aot_eager", fullgraph=True)(x), _waits(x))


# -- registration --------------------------------------------------------------------------------


def test_registering_again_is_harmless() -> None:
    module = torch.tpu
    assert device.register() and device.register()
    assert torch.tpu is module


def test_pallas_namespace_lists_what_it_has() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jaxop'; it has: get_pallas_mesh, jax_op"):
        torch.tpu.pallas.jaxop  # noqa: B018
    assert {"get_pallas_mesh", "jax_op"} <= set(dir(torch.tpu.pallas))


def _as_if_new(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device, "_registered", False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)


def test_another_backend_in_the_only_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_new(monkeypatch, "npu")
    with pytest.raises(device.DeviceTakenError, match="already 'npu'"):
        device.register()
    assert not device.is_simulated()
    from bridge import namespace

    namespace.autoload()  # `import torch` goes on


def test_steps_aside_for_a_registered_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_new(monkeypatch, "tpu")
    assert device.register() is False and not device.is_simulated()


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_a_real_tpu_is_left_to_torch_tpu(
    monkeypatch: pytest.MonkeyPatch, installed: bool, present: bool
) -> None:
    monkeypatch.setattr(precedence, "torch_tpu_installed", lambda: installed)
    monkeypatch.setattr(precedence, "tpu_present", lambda: present)
    assert device.real_backend_expected() is (installed and present)
    _as_if_new(monkeypatch, "privateuseone")
    monkeypatch.setattr(device, "_register", lambda: None)
    assert device.register() is not (installed and present)
