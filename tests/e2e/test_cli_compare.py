"""`tpu-compile compare` finds what is wrong: here rules are made wrong on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result
from jaxlib.mlir.dialects import stablehlo
from torch import nn

from tpu_compile.cli import main
from tpu_compile.comparing import reproducer
from tpu_compile.comparing.bisection import bisect
from tpu_compile.comparing.runs import Subject
from tpu_compile.comparing.verdict import compare
from tpu_compile.lowering import hlo
from tpu_compile.lowering.registry import registry

aten = torch.ops.aten

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x.add_(1)
        h = torch.tanh(self.norm(self.conv(x)))
        return {"pooled": h.mean((2, 3)), "logits": self.head(h.mean((2, 3)))}

def net():
    return Net(), (torch.randn(2, 3, 6, 6),)

def dropout():
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2)), (torch.randn(8, 4),)

def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)), (torch.randn(3, 4),)
"""

WRONG = """
from jaxlib.mlir.dialects import stablehlo
import torch
from tpu_compile.lowering import hlo
from tpu_compile.lowering.registry import registry

right = registry.get(torch.ops.aten.tanh.default).function

def wrong(ctx, x):
    y = right(ctx, x)
    return stablehlo.multiply(y, hlo.full_like(y, 1.01))

registry.register(torch.ops.aten.tanh.default, wrong, replace=True)
from models import net
"""


@pytest.fixture
def tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run a command in this process, in a folder that holds models.py."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
        return done

    yield call
    sys.modules.pop("models", None)


@pytest.fixture
def spoil() -> Iterator[Callable[..., None]]:
    """``spoil(op, change)``: the rule of ``op`` gives ``change(value, operand, ctx)`` until the test ends."""
    registry.load()
    replaced = {}

    def replace(op: Any, change: Callable[[Any, Any, Any], Any]) -> None:
        rule = replaced.setdefault(op, registry.get(op))

        def wrong(ctx: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return change(rule.function(ctx, x, *args, **kwargs), x, ctx)

        registry.register(op, wrong, replace=True)

    yield replace
    for op, rule in replaced.items():
        registry.register(op, rule.function, rule.tier, replace=True)


def scaled(value: Any, *_: Any) -> Any:
    return stablehlo.multiply(value, hlo.full_like(value, 1.01))


def is_a_sum(value: Any) -> bool:
    return getattr(value.owner, "name", "") == "stablehlo.add"  # the owner of an argument is a block, without a name


# ---- what agrees


def test_results_gradients_and_state_of_several_calls_agree(tpu: Callable[..., Result], tmp_path: Path) -> None:
    done = tpu("compare", "models.py:net", "--grad", "--calls", "2", "--json", "--junit", "out/report.xml")
    found = json.loads(done.stdout)
    (comparison,) = found["comparisons"]
    names = {tensor["name"] for tensor in comparison["tensors"]}
    assert found["agrees"] and comparison["reference"] == "eager" and all(t["agrees"] for t in comparison["tensors"])
    for name in ("result['logits']", "argument args[0]", "buffer norm.running_mean", "gradient of conv.weight"):
        assert {f"call 1: {name}", f"call 2: {name}"} <= names
    suite = ElementTree.parse(tmp_path / "out" / "report.xml").getroot().find("testsuite")
    assert suite is not None and suite.get("tests") == str(len(names)) and suite.get("failures") == "0"


def test_each_dtype_is_a_run_of_its_own(tpu: Callable[..., Result]) -> None:
    shown = tpu("compare", "models.py:dropout", "--dtype", "float32,bfloat16").stdout
    assert "float32: all 2 agree with" in shown and "bfloat16: all 2 agree with" in shown and "bfloat16[8, 2]" in shown


def test_random_numbers_are_the_same_on_both_sides(tpu: Callable[..., Result]) -> None:
    found = json.loads(tpu("compare", "models.py:dropout", "--grad", "--calls", "3", "--json").stdout)
    (comparison,) = found["comparisons"]
    assert found["agrees"] and "random numbers" in comparison["reference"] and len(comparison["tensors"]) == 3 * 6


def test_every_tensor_is_listed_on_request(tpu: Callable[..., Result]) -> None:
    short, long = (tpu("compare", "models.py:net", "--calls", "3", *more).stdout for more in ((), ("--all",)))
    assert "(--all lists them)" in short and "--all" not in long and "call 3: buffer norm.running_mean" in long


def test_the_other_lowering_says_the_same_until_a_rule_is_wrong(
    tpu: Callable[..., Result], spoil: Callable[..., None]
) -> None:
    command = ("compare", "models.py:plain", "--grad", "--against", "torch-mlir", "--json")
    (comparison,) = json.loads(tpu(*command).stdout)["comparisons"]
    names = {tensor["name"] for tensor in comparison["tensors"]}
    assert comparison["reference"] == "lowered by torch-mlir" and "gradient of 0.weight" in names
    spoil(aten.tanh.default, scaled)
    (comparison,) = json.loads(tpu(*command, status=1).stdout)["comparisons"]
    assert not {t["name"]: t for t in comparison["tensors"]}["result"]["agrees"]


# ---- what does not


def test_a_wrong_rule_is_found_and_its_reproducer_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "wrong.py").write_text(WRONG)
    tool = str(Path(sys.executable).with_name("tpu-compile"))

    def process(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    done = process(
        tool, "compare", "wrong.py:net", "--grad", "--bisect", "--json", "--junit", "report.xml", "--out", "found"
    )
    assert done.returncode == 1, done.stderr
    (comparison,) = json.loads(done.stdout)["comparisons"]
    culprit = comparison["first_departure"]
    line = 1 + MODELS.splitlines().index("        h = torch.tanh(self.norm(self.conv(x)))")
    assert (culprit["op"], culprit["ops"], culprit["fails_alone"]) == ("aten.tanh.default", 1, True)
    assert f"models.py:{line} " in culprit["where"] and "worst at" in culprit["problem"]
    failed = {case.get("name") for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase") if len(case)}
    assert "result['logits']" in failed and "buffer norm.running_mean" not in failed

    program = culprit["reproducer"]
    with_rule = process(sys.executable, "-c", f"import wrong, runpy; runpy.run_path({program!r})")
    assert with_rule.returncode == 1 and "AssertionError: Tensor-likes are not close" in with_rule.stderr
    without = process(sys.executable, program)
    assert (without.returncode, without.stdout) == (0, "compiled and eager agree\n"), without.stderr
    assert len((tmp_path / program).read_text().splitlines()) < 30 and not culprit["inputs"]


def net() -> Subject:
    torch.manual_seed(0)
    return Subject(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), (torch.randn(3, 4),), {})


def test_a_wrong_gradient_rule_is_found_in_the_backward_graph(spoil: Callable[..., None]) -> None:
    spoil(aten.tanh_backward.default, scaled)
    assert compare(net()).departing == ()
    assert {d.name for d in compare(net(), grad=True).departing} == {"gradient of 0.weight", "gradient of 0.bias"}
    culprit = bisect(net(), grad=True)
    assert culprit is not None and (culprit.op, culprit.name) == ("aten.tanh_backward.default", "Sequential_backward")


def test_nothing_departs_where_nothing_is_wrong() -> None:
    assert bisect(net(), grad=True) is None


def test_a_fault_that_needs_its_neighbour_comes_with_it(spoil: Callable[..., None]) -> None:
    def after_a_sum(value: Any, operand: Any, _: Any) -> Any:
        return scaled(value) if is_a_sum(operand) else value

    spoil(aten.sin.default, after_a_sum)
    subject = Subject(lambda x: torch.sin(torch.exp(x) + x.cos()) * 2, (torch.randn(16),), {})
    culprit = bisect(subject)
    assert culprit is not None and (culprit.op, culprit.ops) == ("aten.sin.default", 2)
    assert "aten.add.Tensor" in culprit.graph.print_readable(print_output=False)


def test_a_fault_that_hides_from_who_looks_is_found_by_prefixes(spoil: Callable[..., None]) -> None:
    def if_nobody_looks(value: Any, operand: Any, ctx: Any) -> Any:
        (end,) = ctx.walk.graph_module.graph.find_nodes(op="output")
        return scaled(value) if is_a_sum(operand) and len(end.args[0]) == 1 else value

    spoil(aten.sin.default, if_nobody_looks)
    culprit = bisect(Subject(lambda x: (torch.sin(torch.exp(x) + 1) + 3).sqrt(), (torch.randn(16),), {}))
    assert culprit is not None and (culprit.op, culprit.ops) == ("aten.sin.default", 2)


def test_a_fault_of_rare_values_keeps_the_inputs_in_a_file(spoil: Callable[..., None], tmp_path: Path) -> None:
    def large_ones(value: Any, operand: Any, _: Any) -> Any:
        return stablehlo.select(hlo.compare(operand, hlo.full_like(operand, 1000), "GT"), scaled(value), value)

    spoil(aten.sqrt.default, large_ones)
    subject = Subject(torch.sqrt, (torch.linspace(1, 2000, 64).view(8, 8).t(),), {})
    culprit = bisect(subject)
    assert culprit is not None
    written = reproducer.write(culprit, tmp_path, "a test")
    assert written.fails and written.inputs is not None
    (kept,) = torch.load(written.inputs)
    assert kept.stride() == (1, 8) and kept.equal(subject.args[0])


def test_several_results_integers_and_constants_are_written_down(spoil: Callable[..., None], tmp_path: Path) -> None:
    def second_wrong(values: Any, *_: Any) -> Any:
        return values[0], stablehlo.add(values[1], hlo.full_like(values[1], 1))

    spoil(aten.max.dim, second_wrong)
    culprit = bisect(Subject(lambda x: torch.max(x + torch.tensor([1.0, 2.0, 3.0]), dim=-1), (torch.randn(4, 3),), {}))
    assert culprit is not None and culprit.op == "aten.max.dim" and "4 of 4 elements" in culprit.difference.problem
    assert reproducer.write(culprit, tmp_path, "a test").fails


def test_dynamic_sizes_and_random_ops_do_not_stop_the_search(spoil: Callable[..., None], tmp_path: Path) -> None:
    spoil(aten.tanh.default, scaled)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh())
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    culprit = bisect(Subject(model, (x,), {}))
    assert culprit is not None and (culprit.op, culprit.ops) == ("aten.tanh.default", 1)
    assert reproducer.write(culprit, tmp_path, "a test").fails


def test_a_compile_that_fails_is_a_difference_and_the_next_dtype_goes_on(
    tpu: Callable[..., Result], spoil: Callable[..., None]
) -> None:
    spoil(aten.tanh.default, lambda value, *_: hlo.convert(value, torch.float64))
    found = json.loads(tpu("compare", "models.py:net", "--dtype", "float32,float64", "--json", status=1).stdout)
    first, second = found["comparisons"]
    (failure,) = first["tensors"]
    assert failure["name"] == "compilation" and failure["problem"].startswith("RuleMismatch: the rule of aten.tanh")
    assert all(tensor["agrees"] for tensor in second["tensors"])


def test_state_that_only_one_side_writes_departs(spoil: Callable[..., None]) -> None:
    spoil(aten.copy_.default, lambda value, destination, _: destination)  # writes the old contents back
    model = nn.BatchNorm1d(3)
    departing = {d.name for d in compare(Subject(model, (torch.randn(8, 3),), {})).departing}
    assert departing == {"buffer running_mean", "buffer running_var", "buffer num_batches_tracked"}
