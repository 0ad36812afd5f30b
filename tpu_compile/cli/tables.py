"""Tables and figures for people: drawn on a terminal, aligned plain text in a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """Print rows of text under their columns; those in ``right`` are aligned to the right."""
    if sys.stdout.isatty():
        _drawn(columns, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        drawn.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))  # as text: [8,128] is no markup
    Console().print(drawn)


def size(count: float) -> str:
    """Bytes, in powers of 1000."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def number(count: float) -> str:
    """A count, in powers of 1000."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, units: Sequence[str]) -> str:
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = f"{count:.0f}" if float(count).is_integer() or abs(count) >= 100 else f"{count:.1f}"
    return f"{digits} {units[power]}".strip()
