"""The command line itself: what it knows without torch, how it says what is wrong, and with which exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import tpu_compile
from tpu_compile.cli import COMMANDS, doctor, main, progress, tables, target
from tpu_compile.config import KNOBS
from tpu_compile.stats import event


def tpu(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, arguments)


def test_help_and_errors_need_neither_torch_nor_jaxlib_nor_rich(run_python: Any) -> None:
    done = run_python("""
        import sys
        from click.testing import CliRunner
        from tpu_compile.cli import main
        for arguments in (["--help"], ["--version"], ["inspect", "--help"], ["compare", "--help"], ["doctor", "--help"],
                          ["ops", "--help"], ["cache", "--help"], ["config"], ["inspect", "no.py:factory"]):
            CliRunner().invoke(main, arguments)
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "jaxlib", "jax", "numpy", "rich"}))
        """)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command() -> None:
    shown = tpu("--help").stdout
    assert all(f"  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_offers_a_traceback(name: str) -> None:
    done = tpu(name, "--help")
    assert done.exit_code == 0 and "--traceback" in done.stdout


def test_version() -> None:
    assert tpu_compile.__version__ in tpu("--version").stdout


def test_an_unknown_command_names_the_nearest() -> None:
    done = tpu("inspct")
    assert (done.exit_code, "Did you mean 'inspect'?" in done.stderr) == (2, True)


# ---- config


def test_config_lists_every_knob_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_COMPILE_CACHE_MAX_SIZE", "1GB")
    listed = json.loads(tpu("config", "--json").stdout)
    assert set(listed) == set(KNOBS)
    assert listed["cache_max_size"] == {"value": 2**30, "origin": "TPU_COMPILE_CACHE_MAX_SIZE"}
    assert listed["excess_precision"] == {"value": False, "origin": "default"}


def test_config_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_COMPILE_CACHE_KEY", "open sesame")
    shown = tpu("config").stdout + tpu("config", "--json").stdout
    assert "(secret)" in shown and "sesame" not in shown


def test_a_malformed_variable_is_a_wrong_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_COMPILE_CACHE", "perhaps")
    done = tpu("config")
    assert done.exit_code == 2 and "TPU_COMPILE_CACHE='perhaps': expected 1 or 0" in done.stderr


# ---- targets


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


FACTORIES = """
import torch

def good():
    return torch.nn.Linear(2, 1), [torch.ones(3, 2)], {}

def drawn():
    return torch.nn.Linear(2, 1), (torch.randn(3, 2),)

def bare():
    return torch.nn.Linear(2, 1), torch.ones(3, 2)

def nothing():
    return None

def raises():
    raise ValueError("no weights today")

number = 3
"""


def test_a_target_is_a_file_or_a_module(here: Path) -> None:
    (here / "zoo.py").write_text(FACTORIES)
    for name in ("zoo.py:good", "zoo:good"):
        found = target.load(name)
        assert (type(found.model).__name__, len(found.args), found.kwargs) == ("Linear", 1, {})


def test_a_factory_makes_the_same_model_each_time(here: Path) -> None:
    (here / "zoo.py").write_text(FACTORIES)
    first, second = target.load("zoo.py:drawn"), target.load("zoo.py:drawn")
    assert first.args[0].equal(second.args[0]) and first.model.weight.equal(second.model.weight)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zoo.py", "is no target"),
        ("zoo.py:", "is no target"),
        ("gone.py:good", "There is no file gone.py"),
        ("gone.pt2", "There is no file gone.pt2"),
        ("gone:good", "There is no module 'gone'"),
        ("zoo.py:goood", "Did you mean 'good'?"),
        ("zoo.py:number", "is a int, not a function"),
        ("zoo.py:bare", r"returned \(Linear, Tensor\); args must be a tuple"),
        ("zoo.py:nothing", "returned NoneType; it must return"),
    ],
)
def test_a_bad_target_says_what_is_wrong(here: Path, text: str, words: str) -> None:
    (here / "zoo.py").write_text(FACTORIES)
    with pytest.raises(target.BadTarget, match=words) as caught:
        target.load(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zoo.py:raises", r"zoo.py:raises\(\) raised ValueError: no weights today\n  at .*zoo.py:\d+ in raises"),
        ("broken.py:f", r"importing broken.py raised SyntaxError"),
        ("needs.py:f", r"importing needs.py raised ModuleNotFoundError: No module named 'no_such_thing'"),
        ("bad.pt2", "loading bad.pt2 raised"),
    ],
)
def test_what_the_users_code_raises_is_said_with_its_line(here: Path, text: str, words: str) -> None:
    (here / "zoo.py").write_text(FACTORIES)
    (here / "broken.py").write_text("def f(:\n")
    (here / "needs.py").write_text("import no_such_thing\n")
    (here / "bad.pt2").write_bytes(b"not a zip file")
    with pytest.raises(target.FactoryFailed, match=words) as caught:
        target.load(text)
    assert caught.value.exit_code == 1


def test_traceback_shows_where_the_users_code_raised(here: Path) -> None:
    (here / "zoo.py").write_text(FACTORIES)
    plain, whole = tpu("inspect", "zoo.py:raises"), tpu("inspect", "zoo.py:raises", "--traceback")
    assert plain.exit_code == 1 and "no weights today" in plain.stderr and "Traceback" not in plain.stderr
    assert isinstance(whole.exception, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "zoo.py:good", "--option", "cache"), "write name=value"),
        (("inspect", "zoo.py:good", "--stage", "llvm"), "'llvm' is not one of"),
        (("compare", "zoo.py:good", "--dtype", "float33"), "'float33' is none of float64, float32"),
        (("compare", "zoo.py:good", "--calls", "0"), "x>=1"),
        (("ops", "--tier", "magic"), "'magic' is not one of"),
    ],
)
def test_a_wrong_option_is_a_wrong_command(arguments: tuple[str, ...], words: str) -> None:
    done = tpu(*arguments)
    assert done.exit_code == 2 and words in done.stderr


# ---- errors


@click.command()
@click.option("--kind", default="")
def failing(kind: str) -> None:
    """Raises what it is told to."""
    raise {
        "ours": tpu_compile.LoweringError("no rule"),
        "usage": tpu_compile.ConfigError("no option"),
        "fault": KeyError("x"),
    }[kind]


@pytest.mark.parametrize(("kind", "status"), [("ours", 1), ("usage", 2)])
def test_our_errors_are_a_message_and_an_exit_status(monkeypatch: pytest.MonkeyPatch, kind: str, status: int) -> None:
    monkeypatch.setitem(COMMANDS, "failing", ("failing:failing", ""))
    monkeypatch.setitem(sys.modules, "tpu_compile.cli.failing", sys.modules[__name__])
    done = tpu("failing", "--kind", kind)
    assert (done.exit_code, done.stderr) == (status, f"Error: no {'rule' if kind == 'ours' else 'option'}\n")
    assert isinstance(tpu("failing", "--kind", kind, "--traceback").exception, tpu_compile.TpuCompileError)


def test_a_fault_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "failing", ("failing:failing", ""))
    monkeypatch.setitem(sys.modules, "tpu_compile.cli.failing", sys.modules[__name__])
    assert isinstance(tpu("failing", "--kind", "fault").exception, KeyError)


# ---- figures and progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.5 kB"),
        (999_600, "1.0 MB"),
        (123_456_789, "123 MB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert tables.size(count) == text


def test_counts() -> None:
    assert [tables.number(n) for n in (7, 1000, 22_713_216, 2.5e12)] == ["7", "1 k", "22.7 M", "2.5 T"]


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    tables.table(("name", "n"), [("a", "10"), ("long", "1")], right=frozenset({1}))
    assert capsys.readouterr().out == "name   n\na     10\nlong   1\n"


@pytest.mark.parametrize(
    ("installed", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.1", ">=2.13,<2.14", False),
        ("2.12.9", ">=2.13,<2.14", False),
        ("0.10.2", ">=0.10.2,<0.11", True),
        ("0.9.9", ">=0.10.2,<0.11", False),
        ("20261001", ">=20261001", True),
        ("1.2", "", True),
        ("0.0.1", "==0.0.1", True),
        ("0.7.0", ">=0.5,!=0.7.0", False),
        ("0.6.0", ">=0.5,!=0.7.0", True),
    ],
)
def test_doctor_knows_which_releases_fit(installed: str, wanted: str, fits: bool) -> None:
    assert doctor.satisfies(installed, wanted) is fits


def test_a_log_hears_of_slow_stages_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("working"):
        for seconds in (0.1, 12.34):
            event("stage/begin", stage="xla", program="net_forward")
            event("stage/end", stage="xla", program="net_forward", seconds=seconds)
        print("the user's own output")
    event("stage/end", stage="xla", program="later", seconds=99.0)
    shown = capsys.readouterr()
    assert shown.err == "tpu-compile: XLA compiles net_forward took 12.3 s\nthe user's own output\n"
    assert shown.out == ""


def test_a_terminal_sees_the_stage_at_work_and_what_came_from_the_cache() -> None:
    watch = progress._Terminal("tracing")
    (task,) = watch._display.tasks
    watch.event("stage/begin", {"stage": "xla", "program": "net_forward"})
    assert task.description == "XLA compiles net_forward"
    watch.event("stage/end", {"stage": "xla", "program": "net_forward", "seconds": 1.0})
    watch.event("stage/end", {"stage": "load", "program": "net_backward", "seconds": 0.1})
    assert task.description == "tracing  (1 compiled, 1 from the cache)"
