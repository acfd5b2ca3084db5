"""`torch.tpu`, and who may be the "tpu" device."""

from __future__ import annotations

import sys

import pytest
import torch

from bridge import device


def test_names_the_chip_and_that_it_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIDGE_CHIP", raising=False)
    assert torch.tpu.get_device_name() == "TPU v6e (simulated)"
    properties = torch.tpu.get_device_properties("tpu:0")
    assert properties.simulated and properties.chip == "v6e" and properties.total_memory == 32 * 1024**3
    monkeypatch.setenv("BRIDGE_CHIP", "tpu7x")
    assert torch.tpu.get_device_name(0) == "tpu7x (simulated)"
    assert torch.tpu.get_device_properties().cores == 2
    monkeypatch.setenv("BRIDGE_CHIP", "v99")
    with pytest.raises(ValueError, match="'v99'.*v5e, v5p, v6e, tpu7x"):
        torch.tpu.get_device_name()


def test_one_device() -> None:
    assert torch.tpu.is_available() and torch.tpu.is_simulated() and device.is_simulated()
    assert (torch.tpu.device_count(), torch.tpu.current_device()) == (1, 0)
    torch.tpu.set_device("tpu:0")
    torch.tpu.synchronize()
    with torch.tpu.device(0):
        assert torch.zeros(1, device="tpu").device.index == 0
    with pytest.raises(RuntimeError, match="device_count.. is 1"):
        torch.tpu.set_device(1)
    with pytest.raises(ValueError, match="expected a tpu device, got cpu"):
        torch.tpu.synchronize("cpu")
    with pytest.raises(TypeError, match="got float"):
        torch.tpu.set_device(0.0)
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.get_device_module("tpu") is torch.tpu is sys.modules["torch.tpu"]


def test_registering_again_is_harmless() -> None:
    module = torch.tpu
    assert device.register() and device.register()
    assert torch.tpu is module


def test_pallas_namespace_lists_what_it_has() -> None:
    with pytest.raises(AttributeError, match="'torch.tpu.pallas' has no attribute 'jaxop'; it has: jax_op"):
        torch.tpu.pallas.jaxop  # noqa: B018
    assert "jax_op" in dir(torch.tpu.pallas)


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
    found = object() if installed else None
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(device, "_tpu_present", lambda: present)
    assert device.real_backend_expected() is (installed and present)
    _as_if_new(monkeypatch, "privateuseone")
    monkeypatch.setattr(device, "_register", lambda: None)
    assert device.register() is not (installed and present)
