"""The training steps of the benchmark in JAX: value, gradients and AdamW in one jitted function, its state donated.

Two of them: written by hand, and as optax users have it (its cross entropy, its chain of transformations, from whose
documentation the formulas are).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed, jax would first look for a TPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from benchmarks import jax_models
from benchmarks.timing import Call
from benchmarks.torch_training import BETAS, DECAY, EPS, RATE

Tree = Any
Forward = Callable[[jax_models.Params, Array], Array]


def gpt2(p: jax_models.Params, ids: Array, layers: int, heads: int) -> Array:
    """GPT-2, whose Conv1D weights are [in, out]; the head is the embedding."""

    def norm(name: str, x: Array) -> Array:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def conv(name: str, x: Array) -> Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    words = p["model.transformer.wte.weight"]
    x = words[ids] + p["model.transformer.wpe.weight"][: ids.shape[1]]
    for i in range(layers):
        at = f"model.transformer.h.{i}"
        parts = jnp.split(conv(f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)), 3, -1)
        q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in parts)
        x = x + conv(f"{at}.attn.c_proj", jax_models.attention(q, k, v, causal=True))
        inner = jax.nn.gelu(conv(f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x)), approximate=True)
        x = x + conv(f"{at}.mlp.c_proj", inner)
    return norm("model.transformer.ln_f", x) @ words.T


FORWARD: dict[str, Forward] = {
    "gpt2": lambda p, ids: gpt2(p, ids, layers=4, heads=4),
    "llama": lambda p, ids: jax_models.llama(p, ids, layers=4, heads=8),
    "gpt2-small": lambda p, ids: gpt2(p, ids, layers=12, heads=12),
}


def by_hand(logits: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def like_optax(logits: Array, labels: Array) -> Array:
    """optax.softmax_cross_entropy_with_integer_labels."""
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked).mean()


def adamw_by_hand(params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    count, m, v = state
    count = count + 1
    m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
    v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)
    first, second = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count
    scaled = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + EPS), m, v)
    return jax.tree.map(lambda p, s: p * (1 - RATE * DECAY) - RATE * s, params, scaled), (count, m, v)


def adamw_like_optax(params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    """chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate), then apply_updates."""
    count, m, v = state
    m = jax.tree.map(lambda g, m: (1 - BETAS[0]) * g + BETAS[0] * m, grads, m)
    v = jax.tree.map(lambda g, v: (1 - BETAS[1]) * (g**2) + BETAS[1] * v, grads, v)
    count = count + 1
    first = jax.tree.map(lambda m: m / (1 - BETAS[0] ** count), m)
    second = jax.tree.map(lambda v: v / (1 - BETAS[1] ** count), v)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + EPS), first, second)
    updates = jax.tree.map(lambda u, p: u + DECAY * p, updates, params)
    updates = jax.tree.map(lambda u: -RATE * u, updates)
    return jax.tree.map(lambda p, u: p + u, params, updates), (count, m, v)


KINDS = {"jax": (by_hand, adamw_by_hand), "jax, like optax": (like_optax, adamw_like_optax)}


def step(name: str, kind: str, model: torch.nn.Module, ids: torch.Tensor) -> tuple[Call, Callable[[], Any]]:
    """A call that makes a step and returns the loss, and what tells XLA's memory analysis of it."""
    loss_of, adamw = KINDS[kind]
    forward = FORWARD[name]
    params = {key: jnp.array(value.detach().numpy()) for key, value in model.named_parameters()}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))
    tokens = jnp.asarray(ids.numpy().astype(np.int32))

    def loss(p: Tree, ids: Array) -> Array:
        return loss_of(forward(p, ids)[:, :-1], ids[:, 1:])

    def train(p: Tree, state: Tree, ids: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, ids)
        return value, *adamw(p, grads, state)

    jitted = jax.jit(train, donate_argnums=(0, 1))
    held = [params, state]

    def call() -> float:
        value, held[0], held[1] = jitted(held[0], held[1], tokens)
        return float(value)

    return call, lambda: jitted.lower(held[0], held[1], tokens).compile().memory_analysis()
