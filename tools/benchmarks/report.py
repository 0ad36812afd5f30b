"""What a benchmark run found: rows of numbers, the project's targets, a table for people and JSON for programs."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One number: ``system`` did ``what`` (of ``section``) in ``value`` ``unit``; ``detail`` says where it went."""

    section: str
    what: str
    system: str
    value: float
    unit: str
    detail: str = ""


@dataclass(frozen=True)
class Target:
    """One of the project's promises, checked: ``value`` must be at most ``limit``."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def find(rows: Sequence[Row], section: str, what: str, system: str) -> float | None:
    values = [row.value for row in rows if (row.section, row.what, row.system) == (section, what, system)]
    return values[0] if values else None


def targets(rows: Sequence[Row]) -> list[Target]:
    """The promises that this run's rows can check."""
    found = []

    def ratio(section: str, what: str, of: str, to: str, limit: float) -> None:
        above, below = find(rows, section, what, of), find(rows, section, what, to)
        if above is not None and below is not None:
            found.append(Target(f"{section}, {what}: {of} / {to}", above / below, limit, "×"))

    def absolute(section: str, what: str, of: str, limit: float, unit: str, less: str = "") -> None:
        value, base = find(rows, section, what, of), find(rows, section, what, less) if less else 0.0
        if value is not None and base is not None:
            name = f"{what}: {of} − {less}" if less else f"{section}, {what}: {of}"
            found.append(Target(name, value - base, limit, unit))

    ratio("call overhead", "mlp", "tpu", "jax", 3.0)
    absolute("call overhead", "mlp", "tpu", 60.0, "µs", less="null AOT")
    for model in ("bert", "llama", "resnet"):
        ratio("steady", model, "tpu", "jax", 1.10)
        absolute("lowering, warm", model, "tpu", 60.0, "µs/node")
    for model in ("llama", "small llama"):
        ratio("decode", model, "tpu", "jax", 1.10)
    for what in ("1 argument", "100 arguments", "gpt"):
        ratio("dispatch", what, "tpu", "limit", 1.0)
    ratio("eager op", "add of 4x4", "tpu", "jax", 4.0)
    absolute("eager op", "add of 4x4", "tpu", 40.0, "µs")
    for what in ("digits, each loss read", "digits, each tenth read"):
        ratio("eager step", what, "defer", "strict", 1 / 1.5)
    for model in ("gpt2", "llama", "gpt2-small"):
        for other in ("jax", "jax, like optax"):
            ratio("training step", model, "tpu", other, 1.05)
            ratio("training, memory", model, "tpu", other, 1.0)
        for peer in sorted({row.system for row in rows if row.system.startswith("torch_xla")}):
            ratio("training step", model, "tpu", peer, 0.8)
    absolute("import", "beyond torch", "tpu_compile", 50.0, "ms")
    for case in ("bert", "llama", "llama-training"):
        absolute("restart", case, "tpu", 1000.0, "ms", less="null")
        absolute("restart", case, "aot", 1500.0, "ms")
    return found


def versions() -> dict[str, Any]:
    """What was measured, and on what."""
    names = ("torch", "jax", "jaxlib", "numpy", "transformers", "tpu-compile")
    root = Path(__file__).parents[2]
    head = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {
        "commit": head.stdout.strip(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: importlib.metadata.version(name) for name in names},
    }


def as_json(rows: Sequence[Row], skipped: Sequence[str]) -> dict[str, Any]:
    checked = [{**asdict(target), "met": target.met} for target in targets(rows)]
    return {"versions": versions(), "rows": [asdict(row) for row in rows], "targets": checked, "skipped": list(skipped)}


def show(console: Console, rows: Sequence[Row], known: Sequence[Row]) -> None:
    """A table for each section of ``rows``, each number with its ratio to ours, which is among ``known``."""
    for _, section in itertools.groupby(rows, lambda row: row.section):
        _show_section(console, list(section), known)


def _show_section(console: Console, rows: Sequence[Row], known: Sequence[Row]) -> None:
    table = Table("", "system", rows[0].unit, "÷ ours", "", title=rows[0].section, title_justify="left")
    for column in table.columns[2:4]:
        column.justify = "right"
    previous = ""
    for row in rows:
        if row.what != previous and previous:
            table.add_section()
        ours = find(known, row.section, row.what, "tpu")
        ratio = f"{row.value / ours:.2f}" if ours and row.system != "tpu" else ""
        table.add_row(row.what * (row.what != previous), row.system, f"{row.value:,.1f}", ratio, row.detail)
        previous = row.what
    console.print(table)


def show_targets(console: Console, found: Sequence[Target]) -> None:
    for each in found:
        mark = "[green]met[/]   " if each.met else "[red]MISSED[/]"
        console.print(f"{mark} {each.name}: {each.value:.2f} {each.unit} (at most {each.limit:g})", highlight=False)
