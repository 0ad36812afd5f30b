"""``_ctc_loss`` and its gradient: torch's overloads take lengths as numbers, here they are data of one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_compile.device import fallback
from tpu_compile.device.schemas import schema_of
from tpu_compile.device.sizes import room
from tpu_compile.lowering.ops import ctc

aten = torch.ops.aten
Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor
_MOST_LABELS = 1 << 20


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """``_ctc_loss``. What torch refuses, it refuses on the CPU in its own words."""
    inputs, labels = _numbers(input_lengths), _numbers(target_lengths)
    if not _sound(log_probs, targets, inputs, labels, blank):
        args = (log_probs, targets, inputs, labels, blank, zero_infinity)
        return fallback.run(schema_of(aten._ctc_loss.default), args, {})
    return ctc.ctc_loss(log_probs, *_prepared(log_probs, targets, inputs, labels), blank)


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    """``_ctc_loss_backward``."""
    inputs, labels = _numbers(input_lengths), _numbers(target_lengths)
    if not _sound(log_probs, targets, inputs, labels, blank):
        args = (grad, log_probs, targets, inputs, labels, neg_log_likelihood, log_alpha, blank, zero_infinity)
        return fallback.run(schema_of(aten._ctc_loss_backward.default), args, {})
    prepared = _prepared(log_probs, targets, inputs, labels)
    return ctc.ctc_loss_backward(grad, log_probs, *prepared, neg_log_likelihood, log_alpha, blank, zero_infinity)


def _numbers(lengths: Lengths) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _sound(log_probs: Tensor, targets: Tensor, inputs: list[int], labels: list[int], blank: int) -> bool:
    """Whether the arguments are what torch takes, and there is something to compute."""
    if log_probs.dim() != 3 or not log_probs.numel() or targets.dtype not in (torch.int32, torch.int64):
        return False
    if log_probs.dtype not in (torch.float32, torch.float64):
        return False
    steps, count, classes = log_probs.shape
    if len(inputs) != count or len(labels) != count or min(inputs) < 0 or min(labels) < 0 or max(inputs) > steps:
        return False
    if targets.dim() == 2:
        fits = targets.shape[0] == count and targets.shape[1] >= max(labels)
    else:
        fits = targets.dim() == 1 and targets.shape[0] == sum(labels)
    return fits and 0 <= blank < classes


def _prepared(log_probs: Tensor, targets: Tensor, inputs: list[int], labels: list[int]) -> tuple[Tensor, ...]:
    """Padded targets and both lengths on the device."""
    if targets.dim() == 1:
        width, begin, rows = room(max(labels), max(_MOST_LABELS, max(labels))), 0, []
        for length in labels:
            rows.append([begin + place if place < length else 0 for place in range(width)])
            begin += length
        places = torch.tensor(rows, device=log_probs.device)
        targets = targets.to(log_probs.device)[places] if begin else torch.zeros_like(places)
    lengths = (torch.tensor(numbers, device=log_probs.device) for numbers in (inputs, labels))
    return (targets.to(log_probs.device), *lengths)
