"""Branches, loops, scans and called regions against eager, with gradients, numbers as carries, and random bodies."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as torch_map
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import tpu_compile

W = torch.linspace(-1, 1, 16).view(4, 4)
Fn = Callable[..., Any]


def compiled(fn: Fn) -> Fn:
    return torch.compile(fn, backend="tpu", fullgraph=True)


def check(fn: Fn, *args: torch.Tensor, grad: bool = False) -> None:
    sides = []
    run = compiled(fn)
    for f in (run, fn):
        leaves = [a.clone().requires_grad_(grad) for a in args]
        out = f(*leaves)
        heads = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        sides.append((out, torch.autograd.grad([t.sin().sum() for t in heads], leaves) if grad else None))
    torch.testing.assert_close(*sides)


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


@torch.compiler.nested_compile_region
def drop(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x)


def branch(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin() @ W, x.clone()), lambda x: (x.cos() - W[0], x + 1), (x,))


def nested_branch(x: torch.Tensor) -> torch.Tensor:
    def inner(k: float) -> Fn:
        return lambda x: torch.cond(x[0, 0] > 0, lambda x: x * k, lambda x: x.exp(), (x,))

    return torch.cond(x.sum() > 0, inner(2.0), inner(3.0), (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fn", [branch, nested_branch])
def test_cond(fn: Fn, sign: float) -> None:
    check(fn, torch.ones(3, 4) * sign, grad=True)


def test_cond_without_results_and_with_a_predicate_known_before() -> None:
    check(lambda x: torch.cond(x.sum() > 0, lambda x: (), lambda x: (), (x,)), torch.ones(3))
    run = torch.compile(
        lambda x: torch.cond(x.shape[0] > 3, lambda x: x + 1, lambda x: x - 1, (x,)), backend="tpu", dynamic=True
    )
    for n in (2, 5, 3):
        assert torch.equal(run(torch.zeros(n)), torch.full((n,), 1.0 if n > 3 else -1.0))


def test_a_branch_may_hold_any_op() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: torch.linalg.solve(x, x @ x).contiguous(), lambda x: x.sort(0).values, (x,)
        )

    check(fn, torch.eye(3) * 2)
    check(fn, -torch.eye(3))


LOOPS: dict[str, Fn] = {
    "captures": lambda x: while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, torch.tanh(x @ W)), (torch.tensor(0), x)),
    "number": lambda x: while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 2 + i), (0, x)),
    "no_turn": lambda x: while_loop(lambda i, x: i > 5, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)),
    "condition_on_data": lambda x: while_loop(lambda x: x.abs().sum() < 50, lambda x: (x * 1.5 + 1,), (x,)),
    "nested": lambda x: while_loop(
        lambda i, x: i < 3,
        lambda i, x: (i + 1, while_loop(lambda j, y: j < i, lambda j, y: (j + 1, y * 1.5), (torch.tensor(0), x))[1]),
        (torch.tensor(0), x),
    ),
    "kept": lambda x: while_loop(
        lambda i, a, b: i < 4,
        lambda i, a, b: (i + 1, a + (b * i).float(), b.clone()),
        (torch.tensor(1), x, x[0].double()),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_while_loop(name: str) -> None:
    check(LOOPS[name], torch.linspace(-1, 1, 12).view(3, 4))


def test_a_loops_program_does_not_grow_with_its_turns() -> None:
    def program(turns: int) -> str:
        x = torch.ones(turns, 4)
        return str(tpu_compile.trace(lambda x: scan(lambda c, x: (c + x, c * x), x[0], x), x).lower().as_text())

    assert abs(len(program(1000)) - len(program(10))) < 200


SCANS: dict[str, Fn] = {
    "captures": lambda x: scan(lambda c, x: (c * 2 + x @ W, c + x), torch.zeros(4), x),
    "reverse": lambda x: scan(lambda c, x: (c * 0.5 + x.sin(), c + x), torch.ones(4), x, reverse=True),
    "tree": lambda x: scan(lambda c, x: ({"a": c["a"] + x["b"]}, (x["b"] * c["a"],)), {"a": torch.ones(4)}, {"b": x}),
    "associative": lambda x: associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic"),
    "map": lambda x: torch_map(lambda r, w: r.sin() * w, x, W[0]),
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo looks, at reverse=True
@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str) -> None:
    check(SCANS[name], torch.linspace(-1, 1, 12).view(3, 4), grad=True)


def test_map_over_several() -> None:
    check(lambda x: torch_map(lambda r, w: (r[0].sin() * w, r[1] @ r[0]), (x, x + 1), W[0]), torch.randn(3, 4))


def test_regions() -> None:
    check(lambda x: region(region(x)) + region(x + 1), torch.randn(3, 4), grad=True)


def test_associative_scan_of_the_higher_order_op() -> None:
    """Dynamo unrolls the generic mode and asks a CUDA tensor of the other; a graph made otherwise may hold the op."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    from tpu_compile.compiler import compile_graph

    outer, inner = torch.fx.Graph(), torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        full, row = torch.empty(5, 2), torch.empty(2)
    a, b = inner.placeholder("a"), inner.placeholder("b")
    total = inner.call_function(torch.ops.aten.add.Tensor, (a, b))
    inner.output((total,))
    x, combine = outer.placeholder("x"), outer.get_attr("combine")
    scanned = outer.call_function(associative_scan_op, (combine, [x], ()))
    result = outer.call_function(torch.ops.aten.neg.default, (outer.call_function(operator.getitem, (scanned, 0)),))
    for node, value in ((a, row), (b, row), (total, row), (x, full), (scanned, (full,)), (result, full)):
        node.meta["val"] = value
    outer.output((result,))
    module = torch.fx.GraphModule({"combine": torch.fx.GraphModule({}, inner)}, outer)
    data = torch.arange(10.0).view(5, 2)
    (got,) = compile_graph(module, "associative", one_graph=True)([data])
    assert torch.equal(got, -data.cumsum(0))


# ---- random numbers inside


def test_every_turn_and_every_call_draws_anew() -> None:
    x = torch.ones(4, 50)

    def fn(x: torch.Tensor) -> Any:
        def body(i: torch.Tensor, y: torch.Tensor) -> Any:
            return i + 1, torch.cat([y[1:], torch.rand_like(y[:1])])

        return (
            while_loop(lambda i, y: i < 4, body, (torch.tensor(0), x))[1],
            scan(lambda c, r: (c * 1, torch.rand_like(r)), x[0], x)[1],
            torch_map(lambda r: torch.rand_like(r * 1), x),
            drop(x) + 10 * drop(x),
            torch.cond(x.sum() > 0, lambda x: torch.rand_like(x), lambda x: x.clone(), (x,)),
        )

    run = compiled(fn)
    torch.manual_seed(3)
    first = run(x)
    loop, scanned, mapped, called, chosen = first
    numbers = torch.cat([t.flatten() for t in (loop, scanned, mapped, chosen)])
    assert numbers.unique().numel() == numbers.numel(), "numbers came twice"
    assert called.unique().tolist() == [0.0, 2.0, 20.0, 22.0]
    assert not torch.equal(run(x)[0], loop)
    torch.manual_seed(3)
    torch.testing.assert_close(run(x), first, rtol=0, atol=0)


def test_gradients_see_the_numbers_of_the_forward() -> None:
    x = torch.ones(4, 50, requires_grad=True)
    y = compiled(lambda x: scan(lambda c, r: (c + F.dropout(r), F.dropout(r.sin())), x[0], x)[1])(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0)
    y = compiled(lambda x: drop(x) * 3)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y.detach())


def test_where_torch_would_draw_again_for_the_backward_it_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    y = compiled(lambda x: torch.cond(x.sum() > 0, lambda x: F.dropout(x.sin()), lambda x: x.clone(), (x,)))(x)
    with pytest.raises(tpu_compile.UnsupportedOp, match="pass the numbers in"):
        torch.autograd.grad(y.sum(), x)


# ---- attention as a function of scores


@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(masked: bool) -> None:
    bias = torch.randn(2, 128)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu") if masked else None

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mod = lambda score, b, h, i, j: score + (i - j) * 0.01 + bias[h, j]  # noqa: E731
        return flex_attention(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=True, return_lse=True)

    q, k, v = torch.randn(2, 2, 128, 8), torch.randn(2, 1, 128, 8), torch.randn(2, 1, 128, 4)
    got = compiled(fn)(q, k, v)
    with warnings.catch_warnings(action="ignore"):  # eager says, once a process, that it is slow
        want = fn(q, k, v)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
