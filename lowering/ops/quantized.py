"""Products of 8-bit operands: int8 with int32 sums, int8 weights of floating activations, scaled float8; and the
rounding to a grid of integers that training for such products does (``fake_quantize``).

The operands go into the dot as they are. What scales a result is applied to its wide sums, which are rounded once.
"""

from __future__ import annotations

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten._int_mm.default)
def int_mm(ctx: LoweringContext, x: Value, mat2: Value) -> Value:
    return hlo.dot_general(x, mat2, ((1,), (0,)), out=torch.int32)


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(ctx: LoweringContext, x: Value, mat2: Value, scales: Value) -> Value:
    """``(x @ mat2.T) * scales``; int8 is exact in every floating dtype."""
    wide = dtypes.opmath(hlo.dtype(x))
    sums = hlo.dot_general(x, hlo.convert(mat2, hlo.dtype(x)), ((1,), (1,)), out=wide)
    scale = hlo.broadcast(hlo.convert(scales, wide), hlo.shape(sums))
    return hlo.convert(stablehlo.multiply(sums, scale), ctx.out.dtype)


@lowers(aten._scaled_mm.default)
def scaled_mm(
    ctx: LoweringContext,
    x: Value,
    mat2: Value,
    scale_a: Value,
    scale_b: Value,
    bias: Value | None = None,
    scale_result: Value | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Value:
    """``(x * scale_a) @ (mat2 * scale_b) + bias``, with one scale for all or one for each row and column."""
    rows, columns = ctx.out.shape
    sums = hlo.dot_general(x, mat2, ((1,), (0,)), out=torch.float32)
    for scale, sizes in ((scale_a, (rows, 1)), (scale_b, (1, columns))):
        sums = stablehlo.multiply(sums, _scale(ctx, scale, sizes, hlo.shape(sums)))
    if bias is not None:
        sums = stablehlo.add(sums, hlo.broadcast(hlo.convert(bias, torch.float32), hlo.shape(sums)))
    if scale_result is not None and ctx.out.dtype.itemsize == 1:
        sums = stablehlo.multiply(sums, _scale(ctx, scale_result, (1, 1), hlo.shape(sums)))
    return hlo.convert(sums, ctx.out.dtype)


def _scale(ctx: LoweringContext, scale: Value, sizes: tuple[int, int], whole: list[int]) -> Value:
    if hlo.numel(scale) == 1:
        sizes = (1, 1)
    elif hlo.shape(scale) != list(sizes):
        ctx.refuse(
            f"scales of {hlo.shape(scale)}: blocks have no rule",
            "give one scale for the tensor, or one for each row of the first factor and column of the second",
        )
    return hlo.broadcast(hlo.reshape(hlo.convert(scale, torch.float32), sizes), whole)


# ---- rounding to a grid


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize_per_tensor_affine_cachemask(
    ctx: LoweringContext, x: Value, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    single = hlo.full(scale, torch.float32, ())
    return _on_grid(x, single, hlo.full(zero_point, torch.int32, ()), quant_min, quant_max)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_with_tensors(
    ctx: LoweringContext,
    x: Value,
    scale: Value,
    zero_point: Value,
    fake_quant_enabled: Value,
    quant_min: int,
    quant_max: int,
) -> tuple[Value, Value]:
    """``fake_quant_enabled`` holds one number; at 0 everything passes as it is."""
    result, inside = _on_grid(x, hlo.reshape(scale, ()), hlo.reshape(zero_point, ()), quant_min, quant_max)
    flag = hlo.reshape(fake_quant_enabled, ())
    enabled = hlo.broadcast(hlo.compare(flag, hlo.full_like(flag, 0), "NE"), hlo.shape(x))
    return hlo.select(enabled, result, x), stablehlo.or_(inside, stablehlo.not_(enabled))


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel_affine_cachemask(
    ctx: LoweringContext, x: Value, scale: Value, zero_point: Value, axis: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    sizes = [hlo.shape(x)[i] if i == axis else 1 for i in range(hlo.rank(x))]
    wide = dtypes.opmath(hlo.dtype(x))
    return _on_grid(x, hlo.reshape(scale, sizes), hlo.reshape(zero_point, sizes), quant_min, quant_max, wide)


def _on_grid(
    x: Value, scale: Value, zero_point: Value, low: int, high: int, grid_in: torch.dtype = torch.float32
) -> tuple[Value, Value]:
    """(the nearest of the numbers ``(q - zero_point) * scale`` with ``low <= q <= high``, where no q was cut off).

    A floating zero point is added before the rounding, an integer after it; the numbers are products in ``grid_in``,
    which for one scale is float32 even if ``x`` is float64: as torch's CPU kernels do.
    """
    wide, shape = dtypes.opmath(hlo.dtype(x)), hlo.shape(x)
    step = hlo.convert(scale, torch.float32)
    inverse = hlo.broadcast(hlo.convert(stablehlo.divide(hlo.full_like(step, 1), step), wide), shape)
    origin = hlo.broadcast(hlo.convert(zero_point, wide), shape)
    scaled = stablehlo.multiply(hlo.convert(x, wide), inverse)
    if dtypes.is_integer(hlo.dtype(zero_point)):
        q = stablehlo.add(stablehlo.round_nearest_even(scaled), origin)
    else:
        q = stablehlo.round_nearest_even(stablehlo.add(scaled, origin))
    kept = stablehlo.clamp(hlo.full(low, wide, ()), q, hlo.full(high, wide, ()))
    steps = hlo.convert(stablehlo.subtract(kept, origin), grid_in)
    grid = stablehlo.multiply(steps, hlo.broadcast(hlo.convert(step, grid_in), shape))
    return hlo.convert(grid, hlo.dtype(x)), hlo.compare(kept, q, "EQ")
