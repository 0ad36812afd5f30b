"""The benchmark's training steps in PyTorch: AdamW on next-token cross entropy.

Needs torch and transformers only, so that the interpreter of another framework can use it too. The networks are scaled
to two CPU cores, but for the last: GPT-2 with its shape, 4 layers of 256 and a vocabulary of 4,096; the Llama of the
other parts with 4 layers of 256; and GPT-2 small as it is, with one text of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from benchmarks import torch_models
from benchmarks.timing import Call

RATE, DECAY, BETAS, EPS = 1e-3, 0.01, (0.9, 0.999), 1e-8


def _gpt2(layers: int, hidden: int, heads: int, vocabulary: int, *shape: int) -> torch_models.Built:
    config = transformers.GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=shape[-1], use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = torch_models.Only(transformers.GPT2LMHeadModel(config), "logits")
    return model, torch_models.tokens(vocabulary, *shape)


def _llama() -> torch_models.Built:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, intermediate_size=688,
        vocab_size=4096, use_cache=False,
    )  # fmt: skip
    return torch_models.Only(transformers.LlamaForCausalLM(config), "logits"), torch_models.tokens(4096, 4, 128)


MODELS: dict[str, Callable[[], torch_models.Built]] = {
    "gpt2": lambda: _gpt2(4, 256, 4, 4096, 4, 128),
    "llama": _llama,
    "gpt2-small": lambda: _gpt2(12, 768, 12, 50257, 1, 128),
}


def build(name: str) -> torch_models.Built:
    """The model in training mode and its tokens, the same in every process."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model, ids = MODELS[name]()
    return model.train(), ids


def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, **options)


def own_loop(
    model: torch.nn.Module,
    ids: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    compiled: Callable[[Any], Any] = lambda function: function,
    compiled_optimizer: Callable[[Any], Any] = lambda function: function,
    end: Callable[[], object] = lambda: None,
) -> Call:
    """The loop that everybody writes: forward, backward, optimizer."""
    forward, update = compiled(model), compiled_optimizer(optimizer.step)

    def call() -> float:
        optimizer.zero_grad()
        loss = loss_fn(forward(ids), ids)
        loss.backward()
        update()
        end()
        return loss.item()

    return call
