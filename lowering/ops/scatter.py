"""scatter, scatter_add and scatter_reduce: every element of ``index`` names the place of one element of ``src`` on one
axis."""

from __future__ import annotations

from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.division import floor_quotient
from tpu_compile.lowering.ops.indexing import Combine, scatter_at
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

_COMBINERS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "maximum",
    "amin": "minimum",
}


def scatter_along(x: Value, dim: int, index: Value, src: Any, combine: Combine) -> Value:
    """``x[i, index[i, j, …], …] = combine(…, src[i, j, …])``. ``index`` may be smaller than ``x`` on the other axes,
    and than ``src``."""
    if not hlo.numel(index):
        return x
    shape = hlo.shape(x)
    rank = max(len(shape), 1)
    x, index = (hlo.reshape(t, [1]) if not hlo.rank(t) else t for t in (x, index))
    sizes, at = hlo.shape(index), axis(dim, rank)
    src = _fit(src, hlo.dtype(x), sizes)
    index = hlo.index_operand(index, max(hlo.shape(x)))
    batching = [i for i in range(rank) if i != at and hlo.shape(x)[i] == sizes[i]]
    dims = [i for i in range(rank) if i not in batching]
    vectors = [hlo.unsqueeze(index if i == at else hlo.iota(sizes, i, hlo.dtype(index)), rank) for i in dims]
    result = scatter_at(
        x,
        hlo.concatenate(vectors, rank),
        src,
        combine,
        update_window=[],
        dims=dims,
        input_batching=batching,
        indices_batching=batching,
    )
    return hlo.reshape(result, shape)


def _fit(src: Any, kind: torch.dtype, sizes: list[int]) -> Value:
    if not hlo.is_value(src):
        return hlo.full(src, kind, sizes)
    src = hlo.convert(src, kind)
    if not hlo.rank(src):
        return hlo.broadcast(src, sizes)
    return hlo.slice_(src, [0] * len(sizes), sizes)


@lowers(aten.scatter.src)
def scatter_src(ctx: LoweringContext, x: Value, dim: int, index: Value, src: Value) -> Value:
    return scatter_along(x, dim, index, src, "second")


@lowers(aten.scatter.value)
def scatter_value(ctx: LoweringContext, x: Value, dim: int, index: Value, value: Any) -> Value:
    return scatter_along(x, dim, index, value, "second")


@lowers(aten.scatter.reduce)
def scatter_reduce_src(ctx: LoweringContext, x: Value, dim: int, index: Value, src: Value, *, reduce: str) -> Value:
    return scatter_along(x, dim, index, src, _COMBINERS[reduce])


@lowers(aten.scatter.value_reduce)
def scatter_reduce_value(ctx: LoweringContext, x: Value, dim: int, index: Value, value: Any, *, reduce: str) -> Value:
    return scatter_along(x, dim, index, value, _COMBINERS[reduce])


@lowers(aten.scatter_add.default)
def scatter_add(ctx: LoweringContext, x: Value, dim: int, index: Value, src: Value) -> Value:
    return scatter_along(x, dim, index, src, "add")


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: LoweringContext, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    return reduce_along(x, dim, index, src, reduce, include_self)


def reduce_along(x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool) -> Value:
    """torch's scatter_reduce: places that ``index`` never names keep what they hold."""
    kind, combine = hlo.dtype(x), _COMBINERS[reduce]
    wide = dtypes.opmath(kind)
    base = hlo.convert(x, wide)
    hits = None
    if not include_self:
        touched = scatter_along(hlo.full(False, torch.bool, hlo.shape(x)), dim, index, True, "second")
        base = hlo.select(touched, hlo.full_like(base, hlo.identity(_bool_combiner(combine, wide), wide)), base)
    result = scatter_along(base, dim, index, hlo.convert(src, wide), combine)
    if reduce == "mean":
        hits = scatter_along(hlo.full(int(include_self), torch.int32, hlo.shape(x)), dim, index, 1, "add")
        result = _average(result, hits)
    return hlo.convert(result, kind)


def _bool_combiner(combine: str, kind: torch.dtype) -> str:
    if kind != torch.bool:
        return combine
    return {"add": "or", "multiply": "and"}.get(combine, combine)


def _average(total: Value, hits: Value) -> Value:
    count = hlo.convert(stablehlo.maximum(hits, hlo.full_like(hits, 1)), hlo.dtype(total))
    if dtypes.is_integer(hlo.dtype(total)):
        return floor_quotient(total, count, lambda x: x)
    return stablehlo.divide(total, count)


@lowers(aten.index_reduce.default)
def index_reduce(
    ctx: LoweringContext, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if not hlo.rank(x):
        index, source = hlo.reshape(index, ()), hlo.reshape(source, ())
    else:
        index = hlo.reshape(index, [hlo.numel(index)])
        index = hlo.broadcast_in_dim(index, hlo.shape(source), [axis(dim, hlo.rank(x))])
    return reduce_along(x, dim, index, source, reduce, include_self)
