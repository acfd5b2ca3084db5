"""`context_parallel`: a block of code in which torch's attention is that of sequences on several ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tpu_kernels.collectives.ops import AnyAxis, AnyMesh
from tpu_kernels.collectives.places import line_of
from tpu_kernels.context_parallel import active
from tpu_kernels.context_parallel.buffers import Buffers
from tpu_kernels.dropins import attention
from tpu_kernels.dropins.attention import Call
from tpu_kernels.dropins.copies import with_names
from tpu_kernels.ring_attention.api import ring_attention
from tpu_kernels.ring_attention.layouts import Layout, part_length
from tpu_kernels.ring_attention.sequence import check_layout, check_length
from tpu_kernels.splash_attention import arguments
from tpu_kernels.ulysses import ulysses_attention

Rotate: TypeAlias = Literal["ring", "ulysses"]

_OP = "context_parallel"
_autograd: Any = torch.autograd
_NEED_WEIGHTS = 15
"""The place of `need_weights` among the arguments of `F.multi_head_attention_forward`."""


@contextlib.contextmanager
def context_parallel(
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    buffers: Sequence[torch.Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    buffer_fills: Sequence[float] | None = None,
    no_restore_buffers: Collection[torch.Tensor] = (),
    length: int | None = None,
    layout: Layout = "zigzag",
    rotate: Rotate = "ring",
) -> Iterator[None]:
    """Context in which each rank has a part of the sequence, and torch's attention is that of the whole.

        positions = torch.arange(L)
        whole = {"buffers": [tokens, labels, positions], "buffer_seq_dims": [1, 1, 0]}
        with context_parallel(mesh, "x", **whole, buffer_fills=[0, -100, 0]):
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()

    Inside, `F.scaled_dot_product_attention` takes this rank's positions of query, key and value, and gives
    this rank's positions of the result: by `ring_attention` or `ulysses_attention`, on `cpu` and `tpu`
    tensors, forward and backward. `is_causal` counts positions of the whole sequence.
    `nn.MultiheadAttention` and transformer layers call it. What works on each position for itself needs no
    change; what depends on positions needs those of this rank: cut them as a buffer, or ask
    `sequence_positions`. A loss is that of this rank's positions, and gradients of parameters are to be added
    up across ranks.

    It holds in the thread that entered it, so ranks that are threads do not disturb each other. Run backward
    inside as well: buffers that it needs are whole again outside, and it raises `RuntimeError`.

    Args:
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names. All of its ranks enter.
        axis: which of the mesh's axes has the parts of a sequence; or (outer, inner), two whose ranks are one
            line, row by row.
        buffers: tensors without gradient that every rank has whole. Inside, each is this rank's part, as of
            `shard_sequence`; afterwards, also after an exception, it is what it was. What is written to it
            inside is lost.
        buffer_seq_dims: the dimension of the sequence in each.
        buffer_fills: what padding holds in each, zero if it is left out. Parts have one size, so there is
            padding at the end of sequences that can't be divided: give labels what the loss ignores.
        no_restore_buffers: those that stay as they are inside.
        length: of the whole sequence; None for that of the buffers. Without buffers, None means that there is
            no padding.
        layout: which positions a rank has. "zigzag" gives all ranks as much to do where attention is causal.
        rotate: "ring" sends keys and values around; "ulysses" exchanges heads for positions, of which the
            ranks must be able to divide the query's.

    Raises:
        TypeError, ValueError: arguments other than these; a buffer that requires a gradient, or that another
            thread has cut. Inside, for calls of attention that can't be computed: with `attn_mask`, dropout
            or `need_weights`, of parts that are not those of the sequence; FlexAttention and varlen_attn.
        RuntimeError: this rank is not in the mesh; or torch.compile traces the block. Compiled functions may
            be called in it.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{_OP}: torch.compile can't trace the block; enter it outside, and call the compiled "
            f"function in it"
        )
    ranks = line_of(_OP, mesh, axis).ranks
    check_layout(_OP, layout)
    if rotate not in get_args(Rotate):
        raise ValueError(f"{_OP}: rotate must be one of {get_args(Rotate)}, got {rotate!r}")
    held = Buffers(buffers, buffer_seq_dims, buffer_fills, no_restore_buffers)
    if length is None:
        length = held.length
    else:
        check_length(_OP, length)
        if held.length not in (None, length):
            raise ValueError(f"{_OP}: the buffers have length {held.length}, got length={length}")
    try:
        held.cut(mesh, axis, layout)
        with _Region(mesh, axis, ranks, layout, length, rotate), active.inside():
            yield
    finally:
        held.restore()


class _Region(TorchFunctionMode):
    """What torch functions do inside. Modes are a thread's own, and torch.compile knows them."""

    def __init__(
        self, mesh: AnyMesh, axis: AnyAxis, ranks: int, layout: Layout, length: int | None, rotate: Rotate
    ) -> None:
        _note_refused()
        self.mesh, self.axis, self.length = mesh, axis, length
        self.layout: Layout = layout
        self.rotate: Rotate = rotate
        self.part = None if length is None else part_length(length, ranks, layout)
        # While the mode handles a call it is off, and would not see what the function calls in turn.
        self.backward = with_names(torch.autograd.backward, _engine_run_backward=self.engine)
        self.grad = with_names(torch.autograd.grad, _engine_run_backward=self.engine)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:  # torch.compile can trace its call on a tensor, but not its code
            return args[0].unflatten(*args[1:], **kwargs)
        role = _roles.get(func)
        if role is None:
            return func(*args, **kwargs)
        if role == "attention":
            return self.attend(*args, **kwargs)
        if role == "layer":
            if kwargs.get("need_weights", args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else True):
                raise ValueError(
                    f"{_OP}: attention weights of a sequence on several ranks are not computed; call "
                    f"nn.MultiheadAttention with need_weights=False"
                )
            with self:
                return _layer(*args, **kwargs)
        if role == "refused":
            raise ValueError(
                f"{_OP}: in this block, {func} would see this rank's part of the sequence only; call "
                f"tpu_kernels.ring_attention, which takes masks, score_mod and segment ids"
            )
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if role == "backward of a tensor":
            return _tensor_backward(self.backward, *args, **kwargs)
        return (self.backward if role == "backward" else self.grad)(*args, **kwargs)

    def engine(self, *args: Any, **kwargs: Any) -> Any:
        """Backward, with what runs in it (such as the forward of a checkpoint) inside of the region."""
        with self:
            return _autograd._engine_run_backward(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`F.scaled_dot_product_attention`."""
        call = attention.under_autocast(Call.of(*args, **kwargs))
        self.check(call)
        if not attention._fits(call):  # wrong by torch's rules, so that torch raises; or empty
            result = attention._torchs(call, _torchs)
            if result.numel():
                raise ValueError(
                    f"{_OP}: this call of attention can't be computed on several ranks: {_shapes(call)}"
                )
            return result
        sizes = arguments.sizes_of(call.query, call.key, call.value)
        query, key, value = (
            arguments.as_rank_4(call.query, sizes.q_heads, sizes),
            arguments.as_rank_4(call.key, sizes.kv_heads, sizes),
            arguments.as_rank_4(call.value, sizes.kv_heads, sizes),
        )
        function = ring_attention if self.rotate == "ring" else ulysses_attention
        output = function(
            query,
            key,
            value,
            self.mesh,
            self.axis,
            mask=attention.CAUSAL if call.is_causal else None,
            layout=self.layout,
            length=self.length,
            scale=call.scale,
        )
        return attention._laid_out_as(call.query, arguments.from_rank_4(output, sizes))

    def check(self, call: Call) -> None:
        """Raise for what would be computed wrong, or not at all."""
        if not attention._are_tensors(call):
            raise TypeError(
                f"{_OP}: query, key and value must be a rank's own dense tensors, got {_shapes(call)}"
            )
        if call.attn_mask is not None:
            raise ValueError(
                f"{_OP}: attn_mask is not taken, as it speaks of positions of parts; use is_causal=True, or "
                f"call tpu_kernels.ring_attention with a mask of tpu_kernels.masks, of the whole sequence"
            )
        if call.dropout_p != 0:
            raise ValueError(
                f"{_OP}: dropout in attention is not computed by a ring, got dropout_p={call.dropout_p}; set "
                f"it to 0, or call tpu_kernels.ulysses_attention"
            )
        if min(call.query.dim(), call.key.dim()) < 2:
            return  # torch raises
        own, of_keys = call.query.shape[-2], call.key.shape[-2]
        if own != of_keys or (self.part is not None and own != self.part):
            whole = (
                "" if self.length is None else f", {self.part} on each rank of a sequence of {self.length}"
            )
            raise ValueError(
                f"{_OP}: queries and keys must be this rank's part of one sequence{whole}; got "
                f"{_shapes(call)}"
            )


def _tensor_backward(
    backward: Any,
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _shapes(call: Call) -> str:
    named = zip(("query", "key", "value"), call, strict=False)
    return ", ".join(f"{name} {list(getattr(t, 'shape', ()))} {type(t).__name__}" for name, t in named)


def _no_torch_function(tensors: Any) -> bool:
    del tensors
    return False


# With the mode on, torch's function would hand the call to it again.
_layer = with_names(F.multi_head_attention_forward, has_torch_function=_no_torch_function)

# As it is now: by the time of a call, the name may be someone else's.
_torchs = F.scaled_dot_product_attention
_roles: dict[Any, str] = {
    _torchs: "attention",
    torch.ops.aten.scaled_dot_product_attention: "attention",
    torch.ops.aten.scaled_dot_product_attention.default: "attention",
    F.multi_head_attention_forward: "layer",
    torch.Tensor.backward: "backward of a tensor",
    torch.autograd.backward: "backward",
    torch.autograd.grad: "grad",
}
"""What the mode does with torch's functions."""


def _note_refused() -> None:
    """Add what would compute attention of a part alone. The modules are large, so they are not imported."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        _roles[flex.flex_attention_hop] = "refused"
    if "torch.nn.attention.varlen" in sys.modules:
        packet = torch.ops.torch_attn._varlen_attn
        _roles.update(dict.fromkeys((packet, packet.default), "refused"))
