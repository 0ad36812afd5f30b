"""Two Llamas to ask `tpu-compile estimate` about; nothing here makes a weight.

tpu-compile estimate demo/llama.py:train_1b --train
tpu-compile estimate demo/llama.py:decode_7b --price v5e=1.20,v5p=4.20,v6e=2.70
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn


def train_1b(batch: int = 1, tokens: int = 1024, layers: int = 16) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """Llama 3.2 1B in bfloat16, and sequences to learn: `--train` makes a step with AdamW of it."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = _model(vocab_size=128256, head_dim=64, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


def decode_7b(batch: int = 1, places: int = 2048, layers: int = 32) -> tuple[nn.Module, tuple[Tensor]]:
    """Llama 2 7B in bfloat16: the next token of each sequence, with room for 2,048 in the cache."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
    model = _model(vocab_size=32000, head_dim=128, num_hidden_layers=layers, **sizes)
    return Decode(model.eval(), batch, places), (torch.zeros(batch, 1, dtype=torch.long),)


def _model(**sizes: Any) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes))
    return model.to(torch.bfloat16)


class Decode(nn.Module):
    """A causal language model and its cache of keys and values, as buffers, which each call writes to."""

    def __init__(self, model: Any, batch: int, places: int) -> None:
        super().__init__()
        config = model.config
        self.model, self.cache = model, transformers.StaticCache(config=config, max_cache_len=places)
        device = model.lm_head.weight.device
        self.cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, device)
        for i, layer in enumerate(self.cache.layers):
            self.register_buffer(f"keys_{i}", layer.keys)
            self.register_buffer(f"values_{i}", layer.values)
            self.register_buffer(f"length_{i}", layer.cumulative_length)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [batch, 1] -> logits [batch, 1, vocabulary]."""
        for i, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            layer.cumulative_length = getattr(self, f"length_{i}")
        logits: Tensor = self.model(ids, past_key_values=self.cache, use_cache=True).logits
        return logits
