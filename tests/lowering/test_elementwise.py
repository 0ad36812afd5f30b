"""Pointwise arithmetic against eager, on edge values of every dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.lowering.edges import assert_same, compiled, values

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNARY = """exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh sqrt rsqrt
    reciprocal sigmoid square abs neg sgn sign isnan isinf isfinite isposinf isneginf logical_not floor ceil trunc frac
    round signbit angle nan_to_num erfc deg2rad rad2deg positive""".split()
NOT_OF_BOOL = "neg abs positive floor ceil trunc frac round".split()
EXACT = "floor ceil trunc round frac sign sgn neg abs isnan isinf isfinite signbit logical_not".split()
ULPS = {torch.float32: 32, torch.float64: 256, torch.bfloat16: 1, torch.float16: 1}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_unary(dtype: torch.dtype) -> None:
    x = values(dtype)
    names = [n for n in UNARY if not (dtype == torch.bool and n in NOT_OF_BOOL)]
    names = [n for n in names if n != "frac" or dtype.is_floating_point]

    def fn(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: getattr(torch, name)(x) for name in names}

    got, want = compiled(fn, x), fn(x)
    for name in names:
        assert_same(got[name], want[name], 0 if name in EXACT else ULPS.get(dtype, 32), name)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_division_rounds_as_torch(dtype: torch.dtype) -> None:
    numbers = values(dtype)
    if dtype.is_signed:  # torch's own kernels trap on MIN / -1
        numbers = numbers[numbers != torch.iinfo(dtype).min]
    x, y = numbers[:, None], numbers[None, numbers != 0]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.div(x, y, rounding_mode="trunc"),
            torch.div(x, y, rounding_mode="floor"),
            torch.remainder(x, y),
            torch.fmod(x, y),
            torch.gcd(x, y),
            torch.lcm(x, y),
        ]

    assert_same(compiled(fn, x, y), fn(x, y))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_the_least_integer_by_minus_one_wraps(dtype: torch.dtype) -> None:
    least = torch.tensor([torch.iinfo(dtype).min] * 3, dtype=dtype)
    quotient, rest = compiled(lambda x, y: (x // y, torch.remainder(x, y)), least, torch.full_like(least, -1))
    assert torch.equal(quotient, least) and not rest.any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_quotients_are_whole_where_torch_has_them(dtype: torch.dtype) -> None:
    """XLA makes a division by a broadcast value a product with its reciprocal: 1 / 0.1 then truncates to 9."""
    x, y = values(dtype)[:, None], values(dtype)[None, :]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.div(x, y, rounding_mode="trunc"),
            torch.div(x, y, rounding_mode="floor"),
            x // y,
            torch.div(x, 0.1, rounding_mode="trunc"),
            torch.div(x, 0.7, rounding_mode="floor"),
        ]

    assert_same(compiled(fn, x, y), fn(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scalars_beside_16_bit_floats(dtype: torch.dtype) -> None:
    """mul and div keep a scalar's float32 digits, the others round it first."""
    x = torch.linspace(-4, 4, 1024).to(dtype)  # whole vectors: eager rounds the rest of the last one otherwise

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.flip(0)
        return [
            *(x * 0.7, x / 0.7, x + 0.7, x - 0.7, 0.7 - x, torch.fmod(x, 0.7), torch.remainder(x, 0.7)),
            *(x * torch.tensor(0.7), x + torch.tensor(0.7), torch.add(x, y, alpha=0.7), torch.lerp(x, y, 0.7)),
            torch.addcmul(x, x, y, value=0.7),
        ]

    assert_same(compiled(fn, x), fn(x))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts_past_the_width(dtype: torch.dtype) -> None:
    x, y = values(dtype)[:, None], values(dtype)[None, :]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x << y, x >> y, x << 3, x >> 3, x & y, x | y, x ^ y, ~x]

    assert_same(compiled(fn, x, y), fn(x, y))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_powers_wrap(dtype: torch.dtype) -> None:
    x, y = values(dtype)[:, None], values(dtype)[None, :]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x**y, 2**x, 0**x, (-1) ** x, x**0, x**1, x**2, x**63, x**70]

    assert_same(compiled(fn, x, y), fn(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_roots_of_what_has_none(dtype: torch.dtype) -> None:
    """Of -inf a NaN, and in float16 infinity: torch has a root of its own for all floats but that one."""
    x = torch.tensor([-math.inf, -4.0, -0.0, 0.0, 2.25, math.inf, math.nan], dtype=dtype)

    def roots(x: torch.Tensor) -> list[torch.Tensor]:
        return [x**0.5, x**-0.5]

    assert_same(compiled(roots, x), roots(x))


def test_logarithms_of_whole_powers_are_whole() -> None:
    for dtype in (torch.float32, torch.float64):
        twos, tens = (
            2.0 ** torch.arange(-100, 100, dtype=dtype),
            torch.tensor([10.0**k for k in range(11)], dtype=dtype),
        )
        two, ten = compiled(lambda a, b: (torch.log2(a), torch.log10(b)), twos, tens)
        assert torch.equal(two, torch.arange(-100, 100, dtype=dtype))
        assert torch.equal(ten, torch.arange(11, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_floats(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    extra = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, limits.eps], dtype=dtype)
    x = torch.cat([values(dtype), extra])

    def pairs(x: torch.Tensor) -> list[Any]:
        return [torch.nextafter(x[:, None], x[None, :]), torch.copysign(x[:, None], x[None, :]), torch.signbit(x)]

    assert_same(compiled(pairs, x), pairs(x))
    finite = x[x.isfinite()]
    assert_same(compiled(torch.frexp, finite), torch.frexp(finite))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_rules_of_extremes(dtype: torch.dtype) -> None:
    x, y = values(dtype)[:, None], values(dtype)[None, :]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [
            *(torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y)),
            *(x.clamp(min=y), x.clamp(max=y), x.clamp(-1, 2), x.clamp(2, -1), x.clamp(math.nan, 2.0)),
            *(torch.heaviside(x, y), torch.where(x > 0, x, y), torch.isclose(x, y, equal_nan=True)),
        ]

    assert_same(compiled(fn, x, y), fn(x, y))


CASTS = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16, torch.complex64)


@pytest.mark.parametrize("target", CASTS, ids=str)
def test_casts(target: torch.dtype) -> None:
    floats = torch.tensor([0.0, -0.0, 1.9, -1.9, 100.5, -100.5, 0.3])
    wide = torch.tensor([0, 1, -1, 127, 128, 255, 256, -129, 70000], dtype=torch.int32)
    odd = torch.tensor([math.nan, math.inf])
    assert_same(compiled(lambda a, b: (a.to(target), b.to(target)), floats, wide), (floats.to(target), wide.to(target)))
    if target in (torch.bool, torch.float16):
        assert_same(compiled(lambda a: a.to(target), odd), odd.to(target))


def test_float8_saturates_where_torch_does() -> None:
    x = torch.tensor([1.0, 448.0, 464.0, 480.0, 1e9, math.inf, -math.inf, math.nan, 0.3, 57344.0, 61440.0])
    for target in (torch.float8_e4m3fn, torch.float8_e5m2):
        got = compiled(lambda x, t=target: x.to(t).float(), x)
        assert_same(got, x.to(target).float(), what=str(target))


def test_reinterpreting_memory() -> None:
    x = torch.randn(3, 8)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        whole = x.view(torch.int32)
        return [whole, x.view(torch.int16), x.view(torch.uint8), whole.view(torch.int64), x.view(torch.complex64).real]

    assert_same(compiled(fn, x), fn(x))
