"""What could be changed about a workload on a chip, each as a program that can be compiled and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tpu_compile import stages
from tpu_compile.config import config, override
from tpu_compile.lowering import layers
from tpu_compile.lowering.gaps import where
from tpu_compile.targets import retype
from tpu_compile.targets.analysis import Analysis
from tpu_compile.targets.describe import emulated, not_donated, relative
from tpu_compile.targets.workload import Load, Made

aten = torch.ops.aten
WORTH = 0.01
"""Share of the time below which nothing is looked into."""
_ROWS = 8
"""Of a tile, and of what the matrix unit takes at once."""
_PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.linear: 0}
"""Where the left side is among the arguments."""
_GELU = {aten.gelu.default: {"approximate": "tanh"}, aten.gelu_backward.default: {"approximate": "tanh"}}


@dataclass(frozen=True)
class Change:
    """One suggestion.

    Attributes:
        kind: ``pad``, ``heads``, ``batch``, ``precision``, ``dtype``, ``index``, ``donate``, ``transpose``, ``scan`` or
            ``op``.
        title: what is wrong.
        where: the user's ``file:line``, or nothing.
        write: what to write.
        share: part of the time that it is about: the most that it could gain.
        made: the changed model.
        graph: the changed graph.
        scope: what the change is traced and lowered under.
        batch: another batch size; the gain is then that of one example.
    """

    kind: str
    title: str
    where: str
    write: str
    share: float
    made: Callable[[Made], Made] | None = None
    graph: Callable[[stages.Traced], torch.fx.GraphModule] | None = None
    scope: Callable[[], Any] = contextlib.nullcontext
    batch: int | None = None


# ---- dimensions


def odd_sizes(load: Load, found: Analysis, names: Sequence[str]) -> Iterator[Change]:
    """Sizes of parameters that fill the matrix unit, or the tiles of memory, poorly."""
    sizes: dict[int, tuple[float, str]] = {}
    parameters = _parameter_sizes(load)
    for step in found.schedule.steps:
        for each in step.products:
            for size in {each.n, each.k} & parameters:
                if _is_odd(size):
                    share, where = sizes.get(size, (0.0, each.where))
                    sizes[size] = share + found.share(step.seconds), where
    for size, (share, where) in sizes.items():
        full = -(-size // found.chip.mxu) * found.chip.mxu
        if share < WORTH or full > 2 * size:
            continue
        write = f"make {size:,} a multiple of {found.chip.mxu}: {full:,} (vocab_size={full}, out_features={full}, …)"
        yield Change(
            "pad",
            f"dimension {size:,} of {_owners(load, names, size)} does not fill the tiles of {found.chip.mxu}",
            where,
            f"{write}; what is added is never read, and masked where it would be",
            share,
            made=partial(_resized, old=size, new=full),
        )


def _parameter_sizes(load: Load) -> set[int]:
    return {size for spec in load.program.inputs if len(spec.shape) >= 2 for size in spec.shape}


def odd_batch(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    """Fewer rows than a tile has: libtpu makes a product of a row or two on the vector unit."""
    few = {rows for rows in (load.items, load.batch) if rows % _ROWS}
    if len(few) == len({load.items, load.batch}) and few & _rows(load.graph):
        full = -(-load.batch // _ROWS) * _ROWS
        yield Change(
            "batch",
            f"{load.items:,} rows do not fill tiles of {_ROWS}",
            "",
            f"batch {full} in place of {load.batch} (or a multiple of {_ROWS})",
            1.0,
            batch=full,
        )


def _rows(graph_module: torch.fx.GraphModule) -> set[int]:
    """How many rows the left sides of a graph's products have."""
    products = [n for n in graph_module.graph.nodes if getattr(n.target, "overloadpacket", None) in _PRODUCTS]
    lefts = [node.args[_PRODUCTS[node.target.overloadpacket]].meta["val"] for node in products]
    return {prod(left.shape[:-1]) for left in lefts}


def _owners(load: Load, names: Sequence[str], size: int) -> str:
    """The arguments that have a dimension, the first two by name."""
    owners = [name for name, spec in zip(names, load.program.inputs, strict=True) if size in spec.shape]
    return ", ".join(owners[:2]) + (f" and {len(owners) - 2} more" if len(owners) > 2 else "")


def _is_odd(size: int) -> bool:
    """Neither a multiple of a tile nor a power of two, such as a head's 64, which the model's shape depends on."""
    return size > 32 and size % 128 != 0 and size & (size - 1) != 0


def _resized(made: Made, old: int, new: int) -> Made:
    """The model with ``new`` wherever its parameters, sizes and configuration say ``old``."""
    grown = resized(lambda value: [new if size == old else size for size in value.shape])
    model = made.model
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: grown(value) for name, value in held.items()})
            for holder in (vars(module), vars(getattr(module, "config", None) or object.__new__(_Nothing))):
                holder.update({k: new for k, v in holder.items() if type(v) is int and v == old})
    return replace(made, args=tree_map(grown, made.args), kwargs=tree_map(grown, dict(made.kwargs)))


def resized(shape: Callable[[torch.Tensor], Sequence[int]]) -> Callable[[Any], Any]:
    """A function that gives a tensor the shape that ``shape`` says, the same tensor the same one, and leaves other
    values."""
    known: dict[int, torch.Tensor] = {}

    def grown(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or list(sizes := shape(value)) == list(value.shape):
            return value
        if id(value) not in known:
            with value.fake_mode:  # type: ignore[attr-defined]
                data = torch.empty(sizes, dtype=value.dtype, device=value.device)
            known[id(value)] = torch.nn.Parameter(data, value.requires_grad) if _is_parameter(value) else data
        return known[id(value)]

    return grown


class _Nothing:
    """What has no attributes."""


def _is_parameter(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter)


# ---- numbers


def float_products(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    wide = found.wide_products
    if not wide:
        return
    share = sum(found.share(step.seconds) for step in {step for step, _ in wide})
    worst = wide[0][1]
    if share < WORTH:
        return
    lines = f"{len({each.where for _, each in wide})} lines multiply float32 in {worst.passes} passes"
    yield Change(
        "precision",
        f"{lines} of the matrix unit",
        worst.where,
        'torch.set_float32_matmul_precision("high") (three passes, about 16 bits of mantissa)',
        share * 0.5,
        scope=lambda: _matmul_precision("high"),
    )
    yield Change(
        "precision",
        f"{lines} of the matrix unit",
        worst.where,
        "model.to(torch.bfloat16), or torch.autocast (one pass, and half the bytes)",
        share * (1 - 1 / worst.passes),
        made=_in_bfloat16,
    )


@contextlib.contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _in_bfloat16(made: Made) -> Made:
    known: dict[int, Any] = {}

    def narrow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        if id(value) not in known:
            with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
                data = torch.empty_strided(value.shape, value.stride(), dtype=torch.bfloat16, device=value.device)
            known[id(value)] = torch.nn.Parameter(data, value.requires_grad) if _is_parameter(value) else data
        return known[id(value)]

    if isinstance(made.model, torch.nn.Module):
        for module in made.model.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: narrow(value) for name, value in held.items()})
    return replace(made, args=tree_map(narrow, made.args), kwargs=tree_map(narrow, dict(made.kwargs)))


def doubles(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    rows = [row for row in emulated(load.graph, found) if row["dtype"] == "f64"]
    if rows:
        yield Change(
            "dtype",
            f"float64 in {len(rows)} places: a TPU has none, and makes it of pairs of float32",
            _first_line(load.graph, torch.float64) or rows[0]["where"],
            "compute in float32 (dtype=torch.float32, no .double())",
            max(WORTH, sum(row["share"] for row in rows)),
            graph=lambda traced: retype.retyped(traced.graph_module, torch.float64, torch.float32),
        )


def indices(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    rows = [row for row in emulated(load.graph, found) if row["dtype"] == "i64"]
    share = sum(row["share"] for row in rows)
    if rows and share >= WORTH:
        yield Change(
            "index",
            f"int64 arithmetic in {len(rows)} places, each emulated with pairs of 32-bit integers",
            rows[0]["where"],
            "keep it int32 (dtype=torch.int32, .int()), where the values allow",
            share,
            graph=lambda traced: retype.retyped(traced.graph_module, torch.int64, torch.int32),
        )


def _first_line(graph_module: torch.fx.GraphModule, dtype: torch.dtype) -> str:
    """Where a dtype comes in."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype is dtype:
            line = where(node)
            return relative(f"{line.file}:{line.line}") if line else ""
    return ""


# ---- ops and arguments


def gelu(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    nodes = [
        node for node in load.graph.graph.nodes if node.target in _GELU and node.kwargs.get("approximate") != "tanh"
    ]
    if not nodes:
        return
    lines = {f"{line.file}:{line.line}" for node in nodes if (line := where(node))}
    share = sum(found.share(step.seconds) for step in found.schedule.steps if step.where in lines)
    yield Change(
        "op",
        f"GELU by erf, in {len(nodes)} places, is a long polynomial on the vector unit",
        next(iter(sorted(lines)), ""),
        'nn.GELU(approximate="tanh") (differs by up to 5e-4)',
        share,
        graph=lambda traced: retype.replaced(traced.graph_module, _GELU),
    )


def repeated_layers(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    """Layers that repeat: one of them to compile in place of all."""
    loops = [] if config.scan_layers else layers.find(load.graph)
    if loops:
        first = loops[0].turns[0][0]
        line = where(first)
        yield Change(
            "scan",
            f"{', '.join(str(len(loop.turns)) for loop in loops)} layers that repeat are compiled one by one",
            f"{line.file}:{line.line}" if line else "",
            'options={"scan_layers": True}: they become one loop of the program',
            WORTH,
            scope=lambda: override(scan_layers=True),
        )


def donations(load: Load, found: Analysis, names: Sequence[str]) -> Iterator[Change]:
    rows = not_donated(load.program, names)
    pairs = _in_place_pairs(load, [row["argument"] for row in rows], names)
    if not pairs:
        return
    held = sum(row["bytes"] for row in rows if row["argument"] in pairs)
    yield Change(
        "donate",
        f"{', '.join(list(pairs)[:4])}: a result has the same shape, and takes {held:,} bytes more",
        "",
        f"write the result into the argument ({next(iter(pairs))}.copy_(…)): its memory is then donated",
        WORTH,
        graph=lambda traced: retype.written_in_place(traced.graph_module, _node_names(load, pairs, names)),
    )


def _in_place_pairs(load: Load, wanted: list[str], names: Sequence[str]) -> Mapping[str, int]:
    """Argument → the position of a result of the graph that has its shape and dtype, each used once."""
    free = {i: spec for i, spec in enumerate(load.program.outputs) if i not in {r for _, r in load.program.mutated}}
    pairs: dict[str, int] = {}
    for name in wanted:
        spec = load.program.inputs[names.index(name)]
        match = next((i for i, s in free.items() if (s.shape, s.dtype) == (spec.shape, spec.dtype)), None)
        if match is not None:
            pairs[name] = match
            del free[match]
    return pairs


def _node_names(load: Load, pairs: Mapping[str, int], names: Sequence[str]) -> dict[str, str]:
    placeholders = load.graph.graph.find_nodes(op="placeholder")
    results: Any = load.graph.graph.output_node().args[0]
    by_index = {result.index: results[i] for i, result in enumerate(load.program.results) if result.index is not None}
    arguments = {name: placeholders[load.program.arguments[names.index(name)]].name for name in pairs}
    return {arguments[name]: by_index[index].name for name, index in pairs.items() if index in by_index}
