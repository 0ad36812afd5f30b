"""One page about a program on a chip: the model's source beside its FX graph, StableHLO and fusions, each line joined
with those that it became, and treemaps of time and memory. It needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch.fx import Node

from tpu_compile.cli.on_target import duration
from tpu_compile.cli.tables import number, size
from tpu_compile.lowering import fx, gaps
from tpu_compile.stages import Compiled
from tpu_compile.targets.analysis import Analysis
from tpu_compile.targets.describe import analysis, lines_of, relative
from tpu_compile.targets.schedule import Step
from tpu_compile.targets.treemap import Tile, treemap

_CONTEXT = 4
"""Lines of source shown around those that became something."""
_LOCATION = re.compile(r'^(#loc\d*) = loc\((?:"([^"]*)":(\d+):\d+|"[^"]*"\((#loc\d*)\)|"[^"]*")\)')
_USE = re.compile(r" loc\((#loc\d*|\"[^\"]*\"|unknown)\)")
_SMALL = 0.002
"""Share below which things are put together in a treemap."""


@dataclass(frozen=True)
class Row:
    """A line of text; ``keys`` are the places that it came from, as numbers. A line of source has its number as
    ``label``, and as ``heat`` its share of the time of the slowest."""

    text: str
    keys: tuple[int, ...] = ()
    label: str = ""
    heat: float = 0.0


@dataclass(frozen=True)
class Box:
    """A rectangle of a treemap, in percent."""

    tile: Tile
    text: str
    title: str
    keys: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Graph:
    """What the page says of one graph."""

    name: str
    summary: Sequence[tuple[str, str]]
    source: Sequence[tuple[str, Sequence[Row]]]
    panes: Sequence[tuple[str, Sequence[Row]]]
    fusions: Sequence[Mapping[str, Any]]
    time: Sequence[Box]
    memory: Sequence[Box]


def render(title: str, compiled: Sequence[Compiled], target: str) -> str:
    """The page, as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((resources.files("tpu_compile.cli") / "page.html.j2").read_text())
    return template.render(title=title, target=target, graphs=[_Page(each, target).graph() for each in compiled])


class _Page:
    def __init__(self, compiled: Compiled, target: str) -> None:
        self.compiled, self.target = compiled, target
        self.found: Analysis = analysis(compiled, target)
        self.keys: dict[str, int] = {}

    def graph(self) -> Graph:
        return Graph(
            self.compiled.name,
            list(self._summary()),
            self._source(),
            [("FX", list(self._fx())), ("StableHLO", list(self._stablehlo()))],
            list(self._fusions()),
            self._time(),
            self._memory(),
        )

    def key(self, where: str) -> tuple[int, ...]:
        return (self.keys.setdefault(where, len(self.keys)),) if where else ()

    def _summary(self) -> Iterator[tuple[str, str]]:
        found, times = self.found, self.found.schedule
        yield "chip", found.chip.name
        yield "time", f"{duration(times.seconds)} ({duration(times.seconds_by('libtpu'))} by libtpu's cycles)"
        yield "at least", duration(times.roofline)
        yield "of peak", f"{times.flops / found.chip.peak('bf16') / times.seconds:.1%}" if times.seconds else "-"
        yield "HBM", f"{size(found.fit.needed)} of {size(found.fit.available)}"
        yield "flops", number(times.flops)
        yield "HBM traffic", size(times.bytes)

    # ---- panes

    def _source(self) -> list[tuple[str, list[Row]]]:
        """(file, lines) of what the model is made of, without the parts that became nothing."""
        seconds = dict(self.found.by_line)
        used: dict[str, set[int]] = {}
        for where in {*seconds, *(fx_where(n) for n in self.compiled.graph_module.graph.nodes)}:
            file, _, line = where.rpartition(":")
            if file:
                used.setdefault(file, set()).add(int(line))
        most = max(seconds.values(), default=0.0)
        return [
            (relative(f"{file}:1")[:-2], list(self._lines(file, lines, seconds, most))) for file, lines in used.items()
        ]

    def _lines(self, file: str, used: set[int], seconds: Mapping[str, float], most: float) -> Iterator[Row]:
        text, last = lines_of(f"{file}:1"), 0
        shown = sorted({n for line in used for n in range(line - _CONTEXT, line + _CONTEXT + 1)} & set(text))
        for line in shown:
            if last and line != last + 1:
                yield Row("⋯")
            last, where = line, f"{file}:{line}"
            heat = seconds.get(where, 0.0) / most if most else 0.0
            yield Row(text[line], self.key(where) if line in used else (), str(line), round(heat, 3))

    def _fx(self) -> Iterator[Row]:
        for node in self.compiled.graph_module.graph.nodes:
            yield Row(_fx_text(node), self.key(fx_where(node)))

    def _stablehlo(self) -> Iterator[Row]:
        lines = fx.text(self.compiled.program.bytecode, locations=True).splitlines()
        places = _places(lines)
        for line in lines:
            if not line.startswith("#loc"):
                used = _USE.findall(line)
                where = places.get(used[-1], "") if used else ""
                yield Row(_USE.sub("", line), self.key(where))

    def _fusions(self) -> Iterator[dict[str, Any]]:
        for step in self.found.schedule.steps:
            yield {
                "name": step.name,
                "kind": step.kind,
                "op": step.op.removeprefix("aten."),
                "where": relative(step.where),
                "keys": self._inside(step),
                "time": duration(step.seconds),
                "cycles": f"{'' if step.by == 'libtpu' else '~'}{number(step.cycles)}",
                "share": self.found.share(step.seconds),
                "bytes": size(step.bytes),
                "flops": number(step.flops) if step.flops else "",
                "bound": step.bound,
                "result": step.result,
            }

    def _inside(self, step: Step) -> tuple[int, ...]:
        """Every place that a fusion was made from."""
        keys = dict.fromkeys(self.key(step.where))
        for computation in self.found.module.computations.values():
            instruction = computation.by_name.get(step.name)
            if instruction is not None:
                for _, each in self.found.module.inside(instruction):
                    keys.update(dict.fromkeys(self.key(each.where)))
                break
        return tuple(keys)

    # ---- treemaps

    def _time(self) -> list[Box]:
        steps = [s for s in self.found.schedule.steps if self.found.share(s.seconds) >= _SMALL]
        rest = self.found.schedule.seconds - sum(s.seconds for s in steps)
        boxes = []
        for tile in treemap([*(s.seconds for s in steps), rest]):
            if tile.index == len(steps):
                boxes.append(Box(tile, "the rest", f"{duration(rest)} in small steps", (), "other"))
                continue
            step = steps[tile.index]
            share = f"{self.found.share(step.seconds):.1%}"
            title = (
                f"{step.name}: {duration(step.seconds)}, {share}, {step.bound} bound\n{step.op} {relative(step.where)}"
            )
            boxes.append(Box(tile, step.op.removeprefix("aten.") or step.name, title, self._inside(step), step.kind))
        return boxes

    def _memory(self) -> list[Box]:
        held = self._held()
        return [
            Box(
                tile,
                held[tile.index][0],
                f"{held[tile.index][0]}: {size(held[tile.index][1])}",
                (),
                held[tile.index][2],
            )
            for tile in treemap([float(nbytes) for _, nbytes, _ in held], 100, 100)
        ]

    def _held(self) -> list[tuple[str, int, str]]:
        """(what, bytes, kind) of all that lies in HBM at once; an argument's bytes without tiles filled up."""
        memory, program = self.found.memory, self.compiled.program
        named = zip(self.compiled.arguments, program.inputs, strict=True)
        arguments = [(name, spec.nbytes, "argument") for name, spec in named]
        taken = {index for _, index in program.mutated}
        results = [
            (f"result {i} {spec}", spec.nbytes, "result") for i, spec in enumerate(program.outputs) if i not in taken
        ]
        others = [
            ("temporaries", memory.temp_size_in_bytes, "temporary"),
            ("code", memory.generated_code_size_in_bytes, "code"),
        ]
        whole = [*arguments, *results, *others]
        least = _SMALL * sum(nbytes for _, nbytes, _ in whole)
        small = sum(nbytes for _, nbytes, _ in whole if nbytes < least)
        return [*(each for each in whole if each[1] >= least), ("small ones", small, "argument")]


def fx_where(node: Node) -> str:
    """``file:line`` of a node, or nothing."""
    line = gaps.where(node)
    return f"{line.file}:{line.line}" if line else ""


def _fx_text(node: Node) -> str:
    value = node.meta.get("val")
    kind = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    if node.op == "placeholder":
        return f"{node.name}{kind}  ← {node.meta.get('argument', node.target)}"
    if node.op == "output":
        return f"return {node.args[0]}"
    return f"{node.name}{kind} = {node.target}({', '.join(map(str, node.args))})"


def _places(lines: Sequence[str]) -> dict[str, str]:
    """``file:line`` of each location that a module names."""
    direct: dict[str, str] = {}
    through: dict[str, str] = {}
    for line in lines:
        if found := _LOCATION.match(line):
            name, file, at, inner = found.groups()
            if file:
                direct[name] = f"{file}:{at}"
            elif inner:
                through[name] = inner
    return {**direct, **{name: direct[inner] for name, inner in through.items() if inner in direct}}
