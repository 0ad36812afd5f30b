"""Buckets: a few programs for all sizes, results as without padding, and an error where that cannot be."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import tpu_compile
from tpu_compile.buckets import Buckets
from tpu_compile.errors import PaddingVisible


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_encoder_sees_no_padding_and_compiles_a_few_programs():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    encode = Buckets(model, batch=(2, 4), sequence=(8, 16), mask="attention_mask")
    for rows, length in ((2, 5), (1, 8), (2, 7), (3, 9), (2, 8)):
        ids = torch.randint(0, 50, (rows, length))
        with torch.no_grad():
            want = model(input_ids=ids)
        got = encode(input_ids=ids)
        close(got.last_hidden_state, want.last_hidden_state)
        close(got.pooler_output, want.pooler_output)
    stats = tpu_compile.stats()
    report = stats["shapes"]["BertModel"]
    assert report["2x8"] == 4 and report["4x16"] == 1 and report["checked"] == 3
    assert (report["elements"], report["padded_elements"]) == (10 + 8 + 14 + 27 + 16, 4 * 16 + 64)
    assert stats["xla_compiles"] == 2


def test_padding_that_shows_is_an_error():
    averaged = Buckets(lambda x: x.mean(1), sequence=(8,))
    with pytest.raises(PaddingVisible, match="result 0 differs"):
        averaged(torch.randn(2, 5))
    flat = Buckets(lambda x: x.flatten(), batch=(4,), sequence=(8,))
    with pytest.raises(PaddingVisible, match="neither the batch nor the sequence"):
        flat(torch.randn(2, 5))
    with pytest.raises(tpu_compile.BadCall, match="nothing to pad"):
        averaged(torch.tensor(1.0))


def test_the_budget_bounds_what_is_compiled():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    run = Buckets(layer, batch=(2, 4, 8), budget=1)
    for rows in (3, 1, 4, 9):
        x = torch.randn(rows, 3)
        with torch.no_grad():
            close(run(x), layer(x))
    report = tpu_compile.stats()["shapes"]["Linear"]
    assert report["4"] == 3 and report["eager"] == 1 and tpu_compile.stats()["xla_compiles"] == 1


def llama(**more) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=50, use_cache=False, **more)
    )


def test_training_with_padding_gives_the_gradients_without():
    model = llama(attention_dropout=0.0)
    run = Buckets(
        model, batch=(4,), sequence=(8, 16), mask="attention_mask", pad_values={"labels": -100}, train=True, budget=2
    )
    for rows, length in ((3, 5), (2, 7), (4, 8)):
        ids = torch.randint(0, 50, (rows, length))
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        want = model(input_ids=ids, labels=ids).loss
        want.backward()
        close(loss, want)
        for ours, theirs in zip(got, model.parameters(), strict=True):
            close(ours, theirs.grad)
    report = tpu_compile.stats()["shapes"]["LlamaForCausalLM"]
    assert report["4x8"] == 3 and report["checked"] == 1 and tpu_compile.stats()["xla_compiles"] == 2
    assert model.training


def test_a_step_of_ones_own_takes_padded_arguments():
    model = llama()
    fit = Buckets(model, sequence=(8,), mask="attention_mask", pad_values={"labels": -100}, budget=1)
    step = tpu_compile.train_step(model, lambda out: out.loss, torch.optim.SGD(model.parameters(), lr=0.0))
    for length in (5, 7):
        ids = torch.randint(0, 50, (2, length))
        _, given = fit.pad(input_ids=ids, labels=ids)
        close(step(given), model(input_ids=ids, labels=ids).loss.detach())
    assert tpu_compile.stats()["xla_compiles"] == 1
    with pytest.raises(tpu_compile.BadCall, match="budget"):
        fit.pad(input_ids=torch.zeros(2, 9, dtype=torch.int64))


def test_padding_on_the_left_keeps_the_last_token_last():
    model = llama().eval()
    run = Buckets(model, sequence=(8,), mask="attention_mask", side="left")
    ids = torch.randint(0, 50, (2, 5))
    with torch.no_grad():
        close(run(input_ids=ids, logits_to_keep=1).logits, model(input_ids=ids, logits_to_keep=1).logits)
        close(run(input_ids=ids).logits, model(input_ids=ids).logits)
    with pytest.raises(tpu_compile.ConfigError, match="side"):
        Buckets(model, side="both")


def test_losses_and_statistics_that_see_padding_are_errors():
    loss = Buckets(lambda x, y: ((x - y) ** 2).mean(), batch=(4,), train=True)
    with pytest.raises(PaddingVisible, match="differs"):
        loss(torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(PaddingVisible, match="batch norm"):
        Buckets(nn.BatchNorm1d(2), batch=(4,), train=True)(torch.randn(3, 2))
