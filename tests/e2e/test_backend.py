"""torch.compile(backend="tpu") gives what eager gives: structures, views, strides, aliases, in-place writes, modes."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpu_compile


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


torch.utils._pytree.register_dataclass(Pair)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


# ---- how the backend is found


@pytest.mark.parametrize("name", ["tpu", "tpu_compile"])
def test_backend_is_found_without_an_import_of_ours(run_python, name):
    code = f"""
        import torch
        f = torch.compile(lambda x: x.sin() + 1, backend="{name}", fullgraph=True)
        x = torch.randn(3)
        torch.testing.assert_close(f(x), x.sin() + 1)
        import tpu_compile
        assert tpu_compile.stats()["executions"] == 1
    """
    run_python(code)


def test_other_backends_and_global_settings_are_left_alone(agrees):
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.compile, torch.get_float32_matmul_precision()
    agrees(lambda x: x @ x, torch.randn(3, 3))
    assert before == (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.compile,
        torch.get_float32_matmul_precision(),
    )
    torch.testing.assert_close(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))


# ---- what goes in and comes out


def test_nested_outputs_none_numbers_and_kwargs(agrees):
    def fn(x, *, scale, flag=True):
        return {"a": (x * scale, None), "b": [x.sum(), 3, "text"], "same": x, "flag": flag}

    agrees(fn, torch.randn(2, 3), kwargs={"scale": torch.tensor(2.0), "flag": False})


def test_dataclass_output():
    compiled = torch.compile(lambda x: Pair(x + 1, x * 2), backend="tpu", fullgraph=True)
    x = torch.randn(4)
    result = compiled(x)
    assert type(result) is Pair
    torch.testing.assert_close((result.first, result.second), (x + 1, x * 2))


def test_one_value_returned_twice(agrees):
    def fn(x):
        y = x + 1
        return y, y, x

    agrees(fn, torch.randn(3))
    y, again, _ = torch.compile(fn, backend="tpu")(torch.randn(3))
    y.zero_()
    assert again.sum() == 0, "eager returns one tensor twice"


def test_zero_dim_and_zero_element_tensors(agrees):
    agrees(lambda x, y: (x * 2, y.exp(), x.sum(0), torch.cat([x, x])), torch.empty(0, 3), torch.tensor(1.5))


def test_output_strides_are_eager_s(agrees):
    def fn(x):
        y = x + 1
        return y.t(), (x * 2)[::2], (x - 1).expand(2, 3, 4), y.permute(1, 0).contiguous(), (x * 3)[:, 1]

    agrees(fn, torch.randn(3, 4))


def test_channels_last_in_and_out(agrees):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    agrees(lambda x: (x * 2, x.relu().contiguous()), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[1:, 2:],
        lambda base: base[::2, ::3],
        lambda base: base[0].expand(5, 8),
        lambda base: base.as_strided((4, 4), (2, 1)),
        lambda base: base.view(-1)[3:7],
        lambda base: base[2, 2],
    ],
    ids=["transposed", "offset", "gaps", "expanded", "overlapping", "unaligned", "zero_dim"],
)
def test_inputs_of_every_layout(agrees, make):
    agrees(lambda x: (x * 2 + 1, x.sum()), make(torch.randn(6, 8)))


def test_an_integer_output_and_a_shape(agrees):
    agrees(lambda x: (x.shape[0] * 2, x.shape, x + x.shape[1]), torch.randn(2, 3))


# ---- aliases and in-place writes


def test_views_of_inputs_stay_views():
    def fn(x):
        return x.view(-1)[2:5], x.t()

    x = torch.randn(2, 3)
    part, turned = torch.compile(fn, backend="tpu", fullgraph=True)(x)
    part.fill_(7)
    assert x.flatten()[2:5].tolist() == [7, 7, 7]
    x.zero_()
    assert turned.sum() == 0


def test_in_place_writes_reach_the_arguments(agrees):
    def fn(x, y):
        x.mul_(2)
        early = x.sum()
        x.copy_(y).neg_()
        y.add_(x)
        return early, x.exp_(), y.clamp_(min=0)

    agrees(fn, torch.randn(5), torch.randn(5), calls=3)


def test_writes_through_views_and_to_strided_arguments(agrees):
    def fn(x, a):
        x.view(-1)[1:3].zero_()
        a.t().mul_(torch.arange(3.0))
        a.diagonal().fill_(0.5)
        return x * 2

    agrees(fn, torch.randn(3, 4), torch.randn(3, 3), calls=2)
    agrees(lambda x: x.add_(1).sum(), torch.randn(4, 6).t(), calls=2)
    agrees(lambda x: x.add_(1).sum(), torch.randn(4, 6)[:, ::2], calls=2)


def test_arguments_that_alias(agrees):
    def fn(a, b, c):
        a.add_(1)
        b[0].mul_(10)
        return a + b.view(-1), c + a[:1]

    base = torch.arange(6.0)
    agrees(fn, base, base.view(2, 3), base[5], calls=2)


def test_batch_norm_in_training_mode(agrees):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False, momentum=0.3)
    )
    agrees(model.train(), torch.randn(3, 3, 7, 7), grad=True, calls=3)


def test_buffers_are_read_at_every_call():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x):
            return x * self.scale

    model, x = Scale(), torch.randn(3)
    compiled = torch.compile(model, backend="tpu")
    before = compiled(x)
    model.scale = torch.full((3,), 5.0)
    after = compiled(x)
    torch.testing.assert_close(after, before / 2 * 5)
    model.scale.mul_(2)
    torch.testing.assert_close(compiled(x), after * 2)


def test_a_parameter_that_moves_in_memory_is_read_where_it_is():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="tpu")
    with torch.no_grad():
        compiled(x)
        for _ in range(3):
            model.weight.data = torch.randn(4, 4)
            torch.testing.assert_close(compiled(x), model(x))
        model.weight.data = torch.randn(4, 4).t()
        torch.testing.assert_close(compiled(x), model(x))


# ---- grad modes


def test_training_forward_and_backward(agrees):
    agrees(mlp(), torch.randn(5, 8), grad=True, calls=2)


def test_gradients_of_inputs_and_of_views(agrees):
    x = torch.randn(3, 4, requires_grad=True)
    agrees(lambda x: (x.t() @ x, x.sin().t()), x, grad=True)


def test_no_grad_and_inference_mode():
    model, x = mlp(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="tpu", fullgraph=True)
    want = model(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), want)
        assert not compiled(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), want)
    assert compiled(x).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, x = mlp(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="tpu", fullgraph=True)
    with torch.autocast("cpu", dtype=dtype):
        want, got = model(x), compiled(x)
    assert want.dtype == got.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_graph_breaks_run_both_sides(agrees):
    def fn(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() + 1

    counters = agrees(fn, torch.randn(4), fullgraph=False)
    assert counters["graphs"] == 2 and counters["executions"] == 2


def test_data_dependent_code_runs_through_graph_breaks(agrees):
    def fn(x):
        if x.sum() > 0:
            return x[x > 0] * 2
        return x.nonzero()

    agrees(fn, torch.tensor([1.0, -2.0, 3.0]), fullgraph=False)
    agrees(fn, torch.tensor([-1.0, -2.0, 0.5]), fullgraph=False)


DATA_DEPENDENT = {
    "nonzero": (lambda x: x.nonzero(), "torch.nonzero_static"),
    "mask": (lambda x: x[x > 0] * 2, r"torch\.where\(mask, x, 0\)"),
    "masked_select": (lambda x: x.masked_select(x > 0), r"torch\.where\(mask, x, 0\)"),
    "unique": (lambda x: x.unique(), r"x\.sort\(\)"),
    "bincount": (lambda x: x.long().abs().bincount(), "scatter_add"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long().abs()), "output_size"),
    "item": (lambda x: torch.ones(int(x[2].item())), r"in place of \.item\(\)"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), r"torch\.where"),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_shape_that_depends_on_data_is_an_error_with_line_and_way_out_or_a_graph_break(agrees, name):
    fn, instead = DATA_DEPENDENT[name]
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(tpu_compile.UnsupportedOp, match=rf"depends on data\n.*test_backend\.py:\d+[\s\S]*{instead}"):
        torch.compile(fn, backend="tpu", fullgraph=True)(x)
    agrees(lambda x: fn(x + 1), x, fullgraph=False)


# ---- copies, resets, threads


def test_deepcopy_of_a_compiled_module():
    model, x = mlp(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="tpu")
    compiled(x)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0)
    assert twin(x).abs().max() == 0
    torch.testing.assert_close(compiled(x), model(x))


def test_dynamo_reset_compiles_nothing_anew():
    f, x = torch.compile(lambda x: x.tanh() * 3, backend="tpu"), torch.randn(7)
    f(x)
    torch._dynamo.reset()
    tpu_compile.reset_stats()
    torch.testing.assert_close(f(x), x.tanh() * 3)
    assert tpu_compile.stats()["memory_hits"] == 1 and tpu_compile.stats()["xla_compiles"] == 0


def test_threads_share_a_compiled_model():
    model = mlp().eval()
    compiled = torch.compile(model, backend="tpu")
    inputs = [torch.randn(5, 8) for _ in range(8)]
    with torch.no_grad():
        want = [model(x) for x in inputs]
        compiled(inputs[0])
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(compiled(inputs[i]), want[i], atol=1e-5):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_inputs_may_be_overwritten_the_moment_a_call_returns():
    f = torch.compile(lambda x, w: (x @ w).sin() @ w, backend="tpu", fullgraph=True)
    w = torch.randn(256, 256) / 16
    for seed in range(20):
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
        want = (x @ w).sin() @ w
        got = f(x, w)
        x.fill_(1e9)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_results_do_not_share_memory_with_later_calls():
    f = torch.compile(lambda x: x + 1, backend="tpu")
    kept = [f(torch.full((64,), float(i))) for i in range(10)]
    for i, t in enumerate(kept):
        assert (t == i + 1).all()
    kept[0].zero_()
    assert (f(torch.zeros(64)) == 1).all()


# ---- random numbers


def test_dropout_trains_and_its_backward_uses_its_mask():
    x = (torch.rand(500) + 1).requires_grad_()
    f = torch.compile(lambda x: F.dropout(F.dropout(x, 0.5) * 2, 0.3), backend="tpu", fullgraph=True)
    y = f(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, (y / x).detach())
    assert 0.25 < (y != 0).float().mean() < 0.45


def test_seeds_govern_compiled_random_numbers():
    f = torch.compile(lambda x: (F.dropout(x, 0.5), torch.rand(9), torch.randn_like(x)), backend="tpu", fullgraph=True)
    x = torch.ones(64)

    def draw() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [t for _ in range(2) for t in f(x)]

    first, again = draw(), draw()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], first[4]), "a second call draws new numbers"
    state = torch.get_rng_state()
    a = f(x)[1]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        f(x)
    b = f(x)[1]
    torch.set_rng_state(state)
    assert torch.equal(a, f(x)[1]) and torch.equal(b, f(x)[1])


def test_checkpointed_dropout_is_recomputed_with_its_mask():
    def block(x):
        return F.dropout(x.sin(), 0.5) * 2

    f = torch.compile(
        lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), backend="tpu", fullgraph=True
    )
    x = (torch.rand(300) + 0.1).requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0)


# ---- bad input


def test_unknown_option_names_the_nearest():
    with pytest.raises(tpu_compile.ConfigError, match="Did you mean 'excess_precision'"):
        torch.compile(lambda x: x + 1, backend="tpu", options={"exces_precision": True})(torch.ones(1))


def test_unsupported_ops_are_listed_together_with_their_lines():
    lib = torch.library.Library("tpu_compile_test", "DEF")
    for name in ("first", "second"):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, lambda x: x * 2, "CPU")
        torch.library.register_fake(f"tpu_compile_test::{name}", torch.empty_like, lib=lib)

    def fn(x):
        y = torch.ops.tpu_compile_test.first(x + 1)
        return torch.ops.tpu_compile_test.second(y * 3)

    x = torch.randn(4)
    with pytest.raises(tpu_compile.UnsupportedOp) as caught:
        torch.compile(fn, backend="tpu", fullgraph=True)(x)
    assert len(caught.value.gaps) == 2
    assert "test_backend.py" in caught.value.gaps[0].where and "first(x + 1)" in caught.value.gaps[0].where
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", tpu_compile.TpuCompileWarning)
        for rows in (4, 5, 4):
            got = torch.compile(fn, backend="tpu", dynamic=False)(x[:1].expand(rows))
    torch.testing.assert_close(got, fn(x[:1].expand(4)))
    (message,) = (str(w.message) for w in told if issubclass(w.category, tpu_compile.TpuCompileWarning))
    assert re.search(
        r"runs 2 op[\s\S]*first[\s\S]*test_backend\.py:\d+[\s\S]*second[\s\S]*test_backend\.py:\d+", message
    )
    assert tpu_compile.stats()["fallback_ops"] == 6


def test_mode_is_accepted_with_one_warning():
    with pytest.warns(tpu_compile.TpuCompileWarning):
        f = torch.compile(lambda x: x.softmax(-1) + 1, backend="tpu", mode="max-autotune", dynamic=False)
        x = torch.randn(3, 5)
        torch.testing.assert_close(f(x), x.softmax(-1) + 1)
