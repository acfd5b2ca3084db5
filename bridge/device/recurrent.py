"""LSTM and GRU cells in one op each: torch asks accelerators for them and has none for the CPU.

`lstm` and `gru` layers on the tpu device call these after the two matrix products of a cell. Gates are
(batch, 4 * hidden) for an LSTM in the order input, forget, cell, output, and (batch, 3 * hidden) for a
GRU in the order reset, update, new. Everything here runs on CPU aliases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.device.storage import read_alias, wrap_result

_Optional = torch.Tensor | None


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: _Optional = None,
    hidden_bias: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_thnn_fused_lstm_cell`: (hidden state, cell state, the activated gates for the backward)."""
    here = _on_device_of(cell)
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * read_alias(cell) + i * g
    workspace = torch.cat([i, f, g, o], 1)
    return here(o * new_cell.tanh()), here(new_cell), here(workspace)


def lstm_cell_backward(
    grad_hidden: _Optional,
    grad_cell: _Optional,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[_Optional, _Optional, _Optional]:
    """`_thnn_fused_lstm_cell_backward_impl`: gradients of (gates, cell state, bias)."""
    here = _on_device_of(cell)
    if grad_hidden is None and grad_cell is None:
        return None, None, None
    i, f, g, o = read_alias(workspace).chunk(4, 1)
    tanh_cell = read_alias(new_cell).tanh()
    into_hidden = torch.zeros_like(tanh_cell) if grad_hidden is None else read_alias(grad_hidden)
    into_cell = into_hidden * o * (1 - tanh_cell.square())
    if grad_cell is not None:
        into_cell = into_cell + read_alias(grad_cell)
    grad_gates = torch.cat(
        [
            into_cell * g * i * (1 - i),
            into_cell * read_alias(cell) * f * (1 - f),
            into_cell * i * (1 - g.square()),
            into_hidden * tanh_cell * o * (1 - o),
        ],
        1,
    )
    grad_bias = here(grad_gates.sum(0)) if has_bias else None
    return here(grad_gates), here(into_cell * f), grad_bias


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: _Optional = None,
    hidden_bias: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_thnn_fused_gru_cell`: (hidden state, what the backward needs)."""
    here = _on_device_of(hidden)
    before = read_alias(hidden)
    input_r, input_z, input_n = _biased(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    new = (input_n + reset * hidden_n).tanh()
    workspace = torch.cat([reset, update, new, before, hidden_n], 1)
    return here(new + update * (before - new)), here(workspace)


def gru_cell_backward(
    grad_hidden: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Optional, _Optional]:
    """`_thnn_fused_gru_cell_backward`: gradients of (input gates, hidden gates, hidden, two biases)."""
    here = _on_device_of(workspace)
    grad = read_alias(grad_hidden)
    reset, update, new, before, hidden_n = read_alias(workspace).chunk(5, 1)
    into_new = grad * (1 - update) * (1 - new.square())
    into_update = grad * (before - new) * update * (1 - update)
    into_reset = into_new * hidden_n * reset * (1 - reset)
    grad_input = torch.cat([into_reset, into_update, into_new], 1)
    grad_gates = torch.cat([into_reset, into_update, into_new * reset], 1)
    return (
        here(grad_input),
        here(grad_gates),
        here(grad * update),
        here(grad_input.sum(0)) if has_bias else None,
        here(grad_gates.sum(0)) if has_bias else None,
    )


def _biased(gates: torch.Tensor, bias: _Optional) -> torch.Tensor:
    return read_alias(gates) if bias is None else read_alias(gates) + read_alias(bias)


def _on_device_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes a CPU result one of the device that this tensor is on."""
    index = tensor.device.index
    return lambda result: wrap_result(result, index)
