"""`tpu-compile estimate`: time, memory, the largest batch and cost, from shapes alone."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch._subclasses.fake_tensor import is_fake

from tpu_compile.cli import main
from tpu_compile.cli.target import factory
from tpu_compile.stats import reset_stats, stats
from tpu_compile.targets.estimate import Estimator, Point
from tpu_compile.targets.workload import Load, Made, Workload, from_factory

MODELS = """
import torch
from torch import nn

def attend(batch=2):  # 1 GB of scores an example
    q = torch.zeros(batch, 4, 8192, 64, dtype=torch.bfloat16)
    return (lambda q: (q @ q.transpose(-1, -2)).softmax(-1) @ q), (q,)

def rows():
    return nn.Linear(256, 128), (torch.zeros(16, 256),)

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 128)
        self.head = nn.Linear(128, 512)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())

def classifier(batch=4):
    ids = torch.zeros(batch, 32, dtype=torch.long)
    return Classifier(), (ids, ids)

def own_step(batch=4):
    import tpu_compile

    model = nn.Linear(128, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tpu_compile.train_step(model, nn.functional.mse_loss, optimizer)
    return step, (torch.zeros(batch, 128), torch.zeros(batch, 512))

def huge():
    return nn.Linear(200_000, 200_000, dtype=torch.bfloat16), (torch.zeros(8, 200_000, dtype=torch.bfloat16),)

def broken():
    raise ValueError("my own mistake")
"""


@pytest.fixture(autouse=True)
def _needs_libtpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")


@pytest.fixture
def tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
        return done

    yield call
    sys.modules.pop("models", None)


def estimates(tpu: Callable[..., Result], *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(tpu("estimate", *arguments, "--json").stdout)["estimates"]
    return found


def test_a_chip_is_judged_and_the_answer_kept(tpu: Callable[..., Result]) -> None:
    arguments = "models.py:attend", "--target", "v5e", "--price", "v5e=1.20"
    (row,) = estimates(tpu, *arguments)
    asked, timed, largest = row["asked"], row["timed"], row["largest"]
    assert (asked["batch"], row["unit"], asked["fits"], timed) == (2, "examples", True, asked)
    assert asked["model_flops"] == 2 * 2 * 2 * 4 * 8192 * 8192 * 64 == asked["flops"]
    assert 0 < asked["roofline"] <= asked["seconds"] and 0 < asked["by_libtpu"] <= asked["seconds"]
    assert row["utilisation"] == pytest.approx(asked["model_flops"] / asked["seconds"] / 197e12)
    assert row["rate"] == pytest.approx(2 / asked["seconds"])
    assert row["price"]["million"] == pytest.approx(1e6 / row["rate"] * 1.20 / 3600)
    assert largest["fits"] and largest["batch"] > 2 and largest["needed"] <= asked["available"]
    assert largest["needed"] / largest["batch"] * (largest["batch"] + 2) > asked["available"], "not many more fit"
    reset_stats()
    assert estimates(tpu, *arguments) == [row] and stats()["xla_compiles"] == stats()["lowerings"] == 0
    shown = tpu("estimate", *arguments).stdout
    for words in ("v5e:1x1", "largest batch", "$/step", f"{largest['batch']}", "Nothing ran"):
        assert words in shown, shown


def test_chips_are_compiled_for_side_by_side(tpu: Callable[..., Result]) -> None:
    rows = estimates(tpu, "models.py:rows", "--target", "v5e,v6e,tpu7x,v5p", "--no-largest")
    assert [row["target"] for row in rows] == ["v5e:1x1", "v6e:1x1", "tpu7x:2x2x1", "v5p:2x2x1"], "in the order asked"
    assert all(row["asked"]["fits"] and row["asked"]["seconds"] > 0 for row in rows)
    assert stats()["xla_compiles"] == 4 and stats()["lowerings"] == 1


def test_a_training_step_is_forward_backward_and_optimizer(tpu: Callable[..., Result]) -> None:
    (plain,) = estimates(tpu, "models.py:classifier", "--target", "v5e", "--no-largest")
    (step,) = estimates(tpu, "models.py:classifier", "--target", "v5e", "--no-largest", "--train")
    assert plain["unit"] == step["unit"] == "tokens" and step["asked"]["items"] == 4 * 32
    assert step["asked"]["model_flops"] == 3 * plain["asked"]["model_flops"]
    state = 4 * 2 * 2 * 512 * 128  # parameters and the optimizer's two moments
    assert step["asked"]["needed"] > plain["asked"]["needed"] + state // 2
    assert step["largest"] is None and step["confirmed"] == "not looked for"


def test_a_train_step_of_the_users_own_is_taken_as_it_is(tpu: Callable[..., Result]) -> None:
    (row,) = estimates(tpu, "models.py:own_step", "--target", "v5e", "--no-largest")
    assert row["asked"]["batch"] == 4 and row["asked"]["fits"]
    assert row["asked"]["model_flops"] == 2 * 2 * 4 * 128 * 512, "forward, and the weight's gradient"


def test_a_factory_without_a_batch_is_resized_along_axis_0(tpu: Callable[..., Result]) -> None:
    (row,) = estimates(tpu, "models.py:rows", "--target", "v5e", "--no-largest", "--batch", "32")
    assert (row["asked"]["batch"], row["asked"]["model_flops"]) == (32, 2 * 32 * 256 * 128)


def test_what_fits_nowhere_is_a_result_with_its_size(tpu: Callable[..., Result]) -> None:
    (row,) = estimates(tpu, "models.py:huge", "--target", "v5e", "--batch", "1")
    assert row["timed"] is None and row["largest"] is None and "does not fit" in row["note"]
    assert row["asked"]["needed"] >= 8 * 10**10 > row["asked"]["available"]
    reset_stats()
    assert "short" in tpu("estimate", "models.py:huge", "--target", "v5e", "--batch", "1").stdout
    assert stats()["xla_compiles"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("models.py:broken",), 1, "my own mistake"),
        (("models.py:rows", "--target", "v7"), 2, "v7"),
        (("models.py:rows", "--price", "h100=2"), 2, "Chips: v4"),
        (("models.py:classifier", "--train", "--optimizer", "adamx", "--target", "v5e"), 2, "Adam"),
        (("models.py:nowhere",), 2, "nowhere"),
    ],
)
def test_wrong_commands_say_what_is_right(
    tpu: Callable[..., Result], arguments: tuple[str, ...], status: int, words: str
) -> None:
    assert words in tpu("estimate", *arguments, status=status).stderr


# ---- the search, on a chip made up: bytes needed are `fixed + each * batch`, and `few` below a batch of 8


class MadeUp(Workload):
    """A workload that nobody traces."""

    def load(self, batch: int | None) -> Load:
        program: Any = SimpleNamespace(name="made up")
        return Load(program, torch.fx.GraphModule({}, torch.fx.Graph()), batch or 1, batch or 1, "examples", 1)


def search(monkeypatch: pytest.MonkeyPatch, needed: Callable[[int], int], *, exact: bool = False) -> tuple[int, int]:
    """(the largest batch found, compiles)."""
    found, compiles = searched(monkeypatch, {"v5e:1x1": needed}, exact=exact)
    return found["v5e:1x1"], compiles["v5e:1x1"]


def searched(
    monkeypatch: pytest.MonkeyPatch, needed: dict[str, Callable[[int], int]], *, exact: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """For each chip the largest batch found, and compiles."""

    def measured(load: Load, target: str) -> Point:
        size = needed[target](load.batch)
        return Point(load.batch, load.batch, size, 1000, size <= 1000, seconds=1.0)

    for name in ("measured", "sized"):
        monkeypatch.setattr(f"tpu_compile.targets.estimate.{name}", measured)
    estimator = Estimator(MadeUp(lambda batch: Made(None, (), {}, batch or 1)), exact=exact, at_once=1)
    rows = estimator.estimate(list(needed))
    compiles = {name: sum(target == name for target, _ in estimator._points) for name in needed}
    return {row.target: row.largest.batch if row.largest else 0 for row in rows}, compiles


def test_a_line_is_found_in_three_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, lambda batch: 100 + 7 * batch) == (128, 3)


def test_no_chip_changes_what_is_found_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one's bytes stop growing where libtpu computes again what it does not keep."""
    lines: dict[str, Callable[[int], int]] = {
        "v5e:1x1": lambda batch: 100 + 7 * batch,
        "v6e:1x1": lambda batch: 50 + 9 * batch,
        "tpu7x:2x2x1": lambda batch: min(400 + 7 * batch, 900) + batch // 4,
    }
    alone = {name: searched(monkeypatch, {name: line})[0][name] for name, line in lines.items()}
    for order in itertools.permutations(lines):
        assert searched(monkeypatch, {name: lines[name] for name in order})[0] == alone


def test_a_line_that_starts_late_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, compiles = search(monkeypatch, lambda batch: 100 + 2 * batch + 5 * max(0, batch - 8))
    assert 128 <= batch <= 134 and compiles <= 6


def test_bisection_finds_the_last_example(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, lambda batch: 100 + batch * batch, exact=True)[0] == 30


def test_what_fits_only_once_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, lambda batch: 900 * batch) == (1, 2)


def test_no_weights_are_made(tpu: Callable[..., Result]) -> None:
    made = from_factory(factory("models.py:huge"))(None)
    assert all(map(is_fake, (*made.model.parameters(), *made.args))), "shapes without numbers"
