"""Distributions that are sampled by rejection: jax.random's, with a key made from that of the draw.

Its generator is Threefry, plain integer arithmetic: the same numbers on every platform, as ours. 16-bit floats are
sampled in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.lowering.jnp import jax, jnp, lax, lowers_jnp
from tpu_compile.lowering.random import keyed_ops

aten = torch.ops.aten

Array = Any


def _key(words: Array) -> Array:
    """A jax key from all 128 bits of a draw's."""
    first, *rest = lax.bitcast_convert_type(words, jnp.uint32).reshape(2, 2)
    key = jax.random.wrap_key_data(first, impl="threefry2x32")
    for word in rest[0]:
        key = jax.random.fold_in(key, word)
    return key


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@lowers_jnp(keyed_ops()[aten.poisson.default])
def poisson(key: Array, x: Array) -> Array:
    return jax.random.poisson(_key(key), _wide(x), dtype=jnp.int64)


@lowers_jnp(keyed_ops()[aten.binomial.default])
def binomial(key: Array, count: Array, prob: Array) -> Array:
    return jax.random.binomial(_key(key), _wide(count), _wide(prob), dtype=_wide(prob).dtype)


@lowers_jnp(keyed_ops()[aten._standard_gamma.default])
def _standard_gamma(key: Array, x: Array) -> Array:
    """Never 0, as in torch: a logarithm may follow."""
    sample = jax.random.gamma(_key(key), _wide(x), dtype=_wide(x).dtype)
    return jnp.maximum(sample, jnp.finfo(x.dtype).tiny)


@lowers_jnp(aten._standard_gamma_grad.default)
def _standard_gamma_grad(x: Array, output: Array) -> Array:
    return lax.random_gamma_grad(_wide(x), _wide(output))
