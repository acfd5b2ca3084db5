"""Donated arguments: tensors that a call uses up.

On a TPU the result takes the donated buffer over. Here the memory is left alone, but a donated
tensor refuses every later use, so that a program which reads one is found before a TPU is. Its
Python class becomes `DonatedTensor`, and its version counter moves, so that a backward that had
saved it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.schema import ONE, Call, OpSignature


class DonatedTensor(torch.Tensor):
    """A tensor that was donated to an op and holds nothing any more."""

    _donated_to: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (a for a in _flat(args, kwargs or {}) if isinstance(a, DonatedTensor))
        by = getattr(next(found, None), "_donated_to", "an op")
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"this tensor was donated to {by} and can't be used any more (by {name}); use the op's result, "
            f"or pass a clone() if the value is still needed"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<tensor donated to {self._donated_to}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _flat(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(_flat(value, {}) if isinstance(value, tuple | list) else [value])
    return found


def donated_indices(signature: OpSignature, donate_argnums: Sequence[int]) -> tuple[int, ...]:
    """Positions among the tensor parameters of the arguments `donate_argnums` (indices in the signature)."""
    found = []
    for number in donate_argnums:
        position = next((i for i, p in enumerate(signature.tensor_parameters) if p.index == number), None)
        if position is None:
            raise ValueError(
                f"{signature.op}: donate_argnums names index {number}, which is not a tensor argument; "
                "those are " + ", ".join(f"{p.index} ({p.name})" for p in signature.tensor_parameters)
            )
        found.append(position)
    return tuple(found)


def tensors_of(call: Call, positions: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a call at these tensor parameters (a list parameter gives all of its tensors)."""
    found: list[torch.Tensor] = []
    start = 0
    for position, entry in enumerate(call.structure):
        count = 0 if entry is None else 1 if entry == ONE else entry
        if position in positions:
            found.extend(call.tensors[start : start + count])
        start += count
    return found


def check(op: str, donated: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a donation that would take memory from a tensor that is still in use.

    Raises:
        ValueError: the tensor is a view or has views, or is passed twice.
        RuntimeError: it requires grad.
    """
    for tensor in donated:
        if tensor.requires_grad:
            raise RuntimeError(
                f"{op}: a tensor that requires grad can't be donated; pass tensor.detach().clone()"
            )
        memory = tensor.untyped_storage()
        if sum(t.untyped_storage()._cdata == memory._cdata for t in tensors) > 1:
            raise ValueError(
                f"{op}: a donated tensor's memory is passed in another argument, too; pass a clone()"
            )
        if tensor._base is not None or _shared(memory):
            raise ValueError(
                f"{op}: a donated tensor must own its memory, and this one shares it with another tensor "
                f"(it is a view, or has views); pass a clone()"
            )


def _shared(memory: torch.UntypedStorage) -> bool:
    # Two references are the tensor's own and the Python object `memory`.
    return torch._C._storage_Use_Count(memory._cdata) > 2


def invalidate(op: str, donated: Sequence[torch.Tensor]) -> None:
    """Make every later use of these tensors raise."""
    for tensor in donated:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            torch.autograd.graph.increment_version(tensor)
            tensor._donated_to = op  # pyright: ignore[reportAttributeAccessIssue]
            tensor.__class__ = DonatedTensor
