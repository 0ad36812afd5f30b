"""Recurrent layers as one loop over time: the inputs' share of all gates is a single product before the loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
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
