"""An optimizer's state: made before the first step as the optimizer itself would make it, and taken apart into what a
program is given."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.errors import LoweringError

Tensor = torch.Tensor

MASTER = "master_weight"
"""The key of a 16-bit parameter's float32 master in its state."""
_HALVES = (torch.bfloat16, torch.float16)


def check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what no program can do.

    Raises:
        LoweringError: the optimizer calls the model itself, is differentiable, or has hooks that expect gradients.
    """
    kind = type(optimizer).__name__
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise LoweringError(
            f"{kind}.step calls the model itself, through a closure, as often as it likes: no fixed program does that. "
            'Compile the model alone, torch.compile(model, backend="tpu"), and call the optimizer in eager.'
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise LoweringError(f"{kind}(differentiable=True): gradients through a step are not captured. Leave it out.")
    if optimizer._optimizer_step_pre_hooks:
        raise LoweringError(
            f"{kind} has step pre-hooks, which expect gradients in .grad; train_step keeps them inside the program. "
            "Put what the hook does into loss_fn, or use torch.compile(model) and a loop of your own."
        )


@contextmanager
def gradients(optimizer: torch.optim.Optimizer, given: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, ``p.grad`` is what is given for ``p``, and None for the optimizer's other parameters."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in every]
    try:
        for p in every:
            p.grad = None
        for p, grad in given:
            p.grad = grad
        yield
    finally:
        for p, grad in zip(every, before, strict=True):
            p.grad = grad


def prime(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> None:
    """Make the state that the optimizer would make in its first step, so that the first step is like every other."""
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return
    lists = len(inspect.signature(make).parameters) - 1
    zeros = [(p, torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)) for p in trained]
    with torch.no_grad(), gradients(optimizer, zeros):
        for group in optimizer.param_groups:
            make(group, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
                _prime_momentum(optimizer, [p for p in group["params"] if p.grad is not None])


def _prime_momentum(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """SGD's first step has no momentum yet and takes the gradient as it is: zeros do the same, without dampening."""
    for p in params:
        if optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def prime_masters(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> None:
    """As ``prime``, as if 16-bit parameters were float32: each gets a master, kept in its state beside the rest."""
    stepped = [_master(optimizer.state[p], p) if p.dtype in _HALVES else p for p in trained]
    other = stand_in(optimizer, {id(p): m for p, m in zip(trained, stepped, strict=True)})
    for p, m in zip(trained, stepped, strict=True):
        other.state[m] = {key: _widened(v, p) for key, v in optimizer.state[p].items() if key != MASTER}
    prime(other, stepped)
    for p, m in zip(trained, stepped, strict=True):
        optimizer.state[p] = other.state[m] if m is p else {**other.state[m], MASTER: m}


def _master(kept: Mapping[str, Any], p: Tensor) -> Tensor:
    master: Tensor = kept[MASTER] if MASTER in kept else p.detach()
    return master.float()


def _widened(value: Any, p: Tensor) -> Any:
    """State that the optimizer has made in the dtype of a 16-bit parameter."""
    return value.float() if isinstance(value, Tensor) and value.dtype == p.dtype and p.dtype in _HALVES else value


def load_exactly(optimizer: torch.optim.Optimizer) -> None:
    """From now on ``load_state_dict`` leaves float32 state of 16-bit parameters what it is; torch would round it."""
    given: list[Mapping[str, Any]] = []

    def before(_: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        given.append(saved)

    def after(loaded: torch.optim.Optimizer) -> None:
        saved = given.pop()
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        params = [p for group in loaded.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for key, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype == torch.float32 and p.dtype in _HALVES and key != "step":
                    loaded.state[p][key] = value.to(p.device, copy=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


@dataclass(frozen=True)
class Slot:
    """One tensor of the state: of which trained parameter, under which key. A ``counter`` is a 0-dim tensor on the CPU
    that counts steps: the host counts it, and programs are given its value."""

    param: int
    key: str
    counter: bool


def slots(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor], counted_here: bool) -> tuple[Slot, ...]:
    """The tensors of the trained parameters' state.

    Args:
        counted_here: steps may be counted by the host: every step is taken.
    """
    found = []
    for index, p in enumerate(trained):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                counter = counted_here and key == "step" and not value.dim() and value.device.type == "cpu"
                found.append(Slot(index, key, counter))
    return tuple(found)


def stand_in(optimizer: torch.optim.Optimizer, of: Mapping[int, Tensor] | None = None) -> torch.optim.Optimizer:
    """The optimizer with a state of its own; ``of``: other tensors in the place of its parameters, by their ids."""
    of = of or {}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(vars(optimizer))
    other.param_groups = [
        {**group, "params": [of.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    if not of:
        other.state.update({p: dict(kept) for p, kept in optimizer.state.items()})
    return other
