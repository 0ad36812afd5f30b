"""One training step of AdamW: ours as one program, eager, inductor with the fused optimizer, and JAX written by hand.

The networks are scaled to two CPU cores: GPT-2 with its shape, 4 layers of 256 and a vocabulary of 4,096, and the Llama
of the other parts with 4 layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from jax import Array

import tpu_compile
from benchmarks import jax_models, torch_models  # first: it tells jax to stay on the CPU
from benchmarks.report import Row
from benchmarks.timing import Call, in_turn

NETWORKS = ("gpt2", "llama")
RATE, DECAY, BETAS, EPS = 1e-3, 0.01, (0.9, 0.999), 1e-8
AGREE = 2e-4
"""Largest relative difference of the losses of the first steps."""


def gpt2() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=4096, n_positions=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = torch_models.Only(transformers.GPT2LMHeadModel(config), "logits")
    return model, torch_models.tokens(4096, 4, 128)


def llama() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, intermediate_size=688,
        vocab_size=4096, use_cache=False,
    )  # fmt: skip
    return torch_models.Only(transformers.LlamaForCausalLM(config), "logits"), torch_models.tokens(4096, 4, 128)


def jax_gpt2(p: jax_models.Params, ids: Array, layers: int = 4, heads: int = 4) -> Array:
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


def jax_llama(p: jax_models.Params, ids: Array) -> Array:
    return jax_models.llama(p, ids, layers=4, heads=8)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {"gpt2": (gpt2, jax_gpt2), "llama": (llama, jax_llama)}


def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model, ids = MODELS[name][0]()
    return model.train(), ids


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, **options)


def on_torch(name: str, backend: str | None) -> Call:
    model, ids = build(name)
    run = torch.compile(model, backend=backend, dynamic=False) if backend else model
    optimizer = adamw(model, fused=True)

    def call() -> float:
        optimizer.zero_grad()
        loss = loss_fn(run(ids), ids)
        loss.backward()
        optimizer.step()
        return loss.item()

    return call


def ours(name: str) -> tuple[Call, int]:
    """The step on `tpu` tensors, and the bytes that its program needs."""
    model, ids = build(name)
    model, ids = model.to("tpu"), ids.to("tpu")
    step = tpu_compile.train_step(model, loss_fn, adamw(model))
    memory = step.trace(ids, ids).lower().compile().memory_analysis()
    return lambda: step(ids, ids).item(), _needed(memory)


def on_jax(name: str) -> tuple[Call, int]:
    """The same with parameters and state donated, as optax users write it."""
    model, ids = build(name)
    forward = MODELS[name][1]
    params = {key: jnp.asarray(value.detach().numpy()) for key, value in model.named_parameters()}
    zeros = {key: jnp.zeros_like(value) for key, value in params.items()}
    state = (jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))
    tokens = jnp.asarray(ids.numpy().astype(np.int32))

    def loss(p: Any, ids: Array) -> Array:
        logits = jax.nn.log_softmax(forward(p, ids)[:, :-1])
        return -jnp.take_along_axis(logits, ids[:, 1:, None], -1).mean()

    def step(p: Any, state: Any, ids: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, ids)
        count, m, v = state
        count = count + 1
        m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
        v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)
        first, second = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count
        scaled = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + EPS), m, v)
        new = jax.tree.map(lambda p, s: p * (1 - RATE * DECAY) - RATE * s, p, scaled)
        return value, new, (count, m, v)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    memory = jitted.lower(params, state, tokens).compile().memory_analysis()
    held = [params, state]

    def call() -> float:
        value, held[0], held[1] = jitted(held[0], held[1], tokens)
        return float(value)

    return call, _needed(memory)


def _needed(memory: Any) -> int:
    """Bytes of arguments, results and temporaries, those that share memory counted once."""
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def rows(name: str, rounds: int, seconds: float) -> list[Row]:
    """Milliseconds a step takes, the seconds of the first one, and the bytes the program needs."""
    (tpu, tpu_bytes), (by_jax, jax_bytes) = ours(name), on_jax(name)
    calls = {"eager": on_torch(name, None), "inductor": on_torch(name, "inductor"), "tpu": tpu, "jax": by_jax}
    first: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for system, call in calls.items():
        start = time.perf_counter()
        losses[system] = [call()]
        first[system] = time.perf_counter() - start
        losses[system] += [call(), call()]
    for system, got in losses.items():
        if not np.allclose(got, losses["eager"], rtol=AGREE):
            raise SystemExit(f"training {name} on {system}: losses {got}, eager {losses['eager']}")
    times = in_turn(calls, rounds, seconds)
    torch._dynamo.reset()
    found = [Row("training step", name, system, 1e3 * value, "ms") for system, value in times.items()]
    found += [Row("training, first step", name, system, 1e3 * value, "ms") for system, value in first.items()]
    memory = {"tpu": tpu_bytes, "jax": jax_bytes}
    return found + [Row("training, memory", name, system, n / 2**20, "MiB") for system, n in memory.items()]
