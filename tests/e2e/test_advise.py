"""`tpu-compile advise`: it finds what costs, tries the change, and says nothing silly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tpu_compile
from tpu_compile.cli import main
from tpu_compile.stats import reset_stats, stats
from tpu_compile.targets import retype

MODELS = """
import torch
from torch import nn

class Language(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.table = nn.Embedding(vocab_size, 128)
        self.head = nn.Linear(128, vocab_size, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        scores = self.head(self.table(ids))
        return scores + 1

def odd_vocabulary():
    return Language(50_257).bfloat16(), (torch.zeros(4, 64, dtype=torch.long),)

def even_vocabulary():
    return Language(50_304).bfloat16(), (torch.zeros(4, 64, dtype=torch.long),)

class Wide(nn.Module):
    def forward(self, x, codes):
        y = x.double() * 1.000001
        z = y.sin().float()
        codes = codes * 31 + 7
        codes = codes ^ (codes >> 3)
        return z, codes

def wide():
    return Wide(), (torch.zeros(1024, 1024), torch.zeros(1024, 1024, dtype=torch.long))

def cache():
    return (lambda kept, new: kept * 0.9 + new), (torch.zeros(512, 1024), torch.zeros(1, 1024))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def deep():
    blocks = [Block().bfloat16() for _ in range(6)]
    return nn.Sequential(*blocks), (torch.zeros(64, 128, dtype=torch.bfloat16),)

def one_row(batch=1):
    return nn.Linear(1024, 1024, dtype=torch.bfloat16), (torch.zeros(batch, 1024, dtype=torch.bfloat16),)

class Turned(nn.Module):
    def forward(self, table, x):
        rows = torch.softmax(table.t(), -1)
        return rows, x @ x

def turned():
    return Turned(), (torch.zeros(4096, 2048), torch.zeros(1024, 1024, dtype=torch.bfloat16))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.head_dim = 4, 64
        self.qkv, self.norm = nn.Linear(256, 768, bias=False), nn.RMSNorm(64)

    def forward(self, x):
        parts = self.qkv(x).view(*x.shape[:2], 3, self.n_head, self.head_dim).transpose(1, 3)
        q, k, v = parts.unbind(2)
        return nn.functional.scaled_dot_product_attention(self.norm(q), k, v)

def heads():
    return Attention().bfloat16(), (torch.zeros(2, 256, 256, dtype=torch.bfloat16),)

class Floats(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 256)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

def floats():
    return Floats(), (torch.zeros(1024, 512),)

def bert():
    import transformers
    sizes = dict(num_hidden_layers=1, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    config = transformers.BertConfig(**sizes)
    ids = torch.zeros(8, 128, dtype=torch.long)
    return transformers.BertModel(config).eval(), (), dict(input_ids=ids, attention_mask=torch.ones_like(ids))

def gpt2():
    import transformers
    config = transformers.GPT2Config(n_layer=1, n_embd=256, n_head=4, vocab_size=50257, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval().bfloat16()
    return model, (), dict(input_ids=torch.zeros(4, 64, dtype=torch.long))
"""
LINES = {words: number for number, words in enumerate(MODELS.splitlines(), 1)}


@pytest.fixture
def advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(name: str, *arguments: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, ["advise", f"models.py:{name}", "--target", "v5e", "--json", *arguments])
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    yield call
    sys.modules.pop("models", None)


def at(line: str) -> str:
    return f"models.py:{LINES[line]}"


def test_an_odd_vocabulary_is_found_with_its_gain(advice: Callable[..., dict[str, Any]]) -> None:
    found = advice("odd_vocabulary")
    # XLA fills tiles up by itself: what is left to gain is small, or nothing.
    (finding,) = [f for f in (*found["findings"], *found["without_gain"]) if f["kind"] == "pad"]
    assert finding["where"] == at("        scores = self.head(self.table(ids))")
    assert "50,257 of self.table.weight" in finding["title"] and "50,304" in finding["write"]
    assert finding["gain"] == pytest.approx(1 - finding["after"] / finding["before"])
    assert found["findings"] == sorted(found["findings"], key=lambda f: -f["gain"]) and not found["untried"]
    reset_stats()
    assert advice("odd_vocabulary")["from_cache"] and stats()["xla_compiles"] == 0
    shown = CliRunner().invoke(main, ["advise", "models.py:odd_vocabulary", "--target", "v5e"]).stdout
    assert "50,304" in shown


def test_an_even_vocabulary_is_left_alone(advice: Callable[..., dict[str, Any]]) -> None:
    assert not [f for f in advice("even_vocabulary")["findings"] if f["kind"] == "pad"]


def test_64_bit_numbers_are_found_where_they_come_in(advice: Callable[..., dict[str, Any]]) -> None:
    found = {f["kind"]: f for f in advice("wide")["findings"]}
    assert found["dtype"]["where"] == at("        y = x.double() * 1.000001") and found["dtype"]["gain"] > 0.2
    assert found["index"]["where"] in (
        at("        codes = codes * 31 + 7"),
        at("        codes = codes ^ (codes >> 3)"),
    )
    assert found["index"]["bytes_saved"] > 0


def test_an_argument_whose_memory_a_result_could_take(advice: Callable[..., dict[str, Any]]) -> None:
    found = {f["kind"]: f for f in advice("cache")["findings"]}
    assert ".copy_" in found["donate"]["write"] and found["donate"]["bytes_saved"] == 512 * 1024 * 4


def test_one_row_wastes_seven(advice: Callable[..., dict[str, Any]]) -> None:
    found = {f["kind"]: f for f in advice("one_row")["findings"]}
    assert found["batch"]["gain"] > 0.5 and "batch 8 in place of 1" in found["batch"]["write"]
    assert found["batch"]["gain"] == pytest.approx(1 - found["batch"]["after"] / 8 / found["batch"]["before"])


def test_a_transpose_of_an_argument_goes_into_how_it_is_kept(advice: Callable[..., dict[str, Any]]) -> None:
    found = {f["kind"]: f for f in advice("turned")["findings"]}
    assert found["transpose"]["where"] == at("        rows = torch.softmax(table.t(), -1)")
    assert "args[0] f32[4096,2048] is transposed" in found["transpose"]["title"]
    assert "keep it as [2048, 4096]" in found["transpose"]["write"] and found["transpose"]["gain"] > 0.1


@pytest.mark.full
def test_narrow_heads_are_padded_or_made_wider_where_the_model_is_trained(
    advice: Callable[..., dict[str, Any]],
) -> None:
    line = at("        return nn.functional.scaled_dot_product_attention(self.norm(q), k, v)")
    for arguments, words in (((), "scale=64**-0.5)[..., :64]"), (("--train",), "2 heads of 128 in place of 4 of 64")):
        found = advice("heads", *arguments)
        (finding,) = [f for f in (*found["findings"], *found["without_gain"]) if f["kind"] == "heads"]
        assert words in finding["write"] and finding["where"] == line and not found["untried"]
        assert finding["gain"] == pytest.approx(1 - finding["after"] / finding["before"])


@pytest.mark.full
def test_float32_products_and_a_long_gelu(advice: Callable[..., dict[str, Any]]) -> None:
    found = advice("floats")["findings"]
    assert [f["kind"] for f in found] == ["precision", "precision", "op"] and found[0]["gain"] > found[1]["gain"] > 0.2
    assert "bfloat16" in found[0]["write"] and 'precision("high")' in found[1]["write"]
    assert found[2]["where"] == at("        return self.down(nn.functional.gelu(self.up(x)))")
    assert 'approximate="tanh"' in found[2]["write"] and all("models.py" in f["where"] for f in found)


def test_layers_that_repeat_are_tried_as_a_loop(advice: Callable[..., dict[str, Any]]) -> None:
    found = advice("deep")
    (finding,) = [f for f in (*found["findings"], *found["without_gain"]) if f["kind"] == "scan"]
    assert finding["title"].startswith("6 layers") and "models.py" in finding["where"]
    assert finding["compile_before"] > 0 and finding["compile_after"] > 0
    recommended = finding in found["findings"]
    assert recommended == (finding["compile_after"] < 0.9 * finding["compile_before"] and finding["gain"] > -0.1)


@pytest.mark.full
def test_nothing_silly_about_bert(advice: Callable[..., dict[str, Any]]) -> None:
    found = advice("bert")
    assert {f["kind"] for f in found["findings"]} <= {"precision", "op", "scan"} and not found["untried"]


@pytest.mark.full
def test_the_vocabulary_of_gpt2(advice: Callable[..., dict[str, Any]]) -> None:
    found = advice("gpt2")
    assert [f["write"] for f in (*found["findings"], *found["without_gain"]) if "50,304" in f["write"]]


# ---- changed graphs


def test_a_retyped_graph_computes_in_the_other_dtype_throughout() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.double().cumsum(0) * torch.arange(4, dtype=torch.float64)).float()

    graph = tpu_compile.trace(fn, torch.ones(4)).graph_module
    changed = retype.retyped(graph, torch.float64, torch.float32)
    values = [n.meta["val"] for n in changed.graph.nodes if n.op == "call_function"]
    assert values and all(value.dtype is torch.float32 for value in values)
    torch.testing.assert_close(changed(torch.ones(4))[0], fn(torch.ones(4)))


def test_an_op_that_insists_on_int64_is_given_it() -> None:
    def fn(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(0, index + 1)

    x, index = torch.arange(4.0), torch.tensor([0, 2])
    changed = retype.retyped(tpu_compile.trace(fn, x, index).graph_module, torch.int64, torch.int32)
    dtypes = {str(n.target): n.meta["val"].dtype for n in changed.graph.nodes if n.op == "call_function"}
    assert dtypes["aten.add.Tensor"] is torch.int32
    torch.testing.assert_close(changed(x, index.int())[0], fn(x, index))
