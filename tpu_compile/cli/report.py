"""What ``inspect`` found out: one run of a model, recorded, then described for people or programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch._dynamo.utils import counters as dynamo
from torch.utils._pytree import tree_leaves

import tpu_compile
from tpu_compile import dump, stages
from tpu_compile.backend import check_options
from tpu_compile.cli import on_target
from tpu_compile.cli.tables import number, size, table
from tpu_compile.cli.target import Target
from tpu_compile.comparing.runs import pull_back
from tpu_compile.compiler import Recorder, record
from tpu_compile.config import override
from tpu_compile.errors import OutOfMemory, TpuCompileWarning
from tpu_compile.targets.analysis import Fit, misfit
from tpu_compile.targets.chips import CHIPS, slice_name
from tpu_compile.targets.describe import described, described_fit

_OWN_PARTS = ("program", "arguments", "results")
"""Of a cache key: the parts that differ from graph to graph."""
_COMMENT = {"fx": "#", "stablehlo": "//", "hlo": "//"}


@dataclass(frozen=True)
class Report:
    """A model's graphs in the order in which they were compiled.

    Attributes:
        recorded: also what runs on the CPU, and why graphs ended early.
        stats: the counters of the run.
    """

    target: Target
    graphs: tuple[stages.Compiled, ...]
    recorded: Recorder
    stats: Mapping[str, float]
    chips: str = ""
    misfits: tuple[tuple[str, Fit], ...] = ()


def run(target: Target, *, grad: bool, dynamic: bool, options: Mapping[str, str], chips: str = "") -> Report:
    """Compile a target with the backend and run it once; with ``grad`` once more, forward and backward.

    Args:
        chips: a TPU slice, such as ``v5e:2x2``, for which every graph is compiled anew. The run is this machine's; a
            model or arguments on the meta device are traced and not run.
    """
    chips = slice_name(chips)
    if chips and on_meta(target):
        return _traced(target, options, chips)
    tpu_compile.reset_stats()
    dynamo.clear()
    compiled: Callable[..., Any] = torch.compile(
        target.model, backend="tpu", dynamic=dynamic or None, options=dict(options) or None
    )
    with record() as recorded, warnings.catch_warnings():
        warnings.simplefilter("ignore", TpuCompileWarning)  # of ops on the CPU: the report lists them
        with torch.no_grad():
            compiled(*target.args, **target.kwargs)
        if grad:
            pull_back(compiled(*target.args, **target.kwargs), seed=0)
    graphs, misfits = _compiled(recorded, options, chips)
    return Report(target, graphs, recorded, tpu_compile.stats(), chips, misfits)


def on_meta(target: Target) -> bool:
    """Whether a target has shapes and no numbers: something of it lies on the meta device."""
    model = target.model
    held = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    return any(isinstance(t, torch.Tensor) and t.is_meta for t in (*held, *tree_leaves((target.args, target.kwargs))))


def _compiled(
    recorded: Recorder, options: Mapping[str, str], chips: str
) -> tuple[tuple[stages.Compiled, ...], tuple[tuple[str, Fit], ...]]:
    """The graphs, for ``chips`` if there are any, and those that these do not hold."""
    graphs, misfits = [], []
    with override(**check_options(options)):
        for lowering in recorded.lowerings:
            try:
                graphs.append(stages.recorded(lowering, chips))
            except OutOfMemory as error:
                misfits.append((lowering.name, misfit(error)))
    return tuple(graphs), tuple(misfits)


def _traced(target: Target, options: Mapping[str, str], chips: str) -> Report:
    tpu_compile.reset_stats()
    traced = stages.trace(target.model, *target.args, **target.kwargs)
    graphs, misfits = [], []
    try:
        graphs.append(traced.lower("tpu").compile(options, target=chips))
    except OutOfMemory as error:
        misfits.append((traced.tracing.name, misfit(error)))
    return Report(target, tuple(graphs), Recorder(), tpu_compile.stats(), chips, tuple(misfits))


# ---- for programs


def describe(report: Report, top: int) -> dict[str, Any]:
    """Everything that the summary says, as plain data."""
    return {
        "target": report.target.name,
        "model": _model(report.target.model),
        "platform": _platform(report),
        "graphs": [_graph(graph, top) for graph in report.graphs],
        **_on_target(report, top),
        "graph_breaks": _breaks(report),
        "on_the_cpu": [asdict(gap) for gap in report.recorded.gaps],
        "stats": dict(report.stats),
    }


def _on_target(report: Report, top: int) -> dict[str, Any]:
    if report.chips.partition(":")[0] not in CHIPS:
        return {}
    return {
        "on_target": [described(graph, report.chips, top) for graph in report.graphs],
        "do_not_fit": [{"name": name, **described_fit(fit)} for name, fit in report.misfits],
    }


def _model(model: Any) -> dict[str, Any]:
    parameters, buffers = (
        (list(model.parameters()), list(model.buffers())) if isinstance(model, torch.nn.Module) else ([], [])
    )
    return {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "buffers": sum(b.numel() for b in buffers),
        "buffer_bytes": sum(b.nbytes for b in buffers),
    }


def _platform(report: Report) -> dict[str, str]:
    client = report.graphs[0].built.client if report.graphs else None
    return {"name": client.platform, "device": client.device_kind} if client else {}


def _breaks(report: Report) -> list[str]:
    """Why graphs ended early, with the line where Dynamo tells us; those before the first op it only counts."""
    known = [text.partition(": ")[2] for text in report.recorded.breaks]
    untold = [reason.partition("\n")[0] for reason in dynamo["graph_break"]]
    return [*report.recorded.breaks, *(reason for reason in untold if reason not in known)]


def _graph(graph: stages.Compiled, top: int) -> dict[str, Any]:
    program, found = graph.program, graph.node_costs()
    return {
        "name": graph.name,
        "nodes": len(graph.graph_module.graph.nodes),
        "ops": dict(program.ops_per_tier),
        "origin": graph.origin,
        "symbols": {str(symbol): value for symbol, value in graph.bindings.items()},
        "arguments": {name: str(spec) for name, spec in zip(graph.arguments, program.inputs, strict=True)},
        "results": list(map(str, program.outputs)),
        "overwritten": graph.overwritten,
        "constant_bytes": sum(t.nbytes for t in program.constants),
        "draws_random_numbers": program.random,
        "ffi_handlers": list(program.ffi_handlers),
        "flops": sum(cost.flops for cost in found),
        "unfused_bytes": sum(cost.bytes for cost in found),
        "cost_analysis": graph.cost_analysis(),
        "memory_analysis": asdict(graph.memory_analysis()),
        "key": {"digest": graph.built.key.digest, **graph.built.key.readable},
        "largest_ops": [asdict(cost) for cost in found[:top]],
    }


def texts(report: Report, dialect: str) -> dict[str, Any]:
    """One stage of every graph."""
    return {"graphs": [{"name": graph.name, "text": graph.as_text(dialect)} for graph in report.graphs]}


# ---- for people


def text(report: Report, dialect: str) -> str:
    """One stage of every graph, each below a comment that names it."""
    mark, count = _COMMENT[dialect], len(report.graphs)
    return "\n".join(
        f"{mark} graph {index} of {count}: {graph.name}\n{graph.as_text(dialect)}"
        for index, graph in enumerate(report.graphs, 1)
    )


def write(report: Report, folder: Path) -> list[Path]:
    """Every stage of every graph as files; the names begin with the graph's."""
    return [path for graph in report.graphs for path in dump.write(folder, graph.graph_module, graph.built)]


def write_page(report: Report, path: Path) -> Path:
    """One self-contained page about every graph on the report's chips."""
    from tpu_compile.cli.page import render

    path.write_text(render(report.target.name, report.graphs, report.chips))
    return path


def show(report: Report, top: int) -> None:
    """Print the summary."""
    found = describe(report, top)
    model = found["model"]
    _line("target", found["target"])
    _line("model", f"{model['class']}, {number(model['parameters'])} parameters ({size(model['parameter_bytes'])})")
    _line("platform", " · ".join(dict.fromkeys(found["platform"].values())))
    _line("graphs", f"{len(report.graphs)}, {_plural(len(found['graph_breaks']), 'graph break')}")
    for reason in found["graph_breaks"]:
        _line("", reason)
    gaps = report.recorded.gaps
    _line("on the CPU", f"{_plural(len(gaps), 'op')} that nothing lowers" if gaps else "nothing")
    for gap in gaps:
        _line("", f"{gap.op}: {gap.reason}, at {gap.where}")
    for index, graph in enumerate(found["graphs"], 1):
        _show_graph(f"graph {index} of {len(report.graphs)}", graph, found.get("on_target"))
        if "on_target" in found:
            on_target.show(found["on_target"][index - 1])
    for each in found.get("do_not_fit", ()):
        on_target.show_misfit(each["name"], each)
    _show_environment([graph["key"] for graph in found["graphs"]])


def _show_graph(title: str, graph: Mapping[str, Any], there: Any) -> None:
    click.echo()
    _line(title, graph["name"])
    tiers = ", ".join(f"{count} {tier}" for tier, count in graph["ops"].items()) or "none"
    _line("  ops", f"{tiers} (of {graph['nodes']} nodes)")
    if graph["symbols"]:
        _line("  symbols", ", ".join(f"{name} = {value}" for name, value in graph["symbols"].items()))
    _line("  compute", f"{number(graph['flops'])} flops; {size(graph['unfused_bytes'])} moved if nothing is fused")
    moved = graph["cost_analysis"].get("bytes accessed")
    if moved is not None:
        _line("", f"{size(moved)} after fusion, by XLA's estimate")
    _line("  memory", _memory(graph["memory_analysis"], graph["constant_bytes"]))
    _line(
        "  executable",
        {"xla": "compiled now", "disk": "from the cache", "memory": "in memory already"}[graph["origin"]],
    )
    for name, what in graph["overwritten"].items():
        _line("  overwrites", f"{name}: {what}")
    if graph["draws_random_numbers"]:
        _line("  random", "takes a seed that torch's generator draws at each call")
    if graph["ffi_handlers"]:
        _line("  calls", ", ".join(graph["ffi_handlers"]))
    _show_key(graph["key"])
    if not there:
        _show_largest(graph["largest_ops"])


def _memory(memory: Mapping[str, int], constants: int) -> str:
    shown = {
        "arguments": memory["argument_size_in_bytes"],
        "results": memory["output_size_in_bytes"],
        "temporaries": memory["temp_size_in_bytes"],
        "shared by arguments and results": memory["alias_size_in_bytes"],
        "code": memory["generated_code_size_in_bytes"],
        "constants passed in": constants,
        "peak": memory["peak_memory_in_bytes"],
    }
    return ", ".join(f"{name} {size(count)}" for name, count in shown.items() if count)


def _show_key(key: Mapping[str, str]) -> None:
    """What of its key is a graph's own."""
    _line("  cache key", key["digest"])
    for label in _OWN_PARTS:
        _line("", f"{label}: {_shortened(key[label])}")


def _show_environment(keys: Sequence[Mapping[str, str]]) -> None:
    """What all graphs' keys have in common."""
    if keys:
        click.echo()
    for label, part in keys[0].items() if keys else ():
        if label not in (*_OWN_PARTS, "digest"):
            _line("in every key" if label == _first(keys[0]) else "", f"{label}: {part or '(nothing)'}")


def _first(key: Mapping[str, str]) -> str:
    return next(label for label in key if label not in (*_OWN_PARTS, "digest"))


def _shortened(part: str, width: int = 90) -> str:
    return part if len(part) <= width else part[: width - 1] + "…"


def _show_largest(largest: list[dict[str, Any]]) -> None:
    if largest:
        click.echo("  largest ops (by flops, then bytes)")
        rows = [("  " + c["op"], number(c["flops"]), size(c["bytes"]), _shortened(c["where"], 100)) for c in largest]
        table(("  op", "flops", "bytes", "where"), rows, right=frozenset({1, 2}))


def _line(title: str, text: str) -> None:
    click.echo(f"{title:<16}{text}")


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
