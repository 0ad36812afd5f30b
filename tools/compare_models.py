"""Small models that continuous integration compares with eager, gradients included: ``tpu-compile compare``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]


def convnet() -> Built:
    """Convolutions and batch norms in training mode; float32 [4, 3, 16, 16] -> [4, 10]."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, stride=2, groups=4), nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )
    return model, (torch.randn(4, 3, 16, 16),)


def encoder() -> Built:
    """Two transformer layers with dropout in training mode; float32 [2, 12, 32] -> [2, 12, 32]."""
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 12, 32),)


def llama() -> Built:
    """A two-layer Llama with grouped heads; int64 [2, 16] -> logits, float32 [2, 16, 128]."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).eval(), (torch.randint(0, 128, (2, 16)),)
