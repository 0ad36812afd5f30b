"""``tpu-compile inspect``: compile a model and show every stage of every graph that it becomes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tpu_compile.cli import target as targets
from tpu_compile.cli.progress import progress

DIALECTS = ("summary", "fx", "stablehlo", "hlo")


def parse_options(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """``--option name=value`` as the dict that ``torch.compile(options=...)`` takes."""
    pairs = [value.partition("=") for value in values]
    for name, separator, _value in pairs:
        if not separator or not name:
            raise click.BadParameter(f"{name!r} is no option; write name=value")
    return {name: value for name, _, value in pairs}


@click.command(epilog=targets.HELP)
@click.argument("target")
@click.option("--stage", type=click.Choice(DIALECTS), default="summary", show_default=True, help="What to print.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write every stage of every graph here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option("--grad", is_flag=True, help="Also the graphs of training: forward and backward.")
@click.option("--dynamic", is_flag=True, help="Compile with dynamic=True: sizes are symbols, bound at each call.")
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
@click.option("--target", "chips", default="", metavar="SLICE", help="Compile for a TPU that is not here: v5e:2x2.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page about it; needs --target.")
@click.option("--top", default=10, show_default=True, help="How many of the largest ops to list.")
def inspect(
    target: str,
    stage: str,
    out: Path | None,
    as_json: bool,
    grad: bool,
    dynamic: bool,
    options: dict[str, str],
    chips: str,
    html: Path | None,
    top: int,
) -> None:
    """What a model becomes: its graphs, StableHLO, HLO, costs, memory, cache key.

    The model is compiled and run once, so that graph breaks, training graphs and what runs outside XLA show. A .tpuc
    file of tpu_compile.export is checked and described: nothing of it is compiled or run.
    """
    if target.endswith(".tpuc"):
        from tpu_compile.cli import exported

        exported.show(Path(target), stage, as_json=as_json, top=top)
        return
    if html and not chips:
        raise click.UsageError("--html shows what a TPU does with the model: name one, as in --target v5e")
    with progress(f"loading {target}"):
        chosen = targets.load(target)
    with progress(f"tracing {target}"):
        from tpu_compile.cli import report

        found = report.run(chosen, grad=grad, dynamic=dynamic, options=options, chips=chips)
    written = report.write(found, out) if out else []
    if html:
        written.append(report.write_page(found, html))
    if as_json:
        described = report.describe(found, top) if stage == "summary" else report.texts(found, stage)
        click.echo(json.dumps({**described, "files": [str(path) for path in written]}, indent=1))
    elif stage == "summary":
        report.show(found, top)
    else:
        click.echo(report.text(found, stage))
    if out and not as_json:
        click.echo(f"{len(written) - bool(html)} files in {out}", err=True)
