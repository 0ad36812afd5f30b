"""Programs that ``advise`` compiles in place of the user's compute the same, or say what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import tpu_compile
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.targets.analysis import analyse
from tpu_compile.targets.heads import padded, with_wider
from tpu_compile.targets.transposes import Transpose, at_the_ends, returned, stored
from tpu_compile.targets.workload import Made

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"100"}}'
ENDS = f"""HloModule m

ENTRY %main (a: f32[8,4,2], b: f32[4,2]) -> (f32[8,4,2], f32[4,2], f32[4,2]) {{
  %a = f32[8,4,2]{{2,1,0:T(8,128)}} parameter(0)
  %b = f32[4,2]{{1,0:T(8,128)}} parameter(1)
  %in = f32[8,4,2]{{1,0,2:T(8,128)}} copy(%a), {CYCLES}
  %work = f32[8,4,2]{{1,0,2:T(8,128)}} negate(%in), {CYCLES}
  %out = f32[8,4,2]{{2,1,0:T(8,128)}} copy(%work), {CYCLES}
  %moved = f32[4,2]{{1,0:T(8,128)S(1)}} copy(%b), {CYCLES}
  %inside = f32[4,2]{{0,1:T(8,128)}} copy(%moved), {CYCLES}
  %sum = f32[4,2]{{0,1:T(8,128)}} add(%inside, %inside), {CYCLES}
  ROOT %all = (f32[8,4,2]{{2,1,0}}, f32[4,2]{{0,1}}, f32[4,2]{{1,0}}) tuple(%out, %sum, %moved)
}}
"""


def test_copies_at_both_ends_and_the_order_that_would_spare_them() -> None:
    found = at_the_ends(analyse(ENDS, MemoryAnalysis(*[0] * 11), "v5e:1x1"))
    assert {(each.side, each.index, each.order) for each in found} == {
        ("argument", 0, (2, 0, 1)),
        ("argument", 1, (1, 0)),
        ("result", 0, (2, 0, 1)),
    }
    assert all(isinstance(each, Transpose) and each.share == pytest.approx(1 / 6) for each in found)


def test_an_argument_that_is_kept_in_another_order() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.softmax(-1) @ y

    x, y = torch.randn(4, 6), torch.randn(6, 3)
    changed = stored(tpu_compile.trace(fn, x, y).graph_module, 0, (1, 0))
    torch.testing.assert_close(changed(x.t().contiguous(), y)[0], fn(x, y))


def test_an_argument_that_is_written_to_is_written_in_its_order() -> None:
    def fn(kept: Tensor, new: Tensor) -> Tensor:
        kept.mul_(2).add_(new)
        return kept.sum(0)

    kept, new = torch.randn(4, 6), torch.randn(4, 6)
    changed = stored(tpu_compile.trace(fn, kept, new).graph_module, 0, (1, 0))
    turned = kept.t().contiguous()
    result = changed(turned, new)[-1]
    torch.testing.assert_close((turned.t(), result), (kept * 2 + new, (kept * 2 + new).sum(0)))


def test_a_result_that_is_returned_in_another_order() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2

    x = torch.randn(4, 6)
    traced = tpu_compile.trace(fn, x)
    first, _ = traced.graph_module.graph.output_node().args[0]
    torch.testing.assert_close(returned(traced, first.name, (1, 0))(x), ((x + 1).t(), x * 2))


def test_padded_heads_attend_as_before() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = torch.randn(3, 2, 4, 16, 24).unbind(0)
    graph = padded(tpu_compile.trace(fn, q, k, v).graph_module, 24, 128)
    widths = {int(n.args[0].meta["val"].shape[-1]) for n in graph.graph.nodes if "attention" in str(n.target)}
    assert widths == {128}
    torch.testing.assert_close(graph(q, k, v)[0], fn(q, k, v))


class Heads(nn.Module):
    @dataclass
    class Config:
        num_attention_heads: int = 8
        num_key_value_heads: int = 4
        head_dim: int = 64
        hidden_size: int = 512

    def __init__(self) -> None:
        super().__init__()
        self.config = Heads.Config()
        self.num_heads, self.head_size, self.width = 8, 64, 64
        self.norm, self.project = nn.RMSNorm(64), nn.Linear(512, 512)
        self.register_buffer("inverse_frequencies", torch.zeros(32))


def test_wider_heads_are_fewer_and_as_wide_together() -> None:
    with FakeTensorMode():
        model = Heads()
    made = with_wider(Made(model, (), {}, 1), {8, 4}, 64, 2)
    assert made.model.config == Heads.Config(4, 2, 128, 512)
    assert (model.num_heads, model.head_size, model.width) == (4, 128, 64), "a number that names no head stays"
    assert model.norm.normalized_shape == (128,) and model.norm.weight.shape == (128,)
    assert model.inverse_frequencies.shape == (64,) and model.project.weight.shape == (512, 512)
