"""Layers that repeat: found in a graph, and lowered as one loop, so that XLA compiles one of them.

A graph's nodes in order are a string of letters: what each computes, on which shapes. A stack of layers is a stretch
with a period. What a turn reads is inside the layer, made by the turn before (carried), the same for all, or another
for each (parameters, saved activations). The last kind is stacked at the beginning of the program: a second copy
while it runs. (A case that picks a turn's own would copy one layer at a time, but XLA compiles a copy for each
branch: with 48 layers that takes as long as they do.) Results that are needed of every layer are collected in a
stacked buffer; where another loop of the program reads them, in this order or the other way round, it takes the buffer
as it is: a training step's backward, from its forward. Between programs of their own they pass stacked too
(``stack_saved``): one returns ``aten.stack`` of them, the other reads ``aten.select`` of one argument.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxlib.mlir.dialects import stablehlo
from torch.fx import Graph, GraphModule, Node, map_arg

from tpu_compile.errors import TpuCompileWarning
from tpu_compile.lowering import hlo
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.random import rng_key

TURNS = 3
"""Fewer layers than this stay as they are."""
NODES = 8
"""A layer has at least so many."""
KEPT = 6
"""For each result that is needed of every layer, and not by a loop, a layer has at least so many nodes: taking those
results apart again is compiled for each layer, and many of them take longer than the layers would."""
_CANDIDATES = 24
_WRITES = torch.ops.aten.copy_.default
_STACK, _SELECT, _SCAN = torch.ops.aten.stack.default, torch.ops.aten.select.int, torch.ops.higher_order.scan


@dataclass(eq=False)
class Loop:
    """A stretch of a graph as a loop: ``turns[k]`` are the nodes of layer k.

    Attributes:
        body: one layer. Its arguments are the carried values, one of each tuple of ``each``, and ``shared``; its
            results the next carried values, then those that ``kept`` names.
        carried: for each carried value the position in a layer that makes it.
        initial: and the node it is before the first turn.
        each: what the turns read that differs from turn to turn.
        shared: what all of them read.
        kept: positions in a layer whose values are needed outside, of every layer.
        last: positions whose values are needed outside, of the last layer only.
    """

    turns: list[list[Node]]
    body: GraphModule
    carried: list[int]
    initial: list[Node]
    each: list[tuple[Node, ...]]
    shared: list[Node]
    kept: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    @functools.cached_property
    def places(self) -> dict[Node, tuple[int, int]]:
        """(place among ``kept``, layer) of each kept result."""
        return {layer[q]: (rank, k) for rank, q in enumerate(self.kept) for k, layer in enumerate(self.turns)}

    def apart(self, loops: Sequence[Loop]) -> set[Node]:
        """The kept results that something reads one at a time, and not as rows of what is stacked."""
        inside = {node for loop in loops for layer in loop.turns for node in layer}
        singly = _singly(loops)
        return {
            n
            for n in self.places
            if n in singly or any(user not in inside and not _stacks(user, loops) for user in n.users)
        }


@dataclass
class Piece:
    """Nodes that are rows of one stack, one after another or backwards.

    ``source``: the graph's argument whose rows they are, or (loop, place among ``kept``); None for a node that is no
    row of anything.
    """

    source: Any
    rows: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def goes_on(self, source: Any, row: int) -> bool:
        """Whether that row is the next one."""
        if source is None or source != self.source:
            return False
        step = row - self.rows[-1]
        return step == (self.rows[-1] - self.rows[-2]) if len(self.rows) > 1 else abs(step) == 1


def pieces(nodes: Sequence[Node], loops: Sequence[Loop]) -> list[Piece]:
    """What ``nodes`` are rows of."""
    found: list[Piece] = []
    for node in nodes:
        source, row = _origin(node, loops)
        if not (found and found[-1].goes_on(source, row)):
            found.append(Piece(source))
        found[-1].rows.append(row)
        found[-1].nodes.append(node)
    return found


def _origin(node: Node, loops: Sequence[Loop]) -> tuple[Any, int]:
    if row_of_argument(node):
        return node.args[0], node.args[2]  # type: ignore[return-value]
    for loop in loops:
        if node in loop.places:
            rank, row = loop.places[node]
            return (loop, rank), row
    return None, 0


def row_of_argument(node: Node) -> bool:
    """Whether a node is a row of an argument of the graph."""
    if node.target is not _SELECT:
        return False
    source, axis, row = node.args
    return isinstance(source, Node) and source.op == "placeholder" and bool(axis == 0) and type(row) is int and row >= 0


def _singly(loops: Sequence[Loop]) -> set[Node]:
    """What loops read that is no row of a stack, or one row of it only."""
    found = {n for loop in loops for n in (*loop.initial, *loop.shared)}
    rows = [piece for loop in loops for nodes in loop.each for piece in pieces(nodes, loops)]
    return found.union(n for piece in rows if len(piece.rows) == 1 for n in piece.nodes)


def _stacks(node: Node, loops: Sequence[Loop]) -> bool:
    """Whether a node puts rows together that lie so already."""
    if node.target is not _STACK or node.args[1:] not in ((), (0,)):
        return False
    found = pieces(node.args[0], loops)  # type: ignore[arg-type]
    return len(found) == 1 and len(found[0].rows) > 1


class Walk(Protocol):
    """What a loop needs of the graph walk."""

    env: dict[Node, Any]

    def spec(self, value: torch.Tensor) -> Any: ...

    def visit(self, node: Node) -> None: ...

    def subgraph(self, graph_module: GraphModule, arguments: Sequence[Any]) -> list[Any]: ...


# ---- finding them


def find(graph_module: GraphModule) -> list[Loop]:
    """The loops of a graph, in its order; none overlap."""
    together = repetitions(graph_module)
    while unpaid := [loop for loop in together if not _pays(loop, together)]:
        together.remove(unpaid[0])
    return together or repetitions(graph_module, alone=True)


def repetitions(graph_module: GraphModule, *, alone: bool = False) -> list[Loop]:
    """What could be loops, whether they pay off or not. ``alone``: each does, whatever reads its results."""
    nodes = [n for n in graph_module.graph.nodes if n.op.startswith("call_") and not standing_alone(n)]
    return list(_loops(graph_module, nodes, [_letter(n) for n in nodes], alone=alone))


def _pays(loop: Loop, loops: Sequence[Loop]) -> bool:
    return len(loop.apart(loops)) * KEPT <= sum(map(len, loop.turns))


def standing_alone(node: Node) -> bool:
    """What reads an argument or nothing can be made before any layer runs. Draws and rows have numbers of their own."""
    return node.op == "get_attr" or node.target is rng_key or row_of_argument(node)


def _loops(graph_module: GraphModule, nodes: list[Node], letters: list[int], *, alone: bool) -> Iterator[Loop]:
    if len(nodes) < TURNS * NODES:
        return
    for start, period, turns in _stretches(letters):
        loop = _as_loop(graph_module, nodes, start, period, turns)
        if loop and (not alone or len(loop.kept) * KEPT <= period):
            end = start + period * len(loop.turns)
            yield from _loops(graph_module, nodes[:start], letters[:start], alone=alone)
            yield loop
            yield from _loops(graph_module, nodes[end:], letters[end:], alone=alone)
            return


def _letter(node: Node) -> int:
    """What a node computes, whatever it reads. What writes is like nothing else."""
    if node.target is _WRITES:
        return id(node)
    shape = (map_arg((node.args, node.kwargs), lambda _: None), _spec(value(node)))
    return hash((node.op, node.target, repr(shape)))


def value(node: Node) -> Any:
    """A node's FakeTensor, or whatever else it computes: as AOTAutograd notes it, or Dynamo."""
    return node.meta.get("val", node.meta.get("example_value"))


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, tuple(value.stride())
    return tuple(map(_spec, value)) if isinstance(value, (tuple, list)) else value


def _stretches(letters: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, period, turns) of what may be a loop, the one that saves most first; every phase of a period counts,
    since where a layer begins is nothing the letters say."""
    found = []
    for period in _periods(letters):
        start, length = _longest_run([a == b for a, b in zip(letters, letters[period:], strict=False)])
        whole = length + period
        for phase in range(min(period, whole - TURNS * period + 1)):
            turns = (whole - phase) // period
            if turns >= TURNS:
                found.append((-(turns - 1) * period, period, start + phase, turns))
    return [(start, period, turns) for _, period, start, turns in sorted(found)]


def _periods(letters: Sequence[int]) -> list[int]:
    latest: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i, letter in enumerate(letters):
        if letter in latest and i - latest[letter] >= NODES:
            gaps[i - latest[letter]] += 1
        latest[letter] = i
    return [gap for gap, _ in gaps.most_common(_CANDIDATES)]


def _longest_run(same: Sequence[bool]) -> tuple[int, int]:
    best, start = (0, 0), 0
    for i, each in enumerate([*same, False]):
        if not each:
            best = max(best, (i - start, -start))
            start = i + 1
    return -best[1], best[0]


# ---- what flows between turns


def _as_loop(graph_module: GraphModule, nodes: list[Node], start: int, period: int, turns: int) -> Loop | None:
    layers = [nodes[start + k * period : start + (k + 1) * period] for k in range(turns)]
    place = {node: (k, q) for k, layer in enumerate(layers) for q, node in enumerate(layer)}
    loop = Loop(layers, GraphModule(graph_module, Graph()), [], [], [], [])
    inputs: dict[Any, Node] = {}  # what an argument of the body stands for, in the order of its making
    graph = loop.body.graph
    copies: dict[int, Node] = {}
    for q, node in enumerate(layers[0]):
        slots = _slots([layer[q] for layer in layers], place, q)
        if slots is None:
            return None
        for slot in slots:
            if slot[0] != "inside" and slot not in inputs:
                inputs[slot] = graph.placeholder(f"input_{len(inputs)}")
                inputs[slot].meta["val"] = value(slot[2][0])
        supply = iter([copies[slot[1]] if slot[0] == "inside" else inputs[slot] for slot in slots])
        args, kwargs = map_arg((node.args, node.kwargs), lambda _, supply=supply: next(supply))  # type: ignore[misc]
        copies[q] = graph.create_node(node.op, node.target, args, kwargs)
        copies[q].meta = dict(node.meta)
    if not _outside(loop, place):
        return None
    _finish(loop, inputs, copies)
    return loop


def _references(node: Node) -> list[Node]:
    """The nodes a node reads, in the order of its arguments, as often as it names them."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _slots(same: list[Node], place: dict[Node, tuple[int, int]], position: int) -> list[Any] | None:
    """What each reference of a node is: ("inside", position), ("carried", position, (first,)),
    ("shared", None, (node,)) or ("each", None, nodes). None if it is nothing of these."""
    slots: list[Any] = []
    for nodes in zip(*map(_references, same), strict=True):
        places = [place.get(n) for n in nodes]
        first = places[1][1] if places[1] else -1
        if all(p == (k, first) for k, p in enumerate(places)) and first < position:
            slots.append(("inside", first))
        elif places[0] is None and all(p == (k, first) for k, p in enumerate(places[1:])) and _tensors(nodes):
            slots.append(("carried", first, (nodes[0],)))
        elif any(places):
            return None
        elif len(set(nodes)) == 1:
            slots.append(("shared", None, (nodes[0],)))
        elif _tensors(nodes):
            slots.append(("each", None, nodes))
        else:
            return None
    return slots


def _tensors(nodes: Sequence[Node]) -> bool:
    """Whether all are tensors, laid out alike."""
    values = [value(n) for n in nodes]
    return all(isinstance(v, torch.Tensor) for v in values) and len(set(map(repr, map(_spec, values)))) == 1


def _outside(loop: Loop, place: dict[Node, tuple[int, int]]) -> bool:
    """Note what is read outside of the loop; False if a tuple is, or if a layer is read by another one but the next."""
    turns = len(loop.turns)
    for q in range(len(loop.turns[0])):
        readers = {k for k in range(turns) if any(user not in place for user in loop.turns[k][q].users)}
        if readers and not isinstance(value(loop.turns[0][q]), torch.Tensor):
            return False
        if readers == {turns - 1}:
            loop.last.append(q)
        elif readers:
            loop.kept.append(q)
    return True


def _finish(loop: Loop, inputs: dict[Any, Node], copies: dict[int, Node]) -> None:
    """Put the body's arguments in order, and its results at its end."""
    graph = loop.body.graph
    by_kind = {kind: [slot for slot in inputs if slot[0] == kind] for kind in ("carried", "each", "shared")}
    ordered = [*by_kind["carried"], *by_kind["each"], *by_kind["shared"]]
    before = copies[0]
    for slot in ordered:
        before.prepend(inputs[slot])
    loop.carried = [slot[1] for slot in by_kind["carried"]]
    loop.initial = [slot[2][0] for slot in by_kind["carried"]]
    loop.each = [slot[2] for slot in by_kind["each"]]
    loop.shared = [slot[2][0] for slot in by_kind["shared"]]
    graph.output(tuple(copies[q] for q in (*loop.carried, *loop.kept, *loop.last)))


# ---- lowering them


Stacks = dict[Loop, list[Value]]
"""The stacked results of the loops that were lowered."""


def lower(walk: Walk, loop: Loop, alone: Sequence[Node], loops: Sequence[Loop], done: Stacks) -> None:
    """Emit the loop where we stand, and note the values of its nodes that are read outside.

    ``alone``: nodes between the layers that stand alone; they are made first.
    """
    for node in alone:
        if node not in walk.env:
            walk.visit(node)
    env, turns = walk.env, len(loop.turns)
    carries, shared = [env[n] for n in loop.initial], [env[n] for n in loop.shared]
    stacks = [_stacked(walk, nodes, loops, done) for nodes in loop.each]
    state = [hlo.scalar(0, torch.int32), *carries, *_buffers(walk, loop)]

    def condition(i: Value, *_: Value) -> Value:
        return hlo.compare(i, hlo.scalar(turns, torch.int32), "LT")

    def body(i: Value, *values: Value) -> list[Value]:
        own = [_row(x, i) for x in stacks]
        results = walk.subgraph(loop.body, [*values[: len(carries)], *own, *shared])
        stacked, rest = values[len(carries) :], results[len(carries) :]
        kept = [_put(buffer, x, i) for buffer, x in zip(stacked, rest[: len(loop.kept)], strict=False)]
        following = stablehlo.add(i, hlo.scalar(1, torch.int32))
        return [following, *results[: len(carries)], *kept, *rest[len(loop.kept) :]]

    results = hlo.while_(state, condition, body)[1 + len(carries) :]
    done[loop] = results[: len(loop.kept)]
    apart = loop.apart(loops)
    for q, stacked in zip(loop.kept, results, strict=False):
        for k, layer in enumerate(loop.turns):
            if layer[q] in apart:
                env[layer[q]] = hlo.squeeze(hlo.slice_axis(stacked, 0, k, k + 1), [0])
    env.update(zip([loop.turns[-1][q] for q in loop.last], results[len(loop.kept) :], strict=True))


def _stacked(walk: Walk, nodes: Sequence[Node], loops: Sequence[Loop], done: Stacks) -> Value:
    """What each layer has of its own, one after another: rows of a stack as they lie, else put together."""
    found: list[Value] = []
    for piece in pieces(nodes, loops):
        rows = piece.rows
        if len(rows) == 1:
            found.append(hlo.unsqueeze(walk.env[piece.nodes[0]], 0))
            continue
        source = piece.source
        stack = walk.env[source] if isinstance(source, Node) else done[source[0]][source[1]]
        part = hlo.slice_axis(stack, 0, min(rows), max(rows) + 1)
        found.append(hlo.reverse(part, [0]) if rows[0] > rows[1] else part)
    return hlo.concatenate(found, 0)


def _buffers(walk: Walk, loop: Loop) -> list[Value]:
    """Zeros: a stacked buffer for each kept result, and a value for each that only the last layer hands out."""
    specs = [walk.spec(loop.turns[0][q].meta["val"]) for q in (*loop.kept, *loop.last)]
    stacked = [[len(loop.turns), *s.shape] if i < len(loop.kept) else s.shape for i, s in enumerate(specs)]
    return [hlo.full(0, spec.dtype, sizes) for spec, sizes in zip(specs, stacked, strict=True)]


def _row(stacked: Value, i: Value) -> Value:
    """``stacked[i]``."""
    sizes, zero = hlo.shape(stacked), hlo.full_like(i, 0)
    piece = hlo.dynamic_slice(stacked, [i, *[zero] * (len(sizes) - 1)], [1, *sizes[1:]])
    return hlo.squeeze(piece, [0])


def _put(buffer: Value, x: Value, i: Value) -> Value:
    zero = hlo.full_like(i, 0)
    return hlo.dynamic_update_slice(buffer, hlo.unsqueeze(x, 0), [i, *[zero] * hlo.rank(x)])


class Loops:
    """The loops of one graph, for its walk."""

    def __init__(self, graph_module: GraphModule, name: str) -> None:
        found = find(graph_module)
        if not found and not graph_module.graph.find_nodes(op="call_function", target=_SCAN):
            _say_none(name)
        self._loops, self._done = found, Stacks()
        self._first = {loop.turns[0][0]: loop for loop in found}
        self._inside = {node for loop in found for layer in loop.turns for node in layer}
        nodes, singly = graph_module.graph.nodes, _singly(found)
        self._stacks = {n for n in nodes if _stacks(n, found)}
        self._rows = {n for n in nodes if row_of_argument(n) and n not in singly and self._inside.issuperset(n.users)}
        self._alone = [n for n in nodes if standing_alone(n) and n not in self._rows]

    def __bool__(self) -> bool:
        return bool(self._first)

    def lower(self, walk: Walk, node: Node) -> bool:
        """Whether the node is a loop's affair; lowers the loop at its first node."""
        loop = self._first.get(node)
        if loop:
            lower(walk, loop, self._alone, self._loops, self._done)
        elif node in self._stacks:
            walk.env[node] = _stacked(walk, node.args[0], self._loops, self._done)  # type: ignore[arg-type]
        return node in self._inside or node in self._rows or node in walk.env


@functools.cache
def _say_none(name: str) -> None:
    """Tell the user, once for each graph, that there was nothing to do."""
    warnings.warn(
        f"scan_layers: {name} has no {TURNS} layers in a row that compute the same and keep little of it; it is "
        "compiled as it is.",
        TpuCompileWarning,
        stacklevel=2,
    )
