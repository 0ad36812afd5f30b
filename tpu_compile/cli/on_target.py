"""``inspect --target``, for people: what a program costs on a TPU that is not there, and what to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from tpu_compile.cli.tables import number, size, table


def show(graph: Mapping[str, Any]) -> None:
    """Print what ``targets.describe.described`` found."""
    _summary(graph)
    _steps(graph["steps"], graph)
    _layouts(graph["layout_changes"])
    _products("f32 products, in several passes of the matrix unit", graph["wide_products"], "passes")
    _products("products that fill the matrix unit poorly", graph["padding"], "waste")
    _emulated(graph["emulated"])
    _not_donated(graph["not_donated"])
    _constants(graph["constants"])


def show_misfit(name: str, fit: Mapping[str, Any]) -> None:
    """Print that a graph does not fit."""
    click.echo()
    _line("graph", name)
    _line("  HBM", _fit(fit))


def _line(title: str, text: str) -> None:
    click.echo(f"{title:<16}{text}")


def _summary(graph: Mapping[str, Any]) -> None:
    hbm, by = graph["hbm"], graph["seconds_by"]
    _line("  on", graph["target"])
    _line("  HBM", _fit(hbm))
    parts = ("arguments", "outputs", "temporaries", "aliased", "code")
    _line("", ", ".join(f"{name} {size(hbm[name])}" for name in parts if hbm[name]))
    _line("  time", f"{duration(graph['seconds'])} estimated: {_whose(by)}")
    _line("", f"{duration(graph['roofline_seconds'])} at the least (roofline: peak flops, HBM bandwidth)")
    flops = f"{number(graph['flops'])} flops, {size(graph['bytes'])} of HBM traffic"
    _line("  work", f"{flops}, {graph['utilisation']:.1%} of the matrix units' bf16 peak")
    _line("", ", ".join(f"{kind} {share:.0%}" for kind, share in graph["kinds"].items() if share >= 0.005))


def _whose(by: Mapping[str, float]) -> str:
    return f"{duration(by['libtpu'])} by libtpu's cycles, {duration(by['roofline'])} by roofline where it gives none"


def _fit(fit: Mapping[str, Any]) -> str:
    words = f"needs {size(fit['needed'])} of {size(fit['available'])}"
    return (
        f"{words}: fits, {size(fit['spare'])} spare" if fit["fits"] else f"{words}: does not fit, {_short(fit)} short"
    )


def _short(fit: Mapping[str, Any]) -> str:
    return size(-fit["spare"])


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{seconds / scale:.3g} {unit}" if seconds >= 1e-10 else "0"


def _steps(rows: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> None:
    click.echo("\n  most expensive fusions (alike ones together)")
    columns = ("  fusion", "n", "cycles", "share", "bytes", "flops", "bound", "op", "where")
    table(columns, [_row(row) for row in rows], right=frozenset({1, 2, 3, 4, 5}))


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    mark = "" if row["by"] == "libtpu" else "~"
    return (
        f"  {row['name'][:28]}",
        str(row["count"]),
        f"{mark}{number(row['cycles'])}",
        f"{row['share']:.1%}",
        size(row["bytes"]),
        number(row["flops"]),
        row["bound"],
        _op(row),
        row["where"],
    )


def _op(row: Mapping[str, Any]) -> str:
    return str(row["op"]).removeprefix("aten.")


def _layouts(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    click.echo("\n  copies, transposes and changes of layout")
    cells = [
        (f"  {r['result'][:40]}", str(r["count"]), duration(r["seconds"]), _share(r), _op(r), r["where"]) for r in rows
    ]
    table(("  result", "n", "time", "share", "of", "where"), cells, right=frozenset({1, 2, 3}))


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['share']:.1%}"


def _products(title: str, rows: Sequence[Mapping[str, Any]], fault: str) -> None:
    if not rows:
        return
    click.echo(f"\n  {title}")
    cells = [
        (
            f"  {row['shape']}",
            row["dtype"],
            str(row["count"]),
            f"{row['waste']:.0%}" if fault == "waste" else str(row["passes"]),
            _share(row),
            row["where"],
        )
        for row in rows
    ]
    heading = "padding" if fault == "waste" else "passes"
    table(("  product", "dtype", "n", heading, "share", "where"), cells, right=frozenset({2, 3, 4}))


def _emulated(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    click.echo("\n  64-bit arithmetic, emulated in 32-bit halves")
    cells = [(f"  {row['dtype']}", row["op"], _share(row), row["where"]) for row in rows]
    table(("  dtype", "op", "share", "where"), cells, right=frozenset({2}))


def _not_donated(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        _line("  not donated", f"{row['argument']} {row['spec']}, {size(row['bytes'])}: a result has its shape")


def _constants(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        _line("  baked in", f"{row['what']}, {size(row['nbytes'])}, {row['where']}")
