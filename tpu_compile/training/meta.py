"""Steps of models that hold no numbers: meta tensors are traced as fake tensors of the CPU, since torch has no gradient
formulas of its own for some operators on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tpu_compile.training import state

Tensor = torch.Tensor


def stands_in(model: torch.nn.Module, batch: Any) -> bool:
    """Whether the model or the batch is on the meta device."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch)]
    return any(isinstance(t, Tensor) and t.is_meta and not isinstance(t, FakeTensor) for t in tensors)


@contextmanager
def on_cpu(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
    """Inside, the model's parameters and buffers are fake tensors of the CPU; so are those of the optimizer and the
    batch that are given back."""
    with FakeTensorMode():
        fakes = {id(t): _fake(t) for t in (*model.parameters(), *model.buffers())}
        before: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table)) for m in model.modules() for table in (m._parameters, m._buffers)
        ]
        try:
            for table, kept in before:
                table.update({name: fakes[id(t)] for name, t in kept.items() if t is not None})
            yield state.stand_in(optimizer, fakes), pytree.tree_map_only(Tensor, _fake, batch)
        finally:
            for table, kept in before:
                table.update(kept)


def _fake(t: Tensor) -> Any:
    device = "cpu" if t.is_meta else t.device
    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return torch.nn.Parameter(fake, t.requires_grad) if isinstance(t, torch.nn.Parameter) else fake
