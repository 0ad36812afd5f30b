"""``debug_checks``: indices out of range and the first NaN or infinity raise, and name the user's line."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tpu_compile

CHECKED = {"debug_checks": True}


def compiled(fn, **options):
    return torch.compile(fn, backend="tpu", fullgraph=True, options=CHECKED, **options)


def put(x, i):
    x = x.clone()
    x[i] = 1
    return x


X = torch.arange(12.0).reshape(3, 4)
OUT_OF_RANGE = {
    "index": lambda i: X[i],
    "second axis": lambda i: X.T[:, i],
    "index_put": lambda i: put(X, i),
    "gather": lambda i: X.gather(0, i[:, None]),
    "scatter": lambda i: X.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda i: X.scatter_add(0, i[:, None], torch.ones(2, 1)),
    "index_select": lambda i: X.index_select(0, i),
    "index_add": lambda i: X.index_add(0, i, torch.ones(2, 4)),
    "embedding": lambda i: F.embedding(i, X),
    "embedding_bag": lambda i: F.embedding_bag(i[None], X),
    "take": lambda i: X.reshape(-1)[:3].take(i),
    "nll_loss": lambda i: F.nll_loss(X[:2, :3], i),
    "cross_entropy": lambda i: F.cross_entropy(X[:2, :3], i),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_that_eager_refuses(name):
    fn, bad = OUT_OF_RANGE[name], torch.tensor([1, 3])
    with pytest.raises((IndexError, RuntimeError)):
        fn(bad)
    checked = compiled(fn)
    torch.testing.assert_close(checked(torch.tensor([1, 2])), fn(torch.tensor([1, 2])))
    with pytest.raises(IndexError, match=r"index 3 is out of bounds for axis . with size 3") as caught:
        checked(bad)
    assert isinstance(caught.value, tpu_compile.IndexOutOfRange)
    assert f"{__file__}:" in str(caught.value)


def test_negative_indices_only_where_eager_takes_them():
    last = torch.tensor([-1, 0])
    torch.testing.assert_close(compiled(lambda i: X[i])(last), X[last])
    with pytest.raises(tpu_compile.IndexOutOfRange, match=r"index -1 .* allowed 0 to 2"):
        compiled(lambda i: X.gather(0, i[:, None]))(last)
    with pytest.raises(tpu_compile.IndexOutOfRange, match="index -4"):
        compiled(lambda i: X[i])(torch.tensor([-4]))


def test_what_has_no_bounds_to_break():
    assert compiled(lambda i: X[i])(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    ignored = torch.tensor([1, -100])
    torch.testing.assert_close(compiled(lambda i: F.cross_entropy(X[:2], i))(ignored), F.cross_entropy(X[:2], ignored))


def test_nan_and_infinity_at_the_op_that_made_them():
    def fn(x):
        y = x + 1
        z = torch.log(y)  # the line
        return (z * 2).sum()

    checked = compiled(fn)
    torch.testing.assert_close(checked(torch.ones(3)), fn(torch.ones(3)))
    with pytest.raises(tpu_compile.NonFiniteResult, match=r"aten\.log\.default.* has NaN[\s\S]*the line"):
        checked(torch.tensor([1.0, -2.0, 1.0]))
    with pytest.raises(FloatingPointError, match=r"aten\.log\.default.* has infinity[\s\S]*the line"):
        checked(torch.tensor([1.0, -1.0, 1.0]))


def test_a_nan_that_was_given_is_nobodys_fault():
    given = torch.tensor([1.0, float("nan"), float("inf")])
    torch.testing.assert_close(compiled(lambda x: x.exp() * 2)(given), given.exp() * 2, equal_nan=True)


def test_masks_of_infinity_are_meant():
    def attend(x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        scores = (x @ x.T).masked_fill(torch.eye(4, dtype=torch.bool).roll(1, 0), float("-inf"))
        return torch.softmax(scores + mask, -1)

    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(attend)(x), attend(x))
    with pytest.raises(tpu_compile.NonFiniteResult, match="has NaN"):  # a row that is masked as a whole
        compiled(lambda x: torch.softmax(x.masked_fill(x < 9, float("-inf")), -1))(torch.zeros(2, 2))


def test_the_gradient_is_checked_too():
    x = torch.zeros(3, requires_grad=True)
    root = compiled(lambda x: torch.sqrt(x).sum())(x)
    with pytest.raises(tpu_compile.NonFiniteResult, match=r"sqrt\(x\)"):
        root.backward()


def test_complex_and_16_bit_values():
    with pytest.raises(tpu_compile.NonFiniteResult):
        compiled(lambda x: torch.complex(x, x) / 0)(torch.ones(2))
    with pytest.raises(tpu_compile.NonFiniteResult, match="infinity"):
        compiled(lambda x: x * 300)(torch.full((2,), 300.0, dtype=torch.float16))


def test_arguments_are_left_alone_when_a_check_fails():
    def fn(x):
        x.log_()

    x = torch.tensor([-1.0, 1.0])
    with pytest.raises(tpu_compile.NonFiniteResult):
        compiled(fn)(x)
    assert x.tolist() == [-1.0, 1.0]


def test_off_it_changes_no_program():
    def lowered():
        return tpu_compile.trace(lambda x, i: x[i].log(), X, torch.tensor([0])).lower()

    plain = lowered()
    with tpu_compile.override(debug_checks=True):
        checked = lowered()
    assert "is_finite" not in plain.as_text() and "is_finite" in checked.as_text()
    assert lowered().as_text() == plain.as_text()


# ---- in the bodies of loops and branches


def in_cond(x, i):
    return torch.cond(x.sum() > 0, lambda x, i: x[i].log(), lambda x, i: x[i] * 2, (x, i))  # branch


def in_while_loop(x, i):
    def body(n, y):
        return n + 1, torch.log(y) + x[i + n]  # body

    return torch.while_loop(lambda n, y: n < 2, body, (torch.zeros((), dtype=torch.int64), x[0:2].clone()))[1]


def in_condition(x, i):
    def go_on(n, y):
        return (n < 2) & (x[i + n].log().sum() > -9)  # condition

    return torch.while_loop(go_on, lambda n, y: (n + 1, y * 2), (torch.zeros((), dtype=torch.int64), x.clone()))[1]


def in_scan(x, i):
    def step(carry, row):
        return carry + 1, row.log() + x[i + carry].sum()  # step

    return scan(step, torch.zeros((), dtype=torch.int64), x)[1]


def in_map(x, i):
    return torch_map(lambda row, x, i: row.log() + x[i].sum(), x.clone(), x, i)  # map


def in_associative_scan(x, i):
    def combine(a, b):
        return torch.log(a * b)  # combine

    return associative_scan(combine, x, 0, combine_mode="generic") + x[i].sum()


def in_nested(x, i):
    def body(n, y):
        return n + 1, torch.cond(n < 1, lambda y: torch.log(y), lambda y: y + x[i + n].sum(), (y,))  # nested

    return torch.while_loop(lambda n, y: n < 2, body, (torch.zeros((), dtype=torch.int64), x.clone()))[1]


@torch.compiler.nested_compile_region
def region(x, i):
    return x[i].log()  # region


def in_region(x, i):
    return region(x, i) + region(x + 1, i)


def in_checkpoint(x, i):
    return checkpoint(lambda x, i: x[i].log(), x, i, use_reentrant=False)  # checkpoint


BODIES = {
    "branch": (in_cond, [1, 3]),
    "body": (in_while_loop, [1, 2]),
    "condition": (in_condition, [1, 2]),
    "step": (in_scan, [0, 1]),
    "map": (in_map, [1, 3]),
    "nested": (in_nested, [1, 2]),
    "region": (in_region, [1, 3]),
    "checkpoint": (in_checkpoint, [1, 3]),
}
ROWS = torch.arange(1.0, 13).reshape(3, 4) * 10


@pytest.mark.parametrize("line", BODIES)
def test_an_index_out_of_range_in_a_body(line):
    fn, bad = BODIES[line]
    good = torch.zeros(2, dtype=torch.int64)
    checked = compiled(fn)
    torch.testing.assert_close(checked(ROWS, good), fn(ROWS, good))
    with pytest.raises(tpu_compile.IndexOutOfRange, match=rf"index 3 [\s\S]*# {line}"):
        checked(ROWS, torch.tensor(bad))


@pytest.mark.parametrize("line", [*BODIES, "combine"])
def test_a_nan_made_in_a_body(line):
    fn = BODIES[line][0] if line in BODIES else in_associative_scan
    good, x = torch.zeros(2, dtype=torch.int64), ROWS.clone()
    x[0, 0] = -1.0
    with pytest.raises(tpu_compile.NonFiniteResult, match=rf"aten\.log\.default.* has NaN[\s\S]*# {line}"):
        compiled(fn)(x, good)


def test_the_first_finding_of_a_loop_is_told():
    """The second turn's index is out of range; the first turn's logarithm was the first fault."""
    x = ROWS.clone()
    x[0, 0] = -1.0
    with pytest.raises(tpu_compile.NonFiniteResult):
        compiled(in_while_loop)(x, torch.tensor([1, 2]))


def test_only_the_branch_taken_is_looked_at():
    wrong = torch.tensor([1, 3])
    both = lambda x, i: torch.cond(x.sum() > 0, lambda x, i: x * 2, lambda x, i: x + x[i].sum(), (x, i))  # noqa: E731
    torch.testing.assert_close(compiled(both)(ROWS, wrong), ROWS * 2)
    with pytest.raises(tpu_compile.IndexOutOfRange):
        compiled(both)(-ROWS, wrong)


def test_a_loop_of_no_turns_finds_nothing():
    def fn(x, i):
        return torch.while_loop(lambda n, y: n < 0, lambda n, y: (n + 1, y + x[i].sum()), (i.sum(), x.clone()))[1]

    torch.testing.assert_close(compiled(fn)(ROWS, torch.tensor([7, 9])), ROWS)
