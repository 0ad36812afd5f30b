"""Every operator that torch tests, compiled against eager. ``ledger.json`` lists the expected failures, each with its
reason; an operator
that passes unexpectedly fails the run until its line is deleted."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("sweep", _HERE / "sweep.py")
assert _spec is not None and _spec.loader is not None
sweep = importlib.util.module_from_spec(_spec)
sys.modules["sweep"] = sweep
_spec.loader.exec_module(sweep)

LEDGER: dict[str, dict[str, str]] = json.loads((_HERE / "ledger.json").read_text())
"""mode → operator → why it fails. A mode is "forward.float32", "grad.float32", "forward.bfloat16", …"""

OTHER_MODES = ["grad.float32", *(f"forward.{d}" for d in ("bfloat16", "int64", "bool", "complex64", "float64"))]


def cases(mode: str) -> list[str]:
    """The operators that torch runs in a mode."""
    kind, dtype = mode.split(".")
    return [name for name in sweep.OPS if sweep.supports(name, getattr(torch, dtype), kind == "grad")]


def quarter(name: str) -> int:
    """Which of four consecutive days an operator's other modes are due."""
    return hashlib.sha256(name.encode()).digest()[0] % 4


def run(mode: str, name: str, samples: int) -> None:
    """One operator in one mode; the ledger decides which outcome is right."""
    kind, dtype = mode.split(".")
    reason = LEDGER.get(mode, {}).get(name)
    try:
        compared = sweep.check(name, getattr(torch, dtype), grad=kind == "grad", samples=samples)
    except Exception as error:
        if reason is None:
            raise
        assert not isinstance(error, AssertionError) or "wrong" in reason, (
            f"a wrong answer is no expected failure: {error}"
        )
        return
    assert reason is None or not compared or samples == 1, f"passes now: delete its line from ledger.json ({reason})"


TODAY = datetime.date.today().toordinal() % 4


@pytest.mark.parametrize("name", cases("forward.float32"))
def test_forward(name: str) -> None:
    run("forward.float32", name, samples=1)


@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode in OTHER_MODES for name in cases(mode) if quarter(name + mode) == TODAY]
)
def test_todays_quarter_of_the_other_modes(mode: str, name: str) -> None:
    run(mode, name, samples=1)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "name"), [(m, name) for m in ["forward.float32", *OTHER_MODES] for name in cases(m)])
def test_three_samples_in_every_mode(mode: str, name: str) -> None:
    run(mode, name, samples=3)


@pytest.mark.parametrize("name", sorted(LEDGER["forward.float32"]))
def test_what_fullgraph_refuses_is_right_without_it(name: str) -> None:
    sweep.check(name, torch.float32, grad=False, samples=1, fullgraph=False)


@pytest.mark.full
@pytest.mark.parametrize("name", cases("forward.float32"))
def test_right_without_fullgraph(name: str) -> None:
    sweep.check(name, torch.float32, grad=False, samples=3, fullgraph=False)


def test_the_ledger_names_operators_that_exist() -> None:
    for mode, entries in LEDGER.items():
        assert mode in ("forward.float32", *OTHER_MODES)
        assert set(entries) <= set(cases(mode)), f"{mode}: {set(entries) - set(cases(mode))}"
        assert all(reason.strip() for reason in entries.values())
