"""scan_layers: repeated layers become one loop that computes the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tpu_compile
from tpu_compile import compiler
from tpu_compile.lowering import fx


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.drop(
            self.down(torch.cat([gate.sigmoid() * value * scale, value.tanh().sin().tanh().cos()], -1))
        )


class Stack(nn.Module):
    def __init__(self, depth: int, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block(p) for _ in range(depth))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale)
        return x.square()


def scanned(model: nn.Module, **options):
    return torch.compile(model, backend="tpu", fullgraph=True, options={"scan_layers": True, **options})


def program(model: nn.Module, *args: torch.Tensor) -> str:
    with compiler.record() as seen, torch.no_grad():
        scanned(model)(*args)
    torch._dynamo.reset()
    return fx.text(seen.lowerings[0].compiled.program.bytecode)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.rand(8)


def test_a_program_does_not_grow_with_depth_and_computes_the_same():
    torch.manual_seed(0)
    args = inputs()
    texts = [program(Stack(depth), *args) for depth in (4, 12)]
    assert [text.count("stablehlo.while") for text in texts] == [1, 1]
    assert [text.count("dot_general") for text in texts] == [3, 3]
    model = Stack(6)
    with torch.no_grad():
        torch.testing.assert_close(scanned(model)(*args), model(*args))


@pytest.mark.filterwarnings("ignore:scan_layers")  # of the forward, which keeps much
def test_gradients_are_the_same_through_a_loop():
    torch.manual_seed(0)
    model, (x, scale) = Stack(5), inputs()
    grads = []
    with compiler.record() as seen:
        scanned(model)(x, scale).sum().backward()
    torch._dynamo.reset()
    backward = next(each for each in seen.lowerings if each.name.endswith("backward"))
    assert "stablehlo.while" in fx.text(backward.compiled.program.bytecode)
    for run in (model, scanned(model)):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf, scale).sum().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in model.parameters())])
    for eager, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_a_training_step_is_a_loop_forward_and_one_backward():
    """The backward's loop reads what the forward's loop keeps, as it lies: nothing is taken apart for each layer."""
    x, scale = inputs()
    lines = []
    for depth in (4, 8):
        torch.manual_seed(0)
        ours, host = Stack(depth), Stack(depth)
        host.load_state_dict(ours.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, host)]
        step = tpu_compile.train_step(ours, torch.sum, optimizers[0])
        with tpu_compile.override(scan_layers=True):
            text = step.trace((x, scale)).lower().as_text()
            loss = step((x, scale))
        want = host(x, scale).sum()
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        optimizers[1].step()
        torch.testing.assert_close(ours.state_dict(), host.state_dict(), rtol=1e-4, atol=1e-5)
        assert text.count("stablehlo.while") == 2
        lines.append(text.count("dot_general"))
    assert lines[0] == lines[1]


def test_each_layer_draws_the_numbers_it_draws_without_a_loop():
    model, args = Stack(4, 0.5).train(), inputs()
    results = []
    for run in (scanned(model), torch.compile(model, backend="tpu", fullgraph=True)):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(run(*args))
        torch._dynamo.reset()
    torch.testing.assert_close(*results)


def test_states_that_are_written_and_results_of_every_layer():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            for i in range(4):
                self.register_buffer(f"seen_{i}", torch.zeros(8))

        def forward(self, x, scale):
            for i, block in enumerate(self.blocks):
                x = block(x, scale)
                getattr(self, f"seen_{i}").add_(x.detach().mean(0))
            return x

    torch.manual_seed(0)
    model, other, args = Counted(), Counted(), inputs()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(scanned(model)(*args), other(*args))
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


def test_nothing_to_repeat_is_said_once():
    class Lonely(nn.Module):
        def forward(self, x):
            return x.sin() + x.cos()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for size in (2, 3):
            torch.testing.assert_close(scanned(Lonely())(torch.ones(size)), Lonely()(torch.ones(size)))
            torch._dynamo.reset()
    said = [w for w in seen if issubclass(w.category, tpu_compile.TpuCompileWarning)]
    assert len(said) == 1 and "Lonely" in str(said[0].message)


def test_an_op_without_a_rule_is_named_at_its_line():
    class Odd(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = torch.nonzero(x.sin().cos().exp().neg().abs().sqrt() * x + x).float().sum() + x
            return x

    with pytest.raises(tpu_compile.UnsupportedOp, match=r"test_layers\.py"):
        scanned(Odd())(torch.ones(3))
