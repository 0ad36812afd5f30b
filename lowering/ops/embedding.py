"""Embedding look-ups and their gradients."""

from __future__ import annotations

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import scatter_at, take_axis
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.embedding.default)
def embedding(
    ctx: LoweringContext,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return take_axis(weight, indices, 0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: LoweringContext, grad_output: Value, indices: Value, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    """Rows are added up in float32. The padding row's share is sent out of range, where a scatter drops it."""
    out = ctx.out
    wide = dtypes.opmath(out.dtype)
    count = hlo.numel(indices)
    zeros = hlo.full(0, wide, out.shape)
    if not count:
        return hlo.convert(zeros, out.dtype)
    rows = hlo.index_operand(hlo.reshape(indices, [count]), num_weights)
    updates = hlo.convert(hlo.reshape(grad_output, [count, *out.shape[1:]]), wide)
    if scale_grad_by_freq:
        share = hlo.convert(_frequency(rows, num_weights), wide)
        updates = stablehlo.divide(updates, hlo.broadcast_in_dim(share, hlo.shape(updates), [0]))
    padding = hlo.compare(rows, hlo.full_like(rows, padding_idx), "EQ")
    rows = hlo.unsqueeze(hlo.select(padding, hlo.full_like(rows, num_weights), rows), 1)
    window = range(1, hlo.rank(updates))
    return hlo.convert(scatter_at(zeros, rows, updates, "add", update_window=window, dims=[0]), out.dtype)


def _frequency(rows: Value, num_weights: int) -> Value:
    """How often each element's value occurs among ``rows``."""
    ones = hlo.full(1, torch.int32, hlo.shape(rows))
    counts = hlo.full(0, torch.int32, [num_weights])
    counts = scatter_at(counts, hlo.unsqueeze(rows, 1), ones, "add", update_window=[], dims=[0])
    return take_axis(counts, rows, 0)
