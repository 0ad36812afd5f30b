"""``inspect`` of a file that ``export`` wrote: what it says of itself. Nothing is compiled or run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tpu_compile.cli.tables import size, table
from tpu_compile.errors import ConfigError
from tpu_compile.exporting import manifest
from tpu_compile.exporting.archive import Archive
from tpu_compile.exporting.manifest import Manifest, ProgramEntry
from tpu_compile.exporting.programs import load_spec
from tpu_compile.lowering import portable


def show(path: Path, stage: str, *, as_json: bool, top: int) -> None:
    """Print a file's summary, or its (first) program at a stage.

    Raises:
        DamagedFile, NewerFile: see ``tpu_compile.load``.
    """
    archive = Archive(path)
    found: Manifest = archive.reading(lambda: manifest.read(archive.manifest))
    if stage != "summary":
        text = _text(archive, found, stage)
        click.echo(json.dumps({"name": found.name, stage: text}, indent=1) if as_json else text)
    elif as_json:
        click.echo(json.dumps(archive.manifest, indent=1))
    else:
        _summary(archive, found, top)


def _text(archive: Archive, found: Manifest, stage: str) -> str:
    if stage == "fx":
        raise ConfigError(f"{archive.path} holds no FX graph to show; --stage stablehlo and --stage hlo are there.")
    from tpu_compile import compiler
    from tpu_compile.lowering import fx

    entry = found.programs[0]
    bytecode = portable.read(bytes(archive.view(entry.member))).bytecode
    if stage == "stablehlo":
        return fx.text(bytecode, locations=True)
    return str(compiler.runtime.client.hlo_text(bytecode))


def _summary(archive: Archive, found: Manifest, top: int) -> None:
    members = archive.manifest["members"]
    made = ", ".join(f"{name} {version}" for name, version in found.made_by.items())
    click.echo(f"{found.name}  {size(archive.path.stat().st_size)}, every member checked\nmade by {made}\n")
    table(("argument", "type"), list(_inputs(found)))
    for symbol in found.signature.symbols:
        click.echo(f"{symbol.name}: {symbol.least} to {symbol.most if symbol.most is not None else 'any'}")
    click.echo()
    programs = [(e, _size(members, e.member)) for e in found.programs]
    table(("program for", "sizes", "returns", "random", "StableHLO"), [_program(e, s) for e, s in programs])
    for family, reason in found.unlowered.items():
        click.echo(f"none for {family}: {reason}")
    if found.executables:
        click.echo()
        ahead = [(e.target, e.parts.get("device_kind", ""), _size(members, e.member)) for e in found.executables]
        table(("executable for", "device", "size"), ahead, right=frozenset({2}))
    click.echo()
    where = "in the file" if found.weights_inside else f"in {found.weights}"
    rows = list(_state(found))
    table((f"weights, {where}", "kind", "type", ""), rows[:top])
    if len(rows) > top:
        click.echo(f"and {len(rows) - top} more")
    lines = archive.json("sources.json")
    click.echo(f"\nfrom {len(lines)} lines of source:")
    for file, line, function, code in lines[:top]:
        click.echo(f"  {file}:{line} in {function}: {code}")


def _size(members: dict[str, Any], name: str) -> str:
    return size(members[name]["size"])


def _inputs(found: Manifest) -> Iterator[tuple[str, str]]:
    signature = found.signature
    positional, named = signature.called[2]
    names = [*signature.parameters[: len(positional[2])], *(named[1] or ())]
    flat = len(names) == len(signature.inputs)
    for i, given in enumerate(signature.inputs):
        yield names[i] if flat else f"{i}", str(given)


def _program(entry: ProgramEntry, bytes_: str) -> tuple[str, ...]:
    record = entry.record
    returned = [r["index"] for r in record["results"] if "index" in r]
    specs = ", ".join(str(load_spec(record["outputs"][i])) for i in returned)
    sizes = " ".join(f"{name}={n}" for name, n in entry.sizes.items()) or "fixed"
    return ", ".join(entry.families), sizes, specs, f"{record['draws']} draws" if record["random"] else "no", bytes_


def _state(found: Manifest) -> Iterator[tuple[str, str, str, str]]:
    written = {
        found.arguments[position][1]
        for e in found.programs
        for position, _ in e.record["mutated"]
        if found.arguments[position][0] == "state"
    }
    for i, entry in enumerate(found.state):
        shape = ",".join(map(str, entry.shape))
        kind = f"{str(entry.dtype).removeprefix('torch.')}[{shape}]"
        yield " = ".join(entry.names), entry.kind, kind, "written to" if i in written else ""
