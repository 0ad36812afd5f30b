"""Random ops: the bits, who governs them, their distributions, and that a backward sees the forward's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tpu_compile
from tpu_compile.compiler import compile_graph, record
from tpu_compile.lowering.random import functionalize_random, keyed_ops, rng_key

N = 40_000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="tpu", fullgraph=True)


def draw(fn: Callable[..., Any], *args: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return compiled(fn)(*args)


# ---- the bits


def test_golden_bits() -> None:
    """StableHLO leaves PHILOX to the implementation: an XLA that changes it fails here."""
    bits, real, whole = draw(lambda: (torch.randint(0, 2**32, (4,)), torch.rand(4), torch.randperm(8)), seed=0)
    assert bits.tolist() == GOLDEN_BITS
    assert (real.double() * 2**24).tolist() == GOLDEN_MANTISSAS
    assert whole.tolist() == GOLDEN_ORDER


GOLDEN_BITS = [577923792, 2359634322, 89055619, 3601908544]
GOLDEN_MANTISSAS = [12818969, 5138621, 15690458, 3612542]
GOLDEN_ORDER = [5, 2, 7, 6, 3, 4, 0, 1]


def test_draws_of_one_program_do_not_overlap() -> None:
    a, b, c = draw(lambda: (torch.rand(5000), torch.rand(5000), torch.rand(3)))
    assert len(torch.cat([a, b]).unique()) > 9990
    assert not torch.equal(a[:3], c)


def test_shape_does_not_choose_the_bits() -> None:
    flat, square = draw(lambda: torch.rand(12)), draw(lambda: torch.rand(3, 4))
    assert torch.equal(flat, square.flatten())


# ---- who governs them


def test_calls_differ_and_manual_seed_repeats() -> None:
    f = compiled(lambda: (torch.rand(9), torch.randn(9)))
    torch.manual_seed(1)
    first, second = f(), f()
    torch.manual_seed(1)
    again = f()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(2)
    assert not torch.equal(f()[0], first[0])


def test_fork_rng_and_states_govern() -> None:
    f = compiled(lambda: torch.rand(6))
    state = torch.get_rng_state()
    a = f()
    with torch.random.fork_rng():
        f()
    b = f()
    torch.set_rng_state(state)
    assert torch.equal(f(), a) and torch.equal(f(), b)


def test_a_program_that_draws_nothing_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    compiled(lambda x: x + 1)(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_its_own_breaks_the_graph_and_governs() -> None:
    generator = torch.Generator()
    fn = torch.compile(lambda g: torch.rand(3, generator=g) + 1, backend="tpu")
    first = fn(generator.manual_seed(3))
    assert torch.equal(first, torch.rand(3, generator=generator.manual_seed(3)) + 1)


def test_a_generator_in_a_graph_is_refused() -> None:
    graph = torch.fx.Graph()
    x, generator = graph.placeholder("x"), graph.get_attr("generator")
    kept = graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.5), {"generator": generator})
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = kept.meta["val"] = torch.empty(3)
    graph.output((kept,))
    module = torch.fx.GraphModule({"generator": torch.Generator()}, graph)
    functionalize_random(module)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [torch.ops.aten.bernoulli.p]
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"torch\.manual_seed"):
        compile_graph(module, "with_generator", one_graph=True)


# ---- distributions


def _one_of_each(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    e = torch.empty_like(x)
    return (
        torch.rand_like(x),
        torch.randn_like(x),
        e.clone().uniform_(-3, 1),
        e.clone().normal_(2, 0.5),
        e.clone().exponential_(2.0),
        e.clone().geometric_(0.3),
        e.clone().log_normal_(0.0, 0.5),
        torch.bernoulli(torch.full_like(x, 0.25)),
        e.clone().bernoulli_(0.1),
        torch.ops.aten.random(x, 3, 50),
        torch.normal(torch.ones_like(x), torch.full_like(x, 3)),
    )


LOG_NORMAL = math.exp(0.125), math.sqrt((math.exp(0.25) - 1) * math.exp(0.25))
MOMENTS = (
    (0.5, 12**-0.5),
    (0, 1),
    (-1, 4 * 12**-0.5),
    (2, 0.5),
    (0.5, 0.5),
    (1 / 0.3, math.sqrt(0.7) / 0.3),
    LOG_NORMAL,
    (0.25, math.sqrt(0.25 * 0.75)),
    (0.1, 0.3),
    (26, math.sqrt((47**2 - 1) / 12)),
    (1, 3),
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_moments(dtype: torch.dtype) -> None:
    for drawn, (mean, std) in zip(draw(_one_of_each, torch.empty(N, dtype=dtype)), MOMENTS, strict=True):
        assert drawn.dtype == dtype
        # multiples of a coarse step in [0, 1) have their mean below a half
        grain = 2.0 ** {torch.bfloat16: -8, torch.float16: -11}.get(dtype, -24)
        assert abs(drawn.double().mean() - mean) < 6 * std / math.sqrt(N) + 2 * grain
        assert abs(drawn.double().std() / std - 1) < 0.04


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_is_a_multiple_of_its_step_below_one(dtype: torch.dtype) -> None:
    drawn = draw(lambda x: torch.rand_like(x), torch.empty(N, dtype=dtype)).double()
    digits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}[dtype]
    assert drawn.min() >= 0 and drawn.max() < 1
    assert torch.equal(drawn * 2**digits, (drawn * 2**digits).floor())


def test_normal_has_its_tails() -> None:
    drawn = draw(lambda: torch.randn(1_000_000))
    for sigma, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027), (4, 6.3e-5)):
        found = (drawn.abs() > sigma).double().mean()
        assert abs(found - share) < 6 * math.sqrt(share / 1e6)


def test_cauchy_has_its_quartiles() -> None:
    drawn = draw(lambda: torch.empty(N).cauchy_(1, 2))
    assert torch.allclose(drawn.quantile(torch.tensor([0.25, 0.5, 0.75])), torch.tensor([-1.0, 1.0, 3.0]), atol=0.15)


def test_exponential_is_never_zero() -> None:
    assert draw(lambda: torch.empty(1_000_000).exponential_()).min() > 0


def test_complex_parts_share_the_variance() -> None:
    drawn = draw(lambda: torch.randn(N, dtype=torch.complex64))
    assert abs(drawn.abs().square().mean() - 1) < 0.03 and abs((drawn.real * drawn.imag).mean()) < 0.02
    both = draw(lambda: torch.rand(N, dtype=torch.complex64))
    assert both.real.min() >= 0 and both.imag.max() < 1 and not torch.equal(both.real, both.imag)


@pytest.mark.parametrize("low, high", [(0, 10), (-5, 3), (0, 2**32), (-(2**40), 2**41), (7, 8)])
def test_integers_fill_their_range(low: int, high: int) -> None:
    drawn = draw(lambda: torch.randint(low, high, (N,)))
    assert drawn.min() >= low and drawn.max() < high
    assert abs((drawn.double().mean() - low) / (high - low) - 0.5 * (high - low - 1) / (high - low)) < 0.01
    if high - low <= 10:
        assert len(drawn.unique()) == high - low


def test_random_fills_a_dtype() -> None:
    small = draw(torch.ops.aten.random, torch.empty(N, dtype=torch.int8))
    assert small.min() == 0 and small.max() == 127
    whole = draw(lambda x: torch.ops.aten.random(x, -(2**63), None), torch.empty(N, dtype=torch.int64))
    assert (whole < 0).double().mean() == pytest.approx(0.5, abs=0.02) and whole.max() > 2**62


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_randperm(n: int) -> None:
    drawn = draw(lambda: torch.randperm(n))
    assert torch.equal(drawn.sort().values, torch.arange(n))
    if n == 1000:
        assert (drawn - torch.arange(n)).abs().double().mean() == pytest.approx(n / 3, rel=0.1)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_events(p: float) -> None:
    both = draw(lambda x: (torch.empty_like(x).bernoulli_(p), torch.bernoulli(torch.full_like(x, p))), torch.empty(N))
    for drawn in both:
        assert (drawn == p).all()


def test_empty_results() -> None:
    drawn = draw(
        lambda: (torch.rand(0, 3), torch.randn(2, 0), torch.randint(0, 5, (0,)), torch.empty(0).bernoulli_(0.5))
    )
    assert all(t.numel() == 0 for t in drawn)


# ---- multinomial


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_multinomial_follows_its_weights(dtype: torch.dtype) -> None:
    weights = torch.tensor([0.0, 1, 0, 4, 0, 3, 0, 0], dtype=dtype)
    drawn = draw(lambda w: torch.multinomial(w, N, replacement=True), weights)
    assert torch.allclose(drawn.bincount(minlength=8) / N, weights.float() / 8, atol=0.02)
    assert (weights[drawn] > 0).all()


def test_multinomial_without_replacement_takes_each_once() -> None:
    weights = torch.tensor([[0.1, 0, 0.2, 0, 0.7, 0]]).expand(3000, 6)
    drawn = draw(lambda w: torch.multinomial(w, 3), weights)
    assert torch.equal(drawn.sort(1).values, torch.tensor([[0, 2, 4]]).expand(3000, 3))
    first = drawn[:, 0].bincount(minlength=6) / 3000
    assert torch.allclose(first, weights[0], atol=0.04)


# ---- dropout and its relatives


def test_backward_uses_the_mask_of_the_forward() -> None:
    x = (torch.rand(500) + 1).requires_grad_()
    y = compiled(lambda x: F.dropout(F.dropout(x, 0.5).sin().exp() - 1, 0.3))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)


def _kept(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = draw(fn, x)
    return y != 0


def test_dropout_by_element_by_channel_and_not_at_all() -> None:
    x = torch.ones(50, 40, 8, 8)
    assert _kept(lambda x: F.dropout(x, 0.25), x).double().mean() == pytest.approx(0.75, abs=0.01)
    channels = _kept(lambda x: F.dropout2d(x, 0.5), x).double().mean((2, 3))
    assert set(channels.unique().tolist()) == {0.0, 1.0} and channels.mean() == pytest.approx(0.5, abs=0.06)
    assert _kept(lambda x: F.dropout(x, 0.5, training=False), x).all()
    assert not _kept(lambda x: F.dropout(x, 1.0), x).any()


def test_alpha_dropout_keeps_the_moments() -> None:
    drawn = draw(lambda x: F.alpha_dropout(x, 0.3, training=True), torch.randn(N))
    assert abs(drawn.mean()) < 0.03 and abs(drawn.std() - 1) < 0.03


def test_rrelu_slopes() -> None:
    x = torch.cat([torch.full((N,), -1.0), torch.full((5,), 2.0)]).requires_grad_()
    y = compiled(lambda x: F.rrelu(x, 0.1, 0.3, training=True))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y[N:], x[N:]) and torch.allclose(grad[:N], -y[:N])
    slopes = -y[:N].detach()
    assert slopes.min() >= 0.1 and slopes.max() < 0.3 and slopes.mean() == pytest.approx(0.2, abs=0.003)


def test_checkpointing_recomputes_with_the_same_numbers() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin() + 3, 0.5).exp() * (torch.rand_like(x) + 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    x = torch.randn(64, 8)
    results = []
    for fn in (block, step):
        leaf = x.clone().requires_grad_()
        y = draw(fn, leaf)
        results.append((y, *torch.autograd.grad(y.sum(), leaf)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    kept = results[0][0] > 1.5
    assert torch.equal(results[1][1] != 0, kept), "the recomputation dropped other elements"


def test_keys_are_saved_and_never_drawn_again() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: F.dropout(y.sin()).exp(), x, use_reentrant=False)

    with record() as recorded:
        compiled(step)(torch.randn(8, requires_grad=True)).sum().backward()
    forward, backward = (entry.graph.graph for entry in recorded.lowerings)
    assert [n for n in forward.nodes if n.target is rng_key] and not [n for n in backward.nodes if n.target is rng_key]
    twin = keyed_ops()[torch.ops.aten.native_dropout.default]
    assert [n for n in backward.nodes if n.target is twin], "the backward recomputes the dropout from its key"
