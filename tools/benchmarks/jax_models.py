"""The benchmark's networks written plainly in JAX, with the parameters of the PyTorch ones.

Each is a function of (parameters, input), where parameters is PyTorch's state_dict as JAX arrays: the same names, the
same layouts, the same arithmetic. `bench.py` checks that they agree before it times anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Array]
Forward = Callable[[Params, Array], Array]


def linear(p: Params, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def mlp(p: Params, x: Array) -> Array:
    return linear(p, "2", jax.nn.relu(linear(p, "0", x)))


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """[batch, tokens, heads, size] three times -> [batch, tokens, heads * size]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def layer_norm(p: Params, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-12) * p[f"{name}.weight"] + p[f"{name}.bias"]


def bert(p: Params, ids: Array, layers: int = 6, heads: int = 12) -> Array:
    at = "model.embeddings"
    words = p[f"{at}.word_embeddings.weight"][ids]
    places = p[f"{at}.position_embeddings.weight"][: ids.shape[1]]
    x = layer_norm(p, f"{at}.LayerNorm", words + places + p[f"{at}.token_type_embeddings.weight"][0])
    for i in range(layers):
        at = f"model.encoder.layer.{i}"
        q, k, v = (
            linear(p, f"{at}.attention.self.{part}", x).reshape(*x.shape[:2], heads, -1)
            for part in ("query", "key", "value")
        )
        mixed = linear(p, f"{at}.attention.output.dense", attention(q, k, v, causal=False))
        x = layer_norm(p, f"{at}.attention.output.LayerNorm", x + mixed)
        inner = jax.nn.gelu(linear(p, f"{at}.intermediate.dense", x), approximate=False)
        x = layer_norm(p, f"{at}.output.LayerNorm", x + linear(p, f"{at}.output.dense", inner))
    return x


def rms_norm(p: Params, name: str, x: Array) -> Array:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]


def rotate(x: Array) -> Array:
    """Rotary positions on [batch, tokens, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama(p: Params, ids: Array, layers: int = 8, heads: int = 8) -> Array:
    x = p["model.model.embed_tokens.weight"][ids]
    for i in range(layers):
        at = f"model.model.layers.{i}"
        y = rms_norm(p, f"{at}.input_layernorm", x)
        q, k, v = (linear(p, f"{at}.self_attn.{n}_proj", y).reshape(*y.shape[:2], heads, -1) for n in "qkv")
        x = x + linear(p, f"{at}.self_attn.o_proj", attention(rotate(q), rotate(k), v, causal=True))
        y = rms_norm(p, f"{at}.post_attention_layernorm", x)
        gated = jax.nn.silu(linear(p, f"{at}.mlp.gate_proj", y)) * linear(p, f"{at}.mlp.up_proj", y)
        x = x + linear(p, f"{at}.mlp.down_proj", gated)
    return linear(p, "model.lm_head", rms_norm(p, "model.model.norm", x))


def conv_norm(p: Params, name: str, x: Array, stride: int, layout: str) -> Array:
    """A convolution without bias and the batch norm of inference; ``layout`` is the images': NCHW or NHWC."""
    weight = p[f"{name}.convolution.weight"]
    pad = (weight.shape[-1] - 1) // 2
    x = lax.conv_general_dilated(
        x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=(layout, "OIHW", layout)
    )
    name += ".normalization"
    scale = p[f"{name}.weight"] * lax.rsqrt(p[f"{name}.running_var"] + 1e-5)
    shift = p[f"{name}.bias"] - p[f"{name}.running_mean"] * scale
    return x * per_channel(scale, layout) + per_channel(shift, layout)


def per_channel(x: Array, layout: str) -> Array:
    return x[:, None, None] if layout == "NCHW" else x


def max_pool(x: Array, layout: str) -> Array:
    """3 × 3, stride 2, padding 1, over the images' height and width."""
    inner = [axis in "HW" for axis in layout]
    size, stride = ([n if each else 1 for each in inner] for n in (3, 2))
    return lax.reduce_window(x, -jnp.inf, lax.max, size, stride, [(int(each), int(each)) for each in inner])


def resnet(p: Params, x: Array, layout: str = "NCHW") -> Array:
    x = jax.nn.relu(conv_norm(p, "model.resnet.embedder.embedder", x, 2, layout))
    x = max_pool(x, layout)
    for stage in range(4):
        for block in range(2):
            at = f"model.resnet.encoder.stages.{stage}.layers.{block}"
            stride = 2 if stage and not block else 1
            y = jax.nn.relu(conv_norm(p, f"{at}.layer.0", x, stride, layout))
            y = conv_norm(p, f"{at}.layer.1", y, 1, layout)
            if f"{at}.shortcut.convolution.weight" in p:
                x = conv_norm(p, f"{at}.shortcut", x, stride, layout)
            x = jax.nn.relu(x + y)
    return linear(p, "model.classifier.1", x.mean((layout.index("H"), layout.index("W"))))


MODELS: dict[str, Forward] = {"mlp": mlp, "bert": bert, "llama": llama, "resnet": resnet}
# The layout XLA's CPU convolutions like best; PyTorch users have NCHW, so the comparison is with that one.
RESNET_NHWC: Forward = partial(resnet, layout="NHWC")
