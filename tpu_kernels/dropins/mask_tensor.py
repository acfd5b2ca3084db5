"""A mask of ours that is a tensor for whoever asks: `[B, 1, L, S]`, bool, made when somebody uses it as
one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_map_only

from bridge import jax_op
from tpu_kernels._integers import int32
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import parse
from tpu_kernels.expressions.hoist import load_from
from tpu_kernels.masks import Mask


class MaskTensor(torch.Tensor):
    """True where a query sees a key. It has no memory: `mask` says it, and any operation gets a table of it.

    Args:
        mask: a mask of b, q and kv, of tensors on `device`.
        shape: batch size, length of queries, length of keys.
        device: where the table would be.
    """

    mask: Mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, mask: Mask, shape: tuple[int, int, int], device: torch.device | str) -> MaskTensor:
        batch, q_len, kv_len = shape
        result = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, (batch, 1, q_len, kv_len), dtype=torch.bool, device=torch.device(device)
        )
        result.mask = mask
        return result

    def table(self) -> torch.Tensor:
        """All elements, as a plain tensor."""
        captures = [t if t.is_floating_point() else int32(t) for t in self.mask.captures]
        batch, _, q_len, kv_len = self.shape
        place = torch.empty(0, dtype=torch.bool, device=self.device)
        return _table(place, captures, self.mask.text, batch, q_len, kv_len)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"MaskTensor({self.mask!r}, shape={list(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(MaskTensor, MaskTensor.table, (args, kwargs or {}))
        return func(*args, **kwargs)


@jax_op("tpu_kernels::mask_table")
def _table(
    place: jax.Array, captures: Sequence[jax.Array], mask: str, batch: int, q_len: int, kv_len: int
) -> jax.Array:
    """[batch, 1, q_len, kv_len]. `place`, an empty array, says on which device."""
    del place
    shape = (batch, 1, q_len, kv_len)
    env: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
    for axis, name in enumerate(("b", "h", "q", "kv")):
        one = tuple(size if i == axis else 1 for i, size in enumerate(shape))
        env[name] = jax.lax.broadcasted_iota(jnp.int32, one, axis)
    return jnp.broadcast_to(evaluate(parse(mask), env, load_from(captures, env)), shape)
