"""The fused paths that nn.MultiheadAttention and nn.TransformerEncoderLayer take in evaluation without gradients."""

from __future__ import annotations

import math

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.attention import scores
from tpu_compile.lowering.ops.matmul import gelu_value
from tpu_compile.lowering.ops.norm import keep, normalised
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def linear(x: Value, weight: Value, bias: Value) -> Value:
    """``x @ weight.T + bias`` over the last axis, rounded once."""
    kind = dtypes.opmath(hlo.dtype(x))
    product = hlo.dot_general(x, weight, ((hlo.rank(x) - 1,), (1,)), out=kind)
    return hlo.convert(stablehlo.add(product, hlo.broadcast(hlo.convert(bias, kind), hlo.shape(product))), hlo.dtype(x))


def heads(x: Value, count: int) -> Value:
    """[B, T, D] as [B, heads, T, D / heads]."""
    b, t, d = hlo.shape(x)
    return hlo.transpose(hlo.reshape(x, [b, t, count, d // count]), [0, 2, 1, 3])


def visible(mask: Value | None, mask_type: int | None, sizes: list[int]) -> Value | None:
    """A mask whose True hides (type 0: [T, T], 1: padded keys [B, T], 2: all axes) as one whose True shows."""
    if mask is None:
        return None
    hidden = hlo.convert(mask, torch.bool)
    axes = {0: [2, 3], 1: [0, 3], 2: [0, 1, 2, 3]}[2 if mask_type is None else mask_type]
    return stablehlo.not_(hlo.broadcast_in_dim(hidden, sizes, axes))


def self_attention(
    query: Value,
    key: Value,
    value: Value,
    count: int,
    weights: tuple[Value, Value, Value, Value],
    mask: Value | None,
    mask_type: int | None,
) -> tuple[Value, Value]:
    """(projected output, attention weights [B, heads, T, T]). ``weights``: of q, k, v as one, then output."""
    in_weight, in_bias, out_weight, out_bias = weights
    width = hlo.shape(in_weight)[0] // 3
    parts = []
    for i, x in enumerate((query, key, value)):
        low, high = i * width, (i + 1) * width
        part = linear(x, hlo.slice_axis(in_weight, 0, low, high), hlo.slice_axis(in_bias, 0, low, high))
        parts.append(heads(part, count))
    q, k, v = parts
    b, _, t, d = hlo.shape(q)
    shown = visible(mask, mask_type, [b, count, t, hlo.shape(k)[2]])
    raw = scores(q, k, shown, False, 1 / math.sqrt(d))
    powers = stablehlo.exponential(stablehlo.subtract(raw, keep(raw, [3], "maximum")))
    shares = hlo.convert(stablehlo.divide(powers, keep(powers, [3], "add")), hlo.dtype(q))
    mixed = hlo.dot_general(shares, v, ((3,), (2,)), ((0, 1), (0, 1)), out=hlo.dtype(raw))
    mixed = hlo.reshape(hlo.transpose(hlo.convert(mixed, hlo.dtype(q)), [0, 2, 1, 3]), [b, t, width])
    return linear(mixed, out_weight, out_bias), shares


@lowers(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    ctx: LoweringContext,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    num_head: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Value, Value]:
    out, weights = ctx.outs
    if 0 in out.shape:
        return hlo.full(0, out.dtype, out.shape), hlo.full(0, weights.dtype, weights.shape)
    packed = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    result, shares = self_attention(query, key, value, num_head, packed, mask, mask_type)
    if not need_weights:
        return result, hlo.full(0, weights.dtype, weights.shape)
    if average_attn_weights:
        total = hlo.reduce(hlo.convert(shares, dtypes.opmath(weights.dtype)), [1], "add")
        shares = hlo.convert(stablehlo.divide(total, hlo.full_like(total, num_head)), weights.dtype)
    return result, shares


@lowers(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer_fwd(
    ctx: LoweringContext,
    src: Value,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None = None,
    mask_type: int | None = None,
) -> Value:
    if hlo.numel(src) == 0:
        return src

    def attend(x: Value) -> Value:
        packed = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return self_attention(x, x, x, num_heads, packed, mask, mask_type)[0]

    def feed_forward(x: Value) -> Value:
        hidden = linear(x, ffn_weight_1, ffn_bias_1)
        wide = hlo.convert(hidden, dtypes.opmath(hlo.dtype(hidden)))
        active = gelu_value(wide) if use_gelu else stablehlo.maximum(wide, hlo.full_like(wide, 0))
        return linear(hlo.convert(active, hlo.dtype(hidden)), ffn_weight_2, ffn_bias_2)

    norms = ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))
    x = src
    for block, (weight, bias) in zip((attend, feed_forward), norms, strict=True):
        if norm_first:
            x = stablehlo.add(x, block(layer_norm(ctx, x, weight, bias, eps)))
        else:
            x = layer_norm(ctx, stablehlo.add(x, block(x)), weight, bias, eps)
    return x


def layer_norm(ctx: LoweringContext, x: Value, weight: Value, bias: Value, eps: float) -> Value:
    """Layer normalisation over the last axis, in ``x``'s dtype."""
    wide = hlo.convert(x, dtypes.opmath(hlo.dtype(x)))
    return hlo.convert(normalised(ctx, wide, [hlo.rank(x) - 1], weight, bias, eps)[0], hlo.dtype(x))
