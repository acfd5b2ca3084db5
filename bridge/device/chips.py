"""What the simulated device says about the chip it stands for (public figures, per chip)."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.interpretation import simulated_chip

_GIB = 1024**3
_MIB = 1024**2


@dataclass(frozen=True)
class ChipProperties:
    """Figures of one TPU chip, and that it is simulated.

    Attributes:
        name: the device name, as `torch.tpu.get_device_name()` gives it.
        chip: "v5e", "v5p", "v6e" or "tpu7x".
        cores: TensorCores on the chip.
        total_memory: high-bandwidth memory (HBM), bytes.
        vmem_per_core: vector memory of one TensorCore, bytes.
        memory_bandwidth: HBM bytes per second.
        bf16_peak: bfloat16 operations per second.
        simulated: always True here: arithmetic runs on the host's CPU, in the host's memory.
    """

    name: str
    chip: str
    cores: int
    total_memory: int
    vmem_per_core: int
    memory_bandwidth: float
    bf16_peak: float
    simulated: bool = True


def _chip(
    chip: str, cores: int, hbm_gib: int, vmem_mib: int, bandwidth: float, peak: float
) -> ChipProperties:
    label = chip if chip.startswith("tpu") else f"TPU {chip}"
    return ChipProperties(
        f"{label} (simulated)", chip, cores, hbm_gib * _GIB, vmem_mib * _MIB, bandwidth, peak
    )


CHIPS: dict[str, ChipProperties] = {
    "v5e": _chip("v5e", 1, 16, 128, 8.19e11, 1.97e14),
    "v5p": _chip("v5p", 2, 95, 64, 2.765e12, 4.59e14),
    "v6e": _chip("v6e", 1, 32, 128, 1.64e12, 9.18e14),
    "tpu7x": _chip("tpu7x", 2, 192, 64, 7.38e12, 2.307e15),
}


def chip_properties() -> ChipProperties:
    """The figures of the chip the device stands for: the environment variable BRIDGE_CHIP, or v6e.

    Raises:
        ValueError: BRIDGE_CHIP names a chip that is not simulated.
    """
    return CHIPS[simulated_chip()]
