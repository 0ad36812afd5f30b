"""``tpu-compile compare``: prove that compiled equals eager on a model, or find the op that differs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpu_compile.cli import target as targets
from tpu_compile.cli.inspect import parse_options
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import table

if TYPE_CHECKING:
    from tpu_compile.comparing.bisection import Culprit
    from tpu_compile.comparing.measure import Difference
    from tpu_compile.comparing.reproducer import Reproducer
    from tpu_compile.comparing.runs import Subject
    from tpu_compile.comparing.verdict import Comparison

DTYPES = ("float64", "float32", "float16", "bfloat16")


def parse_dtypes(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    """``float32,bfloat16``; nothing leaves the model as its factory made it."""
    names = tuple(name.strip() for name in value.split(",")) if value else ("",)
    for name in names:
        if value and name not in DTYPES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(DTYPES)}")
    return names


@click.command(epilog=targets.HELP)
@click.argument("target")
@click.option("--grad", is_flag=True, help="Also gradients, of random directions at the results.")
@click.option(
    "--calls", type=click.IntRange(1), default=1, show_default=True, help="Calls in a row; state carries over."
)
@click.option(
    "--dtype", "dtypes", callback=parse_dtypes, metavar="NAME,…", help="Convert model and inputs, one run each."
)
@click.option("--against", type=click.Choice(("eager", "torch-mlir")), default="eager", show_default=True)
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
@click.option("--bisect", is_flag=True, help="Find the first op that departs, and write a reproducer.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Where reproducers go.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write JUnit XML, for CI.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option("--all", "show_all", is_flag=True, help="List every tensor, not only the worst.")
def compare(
    target: str,
    grad: bool,
    calls: int,
    dtypes: tuple[str, ...],
    against: str,
    options: dict[str, str],
    bisect: bool,
    out: Path,
    junit: Path | None,
    as_json: bool,
    show_all: bool,
) -> None:
    """Prove that compiled equals eager on your model.

    Copies of the model are run both ways. Results, gradients, and whatever a call writes into (arguments, buffers) are
    compared, each within the tolerance of its dtype, or no further from a float64 run than eager is. Exit status 1 if
    something departs.
    """
    with progress(f"loading {target}"):
        chosen = targets.load(target)
    found: dict[str, Comparison] = {}
    culprits: dict[str, tuple[Culprit, Reproducer] | None] = {}
    for name in dtypes:
        with progress(f"comparing {target} {name}".strip()):
            from tpu_compile.comparing.verdict import compare as compare_subject

            subject = _subject(chosen, name)
            found[name] = compare_subject(subject, calls=calls, grad=grad, against=against, options=options)
        if bisect and found[name].departing:
            with progress(f"looking for the first op of {target} that departs"):
                culprits[name] = _culprit(subject, calls, grad, out / name, f"tpu-compile compare --bisect {target}")
    if as_json:
        click.echo(json.dumps(_described(target, found, culprits), indent=1))
    else:
        _show(found, culprits, show_all)
    if junit:
        _write_junit(junit, target, found)
    sys.exit(any(comparison.departing for comparison in found.values()))


def _subject(target: targets.Target, dtype: str) -> Subject:
    import torch

    from tpu_compile.comparing.runs import Subject

    subject = Subject(target.model, target.args, target.kwargs)
    return subject.to(getattr(torch, dtype)) if dtype else subject


def _culprit(subject: Subject, calls: int, grad: bool, out: Path, command: str) -> tuple[Culprit, Reproducer] | None:
    from tpu_compile.comparing import bisection, reproducer

    culprit = bisection.bisect(subject, calls=calls, grad=grad)
    return (culprit, reproducer.write(culprit, out, command)) if culprit else None


# ---- for people


def _show(found: dict[str, Comparison], culprits: dict[str, Any], show_all: bool) -> None:
    for dtype, comparison in found.items():
        departing = comparison.departing
        shown = comparison.differences if show_all else _worst(comparison.differences)
        table(_COLUMNS, [_row(d) for d in shown], right=frozenset({2, 3, 4, 5}))
        left = len(comparison.differences) - len(shown)
        if left:
            click.echo(f"… and {left} that agree better (--all lists them)")
        for difference in departing:
            click.echo(f"{difference.name}: {difference.problem}")
        for gap in comparison.gaps:
            click.echo(f"on the CPU, not compiled: {gap.op} at {gap.where}")
        count = len(comparison.differences)
        verdict = f"{len(departing)} of {count} depart" if departing else f"all {count} agree"
        click.echo(f"{dtype + ': ' if dtype else ''}{verdict} with {comparison.reference}, {comparison.seconds:.1f} s")
        if dtype in culprits:
            _show_culprit(culprits[dtype])


_COLUMNS = ("what", "type", "largest error", "relative", "ulps", "cosine", "verdict")
_SHOWN = 12


def _worst(differences: Sequence[Difference]) -> list[Difference]:
    """All that depart, and the worst of the others."""
    ranked = sorted(differences, key=lambda d: (d.agrees, -d.absolute))
    return ranked[: max(_SHOWN, sum(not d.agrees for d in differences))]


def _row(d: Difference) -> tuple[str, ...]:
    verdict = "departs" if d.problem else f"agrees: {d.note}" if d.note else "agrees"
    cosine = "" if math.isnan(d.cosine) else f"{d.cosine:.7f}"
    return d.name, d.kind, f"{d.absolute:.2e}", f"{d.relative:.2e}", f"{d.ulps:.3g}", cosine, verdict


def _show_culprit(found: tuple[Culprit, Reproducer] | None) -> None:
    if found is None:
        click.echo("Each graph alone agrees with eager on eager's own values: rounding adds up from graph to graph.")
        return
    culprit, reproducer = found
    size = "" if culprit.ops == 1 else f", together with {culprit.ops - 1} ops before it"
    click.echo(f"first departure: {culprit.op} (node {culprit.node} of {culprit.name}){size}")
    if culprit.where:
        click.echo(f"  at {culprit.where}")
    click.echo(f"  {culprit.difference.problem}")
    alone = "fails alone" if reproducer.fails else "does NOT fail alone: what departs depends on the model around it"
    click.echo(f"  reproducer: {reproducer.program} ({alone})")


# ---- for programs


def _described(target: str, found: dict[str, Comparison], culprits: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": target,
        "agrees": not any(comparison.departing for comparison in found.values()),
        "comparisons": [_comparison(dtype, c, culprits.get(dtype)) for dtype, c in found.items()],
    }


def _comparison(dtype: str, c: Comparison, culprit: tuple[Culprit, Reproducer] | None) -> dict[str, Any]:
    return {
        "dtype": dtype or "as made",
        "reference": c.reference,
        "seconds": c.seconds,
        "on_the_cpu": [str(gap) for gap in c.gaps],
        "tensors": [{**{k: _finite(v) for k, v in vars(d).items()}, "agrees": d.agrees} for d in c.differences],
        "first_departure": _plain(*culprit) if culprit else None,
    }


def _plain(culprit: Culprit, reproducer: Reproducer) -> dict[str, Any]:
    return {
        "op": culprit.op,
        "node": culprit.node,
        "graph": culprit.name,
        "where": culprit.where,
        "ops": culprit.ops,
        "problem": culprit.difference.problem,
        "reproducer": str(reproducer.program),
        "inputs": str(reproducer.inputs or ""),
        "fails_alone": reproducer.fails,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_junit(path: Path, target: str, found: dict[str, Comparison]) -> None:
    """One suite for each dtype, one case for each tensor."""
    from xml.etree import ElementTree as xml

    root = xml.Element("testsuites", name=f"tpu-compile compare {target}")
    for dtype, c in found.items():
        counts = {"tests": str(len(c.differences)), "failures": str(len(c.departing)), "time": f"{c.seconds:.3f}"}
        suite = xml.SubElement(root, "testsuite", {"name": f"{target} {dtype}".strip(), **counts})
        for d in c.differences:
            case = xml.SubElement(suite, "testcase", classname=f"{target} {dtype}".strip(), name=d.name)
            if d.problem:
                xml.SubElement(case, "failure", message=d.problem).text = f"{d.kind} against {c.reference}: {d.problem}"
    path.parent.mkdir(parents=True, exist_ok=True)
    xml.indent(root)
    xml.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
