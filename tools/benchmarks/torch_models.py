"""The benchmark's networks in PyTorch, with random weights: one tensor in, one tensor out, float32.

Needs torch and transformers only, so that the interpreter of another framework can use it too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers


class Only(torch.nn.Module):
    """A transformers model reduced to one of its outputs."""

    def __init__(self, model: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)[self.output]
        return result


Built = tuple[torch.nn.Module, torch.Tensor]


def mlp() -> Built:
    """2 layers of 32; float32 [8, 32] -> [8, 32]. So small that a call's overhead is all there is."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    return model, torch.randn(8, 32)


def bert() -> Built:
    """6 layers, hidden 384; int64 [8, 128] -> float32 [8, 128, 384]."""
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )
    return Only(transformers.BertModel(config, add_pooling_layer=False), "last_hidden_state"), tokens(30522, 8, 128)


def llama() -> Built:
    """8 layers, hidden 512; int64 [2, 128] -> float32 [2, 128, 32000]."""
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1376,
        vocab_size=32000,
        use_cache=False,
    )
    return Only(transformers.LlamaForCausalLM(config), "logits"), tokens(32000, 2, 128)


def resnet() -> Built:
    """ResNet-18; float32 [4, 3, 224, 224] -> [4, 1000]."""
    config = transformers.ResNetConfig(
        layer_type="basic",
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        num_labels=1000,
    )
    model = transformers.ResNetForImageClassification(config)
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        # As after training: zeros and ones would hide a wrong formula.
        torch.nn.init.normal_(norm.running_mean, std=0.1)
        torch.nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return Only(model, "logits"), torch.randn(4, 3, 224, 224)


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(5, vocabulary, shape)


MODELS: dict[str, Callable[[], Built]] = {"mlp": mlp, "bert": bert, "llama": llama, "resnet": resnet}


def build(name: str) -> Built:
    """The model in eval mode and its input, the same in every process."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model, x = MODELS[name]()
    return model.eval(), x
