"""The networks in PyTorch: bfloat16, with normalisations, softmax and losses in float32.

Modules are built on the meta device; their tensors are CPU memory that nobody has touched, so that the system never
gives it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """A function of (parameters, *inputs), and shapes for both. ``written``: inputs that it overwrites."""

    function: Callable[..., Any]
    parameters: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    written: tuple[int, ...] = ()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return result


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm_a = Attention(width, heads), nn.LayerNorm(width, 1e-12)
        self.up, self.down, self.norm_b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_a(x + self.attention(x, mask))
        result: Tensor = self.norm_b(x + self.down(F.gelu(self.up(x))))
        return result


class Bert(nn.Module):
    """BERT-base without pooler; ids and mask int64 [batch, tokens] -> [batch, tokens, 768]."""

    def __init__(self, layers: int, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, width) for n in (30522, 512, 2))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)) + self.kinds.weight[0]
        x = self.norm(x)
        allowed = mask[:, None, None, :] != 0
        for layer in self.layers:
            x = layer(x, allowed)
        return x


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, at: Tensor) -> Tensor:
    """Rotary positions ``at`` [tokens] on [batch, heads, tokens, size]."""
    half = x.shape[-1] // 2
    angles = at[:, None].float() * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    """One decoder layer with grouped keys."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm_a, self.norm_b = RMSNorm(width), RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = (*x.shape[:2], -1, self.size)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        return rotate(q, at), rotate(k, at), v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y = self.norm_b(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm_a(x), torch.arange(x.shape[1], device=x.device))
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


class Decoder(nn.Module):
    """One token a sequence through layers with a cache of keys and values, which is written to in place."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.words = nn.Embedding(32000, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 32000, bias=False)

    def forward(self, ids: Tensor, at: Tensor, *cache: Tensor) -> Tensor:
        """int64 [batch, 1] and [1], then keys and values [batch, groups, places, size] of each layer."""
        x = self.words(ids)
        allowed = (torch.arange(cache[0].shape[2], device=ids.device) <= at)[None, None, None]
        for layer, keys, values in zip(self.layers, cache[::2], cache[1::2], strict=True):
            q, k, v = layer.project(layer.norm_a(x), at)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            x = layer.finish(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, enable_gqa=True))
        result: Tensor = self.head(self.norm(x)[:, -1])
        return result


class MixtureOfExperts(nn.Module):
    """Eight SwiGLU experts of which each token takes the best two."""

    def __init__(self, width: int, inner: int, experts: int = 8, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(experts, width, inner)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] -> [tokens, width]."""
        chances = F.softmax(self.router(x).float(), -1)
        weights, chosen = chances.topk(self.best, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        shares = torch.zeros_like(chances, dtype=x.dtype).scatter(-1, chosen, weights)
        inner = F.silu(torch.einsum("tw,ewi->eti", x, self.gate)) * torch.einsum("tw,ewi->eti", x, self.up)
        return torch.einsum("eti,eiw,te->tw", inner, self.down, shares)


class ConvNorm(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(x))
        return result


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            ConvNorm(inputs, inner, 1),
            ConvNorm(inner, inner, 3, stride),
            ConvNorm(inner, 4 * inner, 1),
        )
        self.shortcut = ConvNorm(inputs, 4 * inner, 1, stride) if inputs != 4 * inner else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.c(F.relu(self.b(F.relu(self.a(x))))))


class ResNet(nn.Module):
    """ResNet-50; [batch, 3, height, width] -> [batch, 1000]."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 64, 7, 2)
        blocks, width = [], 64
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(width, 64 << stage, 2 if stage and not block else 1))
                width = 256 << stage
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def forward(module: nn.Module, parameters: dict[str, Tensor], *inputs: Tensor) -> Any:
    return torch.func.functional_call(module, parameters, inputs)


def train_step(module: nn.Module, loss_of: Callable[..., Tensor], held: dict[str, Tensor], *inputs: Tensor) -> Any:
    """The loss, the parameters after a step of gradient descent, and the buffers that the forward has written."""
    learned = {name for name, _ in module.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        buffers = {name: t.clone() for name, t in held.items() if name not in learned}
        y = torch.func.functional_call(module, {**parameters, **buffers}, inputs[:1])
        return loss_of(y, *inputs[1:]), buffers

    known = {name: t for name, t in held.items() if name in learned}
    gradients, (value, buffers) = torch.func.grad_and_value(loss, has_aux=True)(known)
    return value, {name: held[name] - 0.01 * g for name, g in gradients.items()}, buffers


def mean_square(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def attend(_: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def held(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def numbers(*shape: int) -> Tensor:
    return torch.empty(shape)


def whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def bert(layers: int = 12, batch: int = 8, tokens: int = 128) -> Case:
    module = Bert(layers)
    return Case(partial(forward, module), held(module), (whole(batch, tokens), whole(batch, tokens)))


def block(width: int, tokens: int) -> tuple[LlamaBlock, tuple[Tensor, ...]]:
    """Heads of 128, four to a key head where there are as many."""
    heads = width // 128
    return LlamaBlock(width, heads, max(heads // 4, 1), width * 11 // 4), (numbers(1, tokens, width),)


def llama_block(width: int = 2048, tokens: int = 2048) -> Case:
    module, inputs = block(width, tokens)
    return Case(partial(forward, module), held(module), inputs)


def llama_block_train(width: int = 2048, tokens: int = 2048) -> Case:
    module, inputs = block(width, tokens)
    return Case(partial(train_step, module, mean_square), held(module), inputs)


def resnet_train(depths: tuple[int, ...] = (3, 4, 6, 3), batch: int = 32, size: int = 224) -> Case:
    module = ResNet(depths)
    inputs = numbers(batch, 3, size, size), whole(batch)
    return Case(partial(train_step, module, cross_entropy), held(module), inputs)


def mixture(width: int = 1024, tokens: int = 512) -> Case:
    module = MixtureOfExperts(width, width * 11 // 4)
    return Case(partial(forward, module), held(module), (numbers(tokens, width),))


def sdpa(heads: int = 16, tokens: int = 4096) -> Case:
    return Case(attend, {}, tuple(numbers(1, heads, tokens, 128) for _ in range(3)))


def decode(layers: int = 4, width: int = 2048, batch: int = 8, places: int = 2048) -> Case:
    heads = width // 128
    groups = max(heads // 4, 1)
    module = Decoder(layers, width, heads, groups, width * 11 // 4)
    cache = tuple(numbers(batch, groups, places, 128) for _ in range(2 * layers))
    written = tuple(range(2, 2 + len(cache)))
    return Case(partial(forward, module), held(module), (whole(batch, 1), whole(1), *cache), written)


CASES: dict[str, Callable[..., Case]] = {
    "sdpa-4k": sdpa,
    "moe-block": mixture,
    "kv-decode": decode,
    "llama-block": llama_block,
    "llama-block-train": llama_block_train,
    "bert-base": bert,
    "resnet50-train": resnet_train,
}


def build(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Case:
    """A network whose numbers are of one dtype (int64 buffers stay what they are)."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            case = CASES[name](**sizes)
    finally:
        torch.set_default_dtype(previous)
    parameters = {n: torch.empty_like(t, device="cpu", requires_grad=False) for n, t in case.parameters.items()}
    return replace(case, parameters=parameters, inputs=tuple(torch.empty_like(t, device="cpu") for t in case.inputs))
