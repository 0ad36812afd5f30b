"""``tpu-compile cache``: list, explain, verify, prune, clear, export and import what the cache holds.

Exit status 1 also when ``verify`` finds something wrong, or ``export`` or ``import`` refuses something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tpu_compile.cache import CacheStore, EntryInfo, Problem, Removed, nearest
from tpu_compile.cache.archive import Transfer, export_archive, import_archive
from tpu_compile.cache.explain import bullets, described, is_hash
from tpu_compile.cache.store import TRACING_SHARE, tracing_store
from tpu_compile.cli.tables import size as _bytes
from tpu_compile.cli.tables import table
from tpu_compile.cli.warming import warm
from tpu_compile.config import KNOBS
from tpu_compile.errors import CacheError, ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(KNOBS["cache_max_size"].check(value, "size"))
        except ConfigError:
            self.fail(f"{value!r} is no size; write 512MiB or 20GB.", param, ctx)


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", str(value).lower())
        if match is None:
            self.fail(f"{value!r} is no duration; write 45m, 12h, 30d or 2w.", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


@click.group()
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Another cache than the configured one.")
@click.pass_context
def cache(ctx: click.Context, directory: Path | None) -> None:
    """Compiled programs on disk: what is there, what it saved, why something missed."""
    ctx.obj = CacheStore(directory)


cache.add_command(warm)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What the system refuses, as an error with one line."""
    try:
        yield
    except OSError as fault:
        raise CacheError(f"{fault.filename or 'the cache'}: {fault.strerror or fault}") from fault


@cache.command("ls")
@click.option("--all", "everything", is_flag=True, help="Also lowered programs, traces and functions of aot.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.pass_obj
def list_entries(store: CacheStore, everything: bool, as_json: bool) -> None:
    """List the executables, most recently used first."""
    with _explained():
        infos = [info for each in _stores(store) for info in each.entries(of="")]
    shown = sorted(infos if everything else _executables(infos), key=lambda info: info.used, reverse=True)
    if as_json:
        click.echo(json.dumps([_record(info) for info in shown], indent=1))
        return
    columns = ("key", "name", "arguments", "platform", "size", "last used", "hits", "saved")
    if everything:
        table((*columns, "kind"), [(*_row(info), info.kind) for info in shown], right=frozenset({4, 6, 7}))
    else:
        table(columns, [_row(info) for info in shown], right=frozenset({4, 6, 7}))
    click.echo(f"{len(shown)} entries, {_bytes(sum(info.size for info in shown))} in {store.folder.root}")
    rest = len(infos) - len(shown)
    if rest:
        more = _bytes(sum(info.size for info in infos) - sum(info.size for info in shown))
        click.echo(f"--all shows {rest} more, {more}: lowered programs, traces and functions that were compiled ahead.")


def _stores(store: CacheStore) -> tuple[CacheStore, CacheStore]:
    """The cache, and what torch pickled below it."""
    return store, tracing_store(store)


def _executables(infos: Sequence[EntryInfo]) -> list[EntryInfo]:
    return [info for info in infos if info.kind == "executable"]


@cache.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.pass_obj
def explain(store: CacheStore, key: str, as_json: bool) -> None:
    """Show what KEY is made of, and how it differs from the entry nearest to it.

    KEY is the beginning of a key, or a program's name, as `ls` shows them.
    """
    with _explained():
        infos = list(store.entries())
    info = _select(infos, key)
    parts = described(info.header.parts, info.header.metadata)
    near = nearest(infos, info.header.name, parts, info.header.digest)
    if as_json:
        other = {"nearest": _record(near.entry), "differences": list(near.differences)} if near else {"nearest": None}
        click.echo(json.dumps({**_record(info), **other}, indent=1))
        return
    click.echo(f"{_printable(info.header.name)} {info.header.digest}")
    table(("part", "value"), [(_printable(label), _shorten(value, 160)) for label, value in parts.items()])
    if near is None:
        click.echo("There is no other entry to compare with.")
        return
    other_header = near.entry.header
    name = _printable(other_header.name)
    click.echo(f"Nearest: {name} ({other_header.digest[:12]}), {_ago(other_header.created)}. It differs:")
    click.echo(bullets(map(_printable, near.differences)))


@cache.command()
@click.option("--repair", is_flag=True, help="Remove what cannot be used.")
@click.option("--check-contents", is_flag=True, help="Also compile executables anew and compare what they compute.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.pass_obj
def verify(store: CacheStore, repair: bool, check_contents: bool, as_json: bool) -> None:
    """Read and check every entry. Exit status 1 when something is wrong with one."""
    with _explained():
        problems = [problem for each in _stores(store) for problem in each.verify(remove=repair)]
        if check_contents:
            problems += _check_contents(store, repair, quiet=as_json)
        total = sum(len(each.folder.scan()) for each in _stores(store))
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(p), "path": str(p.path)} for p in problems], indent=1))
    else:
        for problem in problems:
            click.echo(f"{problem.path}: {problem.kind}: {problem.reason}")
        done = "removed" if repair else "found; `tpu-compile cache verify --repair` removes them"
        click.echo(f"{len(problems)} problems {done}." if problems else f"All {total} entries are sound.")
    sys.exit(1 if problems else 0)


def _check_contents(store: CacheStore, repair: bool, quiet: bool) -> list[Problem]:
    """Executables that do not compute what their program, compiled anew, computes."""
    from tpu_compile.cli.progress import progress
    from tpu_compile.warm.checking import check

    with progress("compiling anew"):
        checked = list(check(store))
    wrong = [one for one in checked if one.fault]
    for one in wrong if repair else ():
        store.folder.remove(one.digest)
    if not quiet:
        rest = len(list(store.entries())) - len(checked) + len(wrong) * repair
        left = f"; {rest} are of another platform or options, or their program is not here" if rest else ""
        click.echo(f"{len(checked)} executables compared with a fresh compile{left}.")
    return [Problem(store.folder.path(one.digest), "contents", f"{_printable(one.name)}: {one.fault}") for one in wrong]


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.pass_obj
def stats(store: CacheStore, as_json: bool) -> None:
    """What the cache holds and what it has saved."""
    with _explained():
        figures = store.stats()
        kinds = Counter(info.kind for each in _stores(store) for info in each.entries(of=""))
        traced = tracing_store(store).stats()
    if as_json:
        described = {**dataclasses.asdict(figures), "directory": str(figures.directory)}
        click.echo(json.dumps({**described, "kinds": kinds, "tracing_bytes": traced.bytes}, indent=1))
        return
    cap = _bytes(figures.max_size) if figures.max_size else "no cap"
    click.echo(f"directory        {figures.directory}")
    click.echo(f"entries          {figures.entries}")
    click.echo(f"size             {_bytes(figures.bytes)} of {cap}; {_bytes(figures.payload_bytes)} uncompressed")
    click.echo(f"of which         {', '.join(f'{number} {kind}s' for kind, number in sorted(kinds.items()))}")
    click.echo(f"tracing          {_bytes(traced.bytes)} more; pickled by torch, so neither exported nor shared")
    click.echo(f"hits             {figures.hits}")
    click.echo(f"compiling        {_duration(figures.compile_seconds)} spent, {_duration(figures.seconds_saved)} saved")
    if figures.entries:
        click.echo(f"longest unused   {_ago(figures.least_recent_use)}")


@cache.command()
@click.option("--max-size", type=_Size(), help="Evict the longest unused until this is left: 500MB.")
@click.option("--older-than", type=_Duration(), help="Evict what was not used for so long: 30d.")
@click.pass_obj
def prune(store: CacheStore, max_size: int | None, older_than: float | None) -> None:
    """Make room. Entries that are being read stay."""
    if max_size is None and older_than is None:
        max_size = store.max_size or None
    with _explained():
        removed = [
            store.prune(max_size=max_size, older_than=older_than),
            tracing_store(store).prune(max_size=max_size and max_size // TRACING_SHARE, older_than=older_than),
        ]
    click.echo(f"Removed {_total(removed)}.")


def _total(removed: Sequence[Removed]) -> str:
    return f"{sum(r.entries for r in removed)} entries, {_bytes(sum(r.bytes for r in removed))}"


@cache.command()
@click.pass_obj
def clear(store: CacheStore) -> None:
    """Remove every entry."""
    with _explained():
        removed = [each.clear() for each in _stores(store)]
    click.echo(f"Removed {_total(removed)}, from {store.folder.root}.")


@cache.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.pass_obj
def export_file(store: CacheStore, file: Path) -> None:
    """Write all sound entries into FILE (.tar, .tar.gz or .zip), to be imported on other machines.

    Executables and lowered programs, that is; what torch has pickled (traces, functions of aot) stays here.
    """
    with _explained():
        result = export_archive(store, file)
    _report_transfer(result, f"Exported {result.copied} entries, {_bytes(result.bytes)}, to {file}.")


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_obj
def import_file(store: CacheStore, file: Path) -> None:
    """Add the entries in FILE to the cache. They are native code: import only what you trust, or sign it.

    With TPU_COMPILE_CACHE_KEY set, entries that are not signed with it are refused.
    """
    with _explained():
        result = import_archive(store, file)
    _report_transfer(result, f"Imported {result.copied} entries, {_bytes(result.bytes)}; {result.present} were there.")


def _report_transfer(result: Transfer, summary: str) -> None:
    for digest, reason in result.refused.items():
        click.echo(f"refused {digest[:12]}: {reason}", err=True)
    click.echo(summary)
    sys.exit(1 if result.refused else 0)


def _select(infos: Sequence[EntryInfo], key: str) -> EntryInfo:
    found = [info for info in infos if info.header.digest.startswith(key.lower())]
    found = found or [info for info in infos if info.header.name == key]
    if len(found) == 1:
        return found[0]
    if found:
        listed = bullets(
            f"{info.header.digest[:16]} {_printable(info.header.name)}, {_ago(info.header.created)}" for info in found
        )
        raise CacheError(f"{key!r} fits {len(found)} entries; give one of these keys:\n{listed}")
    raise CacheError(f"No key begins with {key!r}, no program has that name: see `tpu-compile cache ls`.")


def _record(info: EntryInfo) -> dict[str, Any]:
    use = {"size": info.size, "used": info.used, "hits": info.hits, "seconds_saved": info.seconds_saved}
    return {**dataclasses.asdict(info.header), "path": str(info.path), **use}


def _row(info: EntryInfo) -> tuple[str, ...]:
    parts = info.header.parts
    return (
        info.header.digest[:12],
        _printable(info.header.name),
        _shorten(parts.get("arguments", ""), 40),
        _shorten(parts.get("platform", ""), 16),
        _bytes(info.size),
        _ago(info.used),
        str(info.hits),
        _duration(info.seconds_saved),
    )


def _printable(text: str) -> str:
    """Text from an entry, which may come from elsewhere, without what would steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _shorten(text: str, width: int) -> str:
    if is_hash(text) and ":" in text:
        return f"{text.split(':')[1][:12]}… ({_bytes(int(text.split(':')[2]))})"
    return _printable(text if len(text) <= width else text[: width - 1] + "…")


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _ago(when: float) -> str:
    return f"{_duration(max(0.0, time.time() - when))} ago"
