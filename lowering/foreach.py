"""Operators on lists of tensors, taken apart: ``_foreach_*``, the fused optimizers, and what GradScaler asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Decomposition = Callable[..., Any]

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def list_decompositions() -> dict[OpOverload, Decomposition]:
    """Functional overload → function. torch's own kernels take foreach ops apart, one tensor at a time."""
    return {**{op: partial(op._op_dk, _COMPOSITE) for op in _foreach_ops()}, **_OPTIMIZERS}


def _foreach_ops() -> list[OpOverload]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_") and torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE.name):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            if not op._schema.is_mutable:
                found.append(op)
    return found


# ---- optimizers: the arithmetic of torch's fused CPU kernels. A learning rate is only ever a factor, so that it may be
# a value of the program.


def _prepared(grads: Tensors, grad_scale: Tensor | None, maximize: bool) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients as they are left behind: without their scale, gradients to step along)."""
    kept = [g if grad_scale is None else (g / grad_scale).to(g.dtype) for g in grads]
    return kept, [-g if maximize else g for g in kept]


def _unless(found_inf: Tensor | None, new: list[Tensor], old: Tensors) -> list[Tensor]:
    """``new``, or ``old`` where GradScaler found a gradient that is not finite."""
    if found_inf is None:
        return new
    return [torch.where(found_inf == 1, o, n) for n, o in zip(new, old, strict=True)]


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """``1 - beta**step``, without the cancellation that float32 would suffer in the first steps."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _adam(decoupled: bool) -> Decomposition:
    def step(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        kept, along = _prepared(grads, grad_scale, maximize)
        new_params, averages, squares, largest = [], [], [], []
        for i, (p, g) in enumerate(zip(params, along, strict=True)):
            if weight_decay and decoupled:
                p = p - p * weight_decay * lr
            elif weight_decay:
                g = g + p * weight_decay
            averages.append(torch.lerp(exp_avgs[i], g, 1 - beta1))
            squares.append(exp_avg_sqs[i] * beta2 + g * g * (1 - beta2))
            if amsgrad:
                largest.append(torch.maximum(max_exp_avg_sqs[i], squares[-1]))
            step = state_steps[i]
            first, second = _bias_correction(beta1, step), torch.sqrt(_bias_correction(beta2, step))
            denominator = torch.sqrt((largest if amsgrad else squares)[-1]) / second + eps
            new_params.append((p - averages[-1] / denominator / first * lr).to(p.dtype))
        return (
            _unless(found_inf, new_params, params),
            kept,
            _unless(found_inf, averages, exp_avgs),
            _unless(found_inf, squares, exp_avg_sqs),
            _unless(found_inf, largest, max_exp_avg_sqs) if amsgrad else [m.clone() for m in max_exp_avg_sqs],
        )

    return step


def _sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Any:
    kept, along = _prepared(grads, grad_scale, maximize)
    new_params, buffers = [], []
    for i, (p, g) in enumerate(zip(params, along, strict=True)):
        g = g + p * weight_decay if weight_decay else g
        if momentum:
            old = momentum_buffer_list[i]
            buffers.append(g.clone() if is_first_step else old * momentum + g * (1 - dampening))
            g = g + buffers[-1] * momentum if nesterov else buffers[-1]
        new_params.append((p - g * lr).to(p.dtype))
    left = _unless(found_inf, buffers, momentum_buffer_list) if momentum else [b.clone() for b in momentum_buffer_list]
    return _unless(found_inf, new_params, params), kept, left


def _adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: float | Tensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Any:
    kept, along = _prepared(grads, grad_scale, maximize)
    new_params, sums = [], []
    for i, (p, g) in enumerate(zip(params, along, strict=True)):
        g = g + p * weight_decay if weight_decay else g
        sums.append(state_sums[i] + g * g)
        slowed = 1 + (state_steps[i] - 1) * lr_decay
        new_params.append((p - g / (torch.sqrt(sums[-1]) + eps) / slowed * lr).to(p.dtype))
    steps = [s.clone() for s in state_steps]
    return _unless(found_inf, new_params, params), kept, _unless(found_inf, sums, state_sums), steps


# ---- GradScaler


def _check_and_unscale(grads: Tensors, found_inf: Tensor, inv_scale: Tensor) -> Any:
    """Gradients times ``inv_scale``; ``found_inf`` becomes 1 where one of them is not finite."""
    for g in grads:
        bad = torch.logical_not(torch.isfinite(g)).any()
        found_inf = torch.where(bad, torch.ones_like(found_inf), found_inf)
    return [(g * inv_scale).to(g.dtype) for g in grads], found_inf.clone()


def _update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Any:
    """Shrink the scale after an overflow; let it grow after ``interval`` steps without one, if it stays finite."""
    bad = found_inf != 0
    counted = growth_tracker + 1
    due = counted == interval
    grown = scale * growth
    grown = torch.where(torch.logical_and(due, torch.isfinite(grown)), grown, scale)
    tracker = torch.where(torch.logical_or(bad, due), torch.zeros_like(growth_tracker), counted)
    return torch.where(bad, scale * backoff, grown), tracker.to(growth_tracker.dtype)


IN_PLACE: dict[OpOverload, Decomposition] = {
    aten._fused_adam_.default: _adam(decoupled=False),
    aten._fused_adam_.tensor_lr: _adam(decoupled=False),
    aten._fused_adamw_.default: _adam(decoupled=True),
    aten._fused_adamw_.tensor_lr: _adam(decoupled=True),
    aten._fused_sgd_.default: _sgd,
    aten._fused_sgd_.tensor_lr: _sgd,
    aten._fused_adagrad_.default: _adagrad,
    aten._fused_adagrad_.tensor_lr: _adagrad,
}
"""In-place overload → the new contents of each list it writes, in the schema's order. torch's own functionalization
asks these overloads for a Meta kernel, which they lack."""
_OPTIMIZERS: dict[OpOverload, Decomposition] = {
    aten._fused_adam.default: _adam(decoupled=False),
    aten._fused_adam.tensor_lr: _adam(decoupled=False),
    aten._fused_adamw.default: _adam(decoupled=True),
    aten._fused_adamw.tensor_lr: _adam(decoupled=True),
    aten._fused_sgd.default: _sgd,
    aten._fused_sgd.tensor_lr: _sgd,
    aten._fused_adagrad.default: _adagrad,
    aten._amp_foreach_non_finite_check_and_unscale.default: _check_and_unscale,
    aten._amp_update_scale.default: _update_scale,
}
