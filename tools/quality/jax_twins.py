"""The same networks written plainly in JAX: the parameters of the PyTorch ones under their names, the same dtypes,
arguments and gathers. Each is a function of (parameters, *inputs)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Array]


def linear(p: Params, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Params, name: str, x: Array, epsilon: float = 1e-12) -> Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
    y = (wide - mean) * lax.rsqrt(variance + epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]
    return y.astype(x.dtype)


def rms_norm(p: Params, name: str, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return p[f"{name}.weight"] * normal.astype(x.dtype)


def attention(q: Array, k: Array, v: Array, allowed: Array) -> Array:
    """[batch, heads, tokens, size] three times -> the same; softmax in float32."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def grouped(q: Array, k: Array, v: Array, allowed: Array) -> Array:
    """``attention`` with several heads of q to one of k and v."""
    batch, heads, tokens, size = q.shape
    split = q.reshape(batch, k.shape[1], heads // k.shape[1], tokens, size)
    scores = jnp.einsum("bgrqd,bgkd->bgrqk", split, k, preferred_element_type=jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bgrqk,bgkd->bgrqd", weights, v).reshape(q.shape)


def causal(tokens: int) -> Array:
    at = jnp.arange(tokens, dtype=jnp.int32)
    return at[:, None] >= at


def split_heads(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def join_heads(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def bert(p: Params, ids: Array, mask: Array, *, heads: int = 12) -> Array:
    x = p["words.weight"][ids] + p["places.weight"][: ids.shape[1]] + p["kinds.weight"][0]
    x = layer_norm(p, "norm", x)
    allowed = (mask != 0)[:, None, None, :]
    for i in range(len({name.split(".")[1] for name in p if name.startswith("layers.")})):
        at = f"layers.{i}"
        q, k, v = (
            split_heads(linear(p, f"{at}.attention.{n}", x), x.shape[-1] // heads) for n in ("query", "key", "value")
        )
        x = layer_norm(p, f"{at}.norm_a", x + linear(p, f"{at}.attention.out", join_heads(attention(q, k, v, allowed))))
        inner = jax.nn.gelu(linear(p, f"{at}.up", x).astype(jnp.float32), approximate=False).astype(x.dtype)
        x = layer_norm(p, f"{at}.norm_b", x + linear(p, f"{at}.down", inner), 1e-5)
    return x


def rotate(x: Array, at: Array) -> Array:
    half = x.shape[-1] // 2
    angles = at[:, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def project(p: Params, at: str, x: Array, where: Array, size: int) -> tuple[Array, Array, Array]:
    q, k, v = (split_heads(linear(p, f"{at}{n}", x), size) for n in ("query", "key", "value"))
    return rotate(q, where), rotate(k, where), v


def finish(p: Params, at: str, x: Array, mixed: Array) -> Array:
    x = x + linear(p, f"{at}out", join_heads(mixed))
    y = rms_norm(p, f"{at}norm_b", x)
    gate = linear(p, f"{at}gate", y)
    return x + linear(p, f"{at}down", jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * linear(p, f"{at}up", y))


def llama_block(p: Params, x: Array, *, size: int = 128) -> Array:
    q, k, v = project(p, "", rms_norm(p, "norm_a", x), jnp.arange(x.shape[1], dtype=jnp.int32), size)
    return finish(p, "", x, grouped(q, k, v, causal(x.shape[1])))


def decode(p: Params, ids: Array, at: Array, *cache: Array, size: int = 128) -> tuple[Array, tuple[Array, ...]]:
    x = p["words.weight"][ids]
    allowed = jnp.arange(cache[0].shape[2], dtype=jnp.int32) <= at.astype(jnp.int32)
    written = []
    for i, (keys, values) in enumerate(zip(cache[::2], cache[1::2], strict=True)):
        q, k, v = project(p, f"layers.{i}.", rms_norm(p, f"layers.{i}.norm_a", x), at, size)
        keys = keys.at[:, :, at].set(k, mode="promise_in_bounds")
        values = values.at[:, :, at].set(v, mode="promise_in_bounds")
        written += [keys, values]
        x = finish(p, f"layers.{i}.", x, grouped(q, keys, values, allowed))
    return linear(p, "head", rms_norm(p, "norm", x)[:, -1]), tuple(written)


def mixture(p: Params, x: Array, *, best: int = 2) -> Array:
    chances = jax.nn.softmax(linear(p, "router", x).astype(jnp.float32))
    weights, chosen = lax.top_k(chances, best)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)
    rows = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    shares = jnp.zeros(chances.shape, x.dtype).at[rows, chosen].set(weights, mode="promise_in_bounds")
    gate, up = (jnp.einsum("tw,ewi->eti", x, p[name]) for name in ("gate", "up"))
    inner = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up
    return jnp.einsum("eti,eiw,te->tw", inner, p["down"], shares)


def conv(p: Params, name: str, x: Array, stride: int) -> Array:
    weight = p[f"{name}.conv.weight"]
    pad = weight.shape[-1] // 2
    names = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=names)


def conv_norm(p: Params, name: str, x: Array, stride: int, written: Params) -> Array:
    """A convolution and the batch norm of training, whose running statistics go to ``written``."""
    y = conv(p, name, x, stride)
    wide, at = y.astype(jnp.float32), f"{name}.norm"
    mean = wide.mean((0, 2, 3))
    variance = (wide**2).mean((0, 2, 3)) - mean**2
    count = y.size // y.shape[1]
    for what, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
        old = p[f"{at}.running_{what}"]
        written[f"{at}.running_{what}"] = (0.9 * old + 0.1 * value).astype(old.dtype)
    written[f"{at}.num_batches_tracked"] = p[f"{at}.num_batches_tracked"] + 1
    scale, shift = (p[f"{at}.{n}"].astype(jnp.float32)[:, None, None] for n in ("weight", "bias"))
    normal = (wide - mean[:, None, None]) * lax.rsqrt(variance + 1e-5)[:, None, None]
    return (normal * scale + shift).astype(x.dtype)


def resnet(p: Params, x: Array) -> tuple[Array, Params]:
    written: Params = {}
    x = jax.nn.relu(conv_norm(p, "stem", x, 2, written))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)])
    for i in range(len({name.split(".")[1] for name in p if name.startswith("blocks.")})):
        at = f"blocks.{i}"
        stride = 2 if i and f"{at}.shortcut.conv.weight" in p else 1
        y = jax.nn.relu(conv_norm(p, f"{at}.a", x, 1, written))
        y = jax.nn.relu(conv_norm(p, f"{at}.b", y, stride, written))
        y = conv_norm(p, f"{at}.c", y, 1, written)
        if f"{at}.shortcut.conv.weight" in p:
            x = conv_norm(p, f"{at}.shortcut", x, stride, written)
        x = jax.nn.relu(x + y)
    return linear(p, "head", x.mean((2, 3))), written


def step(loss: Callable[..., tuple[Array, Params]], p: Params, *inputs: Array) -> Any:
    """Loss, parameters after a step of gradient descent, and what the forward has written."""
    learned = {n: t for n, t in p.items() if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    buffers = {n: t for n, t in p.items() if n not in learned}

    def of(learned: Params) -> tuple[Array, Params]:
        return loss({**learned, **buffers}, *inputs)

    (value, written), gradients = jax.value_and_grad(of, has_aux=True)(learned)
    return value, {n: t - (0.01 * gradients[n]).astype(t.dtype) for n, t in learned.items()}, written


def mean_square(p: Params, x: Array) -> tuple[Array, Params]:
    return (llama_block(p, x).astype(jnp.float32) ** 2).mean(), {}


def cross_entropy(p: Params, x: Array, labels: Array) -> tuple[Array, Params]:
    logits, written = resnet(p, x)
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, labels[:, None], -1, mode="promise_in_bounds").mean(), written


TWINS: dict[str, Callable[..., Any]] = {
    "sdpa-4k": lambda p, q, k, v: attention(q, k, v, causal(q.shape[2])),
    "llama-block": llama_block,
    "llama-block-train": partial(step, mean_square),
    "moe-block": mixture,
    "kv-decode": decode,
    "bert-base": bert,
    "resnet50-train": partial(step, cross_entropy),
}
