"""``tpu-compile ops``: the tier of every aten overload."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import click

from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import table

TIERS = ("native", "jnp", "torch-mlir", "decomposed", "eager")


@click.command()
@click.argument("pattern", required=False, default="")
@click.option("--tier", type=click.Choice(TIERS), help="Only this tier.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
def ops(pattern: str, tier: str | None, as_json: bool) -> None:
    """How each aten operator is lowered.

    PATTERN is a part of the name: `softmax`, `aten.index_put`. Without PATTERN and --tier, only the numbers are shown.
    """
    with progress("looking at torch's operators"):
        from tpu_compile.tiers import TIERS as meanings
        from tpu_compile.tiers import all_tiers

        found = [op for op in all_tiers() if pattern in op.op and tier in (None, op.tier)]
    if as_json:
        click.echo(json.dumps([asdict(op) for op in found], indent=1))
        return
    if not found:
        raise click.ClickException(f"No operator's name holds {pattern!r}" + (f" in tier {tier}." if tier else "."))
    if pattern or tier:
        table(("operator", "tier", "through"), [(op.op, op.tier, op.through) for op in found])
        return
    counts = Counter(op.tier for op in found)
    table(("tier", "operators", "meaning"), [(t, str(counts[t]), meanings[t]) for t in TIERS], right=frozenset({1}))
