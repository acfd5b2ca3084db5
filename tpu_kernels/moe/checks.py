"""Checks of arguments that the functions of a mixture-of-experts layer share."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_int(op: str, name: str, value: object, least: int, most: int | None = None, why: str = "") -> int:
    """`value` as an int from `least` to `most`.

    Args:
        why: what the limits come from, for the message.

    Raises:
        TypeError: it is no int.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{op}: {name} must be {limits}{why}, got {value}")
    return value  # pyright: ignore[reportReturnType]  an int, or one that torch.compile has made symbolic


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ValueError` for what is none of the names."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise `RuntimeError` if tensors are on several devices; None passes."""
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    for name, tensor in given:
        if tensor.device != given[0][1].device:
            raise RuntimeError(
                f"{op}: all tensors must be on one device, got {given[0][0]} on {given[0][1].device} and "
                f"{name} on {tensor.device}"
            )
