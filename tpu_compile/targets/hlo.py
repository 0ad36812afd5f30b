"""Optimised, scheduled HLO text as data: computations, instructions, shapes with their layouts, the user's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

BITS = {
    **{"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32},
    **{"s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
}
"""Bits of an element; the float8 family is told by its prefix, tokens and opaque values have none."""

_NO_ESTIMATE = 2**63 - 1
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_LAYOUT = re.compile(r"([0-9,]*)(?::(.*))?")
_TILE = re.compile(r"\(([0-9,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=")
_NUMBERED = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Shape:
    """An array with its layout.

    Attributes:
        dtype: HLO's element type, such as ``bf16``.
        dims: sizes.
        order: axes from the innermost in memory outwards.
        tile: sizes of the tile that the innermost axes are padded to, outermost first.
        space: 0 for HBM, 1 for VMEM; others hold scalars and semaphores.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bits(self) -> int:
        return 8 if self.dtype.startswith("f8") else BITS.get(self.dtype, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements alone."""
        return self.elements * self.bits // 8

    @property
    def padded_bytes(self) -> int:
        """Bytes it takes in memory, tiles filled up."""
        physical = [self.dims[axis] for axis in reversed(self.order)]
        for back, size in enumerate(reversed(self.tile), 1):
            if back <= len(physical):
                physical[-back] = -(-physical[-back] // size) * size
        return prod(physical) * self.bits // 8 if physical else self.nbytes

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type, those of a tuple in order."""
    return tuple(_shape(*found) for found in _ARRAY.findall(text))


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
    matched = _LAYOUT.match(layout)
    order = tuple(int(axis) for axis in (matched[1] if matched else "").split(",") if axis)
    rest = (matched[2] if matched else "") or ""
    # T(8,128)(2,1): the first tile pads; the second says how 16-bit pairs lie inside it.
    tile = _TILE.search(rest) if rest.startswith("T") else None
    space = _SPACE.search(rest)
    return Shape(
        dtype, sizes, order, tuple(map(int, tile[1].split(","))) if tile else (), int(space[1]) if space else 0
    )


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``attributes`` is what follows its operands, ``literal`` what stands between its parentheses."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    where: str
    op: str
    root: bool

    @property
    def shape(self) -> Shape:
        return self.results[0]

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs."""
        names: list[str] = []
        for found in _CALLED.finditer(self.attributes):
            rest = self.attributes[found.end() :]
            names += _OPERAND.findall(rest[: rest.find("}")] if rest.startswith("{") else rest.partition(",")[0])
        return tuple(names)

    def attribute(self, name: str) -> str:
        """The text of ``name=...``; what stands in braces without them. Empty if there is none."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|([^,\s]+))", self.attributes)
        return next((group for group in found.groups() if group is not None), "") if found else ""

    @cached_property
    def cycles(self) -> int | None:
        """XLA's own estimate, if it gives one: the largest number that there is says that it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found and int(found[1]) < _NO_ESTIMATE else None

    @cached_property
    def trips(self) -> int:
        """How often a ``while`` runs its body; 1 where XLA does not know."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else 1


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {each.name: each for each in self.instructions}

    @property
    def root(self) -> Instruction:
        return next((each for each in self.instructions if each.root), self.instructions[-1])


@dataclass(frozen=True)
class Module:
    """A whole program."""

    name: str
    computations: Mapping[str, Computation]
    entry: Computation

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction of the computations that one runs, nested fusions included."""
        for name in instruction.called:
            computation = self.computations[name]
            for each in computation.instructions:
                yield computation, each
                if each.opcode == "fusion":
                    yield from self.inside(each)


def parse(text: str) -> Module:
    """Read what an executable's ``as_text()`` gives."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if _COMPUTATION.match(line)), len(lines))
    sources = _sources(lines[:start])
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    found: list[Instruction] = []
    for line in lines[start:]:
        if opened := _COMPUTATION.match(line):
            name, found = opened[2], []
            entry = name if opened[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(found))
        elif instruction := _instruction(line, sources):
            found.append(instruction)
    assert entry, "an HLO module has an entry computation"
    title = re.match(r"HloModule ([^,\s]+)", text)
    return Module(title[1] if title else "", computations, computations[entry])


def _instruction(line: str, sources: Mapping[int, str]) -> Instruction | None:
    opened = _INSTRUCTION.match(line)
    if not opened:
        return None
    rest = line[opened.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = _COMMENT.sub("", rest[:end]), rest[end:].lstrip()
    paren = rest.index("(")
    close = paren + _closing(rest[paren:])
    inside, attributes = rest[paren + 1 : close], rest[close + 1 :].lstrip(", ")
    operands = tuple(_OPERAND.findall(inside))
    where, op = _metadata(attributes, sources)
    literal = "" if operands else inside
    return Instruction(
        opened[2], rest[:paren], shapes(shape), operands, literal, attributes, where, op, bool(opened[1])
    )


def _closing(text: str) -> int:
    """Where the parenthesis that opens ``text`` is closed."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(text) - 1


def _metadata(attributes: str, sources: Mapping[int, str]) -> tuple[str, str]:
    """(``file:line``, aten op) of an instruction."""
    at = attributes.find("metadata={")
    if at < 0:
        return "", ""
    text = attributes[at : attributes.find("}", at)]
    op = re.search(r'op_name="([^"]*)"', text)
    file, line = re.search(r'source_file="([^"]*)"', text), re.search(r"source_line=(\d+)", text)
    frame = re.search(r"stack_frame_id=(\d+)", text)
    where = f"{file[1]}:{line[1]}" if file and line else sources.get(int(frame[1]), "") if frame else ""
    return where, op[1] if op else ""


def _sources(lines: list[str]) -> Mapping[int, str]:
    """``file:line`` of each stack frame, from the tables at the head of a module."""
    tables: dict[str, dict[int, Any]] = {}
    current: dict[int, Any] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif found := _NUMBERED.match(line):
            current[int(found[1])] = found[2] if found[3] is None else _fields(found[3])
    files, locations = tables.get("FileNames", {}), tables.get("FileLocations", {})
    places = {key: f"{files[each['file_name_id']]}:{each['line']}" for key, each in locations.items()}
    return {key: places[each["file_location_id"]] for key, each in tables.get("StackFrames", {}).items()}


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
