"""How fast tpu-compile is, as ratios taken in one run: against eager, inductor, JAX, and PyTorch/XLA if you have it.

    python tools/bench.py --quick --only calls,bert
    python tools/bench.py --json out/bench.json --peer-python /path/to/python-with-torch_xla

Contenders take turns in one process, so compare the ratios of one run, never the seconds of two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import dispatch, eager, report, sections
from benchmarks.elsewhere import Peers
from rich.console import Console

import tpu_compile

PARTS = (
    *("import", "calls", "dispatch", "eager", *sections.NETWORKS, *sections.TRAINING),
    *("decode", "lowering", "first-call", "restart"),
)
SLOW = ("train-gpt2-small",)
"""Minutes and gigabytes: measured only if it is asked for."""


def chosen(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part is called {' or '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = tuple(part for part in PARTS if part not in SLOW)
    parts = f"of {','.join(PARTS)}; all but {','.join(SLOW)}"
    parser.add_argument("--only", type=chosen, default=usual, metavar="PARTS", help=parts)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; noisier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has torch_xla")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    return parser.parse_args()


def measured(parts: tuple[str, ...], settings: sections.Settings) -> Iterator[list[report.Row]]:
    """Each part's rows, as soon as they are there."""
    if "import" in parts:
        yield sections.import_time(settings)
    if "calls" in parts:
        yield sections.calls(settings)
    if "dispatch" in parts:
        yield dispatch.rows(settings.rounds)
    if "eager" in parts:
        yield eager.rows(settings.rounds, settings.seconds)
    for name in sections.NETWORKS:
        if name in parts:
            yield sections.steady(name, settings)
    for part, name in sections.TRAINING.items():
        if part in parts:
            yield sections.training(name, settings)
    if "decode" in parts:
        yield sections.decoding(settings)
    if "lowering" in parts:
        yield sections.lowering(settings)
    if "first-call" in parts:
        yield sections.first_calls(("mlp", "bert") if settings.quick else ("mlp", *sections.NETWORKS))
    if "restart" in parts:
        yield sections.restarts(2 if settings.quick else 5)


def main() -> int:
    given = arguments()
    peers = Peers(given.peer_python)
    rounds, seconds = (5, 0.2) if given.quick else (15, 0.5)
    settings = sections.Settings(rounds, seconds, given.quick, peers=peers)
    console, rows = Console(), []
    with tempfile.TemporaryDirectory(prefix="tpu-compile-bench-") as cache, tpu_compile.override(cache_dir=cache):
        for part in measured(given.only, settings):
            rows += part
            report.show(console, part, rows)
    for line in peers.skipped:
        console.print(f"[yellow]skipped[/] {line}", highlight=False)
    found = report.targets(rows)
    report.show_targets(console, found)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report.as_json(rows, peers.skipped), indent=1))
    return int(given.check and not all(target.met for target in found))


if __name__ == "__main__":
    sys.exit(main())
