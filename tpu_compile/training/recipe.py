"""What a training step is made of, and one call of it on its way through Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpu_compile.training import state, update

Tensor = torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """What a step is made of: the arguments of ``train_step``."""

    model: torch.nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    accumulate: int
    clip_norm: float | None
    autocast: torch.dtype | None
    remat: float | None
    scaler: torch.amp.GradScaler | None
    master_weights: bool = False

    @property
    def name(self) -> str:
        """What programs and errors call it."""
        return f"{type(self.model).__name__}_train_step"

    def loss(self) -> Callable[..., Tensor]:
        """The function that Dynamo captures."""
        model, loss_fn, dtype, device = self.model, self.loss_fn, self.autocast, _device_of(self.optimizer)

        def loss(inputs: Any, *targets: Any) -> Tensor:
            if isinstance(inputs, dict):
                return loss_fn(model(**inputs), *targets)
            if isinstance(inputs, (tuple, list)):
                return loss_fn(model(*inputs), *targets)
            return loss_fn(model(inputs), *targets)

        def autocast_loss(inputs: Any, *targets: Any) -> Tensor:
            with torch.autocast(device, dtype=dtype):
                return loss(inputs, *targets)

        return loss if dtype is None else autocast_loss

    def prime(self, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> None:
        """Make the state that the optimizer would make in its first step."""
        make = state.prime_masters if self.master_weights else state.prime
        make(optimizer, trained)

    def scaling(self) -> update.Scaling | None:
        """The scaler's constants; None without one, or if it is disabled."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        return update.Scaling(scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval)

    def scales(self) -> list[Tensor]:
        """The scaler's tensors."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return []
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(_first(self.optimizer).device)
        assert scaler._scale is not None and scaler._growth_tracker is not None
        return [scaler._scale, scaler._growth_tracker]


def _first(optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0]  # type: ignore[no-any-return]


def _device_of(optimizer: torch.optim.Optimizer) -> str:
    kind = _first(optimizer).device.type
    return "cpu" if kind == "meta" else kind


@dataclass(frozen=True)
class Call:
    """One call of a step, on its way through Dynamo: its batch, flat, and what to do where the graph would run."""

    batch: tuple[Any, ...]
    parts: tuple[Any, ...]
    tree: Any
    arrive: Callable[[Any, tuple[Any, ...]], Any]

    @property
    def whole(self) -> dict[int, Tensor]:
        """By the id of each part of a tensor of the batch, the whole of it."""
        pairs = zip(self.parts, self.batch, strict=True)
        return {id(part): leaf for part, leaf in pairs if part is not leaf}

    @property
    def names(self) -> list[str]:
        """What each leaf of the batch is: ``inputs``, ``inputs['mask']``, ``targets[0]``."""
        paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(self.parts, self.tree))[0]]
        return [_argument(path[0].idx) + pytree.keystr(path[1:]) for path in paths]  # type: ignore[attr-defined]


def _argument(index: int) -> str:
    return f"targets[{index - 1}]" if index else "inputs"


current: ContextVar[Call] = ContextVar("tpu_compile_train_step_call")
"""The call that is on its way."""
