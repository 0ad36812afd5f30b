"""Tier 4: a graph split around the ops that nothing lowers. The parts between them are compiled; they run in eager
torch.

Every node gets a level: how often a path from the arguments to it changes between lowered and eager. Nodes of one
level form one part, so two
independent eager ops do not split the graph twice. Writes into arguments come last, after every read.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from tpu_compile.errors import Gap, TpuCompileWarning, UnsupportedOp
from tpu_compile.stats import count

aten = torch.ops.aten
_told: set[str] = set()


class SplitGraph:
    """A graph of compiled and eager parts, called like a CompiledGraph."""

    def __init__(self, graph_module: GraphModule, name: str, error: UnsupportedOp) -> None:
        self._boxed_call = True
        self.name = name
        while True:
            _tell(error.gaps)
            try:
                self._parts = _build(graph_module, name, set(error.nodes))
                self.gaps = error.gaps
                return
            except PartRefused as refused:  # a rule refused its arguments only when it was run
                error = _joined(error, refused.pairs, name)

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values = list(arguments)
        arguments.clear()
        return list(self._parts(*values))


class PartRefused(Exception):
    """A part of a split graph has gaps of its own; ``pairs`` names nodes of the whole graph."""

    def __init__(self, pairs: list[tuple[Node, Gap]]) -> None:
        super().__init__()
        self.pairs = pairs


def _joined(error: UnsupportedOp, pairs: list[tuple[Node, Gap]], name: str) -> UnsupportedOp:
    return UnsupportedOp([*error.gaps, *(g for _, g in pairs)], name, [*error.nodes, *(n for n, _ in pairs)])


def _tell(gaps: tuple[Gap, ...]) -> None:
    """Warn once for each op and line."""
    fresh = list(dict.fromkeys(str(gap) for gap in gaps if str(gap) not in _told))
    if fresh:
        _told.update(fresh)
        listed = "\n  - ".join(fresh)
        warnings.warn(
            f"tpu_compile runs {len(fresh)} op(s) on the CPU, between compiled parts:\n  - {listed}\n"
            "fullgraph=True makes this an error; `tpu_compile.lowers` gives an op a rule.",
            TpuCompileWarning,
            stacklevel=2,
        )


def _build(graph_module: GraphModule, name: str, eager: set[Node]) -> GraphModule:
    levels = _levels(graph_module, eager)
    origin = {n.name: n for n in graph_module.graph.nodes}
    split = split_module(graph_module, graph_module, lambda node: levels[node], keep_original_order=True)
    for index, (part_name, part) in enumerate(list(split.named_children())):
        if not isinstance(part, GraphModule) or not part_name.startswith("submod_"):
            continue
        if int(part_name.removeprefix("submod_")) % 2:
            setattr(split, part_name, EagerPart(part))
        else:
            setattr(split, part_name, _compiled(part, f"{name}_part{index}", origin))
    return split


def _compiled(part: GraphModule, name: str, origin: dict[str, Node]) -> torch.nn.Module:
    from tpu_compile.compiler import CompiledGraph

    single = _return_tuple(part)
    try:
        return CompiledPart(CompiledGraph(part, name), single)
    except UnsupportedOp as error:
        raise PartRefused(
            [(origin[node.name], gap) for node, gap in zip(error.nodes, error.gaps, strict=True)]
        ) from error


def _return_tuple(part: GraphModule) -> bool:
    """Make a part return a tuple, as AOTAutograd's graphs do; tells whether it returned a single value."""
    output = next(n for n in part.graph.nodes if n.op == "output")
    single = not isinstance(output.args[0], (tuple, list))
    if single:
        output.args = ((output.args[0],),)
        part.recompile()
    return single


class CompiledPart(torch.nn.Module):
    """A compiled part behind the calling convention of an FX submodule."""

    def __init__(self, compiled: Any, single: bool) -> None:
        super().__init__()
        self._call, self._single = compiled, single

    def forward(self, *arguments: Any) -> Any:
        results = self._call(list(arguments))
        return results[0] if self._single else tuple(results)


class EagerPart(torch.nn.Module):
    """Ops that nothing lowers, run by torch and counted."""

    def __init__(self, part: GraphModule) -> None:
        super().__init__()
        self._part = part
        self._ops = sum(n.op == "call_function" and n.target is not operator.getitem for n in part.graph.nodes)

    def forward(self, *arguments: Any) -> Any:
        count("fallback_ops", self._ops)
        with torch.no_grad():
            return self._part(*arguments)


def _levels(graph_module: GraphModule, eager: set[Node]) -> dict[Node, int]:
    """Even levels are compiled, odd ones eager; a node stands no lower than what it reads."""
    levels: dict[Node, int] = {}
    nodes = [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    for node in nodes:
        if node.target is operator.getitem:
            levels[node] = levels[node.args[0]]
            continue
        below = max((levels.get(i, 0) for i in node.all_input_nodes), default=0)
        levels[node] = below + ((below % 2) != (node in eager))
    last = max(levels.values(), default=0)
    last += last % 2
    for node in nodes:
        if node.target is aten.copy_.default:
            levels[node] = last
    return levels
