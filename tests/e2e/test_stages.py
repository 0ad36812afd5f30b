"""trace → lower → compile: the stages show what the backend would make, and run it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpu_compile
from tpu_compile import stages
from tpu_compile.compiler import record


@dataclasses.dataclass
class Result:
    values: dict[str, torch.Tensor]
    nothing: None
    number: int


class Stateful(nn.Module):
    """Writes to buffers and to its argument, and returns a dataclass with a view of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, flag: bool = True) -> Result:
        y = self.norm(self.linear(x))
        x.add_(1)
        return Result({"y": y if flag else -y, "transposed": x.t()}, None, 3)


@pytest.fixture
def compiled() -> stages.Compiled:
    return tpu_compile.trace(torch.sin, torch.ones(3)).lower().compile()


def test_a_call_gives_what_eager_gives_and_writes_what_eager_writes() -> None:
    model = Stateful()
    eager = copy.deepcopy(model)
    compiled = tpu_compile.trace(model, torch.randn(8, 4)).lower().compile()
    assert model.norm.num_batches_tracked == 0, "tracing ran the model"
    for _ in range(2):
        x = torch.randn(8, 4)
        theirs = x.clone()
        got, want = compiled(x), eager(theirs)
        assert isinstance(got, Result) and (got.nothing, got.number) == (None, 3)
        torch.testing.assert_close(got.values, want.values)
        torch.testing.assert_close(x, theirs)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
        assert got.values["transposed"].data_ptr() == x.data_ptr(), "a view of the argument became a copy"
        assert not got.values["y"].requires_grad


def test_the_stages_are_the_backends_own_program() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU()).eval(), torch.randn(2, 4)
    built = tpu_compile.trace(model, x).lower().compile()
    with record() as seen, torch.no_grad():
        torch.compile(model, backend="tpu", fullgraph=True)(x)
    (lowering,) = seen.lowerings
    assert lowering.compiled.key.digest == built.built.key.digest
    assert stages.recorded(lowering).as_text() == built.as_text()
    assert tpu_compile.stats()["xla_compiles"] == 1


def test_each_stage_has_the_text_of_all_before_it() -> None:
    traced = tpu_compile.trace(lambda x: torch.sin(x) + 1, torch.ones(3))
    lowered = traced.lower()
    compiled = lowered.compile()
    assert "aten.sin.default" in traced.as_text() and "test_stages.py" in traced.as_text()
    assert "stablehlo.sine" in lowered.as_text()
    assert lowered.as_text("hlo").startswith("HloModule") and "sine(" in lowered.as_text("hlo")
    assert compiled.as_text().startswith("HloModule") and "fused" in compiled.as_text()
    for dialect in ("stablehlo", "fx"):
        assert compiled.as_text(dialect) == lowered.as_text(dialect)


@pytest.mark.parametrize("dialect", ["hlo", "stablehloo"])
def test_an_unknown_dialect_names_the_nearest(dialect: str) -> None:
    traced = tpu_compile.trace(torch.sin, torch.ones(3))
    stage: Any = traced if dialect == "hlo" else traced.lower()
    with pytest.raises(tpu_compile.ConfigError, match="Known: fx" if dialect == "hlo" else "Did you mean 'stablehlo'"):
        stage.as_text(dialect)


def test_analyses_count_what_the_program_does() -> None:
    lowered = tpu_compile.trace(torch.mm, torch.ones(8, 16), torch.ones(16, 4)).lower()
    compiled = lowered.compile()
    assert lowered.cost_analysis()["flops"] == 2 * 8 * 16 * 4
    assert compiled.cost_analysis()["bytes accessed"] > 0
    memory = compiled.memory_analysis()
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (4 * (8 * 16 + 16 * 4), 4 * 8 * 4)


def test_ops_cost_what_their_shapes_say_and_know_their_lines() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.t() @ w).sum()

    compiled = tpu_compile.trace(fn, torch.ones(8, 16), torch.ones(8, 4)).lower().compile()
    found = {cost.op: cost for cost in compiled.node_costs()}
    assert list(found) == ["aten.mm.default", "aten.relu.default", "aten.sum.default"], "largest first, without views"
    product = found["aten.mm.default"]
    assert (product.flops, product.bytes) == (2 * 16 * 8 * 4, 4 * (8 * 16 + 8 * 4 + 16 * 4))
    assert found["aten.sum.default"].flops == 16 * 4
    assert product.where.endswith(" return torch.relu(x.t() @ w).sum()") and "test_stages.py:" in product.where


def test_ops_that_no_line_of_the_users_calls_are_placed_by_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU()))
    compiled = tpu_compile.trace(model, torch.ones(2, 4)).lower().compile()
    assert [cost.where for cost in compiled.node_costs()] == ["0 (Linear)", "1.0 (GELU)"]


def test_arguments_have_the_users_names() -> None:
    def fn(inputs: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
        return model(inputs["x"])

    compiled = tpu_compile.trace(fn, {"x": torch.ones(8, 4)}, nn.Sequential(nn.BatchNorm1d(4))).lower().compile()
    names = set(compiled.arguments)
    assert {name.replace('"', "'").rpartition("[0]")[2] for name in names if "'x'" in name} == {"['x']"}
    assert {name.rpartition(".0.")[2] for name in names if ".0." in name} >= {"weight", "bias", "running_mean"}
    assert all("CPU tensor" in why for why in compiled.overwritten.values()) and len(compiled.overwritten) == 3


def test_donation_is_told_with_its_reason() -> None:
    compiled = tpu_compile.trace(nn.BatchNorm1d(4), torch.ones(8, 4)).lower().compile()
    index = compiled.arguments.index(next(iter(compiled.overwritten)))
    program = dataclasses.replace(compiled.program, donated=(index,))
    donated = dataclasses.replace(compiled, built=dataclasses.replace(compiled.built, program=program)).overwritten
    assert list(donated.values()).count("donated") == 1
    assert all(why.startswith("not donated: the memory of a CPU tensor") for why in compiled.overwritten.values())


def test_attributes_describe_the_arguments() -> None:
    lowered = tpu_compile.trace(Stateful(), torch.randn(8, 4), flag=False).lower()
    spec, flag = lowered.args_info
    assert (str(spec), spec.stride, flag) == ("f32[8,4]", (4, 1), False)
    assert lowered.in_tree == torch.utils._pytree.tree_structure(((0,), {"flag": 0}))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.ones(9, 4),), {}, r"args\[0\] = f32\[8,4\], called with f32\[9,4\]"),
        ((torch.ones(8, 4).double(),), {}, r"args\[0\] = f32\[8,4\], called with f64\[8,4\]"),
        ((torch.ones(8, 4),), {"flag": False}, "another number, names or nesting"),
    ],
)
def test_other_arguments_than_the_traced_ones_are_a_bad_call(args: Any, kwargs: Any, words: str) -> None:
    compiled = tpu_compile.trace(Stateful(), torch.randn(8, 4)).lower().compile()
    with pytest.raises(tpu_compile.BadCall, match=words):
        compiled(*args, **kwargs)
    assert compiled(torch.ones(8, 4)).number == 3, "a bad call spoiled the good ones"


def test_changed_state_is_a_bad_call() -> None:
    model = nn.Dropout(0.5)
    compiled = tpu_compile.trace(model, torch.ones(3)).lower().compile()
    model.eval()
    with pytest.raises(tpu_compile.BadCall, match="has changed"):
        compiled(torch.ones(3))


def test_dropout_draws_new_numbers_that_the_seed_governs() -> None:
    compiled = tpu_compile.trace(nn.Dropout(0.5), torch.ones(64)).lower().compile()
    torch.manual_seed(3)
    first, second = compiled(torch.ones(64)), compiled(torch.ones(64))
    torch.manual_seed(3)
    assert torch.equal(compiled(torch.ones(64)), first) and not torch.equal(first, second)


def test_many_traces_of_one_class_meet_no_recompile_limit() -> None:
    model = nn.Linear(3, 2)
    shapes = {tuple(tpu_compile.trace(model, torch.ones(n, 3)).args_info[0].shape) for n in range(1, 13)}
    assert len(shapes) == 12


def test_a_function_without_tensor_ops_still_runs() -> None:
    x = torch.randn(3)
    assert tpu_compile.trace(lambda x: x, x).lower().compile()(x) is x


def test_nothing_to_compile_is_said() -> None:
    with pytest.raises(tpu_compile.LoweringError, match="runs no tensor operation"):
        tpu_compile.trace(lambda n: n + 1, 3)


def test_gradients_inside_are_refused() -> None:
    model = nn.Linear(3, 2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return model(x)

    with pytest.raises(tpu_compile.LoweringError, match="inference only"):
        tpu_compile.trace(fn, torch.ones(3))


def test_what_nothing_lowers_is_listed_with_its_line() -> None:
    traced = tpu_compile.trace(lambda x: torch.nonzero(x), torch.ones(3))
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"aten.nonzero(.|\n)*test_stages.py"):
        traced.lower()


# ---- exported programs


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[tuple[nn.Module, Path]]:
    """A saved program whose batch is dynamic, and the module it was made of."""
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (torch.randn(8, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    yield model, tmp_path / "model.pt2"


def test_an_exported_file_enters_at_the_same_place_with_its_dynamic_sizes(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    compiled = tpu_compile.trace(path).lower().compile()
    for batch in (8, 5, 33, 5):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(compiled(x), model(x).detach())
    assert tpu_compile.stats()["xla_compiles"] == 3


def test_an_exported_program_counts_its_arguments(exported: tuple[nn.Module, Path]) -> None:
    with pytest.raises(tpu_compile.BadCall, match="takes 1 arguments, got 2"):
        tpu_compile.trace(torch.export.load(exported[1]), torch.ones(8, 4), torch.ones(1))


# ---- options and targets


def test_options_reach_xla_and_the_key() -> None:
    lowered = tpu_compile.trace(torch.sin, torch.ones(3)).lower()
    plain, other = lowered.compile(), lowered.compile({"excess_precision": True})
    changed = {label for label, value in plain.built.key.parts if dict(other.built.key.parts)[label] != value}
    assert changed == {"excess_precision"}
    assert (plain.origin, other.origin, lowered.compile().origin) == ("xla", "xla", "memory")
    with pytest.raises(tpu_compile.ConfigError, match="excess_precision"):
        lowered.compile({"exces_precision": True})


def test_a_tpu_that_is_not_there_is_a_target() -> None:
    compiled = tpu_compile.trace(torch.mm, torch.ones(8, 16), torch.ones(16, 4)).lower().compile(target="v5e:1x1")
    assert "HloModule" in compiled.as_text() and compiled.memory_analysis().peak_memory_in_bytes > 0
    assert dict(compiled.built.key.parts)["topology"] == "v5e:1x1"
    with pytest.raises(tpu_compile.BadCall, match="it can be inspected, not called"):
        compiled(torch.ones(8, 16), torch.ones(16, 4))


def test_a_recorded_stage_is_not_called(compiled: stages.Compiled) -> None:
    with pytest.raises(tpu_compile.BadCall, match="belongs to a function"):
        dataclasses.replace(compiled, run=None, traced=None)(torch.ones(3))
