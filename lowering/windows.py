"""StableHLO's sliding-window operations; a chapter of hlo.py, under the same rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering.hlo import (
    COMBINERS,
    Dims,
    Value,
    compare,
    dtype,
    identity,
    int_matrix,
    precision_config,
    rank,
    region,
    scalar,
    shape,
    tensor_type,
)

Pads = Sequence[tuple[int, int]]


def convolution(
    x: Value,
    kernel: Value,
    dims: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    *,
    strides: Dims,
    padding: Pads,
    base_dilation: Dims,
    window_dilation: Dims,
    feature_groups: int = 1,
    batch_groups: int = 1,
    out: torch.dtype | None = None,
) -> Value:
    """stablehlo.convolution; negative padding crops, ``out`` widens the result.

    ``dims``: (batch, feature) axes of ``x``, (input feature, output feature) of ``kernel``, (batch, feature) of the
    result. The other axes are spatial, in order.
    """
    n = rank(x)
    spatial = [[i for i in range(n) if i not in pair] for pair in dims]
    (x_batch, x_feature), (kernel_in, kernel_out), (y_batch, y_feature) = dims
    sizes = [0] * n
    sizes[y_batch] = shape(x)[x_batch] // batch_groups
    sizes[y_feature] = shape(kernel)[kernel_out]
    for i, (a, b, c) in enumerate(zip(*spatial, strict=True)):
        span = (shape(x)[a] - 1) * base_dilation[i] + 1 + sum(padding[i])
        sizes[c] = max((span - (shape(kernel)[b] - 1) * window_dilation[i] - 1) // strides[i] + 1, 0)
    numbers = stablehlo.ConvDimensionNumbers.get(
        input_batch_dimension=x_batch,
        input_feature_dimension=x_feature,
        input_spatial_dimensions=spatial[0],
        kernel_input_feature_dimension=kernel_in,
        kernel_output_feature_dimension=kernel_out,
        kernel_spatial_dimensions=spatial[1],
        output_batch_dimension=y_batch,
        output_feature_dimension=y_feature,
        output_spatial_dimensions=spatial[2],
    )
    i64 = ir.IntegerType.get_signless(64)
    return stablehlo.convolution(
        tensor_type(sizes, out or dtype(x)),
        x,
        kernel,
        numbers,
        ir.IntegerAttr.get(i64, feature_groups),
        ir.IntegerAttr.get(i64, batch_groups),
        window_strides=ir.DenseI64ArrayAttr.get(list(strides)),
        padding=int_matrix(padding),
        lhs_dilation=ir.DenseI64ArrayAttr.get(list(base_dilation)),
        rhs_dilation=ir.DenseI64ArrayAttr.get(list(window_dilation)),
        precision_config=precision_config(x, kernel),
    )


def reduce_window(
    xs: Sequence[Value],
    inits: Sequence[Value],
    body: Callable[..., Any],
    window: Dims,
    strides: Dims,
    padding: Sequence[tuple[int, int]],
    window_dilation: Dims | None = None,
    base_dilation: Dims | None = None,
) -> list[Value]:
    """Variadic reduce_window; one entry an axis in every list."""
    n = rank(xs[0])
    dilation, base = list(window_dilation or [1] * n), list(base_dilation or [1] * n)
    sizes = []
    for size, w, s, d, b, (low, high) in zip(shape(xs[0]), window, strides, dilation, base, padding, strict=True):
        padded = (max(size - 1, -1) * b + 1 if size else 0) + low + high
        sizes.append(max(0, (padded - ((w - 1) * d + 1)) // s + 1) if padded >= (w - 1) * d + 1 else 0)
    op = stablehlo.ReduceWindowOp(
        [tensor_type(sizes, dtype(x)) for x in xs],
        list(xs),
        list(inits),
        ir.DenseI64ArrayAttr.get(list(window)),
        window_strides=ir.DenseI64ArrayAttr.get(list(strides)),
        base_dilations=ir.DenseI64ArrayAttr.get(base),
        window_dilations=ir.DenseI64ArrayAttr.get(dilation),
        padding=int_matrix(padding),
    )
    element_types = [tensor_type((), dtype(x)) for x in xs]
    region(op, 0, [*element_types, *element_types], body)
    return list(op.results)


def select_and_scatter(
    x: Value, source: Value, window: Dims, strides: Dims, padding: Sequence[tuple[int, int]]
) -> Value:
    """Zeros like ``x``, to which each element of ``source`` is added where its window of ``x`` has its maximum, never
    in the padding. Which of equal ones, XLA chooses."""
    op = stablehlo.SelectAndScatterOp(
        x.type,
        x,
        source,
        scalar(0, dtype(x)),
        window_dimensions=ir.DenseI64ArrayAttr.get(list(window)),
        window_strides=ir.DenseI64ArrayAttr.get(list(strides)),
        padding=int_matrix(padding),
    )
    pair = [tensor_type((), dtype(x))] * 2
    region(op, 0, pair, lambda a, b: compare(a, b, "GE"))
    region(op, 1, pair, stablehlo.add)
    return op.result


def running(x: Value, axis: int, combiner: str | Callable[[Value, Value], Value], init: Any = None) -> Value:
    """Fold along ``axis`` up to and including each place. XLA turns this reduce_window into a tree of small ones,
    everywhere."""
    n = shape(x)[axis]
    if not n:
        return x
    window, padding = [1] * rank(x), [(0, 0)] * rank(x)
    window[axis], padding[axis] = n, (n - 1, 0)
    body = COMBINERS[combiner] if isinstance(combiner, str) else combiner
    start = scalar(identity(str(combiner), dtype(x)) if init is None else init, dtype(x))
    return reduce_window([x], [start], body, window, [1] * rank(x), padding)[0]
