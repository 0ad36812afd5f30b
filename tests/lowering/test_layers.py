"""scan_layers: repeated layers become one loop that computes the same."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

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


def through(model: nn.Module, x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """The result of a model, and the gradients of its sum."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    result = model(leaf, scale)
    result.sum().backward()
    return [result.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]


def plain(model: nn.Module):
    return torch.compile(model, backend="tpu", fullgraph=True)


@pytest.mark.parametrize("p", [0.0, 0.5], ids=["pure", "drawing"])
def test_forward_and_backward_are_a_loop_each_and_pass_what_is_saved_stacked(p):
    """AOTAutograd sees each of the layers that draw numbers."""
    counted, sizes = [], []
    for depth in (4, 8):
        torch.manual_seed(0)
        model, args = Stack(depth, p).train(), inputs()
        results = []
        for compiled in (scanned(model), plain(model)):
            torch.manual_seed(1)
            with compiler.record() as seen:
                results.append((through(compiled, *args), seen))
            torch._dynamo.reset()
        (ours, seen), (want, _) = results
        for mine, other in zip(ours, want, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        programs = {each.name.rpartition("_")[2]: each.compiled.program for each in seen.lowerings}
        texts = [fx.text(programs[kind].bytecode) for kind in ("forward", "backward")]
        assert [text.count("stablehlo.while") for text in texts] == [1, 1]
        counted.append([text.count("dot_general") for text in texts])
        sizes.append(len(programs["forward"].outputs))
    assert counted[0] == counted[1]
    assert sizes[0] == sizes[1]


def traced(model: nn.Module, *args: torch.Tensor):
    with tpu_compile.override(scan_layers=True), torch.no_grad():
        return tpu_compile.trace(model, *args).graph_module


def test_autograd_is_given_one_layer_if_layers_are_pure():
    args = inputs()
    sizes = [len(traced(Stack(depth), *args).graph.nodes) for depth in (4, 8)]
    assert sizes[1] - sizes[0] == 4 * 6  # their parameters
    scan = torch.ops.higher_order.scan
    assert traced(Stack(4), *args).graph.find_nodes(op="call_function", target=scan)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x, scale):
            for block in self.blocks:
                x = block(x, scale).add_(1)
            return x

    for impure in (Stack(4, 0.5).train(), InPlace()):
        assert not traced(impure, *args).graph.find_nodes(op="call_function", target=scan)
    model = InPlace()
    for ours, eager in zip(through(scanned(model), *args), through(model, *args), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "in the model"])
def test_layers_in_autocast_compute_in_its_dtype(inside):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stack(4)

        def forward(self, x, scale):
            with torch.autocast("cpu", torch.bfloat16):
                return self.blocks(x, scale)

    torch.manual_seed(0)
    model, args = Cast() if inside else Stack(4), inputs()
    with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        text = program(model, *args)
        with torch.no_grad():
            torch.testing.assert_close(scanned(model)(*args), model(*args), rtol=2e-2, atol=2e-2)
        torch._dynamo.reset()
        for ours, unrolled in zip(through(scanned(model), *args), through(plain(model), *args), strict=True):
            torch.testing.assert_close(ours, unrolled, rtol=2e-2, atol=2e-2)
    assert "stablehlo.while" in text and "xbf16" in text


def test_what_is_written_to_after_the_layers_keeps_its_aliases():
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x, scale):
            seen, flat = [], []
            for block in self.blocks:
                x = block(x, scale)
                seen.append(x)
                flat.append(x.view(-1))
            for each in seen:
                each.mul_(2)
            return flat

    torch.manual_seed(0)
    model, args = Written(), inputs()
    with torch.no_grad():
        torch.testing.assert_close(scanned(model)(*args), model(*args))


def test_sizes_that_are_symbols_and_layers_in_part_without_gradients():
    torch.manual_seed(0)
    model, (x, scale) = Stack(5), inputs()
    dynamic = torch.compile(model, backend="tpu", fullgraph=True, dynamic=True, options={"scan_layers": True})
    with torch.no_grad():
        for rows in (3, 6):
            more = torch.randn(rows, 8)
            torch.testing.assert_close(dynamic(more, scale), model(more, scale), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    grads = []
    for run in (scanned(model), model):
        model.zero_grad()
        run(x, scale).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, eager in zip(*grads, strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_layers_that_save_views_draws_and_what_the_model_returns():
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(0.5) for _ in range(5))

        def forward(self, x, scale):
            seen = []
            for block in self.blocks:
                x = block(x.transpose(0, 1).contiguous().transpose(0, 1), scale)
                seen.append(x)
            return torch.stack(seen)

    torch.manual_seed(0)
    model, args = Returned().train(), inputs()
    results = []
    for run in (scanned(model), plain(model)):
        torch.manual_seed(1)
        results.append(through(run, *args))
        torch._dynamo.reset()
    for ours, unrolled in zip(*results, strict=True):
        torch.testing.assert_close(ours, unrolled, rtol=1e-4, atol=1e-5)


def test_weights_that_the_user_has_stacked_are_read_as_they_lie():
    class Stacked(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.weights, self.biases = nn.Parameter(torch.randn(depth, 8, 8) / 4), nn.Parameter(torch.randn(depth, 8))
            self.depth = depth

        def forward(self, x):
            for k in range(self.depth):
                x = (x @ self.weights[k] + self.biases[k]).tanh().sin().exp().neg().sigmoid().cos() + x
            return x

    torch.manual_seed(0)
    model, x = Stacked(5), torch.randn(4, 8)
    text = program(model, x)
    assert text.count("stablehlo.while") == 1 and text.count("dot_general") == 1
    assert "stablehlo.concatenate" not in text
    with torch.no_grad():
        torch.testing.assert_close(scanned(model)(x), model(x))


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
    for run in (scanned(model), plain(model)):
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
