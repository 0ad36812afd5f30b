"""The fused LSTM and GRU cells that torch's layers call on an accelerator, taken apart. No CPU kernel of them exists.

Shapes: gates (batch, 4 or 3 * hidden), states (batch, hidden). What the backward needs travels in one workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
Tensor = torch.Tensor


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    along = torch.zeros_like(cy) if grad_cy is None else grad_cy
    out = torch.zeros_like(o)
    if grad_hy is not None:
        out = grad_hy * squashed * o * (1 - o)
        along = along + grad_hy * o * (1 - squashed * squashed)
    parts = [along * g * i * (1 - i), along * cx * f * (1 - f), along * i * (1 - g * g), out]
    grad_gates = torch.cat(parts, 1)
    return grad_gates, along * f, grad_gates.sum(0) if has_bias else None


def _lstm_backward_all(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Any:
    gates, grad_cx, bias = _lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias)
    return gates, gates.clone(), grad_cx, bias, bias if bias is None else bias.clone()


def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, iz, i_new = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hz, h_new = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_new + r * h_new).tanh()
    return new + z * (hx - new), torch.cat([r, z, new, hx, h_new], 1)


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    r, z, new, hx, h_new = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - new) * z * (1 - z)
    grad_new = grad_hy * (1 - z) * (1 - new * new)
    grad_r = grad_new * h_new * r * (1 - r)
    grad_input = torch.cat([grad_r, grad_z, grad_new], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_new * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *biases


RECURRENT: dict[OpOverload, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_lstm_cell_backward.default: _lstm_backward_all,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}
"""Overload → function."""
