"""What ``inspect --target`` says of a program, as plain data: costs by fusion and by line, memory, and faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from tpu_compile.lowering import gaps
from tpu_compile.lowering.program import Program
from tpu_compile.stages import Compiled
from tpu_compile.targets.analysis import Analysis, Fit, analyse, grouped
from tpu_compile.targets.products import Product
from tpu_compile.targets.schedule import Step

_WIDE = {torch.int64: "i64", torch.float64: "f64", torch.complex128: "c128"}
_TAKEABLE = 2**20
"""Bytes; smaller arguments are not worth donating."""


def analysis(compiled: Compiled, target: str) -> Analysis:
    """Read a program that was compiled for ``target``."""
    return analyse(compiled.as_text("hlo"), compiled.memory_analysis(), target)


def described(compiled: Compiled, target: str, top: int) -> dict[str, Any]:
    """One program on one chip. Seconds, bytes and flops are for one run; shares are of its seconds."""
    found = analysis(compiled, target)
    times, named = found.schedule, _arguments(compiled)
    return {
        "target": target,
        "chip": found.chip.name,
        "hbm": {**_memory(found), **described_fit(found.fit)},
        "seconds": times.seconds,
        "seconds_by": {by: times.seconds_by(by) for by in ("libtpu", "roofline")},
        "estimated_cycles": times.cycles,
        "roofline_seconds": times.roofline,
        "flops": times.flops,
        "bytes": times.bytes,
        "utilisation": times.flops / found.chip.peak("bf16") / times.seconds if times.seconds else 0.0,
        "fusions": sum(step.name in found.module.entry.by_name for step in times.steps),
        "kinds": _kinds(found),
        "steps": [_step(found, named, *row) for row in grouped(times.steps)[:top]],
        "layout_changes": [_step(found, named, *row) for row in grouped(found.layout_changes)[:top]],
        "wide_products": _products(found, found.wide_products, top),
        "padding": _products(found, found.wasteful_products(), top),
        "emulated": emulated(compiled.graph_module, found)[:top],
        "not_donated": not_donated(compiled.program, compiled.arguments),
        "constants": [asdict(each) | {"where": relative(each.where)} for each in found.constants[:top]],
    }


def described_fit(fit: Fit) -> dict[str, Any]:
    """Bytes needed and available, and the difference."""
    return {"needed": fit.needed, "available": fit.available, "fits": fit.fits, "spare": fit.spare}


def _memory(found: Analysis) -> dict[str, int]:
    memory = found.memory
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


def _kinds(found: Analysis) -> dict[str, float]:
    totals: dict[str, float] = {}
    for step in found.schedule.steps:
        totals[step.kind] = totals.get(step.kind, 0.0) + step.seconds
    return {kind: found.share(seconds) for kind, seconds in sorted(totals.items(), key=lambda pair: -pair[1])}


def _arguments(compiled: Compiled) -> Mapping[str, tuple[str, str]]:
    """For each placeholder, by which XLA calls what it does to an argument: the user's name of it, and the line that
    uses it first."""
    nodes, positions = compiled.graph_module.graph.find_nodes(op="placeholder"), compiled.program.arguments
    pairs = zip((nodes[position] for position in positions), compiled.arguments, strict=True)
    return {node.name: (f"argument {name}", _first_use(node)) for node, name in pairs}


def _first_use(node: Node) -> str:
    line = next((line for user in node.users if (line := gaps.where(user))), None)
    return f"{line.file}:{line.line}" if line else ""


def _step(
    found: Analysis, named: Mapping[str, tuple[str, str]], step: Step, count: int, seconds: float
) -> dict[str, Any]:
    op, where = named.get(step.op, (step.op, step.where))
    return {
        "name": step.name,
        "count": count,
        "kind": step.kind,
        "op": op,
        "where": relative(where),
        "seconds": seconds,
        "cycles": step.cycles * count,
        "by": step.by,
        "share": found.share(seconds),
        "bytes": step.bytes * count,
        "flops": step.flops * count,
        "bound": step.bound,
        "result": step.result,
    }


def _products(found: Analysis, pairs: list[tuple[Step, Product]], top: int) -> list[dict[str, Any]]:
    """Products with what is wrong with them, those alike together."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for step, each in pairs:
        key = (each.m, each.n, each.k, each.batch, each.dtype, each.passes, each.where)
        row = rows.setdefault(
            key,
            {
                "shape": f"{f'{each.batch} × ' if each.batch > 1 else ''}[{each.m},{each.k}] x [{each.k},{each.n}]",
                "dtype": each.dtype,
                "passes": each.passes,
                "waste": each.waste(found.chip.mxu),
                "op": each.op,
                "where": relative(each.where),
                "count": 0,
                "seconds": 0.0,
                "share": 0.0,
            },
        )
        row["count"] += 1
        row["seconds"] += step.seconds
        row["share"] += found.share(step.seconds)
    return sorted(rows.values(), key=lambda row: -row["seconds"])[:top]


def emulated(graph_module: GraphModule, found: Analysis) -> list[dict[str, Any]]:
    """Ops that compute arrays of 64-bit numbers, which a TPU makes of two 32-bit halves, with the time of the fusions
    that are named after them; the slowest first."""
    seconds: dict[tuple[str, str], float] = {}
    for step in found.schedule.steps:
        seconds[step.op, step.where] = seconds.get((step.op, step.where), 0.0) + step.seconds
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor):
            continue
        if value.dtype in _WIDE and value.numel() > 1 and not _is_view(node.target):
            line = gaps.where(node)
            where = f"{line.file}:{line.line}" if line else ""
            op, dtype = str(node.target), _WIDE[value.dtype]
            taken = seconds.get((op, where), 0.0)
            row = {"dtype": dtype, "op": op, "where": relative(where), "seconds": taken, "share": found.share(taken)}
            rows.setdefault((dtype, op, where), row)
    return sorted(rows.values(), key=lambda row: (-row["seconds"], row["dtype"]))


def _is_view(op: OpOverload) -> bool:
    returned = op._schema.returns
    return bool(returned) and returned[0].alias_info is not None


def not_donated(program: Program, names: Sequence[str]) -> list[dict[str, Any]]:
    """Arguments that a result could take the memory of (same shape and dtype), and does not."""
    taken = {index for position, index in program.mutated if _is_donated(program, position)}
    free = [spec for index, spec in enumerate(program.outputs) if index not in taken]
    rows = []
    for index, spec in enumerate(program.inputs):
        match = next((s for s in free if (s.shape, s.dtype) == (spec.shape, spec.dtype)), None)
        if index in program.donated or match is None or spec.nbytes < _TAKEABLE:
            continue
        free.remove(match)
        rows.append({"argument": names[index], "spec": str(spec), "bytes": spec.nbytes})
    return sorted(rows, key=lambda row: -row["bytes"])


def _is_donated(program: Program, position: int) -> bool:
    return position in program.arguments and program.arguments.index(position) in program.donated


def relative(where: str) -> str:
    """``file:line`` with the file as seen from the current folder, and from where packages are installed."""
    file, colon, line = where.rpartition(":")
    if not colon:
        return where
    path = Path(file)
    for folder in (Path.cwd(), *(p for p in path.parents if p.name == "site-packages")):
        if path.is_relative_to(folder):
            return f"{path.relative_to(folder)}:{line}"
    return where


def lines_of(where: str) -> Mapping[int, str]:
    """The text of the file that ``where`` lies in, by line number; empty if it cannot be read."""
    path = Path(where.rpartition(":")[0])
    if not path.is_file():
        return {}
    return dict(enumerate(path.read_text(errors="replace").splitlines(), 1))
