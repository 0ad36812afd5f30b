"""Decompositions of ops that are a few others, and for which torch has none, or a wrong one.

Gradients of the margin losses and of the shrinking activations are ops of their own on an eager device; compiled, torch
takes the losses apart before it differentiates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor

_NONE, _MEAN = 0, 1


# ---- losses and gradients


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0, grad)


def _multi_margin_loss_backward(
    grad_output: Tensor,
    x: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    rows, chosen = torch.atleast_2d(x), target.reshape(-1, 1)
    excess = margin - rows.gather(1, chosen) + rows
    counts = (excess > 0) & (torch.arange(rows.shape[1], device=x.device) != chosen)
    slope = torch.where(counts, 1 if p == 1 else 2 * excess, 0).to(x.dtype)
    if weight is not None:
        slope = slope * weight[chosen]
    slope = slope.scatter(1, chosen, -slope.sum(1, keepdim=True))
    return _of_each(slope, grad_output, reduction).reshape(x.shape)


def _multilabel_margin_loss_backward(
    grad_output: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    labels, named = _labels(target)
    excess = _excess(x, labels, named, torch.atleast_2d(is_target) > 0)
    counts = (excess > 0).to(x.dtype)
    slope = counts.sum(1).scatter_add(1, labels, -counts.sum(2))
    return _of_each(slope, grad_output, reduction).reshape(x.shape)


def _multilabel_margin_loss_forward(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """torch has one, which counts labels after the first -1 too."""
    labels, named = _labels(target)
    is_target = torch.zeros_like(labels, dtype=x.dtype).scatter_add(1, labels, named.to(x.dtype)) > 0
    losses = _excess(x, labels, named, is_target).sum((1, 2)) / labels.shape[1]
    if reduction == _NONE:
        loss = losses if target.dim() > 1 else losses[0]
    else:
        loss = losses.mean() if reduction == _MEAN else losses.sum()
    return loss, is_target.to(x.dtype).reshape(target.shape)


def _labels(target: Tensor) -> tuple[Tensor, Tensor]:
    """Labels as rows, and which of them count: the first -1 ends a row."""
    labels = torch.atleast_2d(target)
    return labels.clamp(min=0), (labels >= 0).cumprod(1).bool()


def _excess(x: Tensor, labels: Tensor, named: Tensor, is_target: Tensor) -> Tensor:
    """How far each class that is no target comes within 1 of each that is: [rows, labels, classes]."""
    rows = torch.atleast_2d(x)
    excess = (1 - rows.gather(1, labels)[:, :, None] + rows[:, None, :]).clamp(min=0)
    return torch.where(named[:, :, None] & ~is_target[:, None, :], excess, 0)


def _of_each(slope: Tensor, grad_output: Tensor, reduction: int) -> Tensor:
    """The gradient of each row's mean over the classes."""
    given = grad_output.reshape(-1, 1) if reduction == _NONE else grad_output
    return slope * given / (slope.shape[1] * (slope.shape[0] if reduction == _MEAN else 1))


def _glu_jvp(glu: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    gate = x.chunk(2, dim)[1].sigmoid()
    da, db = dx.chunk(2, dim)
    return da * gate + glu * (1 - gate) * db


# ---- windows of signal processing

_Window = Callable[..., Tensor]


def _window(formula: _Window) -> _Window:
    """A factory of windows from ``formula``: places 0, 1, …, ``last``, and ``last`` itself → values."""

    def make(length: int, periodic: bool = True, *numbers: float, dtype: Any = None, **where: Any) -> Tensor:
        dtype, device = dtype or torch.get_default_dtype(), where.get("device")
        if not dtype.is_floating_point:
            raise RuntimeError(f"a window has floating point numbers, not {dtype}")
        if length < 2:
            return torch.ones(length, dtype=dtype, device=device)
        last = length if periodic else length - 1
        wide = torch.promote_types(dtype, torch.float32)  # 16 bits would round each step
        return formula(torch.arange(length, dtype=wide, device=device), last, *numbers).to(dtype)

    return make


def _bartlett(places: Tensor, last: int) -> Tensor:
    rising = places * (2 / last)
    return torch.minimum(rising, 2 - rising)


def _blackman(places: Tensor, last: int) -> Tensor:
    angle = places * (2 * math.pi / last)
    return 0.42 - 0.5 * angle.cos() + 0.08 * (2 * angle).cos()


def _hamming(places: Tensor, last: int, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return alpha - beta * (places * (2 * math.pi / last)).cos()


def _kaiser(places: Tensor, last: int, beta: float = 12.0) -> Tensor:
    inside = (1 - (places * (2 / last) - 1).square()).clamp(min=0).sqrt()
    return torch.special.i0(beta * inside) / torch.special.i0(torch.full_like(places[:1], beta))


# ---- others


def _conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Times, batch, channels."""
    made = torch.nn.functional.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return made.permute(2, 0, 1).contiguous()


def _sample_dirichlet(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """In float64, as torch has it: with small parameters all that is drawn would be 0 in float32."""
    drawn = aten._standard_gamma(x.double(), generator)
    return (drawn / drawn.sum(-1, keepdim=True)).to(x.dtype)


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink_backward.default: _shrink_backward,
    aten.multi_margin_loss_backward.default: _multi_margin_loss_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss_forward,
    aten.multilabel_margin_loss_backward.default: _multilabel_margin_loss_backward,
    aten.glu_jvp.default: _glu_jvp,
    aten.conv_tbc.default: _conv_tbc,
    aten._sample_dirichlet.default: _sample_dirichlet,
    aten._is_all_true.default: torch.all,
    aten._is_any_true.default: torch.any,
    **{
        getattr(packet, name): _window(formula)
        for packet, formula in (
            (aten.bartlett_window, _bartlett),
            (aten.blackman_window, _blackman),
            (aten.hamming_window, _hamming),
            (aten.kaiser_window, _kaiser),
        )
        for name in packet.overloads()
        if not name.endswith("out")
    },
}
