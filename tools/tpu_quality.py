"""Are our TPU programs as good as JAX's? Networks from PyTorch through tpu_compile, and the same networks written
plainly in JAX, compiled by the same libtpu for chips that need not be here: XLA's own estimates, ours over JAX's.

    python tools/tpu_quality.py --target v5e --only sdpa-4k,moe-block
    python tools/tpu_quality.py --json out/quality.json --check

Nothing runs and no weight has a value. What was compiled once is kept in --cache; a full run from nothing takes long.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from quality.measure import Row, measured
from quality.torch_models import CASES
from rich.console import Console
from rich.table import Table

from tpu_compile.errors import CompilationFailed

TARGETS = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
FIGURES = {
    "cycles": "cycles",
    "peak_bytes": "peak HBM",
    "temp_bytes": "temporaries",
    "bytes": "bytes",
    "flops": "flops",
    "fusions": "fusions",
}
EVERY_ROW, ON_AVERAGE = 1.02, 1.00
"""What ``--check`` asks of cycles and peak HBM."""


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
        return chosen

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names(tuple(CASES)), default=list(CASES), metavar="NAMES")
    parser.add_argument("--target", type=names(tuple(TARGETS)), default=list(TARGETS), metavar="CHIPS")
    parser.add_argument("--cache", type=Path, default=Path("out/quality"), help="default: out/quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a row or the average is worse")
    return parser.parse_args()


def mean(rows: Sequence[Row], figure: str) -> float:
    """Geometric mean of the ratios."""
    return math.exp(sum(math.log(row.ratio(figure)) for row in rows) / len(rows))


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="ours / JAX (below 1: ours is better)")
    for column in ("network", "chip", *FIGURES.values()):
        shown.add_column(column, justify="left" if column in ("network", "chip") else "right")
    for row in rows:
        shown.add_row(row.name, row.target, *(f"{row.ratio(f):.3f}" for f in FIGURES))
    means = {f: f"{mean(rows, f):.3f}" if f in ("cycles", "peak_bytes", "bytes") else "" for f in FIGURES}
    shown.add_row("geometric mean", "", *means.values(), style="bold")
    return shown


def worse(rows: Sequence[Row]) -> list[str]:
    """What misses the acceptance figures."""
    found = [
        f"{row.name} on {row.target}: {FIGURES[figure]} {row.ratio(figure):.3f} > {EVERY_ROW}"
        for row in rows
        for figure in ("cycles", "peak_bytes")
        if row.ratio(figure) > EVERY_ROW
    ]
    means = ((figure, mean(rows, figure)) for figure in ("cycles", "peak_bytes"))
    high = [(figure, value) for figure, value in means if value > ON_AVERAGE]
    return found + [f"{FIGURES[figure]}: geometric mean {value:.3f} > {ON_AVERAGE}" for figure, value in high]


def main() -> int:
    given, console, rows, missed = arguments(), Console(), [], []
    for name in given.only:
        for chip in given.target:
            try:
                with console.status(f"{name} for {chip}"):
                    rows.append(measured(name, TARGETS[chip], given.cache))
            except CompilationFailed as error:  # libtpu has programs of JAX that end its process
                missed.append(f"{name} on {chip}: {str(error).partition(chr(10))[0]}")
                continue
            console.print(f"{name} for {chip}: {rows[-1].ratio('cycles'):.3f} of JAX's cycles", highlight=False)
    if rows:
        console.print(table(rows))
        missed += worse(rows)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for line in missed:
        console.print(f"[red]missed[/] {line}", highlight=False)
    return int(given.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
