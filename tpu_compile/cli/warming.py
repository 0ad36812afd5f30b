"""``tpu-compile aot`` and ``tpu-compile cache warm``: a cache filled before anybody waits for it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import click

from tpu_compile.cache import CacheStore, EntryInfo
from tpu_compile.cli import target as targets
from tpu_compile.cli.inspect import parse_options
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import size, table


@click.command(epilog=targets.HELP)
@click.argument("target")
@click.option("--grad", is_flag=True, help="For training: forward and backward. Else under no_grad.")
@click.option("--dynamic", is_flag=True, help="Compile with dynamic=True: sizes are symbols, bound at each call.")
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
def aot(target: str, grad: bool, dynamic: bool, options: dict[str, str]) -> None:
    """Compile and store a model, so that a new process starts without tracing.

    There, tpu_compile.aot(model, args) finds it, if the model's class or function is imported under the same name. It
    stays in the local cache: torch's format for it is code.
    """
    import torch

    from tpu_compile.errors import CacheError, TpuCompileWarning
    from tpu_compile.warm.ahead import Ahead

    with progress(f"loading {target}"):
        chosen = targets.load(target)
    with progress(f"compiling {target}"), torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", TpuCompileWarning)  # what it says is the error below
        made = Ahead(chosen.model, chosen.args, chosen.kwargs, dynamic or None, options)
    if made.why_not:
        raise click.ClickException(f"{target} was not stored: {made.why_not}")
    if not made.stored:
        raise CacheError("Nothing was stored: the knob `cache` is off, or the cache cannot be written.")
    click.echo(f"{made.name} {'was stored before' if made.found else 'is stored'}: {made.stored}")


@click.command(epilog=targets.HELP)
@click.argument("target")
@click.option("--target", "chips", default="", metavar="SLICE", help="Fill it for a TPU that is not here: v5e:2x2.")
@click.option("--grad", is_flag=True, help="Also the graphs of training: forward and backward.")
@click.option("--dynamic", is_flag=True, help="Compile with dynamic=True: sizes are symbols, bound at each call.")
@click.option(
    "--option", "options", multiple=True, callback=parse_options, metavar="NAME=VALUE", help="As options={...}."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.pass_obj
def warm(
    store: CacheStore, target: str, chips: str, grad: bool, dynamic: bool, options: dict[str, str], as_json: bool
) -> None:
    """Fill the cache with what TARGET compiles to, here or (--target) on a TPU that is not here.

    The model is run once on this machine. `cache export` then ships the result.
    """
    from tpu_compile.config import override

    with progress(f"loading {target}"):
        chosen = targets.load(target)
    with progress(f"compiling {target}"), override(cache=True, cache_dir=str(store.folder.root)):
        fresh = (
            _for_slice(chosen, chips, grad, dynamic, options, store) if chips else _here(chosen, grad, dynamic, options)
        )
    found = [info for info in store.entries() if info.header.digest in fresh]
    if as_json:
        rows = [
            {"name": i.header.name, "key": i.header.digest, "size": i.size, "compiled": fresh[i.header.digest]}
            for i in found
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    table(("program", "key", "compiled in", "size"), [_row(info, fresh) for info in found], right=frozenset({2, 3}))
    click.echo(f"{sum(fresh.values())} programs compiled, {len(found) - sum(fresh.values())} were there.")


def _row(info: EntryInfo, fresh: Mapping[str, bool]) -> tuple[str, ...]:
    seconds = f"{info.header.compile_seconds:.1f} s" if fresh[info.header.digest] else "was there"
    return info.header.name, info.header.digest[:12], seconds, size(info.size)


def _here(target: targets.Target, grad: bool, dynamic: bool, options: dict[str, str]) -> dict[str, bool]:
    """Key → whether it was compiled now, of every program that a run of the model compiled or found."""
    from tpu_compile.stats import on_event

    seen: dict[str, bool] = {}

    def note(name: str, details: dict[str, Any]) -> None:
        if name in ("compilation_cache/cache_puts", "compilation_cache/cache_hits"):
            seen.setdefault(details["key"], name.endswith("puts"))

    stop = on_event(note)
    try:
        _run(target, grad, dynamic, options)
    finally:
        stop()
    return seen


def _for_slice(
    target: targets.Target, chips: str, grad: bool, dynamic: bool, options: dict[str, str], store: CacheStore
) -> dict[str, bool]:
    from tpu_compile.backend import check_options
    from tpu_compile.compiler import record
    from tpu_compile.config import override
    from tpu_compile.warm import elsewhere

    with record() as recorded:
        _run(target, grad, dynamic, options)
    with override(**check_options(options)):
        filled = elsewhere.fill(recorded.lowerings, chips, store)
        return {program.key.digest: program.seconds > 0 for program in filled}


def _run(target: targets.Target, grad: bool, dynamic: bool, options: dict[str, str]) -> None:
    import torch

    from tpu_compile.comparing.runs import pull_back

    compiled: Any = torch.compile(target.model, backend="tpu", dynamic=dynamic or None, options=dict(options) or None)
    with torch.no_grad():
        compiled(*target.args, **target.kwargs)
    if grad:
        pull_back(compiled(*target.args, **target.kwargs), seed=0)
