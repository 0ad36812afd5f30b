"""``tpu-compile config``: every knob with its value, where the value came from, and what it does."""

from __future__ import annotations

import json

import click

from tpu_compile.cli.tables import table
from tpu_compile.config import KNOBS, Knob, environment
from tpu_compile.config import config as settings

_SECRET = frozenset({"cache_key"})


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def config(as_json: bool) -> None:
    """Every setting with its value and where it came from.

    A knob is set by its environment variable, by `tpu_compile.override(name=value)`, and some by
    `torch.compile(..., options={...})`.
    """
    if as_json:
        listed = {k.name: {"value": value(k), "origin": origin(k)} for k in KNOBS.values()}
        click.echo(json.dumps(listed, indent=1))
        return
    rows = [(k.name, shown(value(k)), origin(k), k.env, k.help) for k in KNOBS.values()]
    table(("knob", "value", "from", "variable", "what it does"), rows)


def value(knob: Knob) -> object:
    """The value in force; a secret only by whether it is set."""
    held: object = getattr(settings, knob.name)
    return "(secret)" if held and knob.name in _SECRET else held


def origin(knob: Knob) -> str:
    """Where the value in force came from, in a process that has overridden nothing."""
    return knob.env if environment(knob.env) else "default"


def shown(held: object) -> str:
    """A value as its environment variable would hold it."""
    if isinstance(held, bool):
        return str(int(held))
    if isinstance(held, dict):
        return ",".join(f"{k}={v}" for k, v in held.items()) or "(none)"
    return str(held) if held != "" else "(empty)"
