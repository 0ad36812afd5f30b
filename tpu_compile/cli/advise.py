"""``tpu-compile advise``: what to change about a model for a TPU, with the gain that compiling the change shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from tpu_compile.cli import target as targets
from tpu_compile.cli.estimate import HELP
from tpu_compile.cli.inspect import parse_options
from tpu_compile.cli.on_target import duration
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import size


@click.command(epilog=HELP)
@click.argument("target")
@click.option("--target", "chip", default="v5e", show_default=True, help="A generation or slice.")
@click.option("--train", is_flag=True, help="A whole training step: forward, loss, backward, optimizer.")
@click.option("--optimizer", default="AdamW", show_default=True, help="Of torch.optim, for --train.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size. Default: the factory's own.")
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def advise(
    target: str,
    chip: str,
    train: bool,
    optimizer: str,
    batch: int | None,
    options: dict[str, str],
    as_json: bool,
) -> None:
    """What to change about a model for a TPU, the largest gain first.

    Each suggestion is tried: the changed program is compiled for the chip, and the gain is the difference of libtpu's
    estimates. What does not help is listed last.
    """
    with progress(f"loading {target}"):
        factory = targets.factory(target)
        from tpu_compile.backend import check_options
        from tpu_compile.config import override
        from tpu_compile.targets.advise import advise as advice
        from tpu_compile.targets.results import remembered
        from tpu_compile.targets.workload import Workload, from_factory
    make = targets.guarded(target, from_factory(factory))
    asked = {"advise": chip, "factory": target, "train": train, "optimizer": optimizer, "batch": batch}
    with override(**check_options(options)), progress(f"tracing {target}") as say:
        workload = Workload(make, train, optimizer)
        ((row,), stored) = remembered(
            f"advise {target}", asked, make(batch), lambda: [advice(workload, chip, batch, say).as_row()]
        )
    if as_json:
        click.echo(json.dumps({"factory": target, "from_cache": stored, **row}, indent=1))
    else:
        show(target, row)


def show(target: str, row: Mapping[str, Any]) -> None:
    """Print the findings."""
    click.echo(f"{target} on {row['target']}: {duration(row['seconds'])} estimated")
    if not row["findings"]:
        click.echo("Nothing that was tried helps.")
    for rank, finding in enumerate(row["findings"], 1):
        click.echo(f"\n{rank}. {_gain(finding)}: {finding['title']}")
        _detail(finding)
    for each in row["untried"]:
        click.echo(f"\n?. not measured: {each['title']}")
        _detail(each)
        click.echo(f"   why     the model does not take the change as it stands: {each['why']}")
    if row["without_gain"]:
        click.echo("\nTried without gain:")
    for each in row["without_gain"]:
        click.echo(f"   {each['gain']:+.1%}  {each['title']}: {each['write'].partition(';')[0]}")


def _gain(finding: Mapping[str, Any]) -> str:
    if finding["kind"] == "scan":
        compiles = f"{duration(finding['compile_before'])} → {duration(finding['compile_after'])}"
        return f"a shorter compile ({compiles}), the step {finding['gain']:+.1%} faster"
    times = f"{duration(finding['before'])} → {duration(finding['after'])}"
    each = f" an example (a step {times})" if finding["kind"] == "batch" else f" ({times})"
    words = f"{finding['gain']:.1%} faster{each}" if abs(finding["gain"]) >= 5e-4 else "as fast"
    saved = finding["bytes_saved"]
    return words if abs(saved) < 10**6 else f"{words}, {size(abs(saved))} {'less' if saved > 0 else 'more'} HBM"


def _detail(finding: Mapping[str, Any]) -> None:
    if finding["where"]:
        click.echo(f"   where   {finding['where']}")
    click.echo(f"   write   {finding['write']}")
