"""all-MiniLM-L6-v2 through torch.compile(backend="tpu") against eager: with an empty cache, then again from it.

    make demo        or        python demo/demo.py [--backend tpu]

Exit status 1 if a result is wrong, or if the second process compiles anything or is not clearly faster to start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

EMBED = Path(__file__).with_name("embed.py")
MAX_ERROR = 1e-4
MAX_WARM = 0.3
Report = dict[str, float]


def run(folder: Path, name: str, backend: str) -> Report:
    """What one fresh process measured, with ``folder/cache`` as its cache."""
    report = folder / f"{name}.json"
    environment = {**os.environ, "TPU_COMPILE_CACHE_DIR": str(folder / "cache"), "TPU_COMPILE_CACHE": "1"}
    done = subprocess.run([sys.executable, str(EMBED), str(report), "--backend", backend], env=environment)
    if done.returncode:
        sys.exit(f"The {name} process failed with status {done.returncode}: see above.")
    measured: Report = json.loads(report.read_text())
    return measured


def stages(report: Report) -> Report:
    """The first call's seconds: what Dynamo and AOTAutograd took is what our own stages leave."""
    ours = {"lowering": report["lowering_seconds"], "XLA": report["xla_seconds"], "load": report["load_seconds"]}
    return {"Dynamo + AOT": report["first_call"] - sum(ours.values()), **ours}


def after_capture(report: Report) -> float:
    return sum(seconds for stage, seconds in stages(report).items() if stage != "Dynamo + AOT")


def table(cold: Report, warm: Report) -> Table:
    columns = (cold, warm)
    title = f"all-MiniLM-L6-v2: {cold['sentences']:.0f} sentences in batches of 16 × {cold['tokens']:.0f} tokens"
    shown = Table("", "first process\n(empty cache)", "second process\n(same cache)", title=title, title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"

    def row(label: str, values: list[float], form: str) -> None:
        shown.add_row(label, *(form.format(value) for value in values))

    row("largest absolute error", [c["error"] for c in columns], "{:.1e}")
    row("smallest cosine", [c["cosine"] for c in columns], "{:.7f}")
    row("eager, ms a batch", [c["eager_ms"] for c in columns], "{:.1f}")
    row("compiled, ms a batch", [c["compiled_ms"] for c in columns], "{:.1f}")
    shown.add_section()
    row("first call, s", [c["first_call"] for c in columns], "{:.2f}")
    for stage in stages(cold):
        row(f"  {stage}", [stages(c)[stage] for c in columns], "{:.3f}")
    shown.add_section()
    row("XLA compiles", [c["xla_compiles"] for c in columns], "{:.0f}")
    row("cache hits", [c["disk_hits"] for c in columns], "{:.0f}")
    row("cache misses", [c["disk_misses"] for c in columns], "{:.0f}")
    row("operators outside XLA", [c["fallback_ops"] for c in columns], "{:.0f}")
    return shown


def faults(cold: Report, warm: Report) -> list[str]:
    """What is not as it must be, in words."""
    found = []
    for name, report in (("first", cold), ("second", warm)):
        if not report["error"] <= MAX_ERROR:  # a NaN is a fault too
            found.append(f"the {name} process is off by {report['error']:.1e}; {MAX_ERROR:.0e} is allowed")
    if cold["xla_compiles"] < 1:
        found.append("the first process compiled nothing: its cache was not empty, or the model did not reach XLA")
    if cold["fallback_ops"]:
        found.append(f"{cold['fallback_ops']:.0f} operators of the model ran on the CPU outside XLA")
    if warm["xla_compiles"]:
        found.append(f"the second process compiled {warm['xla_compiles']:.0f} programs; all should come from the cache")
    if after_capture(warm) > MAX_WARM * after_capture(cold):
        ratio = after_capture(warm) / after_capture(cold)
        found.append(f"lowering + XLA + load took {ratio:.2f} of the first process's time; {MAX_WARM} is allowed")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="tpu", help="another torch.compile backend, to compare")
    backend = parser.parse_args(arguments).backend
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tpu-compile-demo-") as folder:
        console.print("First process, with an empty cache …")
        cold = run(Path(folder), "first", backend)
        console.print("Second process, with what the first one left there …")
        warm = run(Path(folder), "second", backend)
    console.print(table(cold, warm))
    if found := faults(cold, warm):
        console.print("\n".join(f"[red]✗[/] {fault}" for fault in found))
        return 1
    ratio = after_capture(warm) / after_capture(cold)
    console.print(f"[green]✓[/] right, and the second start took {ratio:.2f} of the first one's lowering + XLA + load")
    return 0


if __name__ == "__main__":
    sys.exit(main())
