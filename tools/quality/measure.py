"""A network compiled for a TPU from PyTorch and from JAX: what libtpu says of both, kept on disk between runs."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import torch

import tpu_compile
from quality import jax_twins, torch_models
from tpu_compile import compiler
from tpu_compile.lowering import fx
from tpu_compile.runtime.options import CompileOptions
from tpu_compile.runtime.topology import topology

jax.config.update("jax_platforms", "cpu")  # it only traces: a TPU of this machine is not its own to open

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FUSION = re.compile(r" fusion\(")


@dataclass(frozen=True)
class Figures:
    """Of one compiled program: XLA's own estimates, and the sum of its estimated cycles. ``peak_bytes``: of HBM."""

    cycles: int
    bytes: int
    flops: int
    temp_bytes: int
    peak_bytes: int
    fusions: int


@dataclass(frozen=True)
class Row:
    """One network on one chip, both ways."""

    name: str
    target: str
    ours: Figures
    jax: Figures

    def ratio(self, figure: str) -> float:
        """Ours over JAX's; 1 where both have none."""
        ours, theirs = getattr(self.ours, figure), getattr(self.jax, figure)
        return float(ours / theirs) if theirs else 1.0 if not ours else float("inf")


def from_torch(name: str) -> bytes:
    """The network's StableHLO, as ``tpu_compile`` lowers it for a TPU."""
    case = torch_models.build(name)
    traced = tpu_compile.trace(case.function, case.parameters, *case.inputs)
    program = compiler.lower_graph(traced.graph_module, name, {}, "tpu", donate=True)
    return program.bytecode


def from_jax(name: str) -> bytes:
    """The StableHLO of the network's twin."""
    case = torch_models.build(name)
    shapes = {n: _shape(t) for n, t in case.parameters.items()}
    donated = tuple(1 + i for i in case.written)
    with jax.enable_x64(True):
        traced = jax.jit(jax_twins.TWINS[name], donate_argnums=donated).trace(shapes, *map(_shape, case.inputs))
        module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
    return stream.getvalue()


def _shape(t: torch.Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def measured(name: str, target: str, folder: Path) -> Row:
    """One row; what was compiled before, of the same program for the same chip, comes from ``folder``."""
    sides: dict[str, Callable[[str], bytes]] = {"ours": from_torch, "jax": from_jax}
    ours, theirs = (_figures(f"{name}-{side}", make(name), target, folder) for side, make in sides.items())
    return Row(name, target, ours, theirs)


def _figures(title: str, bytecode: bytes, target: str, folder: Path) -> Figures:
    chips = topology(target)
    parts = json.dumps(chips.key_parts(CompileOptions())) + fx.text(bytecode)
    stem = folder / f"{title}-{target.partition(':')[0]}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
    kept = stem.with_suffix(".json")
    if kept.exists():
        return Figures(**json.loads(kept.read_text()))
    made = chips.compile(bytecode, title, CompileOptions())
    text, cost, memory = made.as_text(), made.cost_analysis(), made.memory_analysis()
    found = Figures(
        cycles=sum(map(int, _CYCLES.findall(text))),
        bytes=int(cost.get("bytes accessed", 0)),
        flops=int(cost.get("flops", 0)),
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        fusions=len(_FUSION.findall(text)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".hlo.txt").write_text(text)
    kept.write_text(json.dumps(asdict(found)))
    return found
