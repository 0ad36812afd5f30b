"""What the benchmark measures, a function for each part; all return rows."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import tpu_compile
from benchmarks import contenders, decode, first_call, restart, torch_models, torch_training, train
from benchmarks.elsewhere import Elsewhere, Peers
from benchmarks.report import Row
from benchmarks.timing import in_turn

NETWORKS = ("bert", "llama", "resnet")
TRAINING = {f"train-{name}": name for name in torch_training.MODELS}
IMPORT = "import time, torch; t = time.perf_counter(); import tpu_compile; print(time.perf_counter() - t)"


@dataclass(frozen=True)
class Settings:
    """How long to measure: ``rounds`` turns of ``seconds`` for each contender; which backends, under which name; whom
    else."""

    rounds: int
    seconds: float
    quick: bool = False
    backends: Mapping[str, str] = field(default_factory=lambda: {"tpu": "tpu", "inductor": "inductor"})
    peers: Peers = field(default_factory=Peers)


def calls(settings: Settings) -> list[Row]:
    """Microseconds a call of the MLP takes, where nearly nothing is computed."""
    by_name = contenders.contenders("mlp", {**settings.backends, 'backend="eager"': "eager"})
    by_name["null AOT"] = contenders.on_torch(*torch_models.build("mlp"), contenders.null_aot)  # has no right result
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread has nothing to do at this size, and waking it is not what is measured
    with settings.peers.on("mlp") as peers:
        times = in_turn(by_name | peers, settings.rounds * 2, settings.seconds / 2)
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    rows = [Row("call overhead", "mlp", system, 1e6 * value, "µs") for system, value in times.items()]
    return rows + _first("first call, cold", "mlp", peers)


def steady(name: str, settings: Settings) -> list[Row]:
    """Milliseconds a call of one network takes once everything is compiled."""
    calls = contenders.contenders(name, settings.backends)
    with settings.peers.on(name) as peers:
        times = in_turn(calls | peers, settings.rounds, settings.seconds)
    torch._dynamo.reset()
    rows = [Row("steady", name, system, 1e3 * value, "ms") for system, value in times.items()]
    return rows + _first("first call, cold", name, peers)


def _first(section: str, name: str, peers: Mapping[str, Elsewhere]) -> list[Row]:
    return [Row(section, name, system, 1e3 * peer.first, "ms") for system, peer in peers.items()]


def decoding(settings: Settings) -> list[Row]:
    """Microseconds a token, greedy, batch 1; the prompt is part of it."""
    rows = []
    for name in decode.NETWORKS:
        times = decode.seconds_a_token(name, 200, max(5, settings.rounds // 2))
        rows += [Row("decode", name, system, 1e6 * value, "µs/token") for system, value in times.items()]
    return rows


def training(name: str, settings: Settings) -> list[Row]:
    """A training step: milliseconds, what its program needs, the first one, and what a process takes."""
    with settings.peers.on(f"train-{name}") as peers:
        found = train.rows(name, settings.rounds, settings.seconds, peers)
    if name not in train.SLOW and not (settings.quick and name != "gpt2"):
        found += train.in_processes(name, train.FEW if settings.quick else train.SYSTEMS)
    return found + _first("training, first step", name, peers)


def lowering(settings: Settings) -> list[Row]:
    """Microseconds our lowering takes for a node of the graph: the first time here, and the median of later times."""
    rows = []
    for name in NETWORKS:
        model, x = torch_models.build(name)
        each = [_lower_once(model, x) for _ in range(max(3, settings.rounds))]
        nodes = f"{each[0][1]:.0f} nodes"
        rows.append(Row("lowering, first", name, "tpu", each[0][0], "µs/node", nodes))
        warm = statistics.median(microseconds for microseconds, _ in each[1:])
        rows.append(Row("lowering, warm", name, "tpu", warm, "µs/node", nodes))
    return sorted(rows, key=lambda row: row.section)


def _lower_once(model: torch.nn.Module, x: torch.Tensor) -> tuple[float, float]:
    torch._dynamo.reset()
    before = tpu_compile.stats()
    contenders.on_torch(model, x, "tpu")()
    spent = {key: value - before[key] for key, value in tpu_compile.stats().items()}
    return 1e6 * spent["lowering_seconds"] / spent["nodes"], spent["nodes"]


def first_calls(names: tuple[str, ...]) -> list[Row]:
    """Seconds of the first call in a fresh process, with an empty cache and with what the first process left."""
    rows = []
    for name in names:
        for system in ("tpu", "inductor", "jax"):
            for temperature, report in zip(("cold", "warm"), first_call.cold_and_warm(name, system), strict=True):
                row = Row(f"first call, {temperature}", name, system, 1e3 * report["seconds"], "ms", _stages(report))
                rows.append(row)
    return sorted(rows, key=lambda row: row.section)


def restarts(rounds: int) -> list[Row]:
    """Milliseconds of the first call in a process that finds everything in the cache, the fastest of a few processes;
    and what it still had to lower and compile."""
    rows = []
    for case in restart.CASES:
        for system, said in restart.restarts(case, rounds).items():
            fastest = min(said, key=lambda report: report["wall"])
            work = sum(report["lowerings"] + report["xla_compiles"] for report in said)
            detail = f"{1e3 * min(report['cpu'] for report in said):.0f} on the CPU, {work} lowerings and XLA compiles"
            if fastest["step"] > fastest["wall"] + 0.01:
                detail += f", {1e3 * fastest['step']:.0f} to the gradients"
            rows.append(Row("restart", case, system, 1e3 * fastest["wall"], "ms", detail))
    return rows


def _stages(report: dict[str, Any]) -> str:
    if "xla_seconds" not in report:
        return ""
    stages = {stage: 1e3 * report[f"{stage}_seconds"] for stage in ("lowering", "xla", "load")}
    rest = 1e3 * report["seconds"] - sum(stages.values())
    parts = {"Dynamo + AOT": rest, **stages}
    return ", ".join(f"{stage} {value:.0f}" for stage, value in parts.items())


def import_time(settings: Settings) -> list[Row]:
    """Milliseconds that ``import tpu_compile`` takes after ``import torch``, in fresh processes."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        for _ in range(settings.rounds)
    ]
    milliseconds = statistics.median(1e3 * float(run.stdout) for run in runs)
    return [Row("import", "beyond torch", "tpu_compile", milliseconds, "ms")]
