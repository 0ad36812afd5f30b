"""Random numbers: the keyed twins of aten's random ops. The bits are Philox's: a key gives the same on every platform.

A key is int64[2]: Philox's key, and its counter's high word. Draws of one program share the first and differ in the
second, and a draw counts in the low word: no two overlap. Numbers have as many random bits as their dtype has digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.random import RANDOM_OPS, keyed_ops, rng_key
from tpu_compile.lowering.registry import RuleFunction, lowers, operand
from tpu_compile.lowering.windows import running

aten = torch.ops.aten

DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
_WORDS = {torch.float64: (torch.uint64, torch.int64)}


def draws(*ops: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for the keyed twins of aten's random ops: the key comes first, a generator never."""
    return lowers(*(keyed_ops()[op] for op in ops))


@lowers(*RANDOM_OPS)
def unkeyed(ctx: LoweringContext, *_: Any, **__: Any) -> None:
    ctx.refuse(
        "it draws from a torch.Generator of its own, or again in the backward of a branch or loop",
        "seed with torch.manual_seed, not generator=; draw outside of torch.cond and loops, and pass the numbers in",
    )


# ---- bits


@lowers(rng_key)
def key_of_draw(ctx: LoweringContext, index: int) -> Value:
    """The program's seed, with ``index`` added to its second word; in a loop, a key made from that and the turn."""
    seed = hlo.bitcast_convert(ctx.walk.seed, torch.int64)
    first, second = hlo.slice_(seed, [0], [1]), hlo.slice_(seed, [1], [2])
    key = hlo.concatenate([first, stablehlo.add(second, hlo.full_like(second, index))], 0)
    for count in ctx.walk.turns:
        word = hlo.convert(count, torch.uint64) if hlo.is_value(count) else hlo.scalar(count, torch.uint64)
        key = hlo.bitcast_convert(random_bits(key, [2], torch.uint64, word), torch.int64)
    return key


def random_bits(key: Value, sizes: Any, element: torch.dtype = torch.uint32, start: Value | None = None) -> Value:
    """Uniform uint32 or uint64, from place ``start`` of the key's stream."""
    words = hlo.bitcast_convert(key, torch.uint64)
    low = hlo.full(0, torch.uint64, [1]) if start is None else hlo.reshape(start, [1])
    state = hlo.concatenate([hlo.slice_(words, [0], [1]), low, hlo.slice_(words, [1], [2])], 0)
    count = math.prod(sizes)
    if not count:
        return hlo.full(0, element, sizes)
    return hlo.reshape(hlo.rng_bit_generator(state, [count], element), sizes)


def mantissas(key: Value, sizes: Any, kind: torch.dtype, digits: int) -> Value:
    """Uniform whole numbers below ``2**digits``, exact in dtype ``kind`` (float32 or float64)."""
    unsigned, signed = _WORDS.get(kind, (torch.uint32, torch.int32))
    raw = random_bits(key, sizes, unsigned)
    high = stablehlo.shift_right_logical(raw, hlo.full_like(raw, 8 * unsigned.itemsize - digits))
    return hlo.convert(hlo.bitcast_convert(high, signed), kind)


# ---- distributions, in dtype `dtypes.opmath(element)`


def scaled(x: Value, factor: float, offset: float = 0.0) -> Value:
    """``x * factor + offset``."""
    product = stablehlo.multiply(x, hlo.full_like(x, factor))
    return product if offset == 0.0 else stablehlo.add(product, hlo.full_like(product, offset))


def uniform_values(key: Value, sizes: Any, element: torch.dtype) -> Value:
    """Uniform in [0, 1), with as many bits as ``element`` holds."""
    digits = DIGITS[element]
    return scaled(mantissas(key, sizes, dtypes.opmath(element), digits), 2.0**-digits)


def open_uniform(key: Value, sizes: Any, kind: torch.dtype) -> Value:
    """Uniform in (0, 1), symmetric about a half: odd multiples of the smallest step."""
    digits = DIGITS[kind]
    return scaled(mantissas(key, sizes, kind, digits - 1), 2.0 ** (1 - digits), 2.0**-digits)


def normal_values(key: Value, sizes: Any, element: torch.dtype) -> Value:
    """Standard normal, by the inverse of its distribution function; a complex number's parts share the variance."""
    if element.is_complex:
        parts = normal_values(key, [2, *sizes], dtypes.real(element))
        first, second = (hlo.squeeze(hlo.slice_axis(scaled(parts, math.sqrt(0.5)), 0, i, i + 1), [0]) for i in range(2))
        return stablehlo.complex(first, second)
    kind = dtypes.opmath(element)
    digits = DIGITS[kind]
    centred = scaled(mantissas(key, sizes, kind, digits), 2.0 ** (1 - digits), 2.0**-digits - 1)
    return scaled(chlo.erf_inv(centred), math.sqrt(2))


def exponential_values(key: Value, sizes: Any, kind: torch.dtype) -> Value:
    """Standard exponential, never 0."""
    return stablehlo.negate(stablehlo.log(open_uniform(key, sizes, kind)))


def chance(key: Value, sizes: Any, p: float) -> Value:
    """True with probability ``p``, exact to 2**-32."""
    if not 0 < p < 1:
        return hlo.full(p >= 1, torch.bool, sizes)
    raw = random_bits(key, sizes)
    return hlo.compare(raw, hlo.full_like(raw, min(round(p * 2**32), 2**32 - 1)), "LT")


def floating(element: torch.dtype) -> torch.dtype:
    """The dtype to draw in for a result of any dtype."""
    return dtypes.opmath(element) if element.is_floating_point else torch.float32


# ---- uniform, normal


@draws(aten.rand.default, aten.rand_like.default)
def rand(ctx: LoweringContext, key: Value, *_: Any, **__: Any) -> Value:
    return _uniform(ctx, key)


def _uniform(ctx: LoweringContext, key: Value, low: float = 0.0, high: float = 1.0) -> Value:
    out = ctx.out
    if out.dtype.is_complex:
        parts = scaled(uniform_values(key, [2, *out.shape], dtypes.real(out.dtype)), high - low, low)
        first, second = (hlo.squeeze(hlo.slice_axis(parts, 0, i, i + 1), [0]) for i in range(2))
        return stablehlo.complex(first, second)
    values = uniform_values(key, out.shape, out.dtype)
    return hlo.convert(values if (low, high) == (0, 1) else scaled(values, high - low, low), out.dtype)


@draws(aten.uniform.default)
def uniform(ctx: LoweringContext, key: Value, x: Value, from_: float = 0.0, to: float = 1.0) -> Value:
    return _uniform(ctx, key, from_, to)


@draws(aten.randn.default, aten.randn_like.default)
def randn(ctx: LoweringContext, key: Value, *_: Any, **__: Any) -> Value:
    return hlo.convert(normal_values(key, ctx.out.shape, ctx.out.dtype), ctx.out.dtype)


def _normal(ctx: LoweringContext, key: Value, mean: Any, std: Any) -> Value:
    """``mean + std * z``; either may be a tensor. torch adds a real mean to both parts of a complex number."""
    out = ctx.out
    values = normal_values(key, out.shape, out.dtype)
    kind = hlo.dtype(values)
    if not hlo.is_value(mean) and kind.is_complex:
        mean = complex(mean, mean)
    mean, std = (operand(v, kind, out.shape) for v in (mean, std))
    return hlo.convert(stablehlo.add(mean, stablehlo.multiply(std, values)), out.dtype)


@draws(aten.normal_functional.default)
def normal_functional(ctx: LoweringContext, key: Value, x: Value, mean: float = 0.0, std: float = 1.0) -> Value:
    return _normal(ctx, key, mean, std)


@draws(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(ctx: LoweringContext, key: Value, mean: Any, std: Any = 1.0) -> Value:
    return _normal(ctx, key, mean, std)


@draws(aten.normal.float_float)
def normal_float(ctx: LoweringContext, key: Value, mean: float, std: float, size: Any, **_: Any) -> Value:
    return _normal(ctx, key, mean, std)


@draws(aten.log_normal.default)
def log_normal(ctx: LoweringContext, key: Value, x: Value, mean: float = 1.0, std: float = 2.0) -> Value:
    values = scaled(normal_values(key, ctx.out.shape, ctx.out.dtype), std, mean)
    return hlo.convert(stablehlo.exponential(values), ctx.out.dtype)


@draws(aten.exponential.default)
def exponential(ctx: LoweringContext, key: Value, x: Value, lambd: float = 1.0) -> Value:
    values = exponential_values(key, ctx.out.shape, dtypes.opmath(ctx.out.dtype))
    return hlo.convert(stablehlo.divide(values, hlo.full_like(values, lambd)), ctx.out.dtype)


@draws(aten.geometric.default)
def geometric(ctx: LoweringContext, key: Value, x: Value, p: float) -> Value:
    values = exponential_values(key, ctx.out.shape, floating(ctx.out.dtype))
    return hlo.convert(stablehlo.ceil(scaled(values, -1 / math.log1p(-p))), ctx.out.dtype)


@draws(aten.cauchy.default)
def cauchy(ctx: LoweringContext, key: Value, x: Value, median: float = 0.0, sigma: float = 1.0) -> Value:
    angle = scaled(open_uniform(key, ctx.out.shape, dtypes.opmath(ctx.out.dtype)), math.pi, -math.pi / 2)
    return hlo.convert(scaled(chlo.tan(angle), sigma, median), ctx.out.dtype)


# ---- whole numbers


def _integers(ctx: LoweringContext, key: Value, low: int, count: int) -> Value:
    """Uniform in [low, low + count): as in torch, the remainder of 32 random bits, or of 64 if ``count`` needs them."""
    word = torch.uint32 if count <= 2**32 else torch.uint64
    raw = random_bits(key, ctx.out.shape, word)
    if count < 2 ** (8 * word.itemsize):
        raw = stablehlo.remainder(raw, hlo.full_like(raw, count))
    offset = hlo.convert(raw, torch.int64)
    if low:
        offset = stablehlo.add(offset, hlo.full_like(offset, low))
    return hlo.convert(offset, ctx.out.dtype)


@draws(aten.randint.default)
def randint(ctx: LoweringContext, key: Value, high: int, *_: Any, **__: Any) -> Value:
    return _integers(ctx, key, 0, high)


@draws(aten.randint.low)
def randint_low(ctx: LoweringContext, key: Value, low: int, high: int, *_: Any, **__: Any) -> Value:
    return _integers(ctx, key, low, high - low)


@draws(aten.randint_like.default)
def randint_like(ctx: LoweringContext, key: Value, x: Value, high: int, **_: Any) -> Value:
    return _integers(ctx, key, 0, high)


@draws(aten.randint_like.low_dtype)
def randint_like_low(ctx: LoweringContext, key: Value, x: Value, low: int, high: int, **_: Any) -> Value:
    return _integers(ctx, key, low, high - low)


@draws(aten.randint_like.Tensor)
def randint_like_tensor(ctx: LoweringContext, key: Value, x: Value, high: Value, **_: Any) -> Value:
    raw = random_bits(key, ctx.out.shape, torch.uint64)
    limit = hlo.broadcast(hlo.convert(high, torch.uint64), ctx.out.shape)
    return hlo.convert(stablehlo.remainder(raw, limit), ctx.out.dtype)


@draws(aten.random.default)
def random(ctx: LoweringContext, key: Value, x: Value) -> Value:
    return _integers(ctx, key, 0, _largest(ctx.out.dtype) + 1)


@draws(aten.random.to)
def random_to(ctx: LoweringContext, key: Value, x: Value, to: int) -> Value:
    return _integers(ctx, key, 0, to)


@draws(getattr(aten.random, "from"))
def random_from(ctx: LoweringContext, key: Value, x: Value, from_: int, to: int | None) -> Value:
    return _integers(ctx, key, from_, (_largest(ctx.out.dtype) + 1 if to is None else to) - from_)


def _largest(element: torch.dtype) -> int:
    """The largest whole number up to which ``element`` holds all of them."""
    if element == torch.bool:
        return 1
    return 2 ** DIGITS[element] if element.is_floating_point else torch.iinfo(element).max


@draws(aten.randperm.default)
def randperm(ctx: LoweringContext, key: Value, n: int, **_: Any) -> Value:
    """Positions sorted by 64 random bits each: a tie is rarer than any that a program could notice."""
    return hlo.convert(_order(_halves(key, [n]), 0), ctx.out.dtype)


def _halves(key: Value, sizes: Any) -> list[Value]:
    both = random_bits(key, [2, *sizes])
    return [hlo.squeeze(hlo.slice_axis(both, 0, i, i + 1), [0]) for i in range(2)]


def _order(keys: list[Value], axis: int) -> Value:
    """int32 positions that sort two keys, the first one more significant."""

    def less(a0: Value, b0: Value, a1: Value, b1: Value, *_: Value) -> Value:
        tie = stablehlo.and_(hlo.compare(a0, b0, "EQ"), hlo.compare(a1, b1, "LT"))
        return stablehlo.or_(hlo.compare(a0, b0, "LT"), tie)

    return hlo.sort([*keys, hlo.iota(hlo.shape(keys[0]), axis)], axis, less)[-1]


# ---- choice


@draws(aten.bernoulli.default)
def bernoulli(ctx: LoweringContext, key: Value, x: Value) -> Value:
    return _bernoulli(ctx, key, x)


@draws(aten.bernoulli.Tensor)
def bernoulli_tensor(ctx: LoweringContext, key: Value, x: Value, p: Value) -> Value:
    return _bernoulli(ctx, key, p)


def _bernoulli(ctx: LoweringContext, key: Value, p: Value) -> Value:
    kind = floating(hlo.dtype(p))
    drawn = uniform_values(key, ctx.out.shape, kind)
    return hlo.convert(hlo.compare(drawn, hlo.broadcast(hlo.convert(p, kind), ctx.out.shape), "LT"), ctx.out.dtype)


@draws(aten.bernoulli.p)
def bernoulli_p(ctx: LoweringContext, key: Value, x: Value, p: float) -> Value:
    return hlo.convert(chance(key, ctx.out.shape, p), ctx.out.dtype)


@draws(aten.native_dropout.default)
def native_dropout(ctx: LoweringContext, key: Value, input: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    """(what is kept, scaled; where it was kept). A dropped NaN stays NaN, as in torch, which multiplies by 0."""
    out = ctx.outs[0]
    if train is False:
        return input, hlo.full(True, torch.bool, out.shape)
    kept = chance(key, out.shape, 1 - p)
    wide = hlo.convert(input, dtypes.opmath(out.dtype))
    factor = hlo.select(kept, hlo.full_like(wide, 0 if p == 1 else 1 / (1 - p)), hlo.full_like(wide, 0))
    return hlo.convert(stablehlo.multiply(wide, factor), out.dtype), kept


@draws(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise(
    ctx: LoweringContext,
    key: Value,
    x: Value,
    noise: Value,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
) -> tuple[Value, Value]:
    """(result, slopes): in training a random slope for each x <= 0; else the mean slope, and the noise as it was."""
    out = ctx.outs[0]
    wide = hlo.convert(x, dtypes.opmath(out.dtype))
    positive = hlo.compare(wide, hlo.full_like(wide, 0), "GT")
    if training:
        slopes = scaled(uniform_values(key, out.shape, hlo.dtype(wide)), upper - lower, lower)
    else:
        slopes = hlo.full_like(wide, (lower + upper) / 2)
    slopes = hlo.select(positive, hlo.full_like(wide, 1), slopes)
    result = hlo.convert(stablehlo.multiply(wide, slopes), out.dtype)
    return result, hlo.convert(slopes, ctx.outs[1].dtype) if training else noise


# ---- multinomial


@draws(aten.multinomial.default)
def multinomial(ctx: LoweringContext, key: Value, x: Value, num_samples: int, replacement: bool = False) -> Value:
    """Without replacement the largest of ``p / Exponential`` win: the chances of drawing one after another."""
    kind = dtypes.opmath(hlo.dtype(x))
    weights = hlo.convert(x, kind)
    if replacement and num_samples > 1:
        indices = _search(_distribution(weights), key, ctx.out.shape)
    else:
        race = stablehlo.divide(weights, exponential_values(key, hlo.shape(weights), kind))
        indices = _largest_first(race, num_samples)
    return hlo.convert(indices, ctx.out.dtype)


def _largest_first(x: Value, count: int) -> Value:
    axis = hlo.rank(x) - 1
    positions = hlo.iota(hlo.shape(x), axis)
    ordered = hlo.sort([x, positions], axis, lambda a, b, *_: hlo.compare(a, b, "GT"))[1]
    return hlo.slice_axis(ordered, axis, 0, count)


def _distribution(weights: Value) -> Value:
    """Running sums that an element of weight 0 leaves exactly as they were, so that it can never be drawn."""
    axis = hlo.rank(weights) - 1
    sums = running(weights, axis, "add")
    positive = hlo.compare(weights, hlo.full_like(weights, 0), "GT")
    return running(hlo.select(positive, sums, hlo.full_like(sums, -math.inf)), axis, "maximum")


def _search(distribution: Value, key: Value, sizes: Any) -> Value:
    """Where uniform numbers fall in rows of running sums: a binary search, one gather a step."""
    count, kind = hlo.shape(distribution)[-1], hlo.dtype(distribution)
    axis = hlo.rank(distribution) - 1
    totals = hlo.broadcast(hlo.slice_axis(distribution, axis, count - 1, count), sizes)
    wanted = stablehlo.multiply(open_uniform(key, sizes, kind), totals)
    found = hlo.full(0, torch.int32, sizes)
    for step in (2**i for i in reversed(range(count.bit_length()))):
        ahead = stablehlo.add(found, hlo.full_like(found, step))
        inside = hlo.compare(ahead, hlo.full_like(ahead, count), "LE")
        reached = _take_last(distribution, stablehlo.subtract(ahead, hlo.full_like(ahead, 1)))
        passed = stablehlo.and_(hlo.compare(reached, wanted, "LE"), hlo.compare(reached, totals, "LT"))
        found = hlo.select(stablehlo.and_(inside, passed), ahead, found)
    return found


def _take_last(x: Value, index: Value) -> Value:
    """``torch.take_along_dim(x, index, -1)`` for one or two axes; indices past the end are clamped."""
    batch = list(range(hlo.rank(x) - 1))
    return hlo.gather(
        x,
        hlo.unsqueeze(index, hlo.rank(index)),
        offset_dims=[],
        collapsed=[hlo.rank(x) - 1],
        start_index_map=[hlo.rank(x) - 1],
        slice_sizes=[1] * hlo.rank(x),
        operand_batching=batch,
        indices_batching=batch,
    )
