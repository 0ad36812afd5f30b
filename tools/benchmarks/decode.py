"""Greedy decoding of two Llamas, token by token: ours against a loop over a jitted step of the same network in JAX.

Both read the prompt with one program and make each token with one execution, whose cache is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax import Array, lax

from benchmarks.jax_models import Params, linear, rms_norm
from benchmarks.timing import in_turn

PROMPT, ROOM = 32, 256
Cache = list[tuple[Array, Array]]


@dataclass(frozen=True)
class Network:
    """A Llama's size."""

    layers: int
    heads: int
    hidden: int
    inner: int
    vocabulary: int

    def build(self) -> transformers.LlamaForCausalLM:
        """The model, with random weights."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
        )
        return transformers.LlamaForCausalLM(config).eval()


NETWORKS = {
    "llama": Network(layers=8, heads=8, hidden=512, inner=1376, vocabulary=8000),
    "small llama": Network(layers=4, heads=4, hidden=128, inner=344, vocabulary=1000),
}
"""33 million parameters, and 1 million: there a token takes half a millisecond, and the call counts."""


def rotate(x: Array, places: Array) -> Array:
    """Rotary positions on [batch, tokens, heads, size]."""
    half = x.shape[-1] // 2
    angles = places[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Array, keys: Array, values: Array, places: Array) -> Array:
    """Attention of [batch, tokens, heads, size] at ``places`` to a cache [batch, heads, room, size]."""
    scores = jnp.einsum("bqhd,bhkd->bhqk", q, keys) / q.shape[-1] ** 0.5
    seen = jnp.arange(keys.shape[2]) <= places[:, None]
    mixed = jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), values)
    return mixed.reshape(*mixed.shape[:2], -1)


def step(p: Params, cache: Cache, ids: Array, start: Array, made: Array) -> tuple[Cache, Array, Array, Array]:
    """Tokens [batch, n] at ``start`` through the network: the new cache, next token, place, and all tokens made."""
    places = start + jnp.arange(ids.shape[1])
    x, new = p["model.embed_tokens.weight"][ids], []
    for i, (keys, values) in enumerate(cache):
        at = f"model.layers.{i}"
        y = rms_norm(p, f"{at}.input_layernorm", x)
        heads = keys.shape[1]
        q, k, v = (linear(p, f"{at}.self_attn.{n}_proj", y).reshape(*y.shape[:2], heads, -1) for n in "qkv")
        zero = jnp.zeros_like(start)
        keys = lax.dynamic_update_slice(keys, rotate(k, places).transpose(0, 2, 1, 3), (zero, zero, start, zero))
        values = lax.dynamic_update_slice(values, v.transpose(0, 2, 1, 3), (zero, zero, start, zero))
        new.append((keys, values))
        x = x + linear(p, f"{at}.self_attn.o_proj", attend(rotate(q, places), keys, values, places))
        y = rms_norm(p, f"{at}.post_attention_layernorm", x)
        gated = jax.nn.silu(linear(p, f"{at}.mlp.gate_proj", y)) * linear(p, f"{at}.mlp.up_proj", y)
        x = x + linear(p, f"{at}.mlp.down_proj", gated)
    logits = linear(p, "lm_head", rms_norm(p, "model.norm", x[:, -1:]))
    token = jnp.argmax(logits[:, 0], -1).astype(jnp.int32)[:, None]
    place = start + ids.shape[1]
    made = lax.dynamic_update_slice(made, token, (jnp.zeros_like(place), place))
    return new, token, place, made


def on_jax(network: Network, model: torch.nn.Module, ids: torch.Tensor, count: int) -> Callable[[], np.ndarray]:
    """A call that decodes ``count`` tokens: int32 [batch, count]."""
    parameters = {name: jnp.asarray(value.detach().numpy()) for name, value in model.state_dict().items()}
    jitted = jax.jit(step, donate_argnums=(1, 4))
    prompt, batch = jnp.asarray(ids.numpy().astype(np.int32)), ids.shape[0]

    def call() -> np.ndarray:
        shape = (batch, network.heads, ROOM, network.hidden // network.heads)
        cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(network.layers)]
        token, place, made = prompt, jnp.int32(0), jnp.zeros((batch, ROOM), jnp.int32)
        for _ in range(count):
            cache, token, place, made = jitted(parameters, cache, token, place, made)
        return np.asarray(made)[:, PROMPT : PROMPT + count]

    return call


def on_tpu(model: torch.nn.Module, ids: torch.Tensor, count: int) -> Callable[[], np.ndarray]:
    """The same with ``tpu_compile.generation``, on the `tpu` device."""
    from tpu_compile.generation import Decoder

    decoder = Decoder(model.to("tpu"), max_length=ROOM, buckets=(PROMPT,))
    return lambda: decoder(ids, max_new_tokens=count)[:, PROMPT:].numpy()


def contenders(name: str, count: int, batch: int = 1) -> dict[str, Callable[[], np.ndarray]]:
    """Both, checked to make the same tokens."""
    network = NETWORKS[name]
    model = network.build()
    ids = torch.randint(5, network.vocabulary, (batch, PROMPT))
    calls = {"jax": on_jax(network, model, ids, count), "tpu": on_tpu(model, ids, count)}
    tokens = {system: call() for system, call in calls.items()}
    if not np.array_equal(tokens["jax"], tokens["tpu"]):
        raise SystemExit(f"decoding {name} differs from JAX's: a fast wrong answer is not a time")
    return calls


def seconds_a_token(name: str, count: int, rounds: int) -> dict[str, float]:
    """Seconds a token for each contender, taking turns."""
    times = in_turn(contenders(name, count), rounds, 0.0)
    return {system: value / count for system, value in times.items()}
