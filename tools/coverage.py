"""Runs torch's op_db in every mode, and writes the coverage table of README.md and the list of what fails.

    python tools/coverage.py run OUT.jsonl [--modes forward.float32,grad.float32] [--samples 3] [--shard 0/2]
    python tools/coverage.py table OUT.jsonl [OUT2.jsonl ...] [--readme README.md]

``run`` appends a line an operator and mode, and goes on where it stopped. ``table`` needs no torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
MODES = ["forward.float32", "grad.float32", *(f"forward.{d}" for d in "bfloat16 int64 bool complex64 float64".split())]
BEGIN, END = "<!-- coverage: written by tools/coverage.py -->", "<!-- end of coverage -->"


@click.group()
def main() -> None:
    """Coverage of torch's own operator tests."""


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--samples", default=3, show_default=True)
@click.option("--shard", default="0/1", show_default=True, help="I/N: every N-th operator, from the I-th on.")
def run(out: Path, modes: str, samples: int, shard: str) -> None:
    """Compare compiled with eager; append one JSON line an operator and mode to OUT."""
    sys.path.insert(0, str(ROOT / "tests" / "ops"))
    import sweep
    import torch

    done = {(row["mode"], row["op"]) for row in _rows([out])} if out.exists() else set()
    index, count = map(int, shard.split("/"))
    for mode in modes.split(","):
        kind, dtype = mode.split(".")
        names = [n for n in sweep.OPS if sweep.supports(n, getattr(torch, dtype), kind == "grad")]
        for name in names[index::count]:
            if (mode, name) in done:
                continue
            row = _one(sweep, name, getattr(torch, dtype), kind == "grad", samples)
            with out.open("a") as file:
                file.write(json.dumps({"mode": mode, "op": name, **row}) + "\n")


def _one(sweep: Any, name: str, dtype: Any, grad: bool, samples: int) -> dict[str, Any]:
    """Outcome of one operator: right, wrong (an answer, but not eager's), error (none), or untested (eager refuses)."""
    start = time.perf_counter()
    outcome, message = "right", ""
    try:
        if not sweep.check(name, dtype, grad=grad, samples=samples):
            outcome = "untested"
    except AssertionError as error:
        outcome, message = "wrong", str(error)
    except Exception as error:  # whatever an operator raises is this tool's result
        outcome, message = "error", f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "message": " ".join(message.split())[:300], "s": round(time.perf_counter() - start, 2)}


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--readme", type=click.Path(exists=True, path_type=Path), help="Put the table between its markers there.")
def table(files: tuple[Path, ...], readme: Path | None) -> None:
    """Print the table, and what fails."""
    outcomes: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows(files):
        outcomes[row["mode"]][row["outcome"]].append(row)
    lines = [
        "| mode | operators | fully right | share | wrong | not captured or not lowered |",
        "|---|---|---|---|---|---|",
    ]
    for mode in [m for m in MODES if m in outcomes]:
        right, wrong, error = (len(outcomes[mode][o]) for o in ("right", "wrong", "error"))
        total = right + wrong + error
        lines.append(f"| {mode} | {total} | {right} | {right / max(total, 1):.1%} | {wrong} | {error} |")
    text = "\n".join(lines)
    click.echo(text)
    for mode, by_outcome in outcomes.items():
        for row in [*by_outcome["wrong"], *by_outcome["error"]]:
            click.echo(f"{mode:18} {row['outcome']:6} {row['op']}: {row['message'][:160]}")
    if readme:
        page = readme.read_text()
        head, rest = page.split(BEGIN)
        readme.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def _rows(files: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]


if __name__ == "__main__":
    main()
