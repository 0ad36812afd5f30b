"""The demo's verdict and the benchmark's arithmetic: what decides between "fine" and exit status 1."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from demo import demo
from tools.benchmarks import report, timing
from tools.benchmarks.report import Row

ROOT = Path(__file__).parents[2]
COLD = {
    "sentences": 64.0,
    "tokens": 27.0,
    "error": 1e-6,
    "cosine": 1.0,
    "eager_ms": 60.0,
    "compiled_ms": 40.0,
    "first_call": 4.0,
    "lowering_seconds": 0.1,
    "xla_seconds": 1.8,
    "load_seconds": 0.1,
    "xla_compiles": 1.0,
    "disk_hits": 0.0,
    "disk_misses": 1.0,
    "fallback_ops": 0.0,
}
WARM = {**COLD, "xla_compiles": 0.0, "xla_seconds": 0.0, "disk_hits": 1.0, "disk_misses": 0.0}


def test_the_demo_is_content_with_a_right_and_warm_second_process() -> None:
    assert demo.faults(COLD, WARM) == []


@pytest.mark.parametrize(
    ("cold", "warm", "words"),
    [
        ({"error": 2e-4}, {}, "the first process is off by 2.0e-04"),
        ({}, {"error": float("nan")}, "the second process is off by nan"),
        ({"xla_compiles": 0.0}, {}, "the first process compiled nothing"),
        ({"fallback_ops": 2.0}, {}, "2 operators of the model ran on the CPU"),
        ({}, {"xla_compiles": 1.0}, "the second process compiled 1 programs"),
        ({}, {"load_seconds": 0.6}, "lowering + XLA + load took 0.35 of the first process's time"),
    ],
)
def test_the_demo_says_what_is_wrong(cold: dict[str, float], warm: dict[str, float], words: str) -> None:
    (fault,) = demo.faults({**COLD, **cold}, {**WARM, **warm})
    assert fault.startswith(words)


def test_the_demo_gives_dynamo_what_our_stages_leave() -> None:
    assert demo.stages(COLD) == pytest.approx({"Dynamo + AOT": 2.0, "lowering": 0.1, "XLA": 1.8, "load": 0.1})


def test_the_demo_has_sixty_four_different_sentences() -> None:
    sentences = (ROOT / "demo" / "sentences.txt").read_text().splitlines()
    assert len(set(sentences)) == 64 and all(sentences)


def test_targets_are_ratios_and_differences_of_the_rows_there_are() -> None:
    times = {"tpu": 90, "jax": 20, "null AOT": 40}
    rows = [Row("call overhead", "mlp", system, value, "µs") for system, value in times.items()]
    ratio, difference = report.targets(rows)
    assert (ratio.value, ratio.met) == (4.5, False)
    assert (difference.value, difference.met) == (50, True)


def test_a_run_without_rows_promises_nothing() -> None:
    assert report.targets([]) == []
    assert report.as_json([], ["why"])["skipped"] == ["why"]


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    clock = itertools.count()  # every look at the clock is a second later: each call "takes" one second
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    taken = timing.in_turn({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2, seconds=1.0)
    assert "".join(turns) == "ab" + "aabb" * 2
    assert taken == {"a": 1.0, "b": 1.0}


class _Elsewhere:
    """A contender in another process."""

    def __call__(self) -> None: ...

    def per_call(self, seconds: float) -> float:
        return seconds / 4


def test_a_contender_in_another_process_times_itself() -> None:
    assert timing.in_turn({"there": _Elsewhere()}, rounds=3, seconds=2.0) == {"there": 0.5}


@pytest.mark.full
def test_the_demo_ends_well_with_the_real_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 0
    assert "XLA compiles" in capfd.readouterr().out
