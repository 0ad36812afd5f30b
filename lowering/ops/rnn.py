"""Recurrent layers as one loop over time: the inputs' share of all gates is a single product before the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.jnp import jax, jnp, lax, lowers_jnp
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

LSTM = 2
"""oneDNN's number of the mode; torch sends it no other."""


@lowers(aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(
    ctx: LoweringContext,
    input: Value,
    weight0: Value,
    weight1: Value,
    weight2: Value,
    weight3: Value,
    hx_: Value,
    cx_: Value,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Value, ...]:
    if mode != LSTM or batch_sizes:
        ctx.refuse("only an LSTM over sequences of one length", "set torch.backends.mkldnn.enabled = False")
    y, hy, cy, workspace = ctx.outs
    kind = dtypes.opmath(hlo.dtype(input))
    x = hlo.transpose(input, [1, 0, 2]) if batch_first else input
    gates = hlo.dot_general(x, weight0, ((2,), (1,)), out=kind)
    for bias in (weight2, weight3) if has_biases else ():
        gates = stablehlo.add(gates, hlo.broadcast(hlo.convert(bias, kind), hlo.shape(gates)))
    sizes = [hlo.shape(x)[1], hidden_size]
    hidden, cell = (hlo.convert(hlo.reshape(v, sizes), kind) for v in (hx_, cx_))
    steps, hidden, cell = lstm(gates, weight1, hidden, cell, reverse)
    steps = hlo.transpose(steps, [1, 0, 2]) if batch_first else steps
    return (
        hlo.convert(steps, y.dtype),
        hlo.reshape(hlo.convert(hidden, hy.dtype), hy.shape),
        hlo.reshape(hlo.convert(cell, cy.dtype), cy.shape),
        hlo.full(0, workspace.dtype, workspace.shape),
    )


def lstm(gates: Value, recurrent: Value, hidden: Value, cell: Value, reverse: bool) -> tuple[Value, Value, Value]:
    """(hidden state of every step, last hidden state, last cell state).

    Args:
        gates: what the inputs contribute, [T, N, 4 H] in the order input, forget, cell, output.
        recurrent: the weights of the hidden state, [4 H, H], perhaps of a narrower dtype.
    """
    count, n, wide = hlo.shape(gates)
    width = wide // 4
    if not count:
        return hlo.full(0, hlo.dtype(gates), [0, n, width]), hidden, cell
    zero = hlo.scalar(0, torch.int32)

    def go_on(i: Value, *_: Value) -> Value:
        return hlo.compare(i, hlo.scalar(count, torch.int32), "LT")

    def body(i: Value, gates: Value, recurrent: Value, hidden: Value, cell: Value, steps: Value) -> list[Value]:
        at = stablehlo.subtract(hlo.scalar(count - 1, torch.int32), i) if reverse else i
        zero = hlo.scalar(0, torch.int32)
        now = hlo.reshape(hlo.dynamic_slice(gates, [at, zero, zero], [1, n, wide]), [n, wide])
        narrow = hlo.convert(hidden, hlo.dtype(recurrent))
        now = stablehlo.add(now, hlo.dot_general(narrow, recurrent, ((1,), (1,)), out=hlo.dtype(now)))
        enter, keep, new, leave = (hlo.slice_axis(now, 1, k * width, (k + 1) * width) for k in range(4))
        fresh = stablehlo.multiply(stablehlo.logistic(enter), stablehlo.tanh(new))
        cell = stablehlo.add(stablehlo.multiply(stablehlo.logistic(keep), cell), fresh)
        hidden = stablehlo.multiply(stablehlo.logistic(leave), stablehlo.tanh(cell))
        steps = hlo.dynamic_update_slice(steps, hlo.unsqueeze(hidden, 0), [at, zero, zero])
        return [stablehlo.add(i, hlo.scalar(1, torch.int32)), gates, recurrent, hidden, cell, steps]

    start = hlo.full(0, hlo.dtype(gates), [count, n, width])
    results = hlo.while_([zero, gates, recurrent, hidden, cell, start], go_on, body)
    return results[5], results[3], results[4]


@lowers_jnp(aten.mkldnn_rnn_layer_backward.default)
def mkldnn_rnn_layer_backward(
    input: Any,
    weight1: Any,
    weight2: Any,
    weight3: Any,
    weight4: Any,
    hx_: Any,
    cx_tmp: Any,
    output: Any,
    hy_: Any,
    cy_: Any,
    grad_output: Any | None,
    grad_hy: Any | None,
    grad_cy: Any | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Any,
) -> tuple[Any, ...]:
    """jax differentiates the layer, which it runs again: oneDNN's workspace is its own affair."""

    def layer(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        kind = jnp.promote_types(x.dtype, jnp.float32)
        steps = jnp.swapaxes(x, 0, 1) if batch_first else x
        bias = (b_ih + b_hh).astype(kind) if has_biases else 0
        gates = steps.astype(kind) @ w_ih.T.astype(kind) + bias

        def step(state: tuple[Any, Any], now: Any) -> tuple[tuple[Any, Any], Any]:
            hidden, cell = state
            enter, keep, new, leave = jnp.split(now + hidden @ w_hh.T.astype(kind), 4, axis=-1)
            cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
            return (hidden, cell), hidden

        start = tuple(jnp.reshape(v, (gates.shape[1], hidden_size)).astype(kind) for v in (h, c))
        (hidden, cell), steps = lax.scan(step, start, gates, reverse=reverse)
        steps = jnp.swapaxes(steps, 0, 1) if batch_first else steps
        return steps.astype(x.dtype), hidden.reshape(h.shape).astype(h.dtype), cell.reshape(c.shape).astype(c.dtype)

    given = (input, weight1, weight2, weight3, weight4, hx_, cx_tmp)
    results, pull = jax.vjp(layer, *given)
    grads = zip((grad_output, grad_hy, grad_cy), results, strict=True)
    return tuple(pull(tuple(jnp.zeros_like(r) if g is None else g.reshape(r.shape).astype(r.dtype) for g, r in grads)))
