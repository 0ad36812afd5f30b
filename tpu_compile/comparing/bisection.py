"""The first op of a model whose compiled value departs from eager's, and the least part of the graph that shows it.

Every graph that the model runs is run op by op in eager torch. The first whose program gives something else, on the
same arguments, is searched: a program that returns every value shows where they part, then single ops are compiled on
eager's own values. A fault that needs its neighbours (a fusion) is found by compiling longer and longer prefixes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.comparing.interpreted import EagerRun, Executed, Interpreted, is_random
from tpu_compile.comparing.measure import Difference, measure
from tpu_compile.comparing.runs import Subject, run
from tpu_compile.comparing.subgraph import bound, extract
from tpu_compile.compiler import compile_graph
from tpu_compile.config import override
from tpu_compile.errors import TpuCompileWarning
from tpu_compile.lowering import fx
from tpu_compile.places import place

aten = torch.ops.aten
_UNDEFINED = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty))


@dataclass(frozen=True)
class Culprit:
    """The op that departs first.

    Attributes:
        graph: the smallest part of the model's graph found that departs by itself; it ends with the op.
        arguments: eager's values for its arguments.
        name: of the model's graph.
        difference: between the op's value there and eager's.
    """

    graph: GraphModule
    arguments: tuple[Any, ...]
    name: str
    node: str
    op: str
    where: str
    difference: Difference

    @property
    def ops(self) -> int:
        """How many ops the part has."""
        return sum(n.op == "call_function" and n.target is not operator.getitem for n in self.graph.graph.nodes)


def bisect(subject: Subject, *, calls: int = 1, grad: bool = False) -> Culprit | None:
    """The first op that departs; None if every graph alone agrees with eager."""
    ours = subject.copied()
    reference = Interpreted(keep=True)
    torch._dynamo.reset()
    run(ours, torch.compile(ours.model, backend=reference.compile), calls=calls, grad=grad)
    torch._dynamo.reset()
    with override(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", TpuCompileWarning)  # of ops that run on the CPU: they cannot depart
        found = (_Search(executed).culprit() for executed in reference.executed)
        return next((culprit for culprit in found if culprit is not None), None)


class _Search:
    """The search in one executed graph. ``values`` are eager's."""

    def __init__(self, executed: Executed) -> None:
        self.name = executed.name
        self.module = bound(executed.graph, fx.bind(executed.graph.graph, executed.arguments))
        torch.set_rng_state(executed.generator)
        eager = EagerRun(self.module, keep=True)
        eager.outputs([v.clone() if isinstance(v, torch.Tensor) else v for v in executed.arguments])
        self.values = eager.values
        inputs = (n for n in self.module.graph.nodes if n.op == "placeholder")
        self.values.update(zip(inputs, executed.arguments, strict=True))
        self.nodes = [n for n in self.module.graph.nodes if _searched(n)]
        self.units = [n for n in self.nodes if n.target is not operator.getitem]

    def culprit(self) -> Culprit | None:
        ends = self._ends()
        if not ends or not self._departing(self.nodes, ends):
            return None
        flagged = [node for node, _ in self._departing(self.nodes, self.units)]
        alone = next((found for node in flagged if (found := self._alone(node, [node]))), None)
        return alone or self._grown(flagged[0] if flagged else self._first_prefix(ends))

    def _ends(self) -> list[Node]:
        """The values that leave the graph: its results, and what it writes into arguments."""
        leaving = [i for n in self.module.graph.nodes if n.op == "output" for i in n.all_input_nodes]
        leaving += [n.args[1] for n in self.module.graph.nodes if n.target is aten.copy_.default]
        producers = (_unit(n) for n in leaving)
        return [n for n in dict.fromkeys(producers) if n in set(self.units)]

    # ---- compiling parts

    def _departing(self, nodes: Sequence[Node], wanted: Sequence[Node]) -> list[tuple[Node, Difference]]:
        """Which of ``wanted`` depart when ``nodes`` are compiled as one program and run on eager's values."""
        graph, borders = extract(self.module, nodes, wanted)
        results = iter(compile_graph(graph, f"{self.name}_part")([self.values[n] for n in borders]))
        return [(node, d) for node in wanted for d in self._differences(node, results) if not d.agrees]

    def _differences(self, node: Node, results: Iterator[Any]) -> list[Difference]:
        """One for each result of a node, at most one of them departing (the first)."""
        want = self.values[node]
        several = isinstance(want, (tuple, list))
        parts = list(want) if several else [want]
        names = [f"{node.name}[{i}]" if several else node.name for i in range(len(parts))]
        found = [measure(name, w, g) for name, w, g in zip(names, parts, results, strict=False)]
        return [d for d in found if not d.agrees][:1]

    def _alone(self, node: Node, nodes: Sequence[Node]) -> Culprit | None:
        departing = self._departing(nodes, [node])
        if not departing:
            return None
        graph, borders = extract(self.module, nodes, [node])
        arguments = tuple(self.values[n] for n in borders)
        return Culprit(graph, arguments, self.name, node.name, str(node.target), place(node), departing[0][1])

    # ---- faults that need more than one op

    def _grown(self, node: Node) -> Culprit | None:
        """The smallest neighbourhood above ``node``, in steps, in which its value departs."""
        layers = list(self._layers(node))
        smallest = _first(len(layers), lambda depth: bool(self._alone(node, layers[depth])))
        return None if smallest is None else self._alone(node, layers[smallest])

    def _layers(self, node: Node) -> Iterator[list[Node]]:
        """The nodes at most 0, 1, 2, … steps above ``node``, each in graph order."""
        inside, edge, known = {node}, {node}, set(self.nodes)
        while edge:
            yield [n for n in self.nodes if n in inside]
            above = {_unit(i) for n in edge for i in n.all_input_nodes}
            edge = {n for n in above if n in known and n not in inside}
            inside |= edge | {n for n in self.nodes if n.target is operator.getitem and n.args[0] in inside | edge}

    def _first_prefix(self, ends: Sequence[Node]) -> Node:
        """The first node whose value departs if the program ends with it, by halving; an end if all else agrees."""
        end = self._departing(self.nodes, ends)[0][0]
        above = list(self._layers(end))[-1]
        chain = [n for n in above if n in set(self.units)]
        prefixes = [above[: above.index(n) + 1] for n in chain]
        found = _first(len(chain), lambda i: bool(self._departing(prefixes[i], [chain[i]])))
        return end if found is None else chain[found]


def _searched(node: Node) -> bool:
    """Ops that make tensors; eager's values of random and undefined ones are taken as given."""
    if node.op != "call_function" or node.target is aten.copy_.default or is_random(node):
        return False
    if getattr(node.target, "overloadpacket", None) in _UNDEFINED:
        return False
    if node.target is operator.getitem:
        return _searched(node.args[0])  # type: ignore[arg-type]
    value = node.meta.get("val")
    return any(isinstance(part, torch.Tensor) for part in (value if isinstance(value, (tuple, list)) else [value]))


def _unit(node: Node) -> Node:
    """The op that makes a value: of an item, the op whose results it is taken from."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _first(count: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest index for which ``holds``, if it goes on holding from there; None if it does not hold at the end."""
    if not count or not holds(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
