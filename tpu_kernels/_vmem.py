"""How much of a chip's VMEM kernels may use that ask for more than the compiler's default."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.chips import Chip


def vmem_allowed(chip: Chip) -> int:
    """Bytes that a kernel may use: it asks for all of VMEM but an eighth, which is the compiler's own."""
    return chip.vmem_bytes // 8 * 7


def excess_reasons(needed: Mapping[str, int], chip: Chip) -> tuple[str, ...]:
    """Which phases need more bytes than that, one sentence each; empty if none does."""
    allowed = vmem_allowed(chip)
    return tuple(
        f"the {phase} needs about {size / 2**20:.1f} MiB of VMEM and {chip.name} allows "
        f"{allowed / 2**20:.1f} MiB"
        for phase, size in needed.items()
        if size > allowed
    )
