"""Operators of the user's own: a rule in StableHLO, a rule in jax.numpy, and none at all."""

from __future__ import annotations

import pytest
import torch
from jaxlib.mlir.dialects import stablehlo

import tpu_compile
from tpu_compile.lowering.registry import registry


@torch.library.custom_op("tpu_compile_own::cubed", mutates_args=())
def cubed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x**3 * scale


@torch.library.custom_op("tpu_compile_own::logmeanexp", mutates_args=())
def logmeanexp(x: torch.Tensor) -> torch.Tensor:
    return x.exp().mean(-1).log()


@torch.library.custom_op("tpu_compile_own::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


cubed.register_fake(lambda x, scale=1.0: torch.empty_like(x))
logmeanexp.register_fake(lambda x: x.new_empty(x.shape[:-1]))
unknown.register_fake(torch.empty_like)


def slope(ctx, grad):
    (x,) = ctx.saved_tensors
    return 3 * ctx.scale * x**2 * grad, None


def remember(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


cubed.register_autograd(slope, setup_context=remember)
unknown.register_autograd(lambda ctx, grad: grad)


def cubed_rule(ctx, x, scale=1.0):
    cube = stablehlo.multiply(x, stablehlo.multiply(x, x))
    return stablehlo.multiply(cube, tpu_compile.lowering.hlo.full_like(x, scale))


def logmeanexp_rule(x):
    import jax.numpy as jnp

    return jnp.log(jnp.mean(jnp.exp(x), -1))


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this module's tests only: graphs that may meet a rule of the user's are traced anew in each process."""
    registry.load()
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    tpu_compile.lowers(torch.ops.tpu_compile_own.cubed.default)(cubed_rule)
    tpu_compile.lowers_jnp(torch.ops.tpu_compile_own.logmeanexp.default)(logmeanexp_rule)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_rule_in_stablehlo(agrees):
    counters = agrees(lambda x: cubed(x + 1, 0.5) * 2, X)
    assert counters["ops_native"] >= 3 and not counters["fallback_ops"]


def test_its_gradient_through_register_autograd(agrees):
    counters = agrees(lambda x: cubed(x.sin(), 2.0).cos(), X.clone().requires_grad_(), grad=True)
    assert not counters["fallback_ops"]


def test_a_rule_in_jax_numpy(agrees):
    counters = agrees(lambda x: logmeanexp(x * 2) + 1, X)
    assert counters["ops_jnp"] == 1 and not counters["fallback_ops"]


def test_both_take_symbolic_sizes(agrees):
    compiled = torch.compile(lambda x: logmeanexp(cubed(x)), backend="tpu", dynamic=True, fullgraph=True)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), logmeanexp(cubed(x)))


def test_without_a_rule_it_runs_on_the_cpu_between_compiled_parts(agrees):
    with pytest.warns(tpu_compile.TpuCompileWarning, match=r"tpu_compile_own\.unknown"):
        counters = agrees(lambda x: unknown(x * 2).cos() * x, X.clone().requires_grad_(), grad=True, fullgraph=False)
    assert counters["fallback_ops"] == 1 and counters["ops_native"] > 0


def test_without_a_rule_fullgraph_names_it_and_the_line():
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"unknown[\s\S]*test_custom_ops\.py[\s\S]*tpu_compile\.lowers"):
        torch.compile(lambda x: unknown(x) + 1, backend="tpu", fullgraph=True)(X)


def test_a_wrong_rule_is_named():
    op = torch.ops.tpu_compile_own.cubed.default
    with pytest.raises(ValueError, match="has a rule already: cubed_rule"):
        tpu_compile.lowers(op)(cubed_rule)
    with pytest.raises(TypeError, match="takes"):
        tpu_compile.lowers(torch.ops.tpu_compile_own.unknown.default)(lambda ctx, y: y)
