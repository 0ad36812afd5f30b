"""Cross entropy of a linear layer without all of its logits: rows go through in chunks, in one loop.

Custom operators of torch.nn (``F.linear_cross_entropy`` with chunking), which compute the gradients with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers


@dataclass(frozen=True)
class Rows:
    """The operands of one chunk, or of all rows: x [N, F], i32 targets [N], the loss's weight of each row [N]."""

    x: Value
    target: Value
    weight: Value


@dataclass(frozen=True)
class Chunk:
    """What a chunk gives: the loss of each row, and the gradient of its logits."""

    losses: Value
    slope: Value


def row_weights(target: Value, weight: Value | None, ignore_index: int, reduction: str, kind: torch.dtype) -> Value:
    """The class weight of each row, 0 where ignored; for a mean divided by their sum (NaN if that is 0)."""
    n = hlo.shape(target)
    ignored = hlo.compare(target, hlo.full_like(target, ignore_index), "EQ")
    if weight is None:
        chosen = hlo.full(1, kind, n)
    else:
        chosen = hlo.reduce(spread_classes(target, hlo.convert(weight, kind)), [1], "add")
    result = hlo.select(ignored, hlo.full(0, kind, n), chosen)
    if reduction != "mean":
        return result
    total = hlo.reduce(result, [0], "add")
    total = hlo.select(hlo.compare(total, hlo.full_like(total, 0), "EQ"), hlo.full_like(total, float("nan")), total)
    return stablehlo.divide(result, hlo.broadcast(total, n))


def spread_classes(target: Value, values: Value) -> Value:
    """[N, V]: ``values`` [V] or [N, V] at each row's target class, 0 elsewhere."""
    sizes = [hlo.shape(target)[0], hlo.shape(values)[-1]]
    classes = hlo.iota(sizes, 1, hlo.dtype(target))
    hit = hlo.compare(classes, hlo.broadcast_in_dim(target, sizes, [0]), "EQ")
    return hlo.select(hit, hlo.broadcast(values, sizes), hlo.full(0, hlo.dtype(values), sizes))


def cross_entropy(rows: Rows, matrix: Value, bias: Value | None) -> Chunk:
    """The loss of each row of a chunk and its slope in the logits."""
    kind = hlo.dtype(rows.weight)
    logits = hlo.dot_general(rows.x, matrix, ((1,), (1,)), out=kind)
    sizes = hlo.shape(logits)
    if bias is not None:
        logits = stablehlo.add(logits, hlo.broadcast(hlo.convert(bias, kind), sizes))
    logits = stablehlo.subtract(logits, hlo.broadcast_in_dim(hlo.reduce(logits, [1], "maximum"), sizes, [0]))
    powers = stablehlo.exponential(logits)
    total = hlo.reduce(powers, [1], "add")
    chosen = hlo.reduce(spread_classes(rows.target, logits), [1], "add")
    losses = stablehlo.multiply(rows.weight, stablehlo.subtract(stablehlo.log(total), chosen))
    share = hlo.broadcast_in_dim(stablehlo.divide(rows.weight, total), sizes, [0])
    own = spread_classes(rows.target, hlo.broadcast_in_dim(rows.weight, sizes, [0]))
    return Chunk(losses, stablehlo.subtract(stablehlo.multiply(powers, share), own))


def run_chunks(rows: Rows, matrix: Value, bias: Value | None, size: int) -> tuple[Value, Value, Value, Value]:
    """(losses [N], gradients of x, matrix and bias). What nobody reads, XLA drops from the loop."""
    count, width = hlo.shape(rows.x)
    classes, kind = hlo.shape(matrix)[0], hlo.dtype(rows.weight)
    size = min(size, count)
    steps = -(-count // size)
    extra = steps * size - count
    padded = [
        hlo.pad(rows.x, 0, [0, 0], [extra, 0]),
        hlo.pad(rows.target, 0, [0], [extra]),
        hlo.pad(rows.weight, 0, [0], [extra]),
    ]
    fixed = [*padded, matrix, *([bias] if bias is not None else [])]
    sums = [hlo.full(0, kind, s) for s in ([steps * size], [steps * size, width], [classes, width], [classes])]

    def go_on(i: Value, *_: Value) -> Value:
        return hlo.compare(i, hlo.scalar(steps, torch.int32), "LT")

    def body(i: Value, *state: Value) -> list[Value]:
        (x, target, weight, matrix, *rest), totals = state[: len(fixed)], state[len(fixed) :]
        zero, at = hlo.scalar(0, torch.int32), stablehlo.multiply(i, hlo.scalar(size, torch.int32))
        x_now = hlo.dynamic_slice(x, [at, zero], [size, width])
        now = Rows(x_now, *(hlo.dynamic_slice(v, [at], [size]) for v in (target, weight)))
        chunk = cross_entropy(now, matrix, rest[0] if rest else None)
        narrow = hlo.convert(chunk.slope, hlo.dtype(x))
        of_x = hlo.dot_general(narrow, matrix, ((1,), (0,)), out=kind)
        of_matrix = hlo.dot_general(narrow, x_now, ((0,), (0,)), out=kind)
        return [
            stablehlo.add(i, hlo.scalar(1, torch.int32)),
            *state[: len(fixed)],
            hlo.dynamic_update_slice(totals[0], chunk.losses, [at]),
            hlo.dynamic_update_slice(totals[1], of_x, [at, zero]),
            stablehlo.add(totals[2], of_matrix),
            stablehlo.add(totals[3], hlo.reduce(chunk.slope, [0], "add")),
        ]

    results = hlo.while_([hlo.scalar(0, torch.int32), *fixed, *sums], go_on, body)
    losses, of_x, of_matrix, of_bias = results[1 + len(fixed) :]
    return hlo.slice_axis(losses, 0, 0, count), hlo.slice_axis(of_x, 0, 0, count), of_matrix, of_bias


def _rows(x: Value, target: Value, weight: Value | None, ignore_index: int, reduction: str, kind: Any) -> Rows:
    return Rows(x, target, row_weights(target, weight, ignore_index, reduction, kind))


@lowers("torch_nn::_linear_cross_entropy_batch_chunked")
def linear_cross_entropy(
    ctx: LoweringContext,
    input: Value,
    linear_weight: Value,
    target: Value,
    linear_bias: Value | None,
    weight: Value | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[Value, ...]:
    outs = ctx.outs
    if hlo.shape(input)[0] == 0:
        blank = float("nan") if reduction == "mean" else 0
        return hlo.full(blank, outs[0].dtype, ()), *(hlo.full(0, s.dtype, s.shape) for s in outs[1:])
    rows = _rows(input, target, weight, ignore_index, reduction, dtypes.opmath(outs[0].dtype))
    matrix = hlo.convert(linear_weight, hlo.dtype(input))
    losses, *grads = run_chunks(rows, matrix, linear_bias, batch_chunk_size)
    wanted = (compute_input_grad, compute_linear_weight_grad, compute_linear_bias_grad)
    given = [
        hlo.convert(g, s.dtype) if want else hlo.full(0, s.dtype, s.shape)
        for g, s, want in zip(grads, outs[1:], wanted, strict=True)
    ]
    return hlo.convert(hlo.reduce(losses, [0], "add"), outs[0].dtype), *given


@lowers("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy_no_reduction(
    ctx: LoweringContext,
    input: Value,
    linear_weight: Value,
    target: Value,
    linear_bias: Value | None,
    weight: Value | None,
    ignore_index: int,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
) -> Value:
    out = ctx.out
    if 0 in out.shape:
        return hlo.full(0, out.dtype, out.shape)
    rows = _rows(input, target, weight, ignore_index, "none", dtypes.opmath(out.dtype))
    losses, *_ = run_chunks(rows, hlo.convert(linear_weight, hlo.dtype(input)), linear_bias, batch_chunk_size)
    return hlo.convert(losses, out.dtype)
