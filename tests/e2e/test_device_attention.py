"""Attention on the tpu device is one operator, forward and backward, and equals the CPU's."""

from __future__ import annotations

import pytest
import torch

import tpu_compile

F = torch.nn.functional


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("heads", [4, 2], ids=["equal", "grouped"])
def test_results_and_gradients(mask, heads):
    torch.manual_seed(0)
    given = [torch.randn(2, n, 5, 8) for n in (4, heads, heads)]
    bias = {"bool": torch.rand(2, 1, 5, 5) > 0.3, "float": torch.randn(1, 4, 5, 5)}.get(mask)

    def run(device: str) -> list[torch.Tensor]:
        leaves = [t.clone().to(device).requires_grad_() for t in map(torch.Tensor.detach, given)]
        held = None if bias is None else bias.to(device)
        result = F.scaled_dot_product_attention(
            *(leaf * 1.0 for leaf in leaves), attn_mask=held, is_causal=mask == "causal", enable_gqa=heads == 2
        )
        grads = torch.autograd.grad(result.square().sum(), leaves)
        return [t.detach().cpu() for t in (result, *grads)]

    for ours, theirs in zip(run("tpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_a_graph_holds_it_whole_and_what_has_no_rule_in_parts():
    def names(*args, **kwargs) -> str:
        traced = tpu_compile.trace(lambda q: F.scaled_dot_product_attention(q, q, q, **kwargs), *args)
        return str([n.target for n in traced.graph_module.graph.nodes])

    q = torch.randn(1, 2, 4, 8, device="tpu")
    assert "fused_attention_overrideable" in names(q)
    assert "fused" not in names(q, dropout_p=0.5) and "fused" not in names(q[0])
    assert F.scaled_dot_product_attention(q[0], q[0], q[0]).shape == (2, 4, 8)
