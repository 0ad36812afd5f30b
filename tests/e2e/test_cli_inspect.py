"""`tpu-compile inspect`, `ops` and `doctor` on real models: what they say is what the backend did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from tpu_compile import tiers
from tpu_compile.cli import main
from tpu_compile.compiler import runtime

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 4)

    def forward(self, x, scale=1.0):
        h = torch.relu(self.norm(self.first(x)))
        return self.second(h) * scale

class Breaking(Net):
    def forward(self, x):
        h = self.first(x)
        print("the user's own output")
        return self.second(torch.relu(h))

class Sparse(Net):
    def forward(self, x):
        h = self.first(x)
        return self.second(torch.special.bessel_y1(h).nan_to_num() + h)

def net():
    return Net(), (torch.randn(8, 16),), {"scale": 2.0}

def breaking():
    return Breaking(), (torch.randn(8, 16),)

def sparse():
    return Sparse(), (torch.randn(8, 16),)

def frozen():
    return Net().requires_grad_(False), (torch.randn(8, 16),)
"""


@pytest.fixture
def tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run a command in this process, in a folder that holds models.py."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    runtime.forget()  # executables of other tests: this cache is empty

    def call(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
        return done

    yield call
    sys.modules.pop("models", None)


def described(tpu: Callable[..., Result], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tpu("inspect", *arguments, "--json").stdout)
    return found


def test_the_summary_says_what_the_program_is(tpu: Callable[..., Result]) -> None:
    found = described(tpu, "models.py:net")
    (graph,) = found["graphs"]
    assert found["model"]["parameters"] == 16 * 32 + 32 + 2 * 32 + 32 * 4 + 4
    assert graph["arguments"]["self.first.weight"] == "f32[32,16]" and graph["arguments"]["x"] == "f32[8,16]"
    assert graph["results"][0] == "f32[8,4]"
    assert set(graph["overwritten"]) == {
        f"self.norm.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")
    }
    assert all("not donated" in why for why in graph["overwritten"].values())
    assert sum(graph["ops"].values()) > 5 and set(graph["ops"]) == {"native"}
    assert graph["memory_analysis"]["argument_size_in_bytes"] >= 4 * found["model"]["parameters"]
    assert graph["origin"] == "xla" and len(graph["key"]["digest"]) == 64 and graph["key"]["jaxlib"]
    assert (found["graph_breaks"], found["on_the_cpu"], found["stats"]["xla_compiles"]) == ([], [], 1)
    largest = graph["largest_ops"][0]
    assert (largest["op"], largest["flops"]) == ("aten.addmm.default", 2 * 8 * 16 * 32)
    assert largest["where"].startswith("models.py:") and "self.first(x)" in largest["where"]


def test_the_summary_for_people_holds_the_same(tpu: Callable[..., Result]) -> None:
    shown = tpu("inspect", "models.py:net", "--top", "2").stdout
    for words in (
        "Net, 740 parameters",
        "graph 1 of 1    Net_inference",
        "overwrites    self.norm.running_mean",
        "in every key",
    ):
        assert words in shown, shown
    assert shown.count("aten.") == 2, "--top"


def test_a_second_process_gets_it_from_the_cache(tpu: Callable[..., Result], tmp_path: Path) -> None:
    tpu("inspect", "models.py:net")
    command = [Path(sys.executable).with_name("tpu-compile"), "inspect", "models:net", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert (found["graphs"][0]["origin"], found["stats"]["xla_compiles"]) == ("disk", 0)


def test_training_adds_the_forward_and_the_backward_graph(tpu: Callable[..., Result]) -> None:
    found = described(tpu, "models.py:net", "--grad")
    kinds = [graph["name"].rpartition("_")[2] for graph in found["graphs"]]
    assert kinds == ["inference", "forward", "backward"]
    assert "gradient of result 0" in found["graphs"][2]["arguments"]


def test_no_gradient_to_inspect_is_a_wrong_command(tpu: Callable[..., Result]) -> None:
    assert (
        "nothing in the model's result requires a gradient"
        in tpu("inspect", "models.py:frozen", "--grad", status=2).stderr
    )


@pytest.mark.parametrize(
    ("stage", "words"), [("fx", "aten.addmm"), ("stablehlo", "stablehlo.dot_general"), ("hlo", "HloModule")]
)
def test_each_stage_is_printed(tpu: Callable[..., Result], stage: str, words: str) -> None:
    shown = tpu("inspect", "models.py:net", "--stage", stage).stdout
    assert shown.splitlines()[0].endswith("graph 1 of 1: Net_inference") and words in shown


def test_every_stage_of_every_graph_is_written(tpu: Callable[..., Result], tmp_path: Path) -> None:
    found = described(tpu, "models.py:net", "--grad", "--out", "stages")
    written = sorted(path.name.partition(".")[2] for path in (tmp_path / "stages").iterdir())
    assert written == sorted(["fx.py", "hlo.txt", "key.json", "stablehlo.mlir"] * 3)
    assert sorted(found["files"]) == sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "stages").iterdir())


def test_graph_breaks_are_listed_with_their_lines_and_output_stays_apart(tpu: Callable[..., Result]) -> None:
    done = tpu("inspect", "models.py:breaking", "--json")
    found = json.loads(done.stdout)
    (reason,) = found["graph_breaks"]
    line = 1 + MODELS.splitlines().index('        print("the user\'s own output")')
    assert f"models.py:{line}: " in reason and len(found["graphs"]) == 2
    assert "the user's own output" in done.stderr


def test_what_runs_on_the_cpu_is_listed_with_its_line(tpu: Callable[..., Result]) -> None:
    eager = tiers.tier_of(torch.ops.aten.special_bessel_y1.default).tier
    found = described(tpu, "models.py:sparse")
    assert [gap["op"] for gap in found["on_the_cpu"]] == ["aten.special_bessel_y1.default"] * (eager == "eager")
    assert all("models.py" in gap["where"] for gap in found["on_the_cpu"])
    assert len(found["graphs"]) == 1 + (eager == "eager"), "the parts before and after it"


def test_dynamic_sizes_are_symbols_with_this_calls_numbers(tpu: Callable[..., Result]) -> None:
    (graph,) = described(tpu, "models.py:net", "--dynamic")["graphs"]
    assert 8 in graph["symbols"].values() and graph["arguments"]["x"] == "f32[8,16]"


def test_options_reach_the_compiler(tpu: Callable[..., Result]) -> None:
    found = described(tpu, "models.py:net", "--option", "excess_precision=1")
    assert found["graphs"][0]["key"]["excess_precision"] == "True"
    assert (
        "Did you mean 'excess_precision'"
        in tpu("inspect", "models.py:net", "--option", "exces_precision=1", status=2).stderr
    )


def test_an_exported_file_is_a_target(tpu: Callable[..., Result], tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(8, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    (graph,) = described(tpu, "model.pt2")["graphs"]
    assert list(graph["symbols"].values()) == [8] and graph["results"] == ["f32[8,2]"]


def test_what_dynamo_cannot_capture_is_a_message(tpu: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("import torch\ndef bad():\n    return (lambda x: x @ x), (torch.ones(2, 3),)\n")
    done = tpu("inspect", "models.py:bad", status=1)
    assert done.stderr.startswith("Error: ") and "TORCHDYNAMO_VERBOSE" not in done.stderr


# ---- ops


def test_ops_counts_and_finds(tpu: Callable[..., Result]) -> None:
    listed = json.loads(tpu("ops", "--json").stdout)
    by_name = {op["op"]: op for op in listed}
    assert len(by_name) == len(listed) > 2500
    assert by_name["aten.add.Tensor"] == {
        "op": "aten.add.Tensor",
        "tier": "native",
        "through": "lowering/ops/elementwise.py",
    }
    assert by_name["aten.add_.Tensor"]["through"] == by_name["aten.add.out"]["through"] == "as aten.add.Tensor"
    assert (
        by_name["aten.bernoulli_.float"]["tier"] == "native" and by_name["aten.linear.default"]["tier"] == "decomposed"
    )
    assert by_name["aten.nonzero.default"]["tier"] == "eager"
    shown = tpu("ops", "add.Tensor").stdout
    assert "aten.add.Tensor" in shown and "aten.mul.Tensor" not in shown
    counts = tpu("ops").stdout
    assert all(f"{tier} " in counts for tier in tiers.TIERS)


def test_ops_of_one_tier(tpu: Callable[..., Result]) -> None:
    listed = json.loads(tpu("ops", "linalg", "--tier", "jnp", "--json").stdout)
    assert listed and all(op["tier"] == "jnp" and "linalg" in op["op"] for op in listed)
    assert (
        "No operator's name holds 'nonesuch' in tier jnp." in tpu("ops", "nonesuch", "--tier", "jnp", status=1).stderr
    )


# ---- doctor


def doctor(tpu: Callable[..., Result], status: int = 0) -> dict[str, dict[str, str]]:
    return {finding["about"]: finding for finding in json.loads(tpu("doctor", "--json", status=status).stdout)}


def test_doctor_is_content_here(tpu: Callable[..., Result], cache_dir: Path) -> None:
    found = doctor(tpu)
    assert not [finding for finding in found.values() if finding["state"] == "broken"]
    assert found["torch"]["text"] == torch.__version__ and found["backend 'tpu'"]["state"] == "ok"
    assert "a small program is right" in found["device"]["text"]
    assert str(cache_dir) in found["cache"]["text"] and found["knob cache_dir"]["state"] == "note"


def test_doctor_says_what_is_broken(tpu: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_COMPILE_PLATFORM", "tpuu")
    monkeypatch.setenv("TPU_COMPILE_CACHE", "0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    found = doctor(tpu, status=1)
    assert found["device"]["state"] == "broken" and "No PJRT plugin serves 'tpuu'" in found["device"]["text"]
    assert found["platform"]["text"] == "tpuu (from TPU_COMPILE_PLATFORM)"
    assert found["cache"]["text"] == "off (from TPU_COMPILE_CACHE)" and found["XLA_FLAGS"]["state"] == "note"


def test_doctor_knows_rivals_and_unwritable_caches(
    tpu: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_tpu").mkdir()
    (tmp_path / "torch_tpu" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPU_COMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = doctor(tpu)
    assert "use backend='tpu_compile'" in found["torch_tpu"]["text"]
    assert found["cache"]["state"] == "note"


# ---- on a TPU that is not here

ON_TARGET = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 300)
        self.down = nn.Linear(300, 256)
        self.register_buffer("kept", torch.zeros(512, 1024))

    def forward(self, x, table):
        self.kept += 1
        h = torch.relu(self.up(x))
        h = (h.double() * 1.000001).float()
        return self.down(h), table.t().contiguous() + 1, self.kept.sum()

def wide():
    return Wide(), (torch.randn(128, 256), torch.randn(2048, 2048))

def huge():
    with torch.device("meta"):
        return nn.Linear(100_000, 100_000), (torch.randn(8, 100_000),)
"""


@pytest.fixture
def on_target(tpu: Callable[..., Result], tmp_path: Path) -> Callable[..., Result]:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")
    (tmp_path / "models.py").write_text(ON_TARGET)
    return tpu


def test_a_program_is_judged_for_a_chip(on_target: Callable[..., Result]) -> None:
    arguments = "models.py:wide", "--target", "v5e"
    shown = on_target("inspect", *arguments).stdout
    (found,) = described(on_target, *arguments)["on_target"]
    assert found["chip"] == "v5e" and found["hbm"]["fits"] and found["hbm"]["peak"] > 2**21
    assert found["hbm"]["spare"] == found["hbm"]["available"] - found["hbm"]["needed"]
    assert 0 < found["roofline_seconds"] <= found["seconds"] < 1e-3
    products = [step for step in found["steps"] if step["kind"] == "product"]
    line = {words: 1 + ON_TARGET.splitlines().index(words) for words in ON_TARGET.splitlines()}
    up = f"models.py:{line['        h = torch.relu(self.up(x))']}"
    assert up in [step["where"] for step in products]
    assert sum(step["flops"] for step in products) == found["flops"] == 2 * 2 * 128 * 256 * 300
    assert all(step["share"] <= 1 and step["cycles"] > 0 for step in products)
    wide = {row["where"]: row for row in found["wide_products"]}
    assert wide[up]["passes"] == 6 and wide[up]["dtype"] == "f32"
    assert {row["where"]: row for row in found["padding"]}[up]["waste"] == pytest.approx(1 - 300 / 384)
    emulated = [(row["dtype"], row["where"]) for row in found["emulated"]]
    assert ("f64", f"models.py:{line['        h = (h.double() * 1.000001).float()']}") in emulated
    assert [row["argument"] for row in found["not_donated"]] == ["table"]
    turned = f"models.py:{line['        return self.down(h), table.t().contiguous() + 1, self.kept.sum()']}"
    assert ("argument table", turned) in [(row["op"], row["where"]) for row in found["layout_changes"]]
    for words in ("most expensive fusions", "6", "emulated", "not donated", "fits", up):
        assert words in shown, shown


def test_what_does_not_fit_is_a_result_and_needs_no_memory_here(on_target: Callable[..., Result]) -> None:
    found = described(on_target, "models.py:huge", "--target", "v5e:1x1")
    (misfit,) = found["do_not_fit"]
    assert misfit["needed"] >= 4 * 10**10 > misfit["available"] and not misfit["fits"] and found["graphs"] == []
    assert "does not fit" in on_target("inspect", "models.py:huge", "--target", "v5e:1x1").stdout


def test_a_chip_that_does_not_exist_is_answered_with_those_that_do(on_target: Callable[..., Result]) -> None:
    assert "v5e" in on_target("inspect", "models.py:wide", "--target", "v9z:1x1", status=2).stderr
