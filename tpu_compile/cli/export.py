"""``tpu-compile export``: a model as one file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from tpu_compile.cli import target as targets
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import size

_DYNAMIC = re.compile(r"(?P<argument>\w+):(?P<axis>\d+)(=(?P<name>[A-Za-z_]\w*)(:(?P<least>\d+)(:(?P<most>\d+))?)?)?")


def parse_dynamic(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[re.Match[str]]:
    """``--dynamic ARGUMENT:AXIS[=NAME[:LEAST[:MOST]]]``."""
    found = []
    for value in values:
        match = _DYNAMIC.fullmatch(value)
        if match is None:
            raise click.BadParameter(f"{value!r} is not of the form ARGUMENT:AXIS[=NAME[:LEAST[:MOST]]]")
        found.append(match)
    return found


@click.command(epilog=targets.HELP)
@click.argument("target")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
@click.option(
    "--target", "chips", multiple=True, metavar="SLICE", help="Compile ahead for it: v6e:1x1, or cpu. Repeatable."
)
@click.option(
    "--dynamic",
    multiple=True,
    callback=parse_dynamic,
    metavar="ARGUMENT:AXIS[=NAME[:LEAST[:MOST]]]",
    help="A size that may vary; axes of one NAME have one size. ARGUMENT: a name, or a position from 0. Repeatable.",
)
@click.option("--weights", type=click.Choice(["include", "reference"]), default="include", show_default=True)
def export(target: str, out: Path, chips: tuple[str, ...], dynamic: list[re.Match[str]], weights: Any) -> None:
    """Write a model as one file that tpu_compile.load runs without the model's code."""
    with progress(f"loading {target}"):
        chosen = targets.load(target)
    with progress(f"exporting {target}"):
        from tpu_compile.exporting.writing import export as write

        shapes = _shapes(chosen, dynamic) if dynamic else None
        write(
            chosen.model,
            chosen.args,
            chosen.kwargs,
            path=out,
            targets=chips,
            dynamic_shapes=shapes,
            weights=weights,
        )
    click.echo(f"{out}: {size(out.stat().st_size)}")


def _shapes(target: targets.Target, dynamic: list[re.Match[str]]) -> dict[str, Any]:
    """As ``torch.export`` wants them: for every argument, by its name, the axes that vary."""
    import inspect

    import torch

    call = target.model.forward if isinstance(target.model, torch.nn.Module) else target.model
    bound = inspect.signature(call).bind(*target.args, **target.kwargs)
    names = list(bound.arguments)
    shapes: dict[str, Any] = dict.fromkeys(names)
    dims: dict[str, Any] = {}
    for match in dynamic:
        argument = names[int(match["argument"])] if match["argument"].isdigit() else match["argument"]
        if argument not in shapes or not isinstance(bound.arguments[argument], torch.Tensor):
            tensors = [n for n in names if isinstance(bound.arguments[n], torch.Tensor)]
            raise click.BadParameter(f"no tensor among the arguments is called {argument!r}; there is {tensors}")
        name = match["name"] or f"{argument}_{match['axis']}"
        if name not in dims:
            bounds = {k: int(match[g]) for k, g in (("min", "least"), ("max", "most")) if match[g]}
            dims[name] = torch.export.Dim(name, **bounds)
        shapes[argument] = {**(shapes[argument] or {}), int(match["axis"]): dims[name]}
    return shapes
