"""``tpu_compile.export``: a model traced, lowered and written to a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tpu_compile import compiler
from tpu_compile.config import override
from tpu_compile.errors import ExportError, UnsupportedOp
from tpu_compile.exporting import archive, expressions, graphs, programs, tracing, weights
from tpu_compile.exporting.tracing import Exportable
from tpu_compile.lowering import portable
from tpu_compile.lowering.context import source_line
from tpu_compile.lowering.fx import bind
from tpu_compile.lowering.program import Program

FAMILIES = ("cpu", "tpu")
"""A file holds a program for each of these (one, where they are the same), and for the platform in force."""


def export(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path,
    targets: Sequence[str] = (),
    dynamic_shapes: Any = None,
    weights: Literal["include", "reference"] = "include",
    source_lines: bool = True,
) -> Path:
    """Write a model as one file (``.tpuc``) that ``tpu_compile.load`` runs where the model's code is not.

    The file holds StableHLO in its versioned form, for CPU and TPU; the weights; how arguments and results nest; what
    is written to; the lines of your code that the operators come from. It runs inference: gradients are not exported.

    Args:
        model: an ``nn.Module``, a function, a ``torch.export.ExportedProgram``, or the path of a ``.pt2`` file (its
            example inputs then stand for ``args``).
        args, kwargs: example arguments; values that are no tensors are fixed.
        path: the file to write.
        targets: compile ahead for these, and put the executables in: a TPU slice such as ``v6e:1x1``, or ``cpu`` for
            this machine's.
        dynamic_shapes: the sizes that may vary, as ``torch.export.export`` takes them.
        weights: ``"include"`` puts them into the file; ``"reference"`` into ``<path>.safetensors`` beside it, which
            the file names with its SHA-256.
        source_lines: ``False`` leaves out the lines of your code and the names of your files.

    Raises:
        ExportError: the model does what a file cannot describe.
        UnsupportedOp: an operator that nothing lowers, with every gap.
        OutOfMemory, CompilationFailed: a target's compiler refuses the program.
    """
    if weights not in ("include", "reference"):
        raise ExportError(f"weights={weights!r}: say 'include' or 'reference'")
    with override(debug_checks=False):
        found = tracing.trace(model, tuple(args), dict(kwargs or {}), dynamic_shapes)
        return _Writing(found, Path(path), weights == "include", source_lines).write(targets)


@dataclass(frozen=True)
class _Lowered:
    """A program for some families, as it will be read: ``program`` is made from the artifact."""

    families: tuple[str, ...]
    program: Program
    artifact: bytes


class _Writing:
    def __init__(self, found: Exportable, path: Path, include: bool, source_lines: bool) -> None:
        self.found, self.path, self.include, self.source_lines = found, path, include, source_lines
        self.tensors: list[torch.Tensor] = [s.tensor for s in found.state]
        self.unlowered: dict[str, str] = {}
        self.members: dict[str, archive.Content] = {}

    def write(self, targets: Sequence[str]) -> Path:
        symbols = self._symbols()
        flat = [self.found.example[i] if kind == "input" else None for kind, i in self.found.arguments]
        bindings = bind(self.found.graph.graph, flat) if symbols else {}
        lowered = self._lower(bindings)
        sizes = {self.found.names.get(str(symbol), str(symbol)): number for symbol, number in bindings.items()}
        manifest: dict[str, Any] = {
            "made_by": made_by(),
            "name": self.found.name,
            "signature": self._signature(symbols),
            "state": [_state(s) for s in self.found.state],
            "arguments": [list(a) for a in self.found.arguments],
            "programs": [self._program(i, low, sizes) for i, low in enumerate(lowered)],
            "unlowered": self.unlowered,
            "graph": self._graph() if symbols else None,
            "executables": [self._executable(i, target, lowered) for i, target in enumerate(targets)],
        }
        self.members["sources.json"] = archive.encoded(self._sources() if self.source_lines else [])
        manifest["constants"] = len(self.tensors) - len(self.found.state)
        manifest["weights"] = self._weights()
        archive.write(self.path, manifest, self.members)
        return self.path

    # ---- programs

    def _lower(self, bindings: dict[Any, int]) -> list[_Lowered]:
        """One program for each distinct lowering. A family that lacks an operator is noted; if all do it is an
        error."""
        made: dict[str, _Lowered] = {}
        gaps: UnsupportedOp | None = None
        for family in dict.fromkeys((compiler.runtime.client.family, *FAMILIES)):
            try:
                program = compiler.lower_graph(self.found.graph, self.found.name, bindings, family, donate=True)
            except UnsupportedOp as error:
                gaps, self.unlowered[family] = error, str(error)
                continue
            artifact = portable.write(program.bytecode, source_lines=self.source_lines)
            known = made.get(program.digest)
            families = (*known.families, family) if known else (family,)
            read = portable.read(artifact)
            made[program.digest] = _Lowered(
                families, replace(program, bytecode=read.bytecode, digest=read.digest), artifact
            )
        if not made:
            assert gaps is not None, "a family is lowered or has gaps"
            raise gaps
        return list(made.values())

    def _program(self, index: int, lowered: _Lowered, sizes: dict[str, int]) -> dict[str, Any]:
        member = f"programs/{index}.vhlo"
        self.members[member] = lowered.artifact
        places = [self._place(t) for t in lowered.program.constants]
        record = {**programs.dump(lowered.program), "constants": places}
        return {"families": list(lowered.families), "sizes": sizes, "member": member, "record": record}

    def _place(self, constant: torch.Tensor) -> int:
        """Where a constant of the graph is among the weights."""
        for place, known in enumerate(self.tensors):
            if known is constant:
                return place
        self.tensors.append(constant)
        return len(self.tensors) - 1

    def _executable(self, index: int, target: str, lowered: Sequence[_Lowered]) -> dict[str, Any]:
        options = compiler.options_in_force()
        if target == "cpu":
            with override(platform="cpu"):
                chosen, program = _for_family("cpu", lowered, self.unlowered)
                built = compiler.runtime.executable(program, options)
                parts, payload = built.client.key_parts(options), built.executable.serialize()
        else:
            from tpu_compile.runtime.topology import topology

            chosen, program = _for_family("tpu", lowered, self.unlowered)
            chips = topology(target)
            compiled = chips.compile(program.bytecode, program.name, options)
            parts, payload = chips.key_parts(options), compiled.serialize()
        member = f"executables/{index}.bin"
        self.members[member] = payload
        family = "cpu" if target == "cpu" else "tpu"
        return {"target": target, "family": family, "member": member, "program": chosen, "parts": parts}

    def _graph(self) -> str:
        nodes, constants = graphs.dump(self.found.graph, self.found.names, source_lines=self.source_lines)
        record = {"nodes": nodes, "constants": [self._place(t) for t in constants]}
        self.members["graph.json"] = archive.encoded(record)
        return "graph.json"

    # ---- the rest

    def _symbols(self) -> dict[str, tuple[int, int | None]]:
        """The symbols of the arguments' sizes, with their bounds."""
        shapes = [n for v in self.found.inputs for n in (v.shape if isinstance(v, torch.Tensor) else [v])]
        symbolic = [n.node.expr for n in shapes if isinstance(n, torch.SymInt)]
        names = dict.fromkeys(s.name for e in symbolic for s in sorted(e.free_symbols, key=str))
        alone = {e.name for e in symbolic if e.is_Symbol}
        for name in names:
            if name not in alone:
                raise ExportError(f"the size {name} occurs only inside {symbolic}: no argument's size says what it is")
        return {name: self.found.ranges.get(name, (0, None)) for name in names}

    def _signature(self, symbols: Mapping[str, tuple[int, int | None]]) -> dict[str, Any]:
        return {
            "parameters": list(self.found.parameters),
            "called": self.found.called,
            "returned": self.found.returned,
            "inputs": [self._input(value, i) for i, value in enumerate(self.found.inputs)],
            "symbols": {self.found.names.get(name, name): list(bounds) for name, bounds in symbols.items()},
        }

    def _input(self, value: Any, index: int) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            shape = [expressions.dump(n, self.found.names) for n in value.shape]
            return {"tensor": [programs.dtype_name(value.dtype), shape]}
        if isinstance(value, torch.SymInt):
            return {"number": expressions.dump(value, self.found.names)}
        return {"value": programs.dump_plain(value, f"argument {index} is")}

    def _weights(self) -> dict[str, Any]:
        names = [s.names[0] for s in self.found.state]
        names += [f"constant.{i}" for i in range(len(names), len(self.tensors))]
        tensors = dict(zip(names, self.tensors, strict=True))
        if self.include:
            self.members["weights.safetensors"] = weights.write(tensors)
            return {"file": "weights.safetensors", "included": True, "sha256": ""}
        beside = self.path.with_name(self.path.name + ".safetensors")
        digest = hashlib.sha256()
        with beside.open("wb") as stream:
            for piece in weights.write(tensors):
                digest.update(piece)
                stream.write(piece)
        return {"file": beside.name, "included": False, "sha256": digest.hexdigest()}

    def _sources(self) -> list[list[Any]]:
        """The user's lines, each once: file, line number, function, text."""
        lines = (source_line(n.stack_trace) for n in self.found.graph.graph.nodes if n.stack_trace)
        return [[s.file, s.line, s.function, s.code] for s in dict.fromkeys(lines) if s is not None]


def _for_family(family: str, lowered: Sequence[_Lowered], unlowered: Mapping[str, str]) -> tuple[int, Program]:
    for index, candidate in enumerate(lowered):
        if family in candidate.families:
            return index, candidate.program
    raise ExportError(f"the model has no program for {family}: {unlowered[family]}")


def _state(state: tracing.State) -> dict[str, Any]:
    t = state.tensor
    return {
        "names": list(state.names),
        "kind": state.kind,
        "dtype": programs.dtype_name(t.dtype),
        "shape": list(t.shape),
    }


def made_by() -> dict[str, str]:
    """The versions that decide what a file says."""
    from tpu_compile import __version__
    from tpu_compile.runtime.compiling import toolchain_parts

    return {
        "tpu_compile": __version__,
        "torch": torch.__version__,
        "jaxlib": toolchain_parts()["jaxlib"],
        "stablehlo": portable.written_version(),
    }
