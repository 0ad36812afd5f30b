"""Connectionist temporal classification with the lengths as data, which aten's own overload takes as numbers: a batch
of other lengths is the same program.

Shapes: T steps, N sequences, C classes, targets padded to S. A target's states are its labels with a blank before,
between and after them: 2 S + 1. What is longer than a sequence's own lengths counts for nothing.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from tpu_compile.lowering.jnp import jnp, lax, lowers_jnp

Array = Any

_library = torch.library.Library("tpu_compile", "FRAGMENT")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,"
    " Tensor loss, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor"
)
ctc_loss = torch.ops.tpu_compile.ctc_loss.default
"""(log_probs[T, N, C], targets[N, S], both lengths[N], blank) -> (loss[N], log_alpha[N, T, 2 S + 1])."""
ctc_loss_backward = torch.ops.tpu_compile.ctc_loss_backward.default
"""The gradient of ``log_probs``."""


@torch.library.register_fake("tpu_compile::ctc_loss", lib=_library)  # type: ignore[untyped-decorator]
def _fake(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int) -> Any:
    steps, count, _ = log_probs.shape
    return log_probs.new_empty(count), log_probs.new_empty(count, steps, 2 * targets.shape[1] + 1)


@torch.library.register_fake("tpu_compile::ctc_loss_backward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_backward(grad: Any, log_probs: Any, *_: Any) -> Any:
    return log_probs.new_empty(log_probs.shape)


@lowers_jnp(ctc_loss)
def forward(log_probs: Array, targets: Array, input_lengths: Array, target_lengths: Array, blank: int) -> Any:
    states = _states(targets, blank)
    emitted, skips = _emitted(log_probs, states), _skips(states)
    begun = (jnp.arange(states.shape[1]) == 0) | ((jnp.arange(states.shape[1]) == 1) & (target_lengths > 0)[:, None])

    def step(alpha: Array, now: Array) -> Any:
        alpha = now + _log_sum(alpha, _later(alpha, 1), jnp.where(skips, _later(alpha, 2), -jnp.inf))
        return alpha, alpha

    first = jnp.where(begun, emitted[0], -jnp.inf)
    log_alpha = jnp.concatenate([first[None], lax.scan(step, first, emitted[1:])[1]])
    last = log_alpha[jnp.maximum(input_lengths - 1, 0), jnp.arange(len(targets))]
    ends = jnp.where(_ends(states, target_lengths), last, -jnp.inf)
    loss = jnp.where(input_lengths > 0, -_log_sum(*jnp.moveaxis(ends, 1, 0)), jnp.where(target_lengths > 0, jnp.inf, 0))
    return loss, jnp.moveaxis(log_alpha, 0, 1)


@lowers_jnp(ctc_loss_backward)
def backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    loss: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool,
) -> Array:
    steps, count, _ = log_probs.shape
    states = _states(targets, blank)
    emitted, skips = _emitted(log_probs, states), _earlier(_skips(states), 2, False)
    ends = _ends(states, target_lengths)

    def step(beta: Array, given: Any) -> Any:
        now, left = given
        follows = _log_sum(beta, _earlier(beta, 1), jnp.where(skips, _earlier(beta, 2), -jnp.inf))
        beta = now + jnp.where((left == 0)[:, None], jnp.where(ends, 0, -jnp.inf), follows)
        beta = jnp.where((left < 0)[:, None], -jnp.inf, beta)
        return beta, beta

    left = input_lengths - 1 - jnp.arange(steps)[:, None]
    log_beta = lax.scan(step, jnp.full_like(emitted[0], -jnp.inf), (emitted, left), reverse=True)[1]
    posterior = jnp.exp(jnp.moveaxis(log_alpha, 1, 0) + log_beta - emitted + loss[:, None])
    index = jnp.arange(steps)[:, None, None], jnp.arange(count)[:, None], states
    visited = jnp.zeros_like(log_probs).at[index].add(jnp.where(left[..., None] < 0, 0, posterior), mode="drop")
    result = (jnp.exp(log_probs) - visited) * grad[:, None]
    result = jnp.where(jnp.isinf(loss)[:, None], 0 if zero_infinity else jnp.nan, result)
    return jnp.where(left[..., None] < 0, 0, result)


def _states(targets: Array, blank: int) -> Array:
    count, size = targets.shape
    return jnp.full((count, 2 * size + 1), blank, targets.dtype).at[:, 1::2].set(targets)


def _emitted(log_probs: Array, states: Array) -> Array:
    """What each state's label scores at each step: [T, N, 2 S + 1]."""
    return jnp.take_along_axis(log_probs, states[None], 2, mode="clip")


def _skips(states: Array) -> Array:
    """Which states may be reached from two before: those with another label."""
    return jnp.pad(states[:, 2:] != states[:, :-2], ((0, 0), (min(2, states.shape[1]), 0)))


def _ends(states: Array, target_lengths: Array) -> Array:
    """The states in which a sequence may end: its last label and the blank after it."""
    place, last = jnp.arange(states.shape[1]), 2 * target_lengths[:, None]
    return (place == last) | (place == last - 1)


def _later(x: Array, by: int) -> Array:
    return jnp.pad(x, ((0, 0), (by, 0)), constant_values=-jnp.inf)[:, : x.shape[1]]


def _earlier(x: Array, by: int, fill: Any = -inf) -> Array:
    return jnp.pad(x, ((0, 0), (0, by)), constant_values=fill)[:, by:]


def _log_sum(*terms: Array) -> Array:
    """The logarithm of the sum of the terms' exponentials, elementwise; -inf where all are."""
    top = jnp.stack(terms).max(0)
    top = jnp.where(jnp.isinf(top), 0, top)
    return top + jnp.log(sum(jnp.exp(term - top) for term in terms))
