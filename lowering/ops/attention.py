"""Scaled dot-product attention and its gradient, kept whole.

Scores of 16-bit data are float32. Query heads that share a key head have an axis of their own: keys are never copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.norm import promised
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

_HEADS = ((0, 1), (0, 1))
_LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
_DIVIDED_EARLY = 32 << 20
"""Bytes of scores that stay in a TPU's vector memory: dividing them there costs nothing. Larger ones go through HBM,
and the result of the product is divided."""
_SHORT = 2048
"""Keys up to which a TPU divides in the fusion that makes the powers. With twice as many, on a v6e, that takes five
times as long as dividing afterwards."""


def scores(query: Value, key: Value, mask: Value | None, causal: bool, scale: float | None) -> Value:
    """``scale * query @ key.T + mask``: [B, H, L, S], or as ``by_key_head`` has it, in the widened dtype; -inf where
    masked."""
    kind = dtypes.opmath(hlo.dtype(query))
    width = hlo.shape(query)[3]
    grouped = by_key_head(query, key)
    raw = hlo.dot_general(grouped, key, ((hlo.rank(grouped) - 1,), (3,)), _HEADS, out=kind)
    raw = stablehlo.multiply(raw, hlo.full_like(raw, 1 / math.sqrt(max(width, 1)) if scale is None else scale))
    sizes = hlo.shape(raw)
    if mask is not None:
        mask = _mask_by_key_head(mask, query, key)
    if mask is not None and hlo.dtype(mask) == torch.bool:
        raw = hlo.select(hlo.broadcast(mask, sizes), raw, hlo.full_like(raw, -math.inf))
    elif mask is not None:
        raw = stablehlo.add(raw, hlo.broadcast(hlo.convert(mask, kind), sizes))
    if causal:
        seen = hlo.compare(hlo.iota(sizes[-2:], 0), hlo.iota(sizes[-2:], 1), "GE")
        raw = hlo.select(hlo.broadcast(seen, sizes), raw, hlo.full_like(raw, -math.inf))
    return raw


def by_key_head(x: Value, key: Value) -> Value:
    """[B, H, L, ...] as [B, key heads, queries that share one, L, ...]; as it is where each has its own.

    An axis of its own: folded into L, it would have to be taken apart where the mask is broadcast, and a TPU would
    write the mask out for every head.
    """
    batch, h, *rest = hlo.shape(x)
    heads = hlo.shape(key)[1]
    return x if h == heads else hlo.reshape(x, [batch, heads, h // max(heads, 1), *rest])


def _mask_by_key_head(mask: Value, query: Value, key: Value) -> Value:
    sizes = hlo.shape(mask)
    if len(sizes) < 3 or hlo.shape(query)[1] == hlo.shape(key)[1]:
        return mask
    *batch, heads, length, s = sizes
    split = [1, 1] if heads == 1 else [hlo.shape(key)[1], heads // hlo.shape(key)[1]]
    return hlo.reshape(mask, [*batch, *split, length, s])


def attend(
    ctx: LoweringContext,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> tuple[Value, Value]:
    """(output, log-sum-exp of the scores), in the widened dtype. A row that sees nothing gives 0, as in torch."""
    raw = scores(query, key, mask, causal, scale)
    kind, last = hlo.dtype(raw), hlo.rank(raw) - 1
    plain = _is_plain(ctx, key, mask)
    top, powers, powers_sum, total = _powers(raw, plain)
    early = ctx.family == "tpu" and hlo.numel(raw) * kind.itemsize <= _DIVIDED_EARLY
    early = early or (plain and hlo.shape(key)[2] <= _SHORT)
    if early:
        powers = stablehlo.divide(powers, _by_row(total, hlo.shape(powers)))
    mixed = hlo.dot_general(hlo.convert(powers, hlo.dtype(value)), value, ((last,), (2,)), _HEADS, out=kind)
    output = mixed if early else stablehlo.divide(mixed, _by_row(total, hlo.shape(mixed)))
    rows = hlo.shape(query)[:3]
    blank = hlo.compare(powers_sum, hlo.full_like(total, 0), "EQ")
    peak = top if plain else hlo.select(blank, hlo.full_like(top, 0), top)
    summed = hlo.reshape(stablehlo.add(peak, stablehlo.log(total)), rows)
    return hlo.reshape(output, [*rows, hlo.shape(value)[3]]), summed


def _is_plain(ctx: LoweringContext, key: Value, mask: Value | None) -> bool:
    """Whether a TPU can be given the softmax it knows, because every row sees a key."""
    return ctx.family == "tpu" and mask is None and hlo.shape(key)[2] > 0


def _powers(raw: Value, plain: bool) -> tuple[Value, Value, Value, Value]:
    """Of scores: each row's top, their powers, each row's sum, and what its powers are to be divided by.

    Of a plain softmax, a TPU makes powers and sums in one fusion. Else a row of -inf has the lowest finite number as
    its top, powers of 0, and 1 in place of their sum; comparing and selecting instead would keep a TPU from fusing the
    powers with their sum.
    """
    kind, last = hlo.dtype(raw), hlo.rank(raw) - 1
    top = hlo.reduce(raw, [last], "maximum", init=-math.inf if plain else _LOWEST[kind])
    powers = stablehlo.exponential(stablehlo.subtract(raw, _by_row(top, hlo.shape(raw))))
    powers_sum = hlo.reduce(powers, [last], "add")
    total = powers_sum if plain else stablehlo.maximum(powers_sum, hlo.full_like(powers_sum, 1))
    return top, powers, powers_sum, total


def _weights(ctx: LoweringContext, raw: Value, key: Value, mask: Value | None, logsumexp: Value) -> Value:
    """The forward's softmax of scores. For a TPU it is computed as there and reads no ``logsumexp``: with a second use
    of the scores or of their tops, powers and sums would no longer be one fusion."""
    if ctx.family != "tpu":
        logsumexp = hlo.convert(logsumexp, hlo.dtype(raw))
        return stablehlo.exponential(stablehlo.subtract(raw, _by_row(logsumexp, hlo.shape(raw))))
    _, powers, _, total = _powers(raw, _is_plain(ctx, key, mask))
    return stablehlo.divide(powers, _by_row(total, hlo.shape(powers)))


def attend_backward(
    ctx: LoweringContext,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> tuple[Value, Value, Value, Value]:
    """Gradients of query, key, value and the scores, in the widened dtype."""
    kind = dtypes.opmath(hlo.dtype(query))
    factor = 1 / math.sqrt(max(hlo.shape(query)[3], 1)) if scale is None else scale
    raw = scores(query, key, mask, causal, scale)
    sizes, last = hlo.shape(raw), hlo.rank(raw) - 1
    weights = _weights(ctx, raw, key, mask, logsumexp)
    grouped = by_key_head(grad, key)
    pull = hlo.dot_general(grouped, value, ((last,), (3,)), _HEADS, out=kind)
    delta = hlo.reduce(stablehlo.multiply(hlo.convert(grad, kind), hlo.convert(out, kind)), [3], "add")
    slope = stablehlo.multiply(weights, stablehlo.subtract(pull, _by_row(delta, sizes)))
    narrow = hlo.dtype(query)
    scaled = hlo.convert(stablehlo.multiply(slope, hlo.full_like(slope, factor)), narrow)
    rows = tuple(range(2, last))
    of_query = hlo.dot_general(scaled, key, ((last,), (2,)), _HEADS, out=kind)
    of_key = hlo.dot_general(scaled, by_key_head(query, key), (rows, rows), _HEADS, out=kind)
    of_value = hlo.dot_general(hlo.convert(weights, narrow), grouped, (rows, rows), _HEADS, out=kind)
    whole = [*hlo.shape(query)[:3], sizes[-1]]
    return hlo.reshape(of_query, hlo.shape(query)), of_key, of_value, hlo.reshape(slope, whole)


def _by_row(x: Value, sizes: Sequence[int]) -> Value:
    """[B, H, L] along the rows of the scores."""
    return hlo.broadcast_in_dim(hlo.reshape(x, sizes[:-1]), sizes, list(range(len(sizes) - 1)))


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def scaled_dot_product_flash_attention_for_cpu(
    ctx: LoweringContext,
    query: Value,
    key: Value,
    value: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    _no_dropout(ctx, dropout_p)
    return promised(ctx, *attend(ctx, query, key, value, attn_mask, is_causal, scale))


def _no_dropout(ctx: LoweringContext, dropout_p: float) -> None:
    if dropout_p:
        ctx.refuse("a fused attention with dropout", "call torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around it")


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def scaled_dot_product_flash_attention_for_cpu_backward(
    ctx: LoweringContext,
    grad_out: Value,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    _no_dropout(ctx, dropout_p)
    grads = attend_backward(ctx, grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)
    return promised(ctx, *grads[:3])


@lowers(aten._scaled_dot_product_fused_attention_overrideable.default)
def scaled_dot_product_fused_attention_overrideable(
    ctx: LoweringContext,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _no_dropout(ctx, dropout_p)
    output, total = promised_pair(ctx, *attend(ctx, query, key, value, attn_bias, is_causal, scale))
    rest = [hlo.full(0, s.dtype, s.shape) if hasattr(s, "dtype") else s for s in ctx.outs[2:]]
    return output, total, *rest


def promised_pair(ctx: LoweringContext, output: Value, total: Value) -> tuple[Value, Value]:
    """The first two results in their promised dtypes."""
    return hlo.convert(output, ctx.outs[0].dtype), hlo.convert(total, ctx.outs[1].dtype)


@lowers(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def scaled_dot_product_fused_attention_overrideable_backward(
    ctx: LoweringContext,
    grad_out: Value,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value,
    grad_input_mask: Any,
    out: Value,
    logsumexp: Value,
    cum_seq_q: Value,
    cum_seq_k: Value,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Value,
    philox_offset: Value,
    *,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    _no_dropout(ctx, dropout_p)
    mask = attn_bias if attn_bias is not None and hlo.numel(attn_bias) else None
    *grads, slope = attend_backward(ctx, grad_out, query, key, value, out, logsumexp, mask, is_causal, scale)
    bias = ctx.outs[3]
    return (
        *promised(ctx, *grads, None)[:3],
        None if bias is None else hlo.convert(unbroadcast(slope, bias.shape), bias.dtype),
    )


def unbroadcast(x: Value, sizes: Any) -> Value:
    """Sum ``x`` over the axes along which ``sizes`` was broadcast to it."""
    offset = hlo.rank(x) - len(sizes)
    spread = [i for i, n in enumerate(hlo.shape(x)) if i < offset or sizes[i - offset] != n]
    return hlo.reshape(hlo.reduce(x, spread, "add"), sizes)
