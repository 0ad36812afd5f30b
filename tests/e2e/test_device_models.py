"""Models of transformers, uncompiled on the `tpu` device: no op of theirs is the CPU's, and the numbers are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tpu_compile
from tests import architectures
from tpu_compile.tolerances import tolerance

QUICK = "llama"


def results_and_gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every floating-point output, and the parameters' gradients of their weighted sum."""
    leaves = tree_leaves(dict(model(**inputs)))
    outputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    # Weights, because the sum of squares behind a normalisation is constant, and its gradient nothing but rounding.
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.device) for t in outputs]
    sum((t * w).mean() for t, w in zip(outputs, weights, strict=True)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{f"output {i}": t.detach() for i, t in enumerate(outputs)}, **grads}


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.full) for n in architectures.ALL]
)
def test_a_model_runs_as_on_the_cpu(name):
    torch.manual_seed(0)
    model, inputs = architectures.make(name)
    moved = copy.deepcopy(model).to("tpu")
    want = results_and_gradients(model, inputs)
    got = results_and_gradients(moved, {key: value.to("tpu") for key, value in inputs.items()})
    assert want.keys() == got.keys() and tpu_compile.stats()["fallback_ops"] == 0
    rtol, atol = tolerance(torch.float32)
    for key, value in want.items():
        torch.testing.assert_close(got[key].cpu(), value, rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}")
