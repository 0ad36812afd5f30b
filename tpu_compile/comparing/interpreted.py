"""The graphs that the backend would compile, run op by op in eager torch: what bisection measures the program against.

Random ops are run by the compiled program's own rules, on the seed that it would draw: with the same
``torch.manual_seed`` both see the same numbers, and a model with dropout can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from tpu_compile import capture
from tpu_compile.comparing.subgraph import extract
from tpu_compile.compiler import CompiledGraph
from tpu_compile.lowering.random import functionalize_random, keyed_ops, rng_key


@dataclass(frozen=True)
class Executed:
    """One execution of a graph: its arguments as they were before, and the generator's state."""

    name: str
    graph: GraphModule
    arguments: tuple[Any, ...]
    generator: torch.Tensor


class Interpreted:
    """A Dynamo backend. ``executed`` holds what ran, in order, if ``keep`` says so."""

    def __init__(self, *, keep: bool = False) -> None:
        self.executed: list[Executed] = []
        self._keep = keep

    def compile(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """What ``torch.compile(backend=...)`` takes."""
        name = capture.frame_name()
        return capture.aot_graphs(
            graph_module, example_inputs, lambda graph, kind: self._graph(graph, f"{name}_{kind}")
        )

    def _graph(self, graph: GraphModule, name: str) -> Callable[[list[Any]], list[Any]]:
        functionalize_random(graph)

        def run(arguments: list[Any]) -> list[Any]:
            given = tuple(arguments)
            arguments.clear()
            if self._keep:
                self.executed.append(Executed(name, graph, _snapshot(given), torch.get_rng_state()))
            return EagerRun(graph).outputs(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _snapshot(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)


class EagerRun(Interpreter):
    """One run of a graph. ``values`` holds the value of every node that was kept (``keep=True``)."""

    def __init__(self, graph: GraphModule, *, keep: bool = False) -> None:
        super().__init__(graph, garbage_collect_values=not keep)
        self.values: dict[Node, Any] = {}
        self._keep = keep
        self._seed_state: torch.Tensor | None = None

    def outputs(self, arguments: Sequence[Any]) -> list[Any]:
        """The graph's outputs for its flat arguments."""
        with torch.no_grad():
            return list(self.run(*arguments))

    def run_node(self, n: Node) -> Any:
        value = self._draw(n) if is_random(n) else super().run_node(n)
        if self._keep:
            self.values[n] = value
        return value

    def _draw(self, node: Node) -> Any:
        """A random op by our rule. All keys of a call come from one seed, so the generator is set back for each."""
        program = _program(node)
        arguments = [self.env[i] for i in node.all_input_nodes]
        if node.target is not rng_key:
            return program(arguments)
        if self._seed_state is None:
            self._seed_state = torch.get_rng_state()
        torch.set_rng_state(self._seed_state)
        return program(arguments)


def is_random(node: Node) -> bool:
    """Whether a node is an op that only our rules know."""
    return node.target is rng_key or node.target in _twins()


@cache
def _twins() -> frozenset[Any]:
    return frozenset(keyed_ops().values())


def _program(node: Node) -> Callable[[list[Any]], Any]:
    """A node alone, compiled; its value, not a list of one."""
    graph, _ = extract(node.graph.owning_module, [node], [node])
    compiled = CompiledGraph(graph, node.name)
    several = isinstance(node.meta["val"], (tuple, list))
    return lambda arguments: tuple(compiled(arguments)) if several else compiled(arguments)[0]
