"""What a step takes from an optimizer's parameter groups: numbers that a schedule may change are arguments of the
program; everything else decides which program it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

FIXED = frozenset({"eps", "ns_coefficients", "ns_steps", "initial_lr", "min_lr", "max_lr", "base_momentum"})
"""Numbers that no schedule changes, or that the optimizer does not read: built into the program."""
_ALSO_WHOLE = frozenset({"lr", "weight_decay", "momentum", "dampening"})
"""Hyperparameters that people write as whole numbers too."""


@dataclass(frozen=True)
class Place:
    """Where a number lies: a parameter group, a key, and the item if the value there is a tuple (betas)."""

    group: int
    key: str
    item: int | None = None

    def read(self, groups: list[dict[str, Any]]) -> Any:
        """Its value now."""
        value = groups[self.group][self.key]
        return value if self.item is None else value[self.item]


def places(groups: list[dict[str, Any]]) -> tuple[Place, ...]:
    """The numbers that are arguments. A zero is not one, but for the learning rate: optimizers leave out what it would
    multiply."""
    return tuple(place for place in _numbers(groups) if _lifted(place, place.read(groups)))


def _numbers(groups: list[dict[str, Any]]) -> Iterator[Place]:
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key == "params" or key in FIXED:
                continue
            if isinstance(value, tuple):
                yield from (Place(index, key, item) for item in range(len(value)))
            else:
                yield Place(index, key)


def _lifted(place: Place, value: Any) -> bool:
    return _is_number(place.key, value) and (bool(value) or place.key == "lr")


def _is_number(key: str, value: Any) -> bool:
    return type(value) is float or (type(value) is int and key in _ALSO_WHOLE)


def signature(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that decides the program and is no number of ``places``; equal for two steps that share their program."""
    return [{key: _kind(key, value) for key, value in group.items()} for group in groups]


def _kind(key: str, value: Any) -> Any:
    if key == "params":
        return len(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device
    if key in FIXED:
        return value if not isinstance(value, list) else tuple(value)
    if isinstance(value, (tuple, list)):
        return tuple([_kind(key, item) for item in value])
    if _is_number(key, value):
        return float if value or key == "lr" else 0.0
    return value
