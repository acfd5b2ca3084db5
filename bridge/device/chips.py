"""What the simulated device says about the chip it stands for. The figures are those of `bridge.chips`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bridge.chips import chip
from bridge.interpretation import simulated_chip


@dataclass(frozen=True)
class ChipProperties:
    """Figures of one TPU device, and that it is simulated.

    A device is what a program sees as one: a whole chip, or half of a tpu7x, whose two cores are two devices
    with half of the chip's memory each.

    Attributes:
        name: the device name, as `torch.tpu.get_device_name()` gives it.
        chip: "v5e", "v5p", "v6e" or "tpu7x".
        cores: TensorCores of the device.
        total_memory: high-bandwidth memory (HBM) of the device, bytes.
        vmem_per_core: vector memory of one TensorCore, bytes.
        memory_bandwidth: HBM bytes per second of the device.
        bf16_peak: bfloat16 operations per second of the device.
        devices_per_chip: 2 for tpu7x, else 1.
        multi_processor_count: 1, which is what `torch_tpu` tells torch's compiler.
        simulated: always True here: arithmetic runs on the host's CPU, in the host's memory.
    """

    name: str
    chip: str
    cores: int
    total_memory: int
    vmem_per_core: int
    memory_bandwidth: float
    bf16_peak: float
    devices_per_chip: int = 1
    multi_processor_count: int = 1
    simulated: bool = True


def chip_properties() -> ChipProperties:
    """The figures of the device: of the chip in the environment variable BRIDGE_CHIP, or v6e.

    Raises:
        ValueError: BRIDGE_CHIP names a chip that is not simulated.
    """
    return _properties(simulated_chip())


@functools.cache
def _properties(name: str) -> ChipProperties:
    whole = chip(name)
    devices = whole.devices_per_chip
    label = name if name.startswith("tpu") else f"TPU {name}"
    return ChipProperties(
        name=f"{label} (simulated)",
        chip=name,
        cores=whole.tensor_cores // devices,
        total_memory=whole.hbm_bytes // devices,
        vmem_per_core=whole.vmem_bytes,
        memory_bandwidth=whole.hbm_bytes_per_second / devices,
        bf16_peak=whole.bf16_flops_per_second / devices,
        devices_per_chip=devices,
    )
