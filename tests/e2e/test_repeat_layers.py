"""``repeat_layers``: one stacked layer for all, a loop forward and backward, and what the single layers computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tpu_compile
from tpu_compile import compiler, repeat_layers
from tpu_compile.lowering import fx


def llama(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            use_cache=False,
        )
    )


IDS = torch.arange(16).view(2, 8) * 7 % 64


def next_token(outputs, ids):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def single(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by the names of single layers."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    return model.state_dict()


def test_forward_and_backward_are_one_loop_each():
    host = llama(3)
    model = repeat_layers(copy.deepcopy(host), IDS)
    with compiler.record() as seen:
        loss = next_token(torch.compile(model, backend="tpu", fullgraph=True)(IDS), IDS)
        loss.backward()
    want = next_token(host(IDS), IDS)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(single(model), single(host), rtol=1e-4, atol=1e-6)
    texts = [fx.text(lowering.compiled.program.bytecode) for lowering in seen.lowerings]
    assert [text.count("stablehlo.while") for text in texts] == [1, 1]


def test_the_program_is_as_long_for_any_depth():
    texts = [tpu_compile.trace(repeat_layers(llama(n), IDS), IDS).lower().as_text() for n in (3, 9)]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())


def test_a_training_step_trains_the_stack():
    host, device = llama(3), "tpu"
    model = repeat_layers(copy.deepcopy(host).to(device), IDS.to(device))
    steps, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, host))
    step = tpu_compile.train_step(model, next_token, steps, clip_norm=1.0)
    ids = IDS.to(device)
    text = step.trace(ids, ids).lower().as_text()
    assert text.count("stablehlo.while") == 2
    for _ in range(3):
        other.zero_grad()
        want = next_token(host(IDS), IDS)
        want.backward()
        nn.utils.clip_grad_norm_(host.parameters(), 1.0)
        other.step()
        assert step(ids, ids).item() == pytest.approx(want.item(), abs=1e-5)
    got = {name: t.cpu() for name, t in model.state_dict().items()}
    torch.testing.assert_close(got, host.state_dict(), rtol=1e-3, atol=1e-5)


def test_weights_are_saved_and_loaded_under_the_names_of_single_layers():
    host, other = llama(3), llama(3)
    for p in other.parameters():
        nn.init.normal_(p)
    model = repeat_layers(copy.deepcopy(host), IDS)
    assert list(model.state_dict()) == list(host.state_dict()) and len(list(model.parameters())) == 12
    torch.testing.assert_close(model.state_dict(), host.state_dict())
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits)
    host.load_state_dict(model.state_dict())
    torch.testing.assert_close(host(IDS).logits, other(IDS).logits)
    broken = other.state_dict()
    del broken["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj\.weight"):
        model.load_state_dict(broken)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(4000)), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x * self.weight)


def test_each_turn_draws_its_own_numbers_and_the_gradient_sees_them():
    model = repeat_layers(nn.Sequential(*(Dropping() for _ in range(3))), torch.ones(4000))
    run = torch.compile(model, backend="tpu", fullgraph=True)
    torch.manual_seed(0)
    y = run(torch.ones(4000))
    assert (y > 0).float().mean().item() == pytest.approx(1 / 8, abs=0.02)
    y.sum().backward()
    (stack,) = model.parameters()
    torch.testing.assert_close(stack.grad, y.detach().expand(3, -1))  # dy/dw = y / w, and w is 1
    torch.manual_seed(0)
    assert torch.equal(run(torch.ones(4000)), y) and not torch.equal(run(torch.ones(4000)), y)
    assert torch.equal(run.eval()(torch.ones(4000)), torch.ones(4000))


class Other(nn.Module):
    """Runs a list of layers in a way of its own."""

    def __init__(self, way, make=lambda k: nn.Linear(4, 4)) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(make(k) for k in range(3)), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.layers, x)


def in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def with_scales(layers, x):
    for k, layer in enumerate(layers):
        x = layer(x) * (k + 1)
    return x


class Numbered(nn.Linear):
    def __init__(self, place: int) -> None:
        super().__init__(4, 4)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.place


ONE = nn.Linear(4, 4)
CASES = {
    "is not given the result": Other(with_scales),
    "were called 2 times": Other(lambda layers, x: layers[1](layers[0](x))),
    r"weight of layer 1 is torch.float32\[4, 4\], and torch.float32\[4, 4\]|other parts": Other(
        in_turn, lambda k: nn.Linear(4, 4, bias=k != 1)
    ),
    "p of layer 1 is 0.1, and 0.0 of layer 0": Other(
        in_turn, lambda k: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 * k))
    ),
    "share parameters": Other(in_turn, lambda k: ONE),
    "results differ": Other(in_turn, Numbered),
    "no layers of Linear can be stacked": nn.Linear(4, 4),
}


@pytest.mark.parametrize("reason", CASES)
def test_what_is_no_loop_stays_as_it_is(reason):
    model = CASES[reason].eval()
    before, x = copy.deepcopy(model), torch.randn(2, 4)
    with pytest.raises(tpu_compile.BadCall, match=reason):
        repeat_layers(model, x)
    torch.testing.assert_close(model.state_dict(), before.state_dict())
    torch.testing.assert_close(model(x), before(x))
