"""Bits of integers, and of floats: shifts, logic, signs, neighbours, mantissa and exponent, reinterpretation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import elementwise, lowers

aten = torch.ops.aten


def binary(build: Any) -> Any:
    """A rule that is one builder of two operands."""

    def rule(ctx: LoweringContext, x: Value, other: Value) -> Value:
        return build(x, other)

    return rule


for _name, _build in {"and": stablehlo.and_, "or": stablehlo.or_, "xor": stablehlo.xor}.items():
    _packet = getattr(aten, f"bitwise_{_name}")
    elementwise(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor, opmath=False)(binary(_build))


@elementwise(aten.bitwise_not.default, opmath=False)
def bitwise_not(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.not_(x)


# ---- shifts: an amount past the width, negative ones included, shifts everything out, in torch and in StableHLO


@elementwise(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    opmath=False,
)
def left_shift(ctx: LoweringContext, x: Value, other: Value) -> Value:
    if hlo.dtype(x).is_floating_point:
        return stablehlo.multiply(x, stablehlo.power(hlo.full_like(x, 2), other))
    return stablehlo.shift_left(x, other)


@elementwise(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
    opmath=False,
)
def right_shift(ctx: LoweringContext, x: Value, other: Value) -> Value:
    if hlo.dtype(x).is_floating_point:
        return stablehlo.divide(x, stablehlo.power(hlo.full_like(x, 2), other))
    shift = stablehlo.shift_right_arithmetic if hlo.dtype(x).is_signed else stablehlo.shift_right_logical
    return shift(x, other)


# ---- floats as bits


@dataclass(frozen=True)
class Layout:
    """An IEEE float's fields: the signed integer of its width, the bits of its fraction, and its exponent's bias."""

    carrier: torch.dtype
    fraction: int
    bias: int

    @property
    def sign(self) -> int:
        return int(torch.iinfo(self.carrier).min)

    @property
    def fraction_mask(self) -> int:
        return (1 << self.fraction) - 1

    @property
    def exponent_mask(self) -> int:
        return 2 * self.bias + 1


LAYOUTS = {
    torch.float64: Layout(torch.int64, 52, 1023),
    torch.float32: Layout(torch.int32, 23, 127),
    torch.bfloat16: Layout(torch.int16, 7, 127),
    torch.float16: Layout(torch.int16, 10, 15),
}


def as_bits(x: Value) -> Value:
    """A float's bits, as a signed integer of its width."""
    return stablehlo.bitcast_convert(hlo.tensor_type(hlo.shape(x), LAYOUTS[hlo.dtype(x)].carrier), x)


def from_bits(bits: Value, kind: torch.dtype) -> Value:
    """The float with these bits."""
    return stablehlo.bitcast_convert(hlo.tensor_type(hlo.shape(bits), kind), bits)


@lowers(aten.signbit.default)
def signbit(ctx: LoweringContext, x: Value) -> Value:
    return is_negative(x)


def is_negative(x: Value) -> Value:
    """Where the sign bit is set; -0.0 and negative NaNs count."""
    kind = hlo.dtype(x)
    if kind == torch.bool or not (kind.is_floating_point or kind.is_signed):
        return hlo.full(False, torch.bool, hlo.shape(x))
    bits = as_bits(x) if kind.is_floating_point else x
    return hlo.compare(bits, hlo.full_like(bits, 0), "LT")


@elementwise(aten.copysign.Tensor, aten.copysign.Scalar, opmath=False)
def copysign(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return with_sign(x, other)


def with_sign(x: Value, sign: Value) -> Value:
    """``x``'s magnitude with ``sign``'s sign bit; both floats of one dtype."""
    layout = LAYOUTS[hlo.dtype(x)]
    magnitude, negative = as_bits(x), as_bits(sign)
    magnitude = stablehlo.and_(magnitude, hlo.full_like(magnitude, ~layout.sign))
    negative = stablehlo.and_(negative, hlo.full_like(negative, layout.sign))
    return from_bits(stablehlo.or_(magnitude, negative), hlo.dtype(x))


@elementwise(aten.nextafter.default, opmath=False)
def nextafter(ctx: LoweringContext, x: Value, other: Value) -> Value:
    """By counting in bits: comparing floats would flush subnormals to 0 on some platforms."""
    here, there = _ordered(as_bits(x)), _ordered(as_bits(other))
    one = hlo.full_like(here, 1)
    up, down = stablehlo.add(here, one), stablehlo.subtract(here, one)
    step = hlo.select(hlo.compare(here, there, "LT"), up, down)
    moved = from_bits(_ordered(step), hlo.dtype(x))
    away = with_sign(from_bits(one, hlo.dtype(x)), other)
    zero = hlo.full_like(here, 0)
    moved = hlo.select(hlo.compare(here, zero, "EQ"), away, moved)
    moved = hlo.select(hlo.compare(here, there, "EQ"), other, moved)
    return hlo.select(hlo.is_nan(x), x, hlo.select(hlo.is_nan(other), other, moved))


def _ordered(bits: Value) -> Value:
    """Sign-and-magnitude bits as integers in the floats' own order (both zeros are 0), and back again."""
    lowest = hlo.full_like(bits, hlo.lowest(hlo.dtype(bits)))
    return hlo.select(hlo.compare(bits, hlo.full_like(bits, 0), "LT"), stablehlo.subtract(lowest, bits), bits)


@lowers(aten.frexp.Tensor)
def frexp(ctx: LoweringContext, x: Value) -> tuple[Value, Value]:
    mantissa, exponent = ctx.outs
    fraction, power = split_exponent(hlo.convert(x, dtypes.opmath(mantissa.dtype)))
    return hlo.convert(fraction, mantissa.dtype), hlo.convert(power, exponent.dtype)


def split_exponent(x: Value) -> tuple[Value, Value]:
    """(mantissa in ±[0.5, 1), exponent as an integer of ``x``'s width), exactly, subnormals too.

    0, inf and NaN are their own mantissa.
    """
    layout = LAYOUTS[hlo.dtype(x)]
    bits = as_bits(x)
    fraction = stablehlo.and_(bits, hlo.full_like(bits, layout.fraction_mask))
    biased = stablehlo.shift_right_logical(bits, hlo.full_like(bits, layout.fraction))
    biased = stablehlo.and_(biased, hlo.full_like(bits, layout.exponent_mask))
    leading = stablehlo.count_leading_zeros(fraction)
    shift = stablehlo.subtract(leading, hlo.full_like(bits, layout.carrier.itemsize * 8 - 1 - layout.fraction))
    zero, one = hlo.full_like(bits, 0), hlo.full_like(bits, 1)
    subnormal = hlo.compare(biased, zero, "EQ")
    grown = stablehlo.and_(stablehlo.shift_left(fraction, shift), hlo.full_like(bits, layout.fraction_mask))
    fraction = hlo.select(subnormal, grown, fraction)
    biased = hlo.select(subnormal, stablehlo.subtract(one, shift), biased)
    sign = stablehlo.and_(bits, hlo.full_like(bits, layout.sign))
    half = hlo.full_like(bits, (layout.bias - 1) << layout.fraction)
    mantissa = stablehlo.or_(sign, stablehlo.or_(half, fraction))
    special = stablehlo.or_(_not_finite(bits, layout), hlo.compare(bits, sign, "EQ"))
    exponent = stablehlo.subtract(biased, hlo.full_like(bits, layout.bias - 1))
    chosen = from_bits(hlo.select(special, bits, mantissa), hlo.dtype(x))  # of floats, LLVM takes subnormals for 0
    return chosen, hlo.select(special, zero, exponent)


def _not_finite(bits: Value, layout: Layout) -> Value:
    mask = hlo.full_like(bits, layout.exponent_mask << layout.fraction)
    return hlo.compare(stablehlo.and_(bits, mask), mask, "EQ")


# ---- reinterpretation


@lowers(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(ctx: LoweringContext, x: Value, dtype: Any) -> Value:
    return reinterpret(x, dtype, ctx.out.shape)


def reinterpret(x: Value, kind: torch.dtype, sizes: Any) -> Value:
    """The same memory as another dtype. A complex number counts as its two parts, a bool as a byte that is 0 or 1."""
    if hlo.dtype(x) == kind:
        return x
    if hlo.dtype(x).is_complex:
        x = split_parts(x)
        sizes_of_parts = [*hlo.shape(x)[:-2], hlo.shape(x)[-2] * 2] if hlo.rank(x) > 1 else hlo.shape(x)
        return reinterpret(hlo.reshape(x, sizes_of_parts), kind, sizes)
    if kind.is_complex:
        part = dtypes.real(kind)
        pairs = reinterpret(x, part, [*sizes[:-1], sizes[-1] * 2] if len(sizes) else [2])
        return join_parts(hlo.reshape(pairs, [*sizes, 2]))
    if hlo.dtype(x) == torch.bool:
        return reinterpret(hlo.convert(x, torch.uint8), kind, sizes)
    if kind == torch.bool:
        return hlo.convert(reinterpret(x, torch.uint8, sizes), torch.bool)
    return _bitcast(x, kind, list(sizes))


def _bitcast(x: Value, kind: torch.dtype, sizes: list[int]) -> Value:
    """StableHLO packs and unpacks a trailing axis of its own; torch's last axis grows or shrinks."""
    old, new = hlo.dtype(x).itemsize, kind.itemsize
    if old == new:
        return stablehlo.bitcast_convert(hlo.tensor_type(sizes, kind), x)
    if old > new:
        parts = stablehlo.bitcast_convert(hlo.tensor_type([*hlo.shape(x), old // new], kind), x)
        return hlo.reshape(parts, sizes)
    packed = hlo.reshape(x, [*sizes, new // old])
    return stablehlo.bitcast_convert(hlo.tensor_type(sizes, kind), packed)


def split_parts(x: Value) -> Value:
    """Complex numbers as (..., 2) real values."""
    axis = hlo.rank(x)
    return hlo.concatenate([hlo.unsqueeze(part, axis) for part in (stablehlo.real(x), stablehlo.imag(x))], axis)


def join_parts(pairs: Value) -> Value:
    """(..., 2) real values as complex numbers."""
    axis = hlo.rank(pairs) - 1
    parts = [hlo.squeeze(hlo.slice_axis(pairs, axis, i, i + 1), [axis]) for i in (0, 1)]
    return stablehlo.complex(*parts)
