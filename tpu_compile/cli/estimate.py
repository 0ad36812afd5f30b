"""``tpu-compile estimate``: what a model would cost on TPUs, before renting one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tpu_compile.cli import target as targets
from tpu_compile.cli.inspect import parse_options
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import size, table

CHIPS = "v5e,v5p,v6e,tpu7x"
HELP = f"""{targets.HELP}

The factory runs on the meta device: weights have shapes and no numbers, and take no memory. If it has a parameter named
batch it is called with the batch sizes that are tried; otherwise axis 0 of the arguments is the batch. It may return
(tpu_compile.train_step(...), batch) too."""


def parse_prices(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """``--price v5e=1.2`` as a dict."""
    from tpu_compile.targets.chips import CHIPS as KNOWN

    prices = {}
    for value in (each for text in values for each in text.split(",")):
        name, _, amount = value.partition("=")
        if name not in KNOWN:
            raise click.BadParameter(f"no chip is called {name!r}; write v5e=1.20. Chips: {', '.join(KNOWN)}.")
        try:
            prices[name] = float(amount.lstrip("$"))
        except ValueError:
            raise click.BadParameter(f"{value!r}: dollars an hour and chip were expected, as in v5e=1.20") from None
    return prices


@click.command(epilog=HELP)
@click.argument("target")
@click.option("--target", "chips", default=CHIPS, show_default=True, help="Generations or slices, with commas.")
@click.option("--train", is_flag=True, help="A whole training step: forward, loss, backward, optimizer.")
@click.option("--optimizer", default="AdamW", show_default=True, help="Of torch.optim, for --train.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size to time. Default: the factory's own.")
@click.option("--largest/--no-largest", default=True, help="Look for the largest batch that fits.")
@click.option("--exact", is_flag=True, help="Look for it by bisection, to the last example.")
@click.option("--price", "prices", multiple=True, callback=parse_prices, metavar="CHIP=$/H", help="Of a chip hour.")
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def estimate(
    target: str,
    chips: str,
    train: bool,
    optimizer: str,
    batch: int | None,
    largest: bool,
    exact: bool,
    prices: dict[str, float],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Step time, utilisation, memory and cost of a model on TPUs that are not here."""
    names = [name for name in chips.split(",") if name]
    with progress(f"loading {target}"):
        factory = targets.factory(target)
        from tpu_compile.backend import check_options
        from tpu_compile.config import override
    with override(**check_options(options)), progress(f"tracing {target}") as say:
        rows, stored = _rows(target, factory, names, train, optimizer, batch, largest, exact, say)
    for row in rows:
        _add_price(row, prices)
    if as_json:
        click.echo(json.dumps({"factory": target, "train": train, "from_cache": stored, "estimates": rows}, indent=1))
    else:
        show(target, rows, train)


def _rows(
    target: str,
    factory: Any,
    names: list[str],
    train: bool,
    optimizer: str,
    batch: int | None,
    largest: bool,
    exact: bool,
    say: Any,
) -> tuple[list[dict[str, Any]], bool]:
    from tpu_compile.targets.estimate import Estimator, as_rows
    from tpu_compile.targets.results import remembered
    from tpu_compile.targets.workload import Workload, from_factory

    make = targets.guarded(target, from_factory(factory))
    workload = Workload(make, train, optimizer)
    asked = {
        **{"estimate": names, "factory": target, "train": train, "optimizer": optimizer},
        **{"batch": batch, "largest": largest, "exact": exact},
    }
    estimator = Estimator(workload, largest, exact, say)
    return remembered(f"estimate {target}", asked, make(batch), lambda: as_rows(estimator.estimate(names, batch)))


def _add_price(row: dict[str, Any], prices: Mapping[str, float]) -> None:
    from tpu_compile.targets.chips import chip
    from tpu_compile.targets.estimate import price

    hourly = prices.get(chip(row["target"]).name)
    if hourly is not None:
        row["price"] = price(row, hourly)


# ---- for people


def show(target: str, rows: Sequence[Mapping[str, Any]], train: bool) -> None:
    """Print the estimates side by side."""
    from tpu_compile.cli.on_target import duration

    click.echo(f"{target}, {'a training step' if train else 'a forward'} on one device of each chip\n")
    unit = rows[0]["unit"] if rows else "examples"
    columns = ["chip", "batch", "step", "at least", "of peak", "HBM", "fits", "largest batch", f"{unit}/s"]
    priced = any("price" in row for row in rows)
    columns += ["$/step", f"$/M {unit}"] if priced else []
    cells = [[*_cells(row, duration), *(_priced(row) if priced else ())] for row in rows]
    table(columns, cells, right=frozenset(range(1, len(columns))))
    click.echo()
    for row in rows:
        for words in filter(None, (row["note"], row["largest"] and f"largest batch {row['confirmed']}")):
            click.echo(f"{row['target']}: {words}")
    _footnote(rows)


def _cells(row: Mapping[str, Any], duration: Any) -> list[str]:
    asked, timed, largest = row["asked"], row["timed"], row["largest"]
    least = (timed or asked)["roofline"]
    fits = "yes" if asked["fits"] else f"{size(asked['needed'] - asked['available'])} short"
    return [
        row["target"],
        str((timed or asked)["batch"]),
        duration(timed["seconds"]) if timed else "-",
        duration(least) if least else "-",
        f"{row['utilisation']:.1%}" if timed else "-",
        f"{size(asked['needed'])} of {size(asked['available'])}",
        fits,
        str(largest["batch"]) if largest else "-",
        f"{row['rate']:,.0f}" if timed else "-",
    ]


def _priced(row: Mapping[str, Any]) -> list[str]:
    price = row.get("price")
    return [f"{price['step']:.2g}", f"{price['million']:.3g}"] if price and row["timed"] else ["-", "-"]


def _footnote(rows: Sequence[Mapping[str, Any]]) -> None:
    timed = [row["timed"] for row in rows if row["timed"]]
    if not timed:
        return
    share = sum(t["by_libtpu"] for t in timed) / sum(t["seconds"] for t in timed)
    click.echo(
        f"\nNothing ran. HBM: libtpu's allocation for the compiled program, exact. Step: {share:.0%} of it are cycles\n"
        "that libtpu's compiler estimates for each fusion, at the chip's clock; the rest (waiting for HBM, ops\n"
        "without an estimate, collectives) is a roofline of published bandwidths. At least: flops at peak or HBM\n"
        "traffic at full bandwidth, whichever takes longer. Of peak: the model's own flops over the bf16 peak.\n"
        "Host, input pipeline and launch times are not in it."
    )
