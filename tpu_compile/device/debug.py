"""The ``debug`` mode: each op is checked, run, and waited for, and what goes wrong is raised at its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tpu_compile.device import contents
from tpu_compile.device.calls import Call
from tpu_compile.device.fallback import user_line
from tpu_compile.device.programs import Plan
from tpu_compile.device.schemas import Schema
from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell, cell_of
from tpu_compile.errors import DeviceError

_INDEXED = frozenset(
    """
    index _unsafe_index index_put _index_put_impl _unsafe_index_put index_select index_add index_copy index_fill
    index_reduce gather scatter scatter_add scatter_reduce take put embedding _embedding_bag _embedding_bag_forward_only
    nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d
    """.split()
)
"""Operators whose CPU kernels check the values of an index; on the device a bad one is clamped or dropped."""


class Debugger:
    """Runs plans one by one. ``nans``: a NaN that an op makes is an error."""

    def __init__(self, nans: bool) -> None:
        self.nans = nans

    def flush(self) -> None:
        """Nothing is put off."""

    def settled(self, deferred: Any) -> None:
        """Nothing knows buffers by what they were."""

    def run(self, plan: Plan, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Check, run, wait.

        Raises:
            IndexError, RuntimeError: an index out of range, in torch's words.
            FloatingPointError: a new NaN, where they are asked for.
            DeviceError: the program failed.
        """
        try:
            if schema.base in _INDEXED:
                _check_indices(schema, args, kwargs)
            clean = self.nans and not any(map(_has_nan, _floats((args, kwargs))))
            result = plan.execute(call, schema, args, kwargs)
            device.client.ready([contents.contents(cell) for cell in _cells((args, kwargs, result))])
        except (DeviceError, IndexError, RuntimeError) as error:
            error.add_note(_place(schema))
            raise
        if clean and any(map(_has_nan, _floats((args, kwargs, result)))):
            raise FloatingPointError(f"{schema.op} made a NaN of arguments without one. {_place(schema)}")
        return result


def _place(schema: Schema) -> str:
    return f"In {schema.op}, at {user_line()}"


def _cells(tree: Any) -> Iterator[Cell]:
    for leaf in tree_leaves(tree):
        cell = cell_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if cell is not None and type(cell.buffer) is device.array:
            yield cell


def _floats(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and cell_of(leaf) is not None:
            yield leaf


def _has_nan(t: torch.Tensor) -> bool:
    return bool(_on_cpu(t).isnan().any())


def _check_indices(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run the op on copies on the CPU: its kernels look at every index."""
    schema.op(*tree_map(_on_cpu, tuple(args)), **tree_map(_on_cpu, kwargs))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    cell = cell_of(value) if isinstance(value, torch.Tensor) else None
    return value if cell is None else contents.to_cpu(value, cell)
