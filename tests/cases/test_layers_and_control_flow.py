"""Reported faults: pools, convolutions, norms, attention, autocast, loops. Each test names the public report it was
drawn from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import while_loop


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_average_pool_divisors(agrees):  # llvm/torch-mlir#4169
    def fn(x):
        flags = (False, True)
        pools = [F.avg_pool2d(x, 3, 2, 1, ceil_mode=c, count_include_pad=i) for c in flags for i in flags]
        odd = F.avg_pool2d(x, 2, 3, ceil_mode=True), F.avg_pool2d(x, (3, 2), divisor_override=5)
        return pools, odd, F.avg_pool1d(x[0], 4, 3, 2, ceil_mode=True)

    agrees(fn, leaf(2, 3, 7, 8), grad=True)


def test_transposed_convolution_with_output_padding(agrees):  # llvm/torch-mlir#2026
    layer = nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=(1, 0), groups=2)
    agrees(layer, torch.randn(2, 4, 4, 5), grad=True)


def test_uneven_adaptive_pools(agrees):  # tenstorrent/tt-xla#3549
    def fn(x):
        means = F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool1d(x[0], 4)
        return means, F.adaptive_max_pool2d(x, (2, None))

    agrees(fn, leaf(2, 3, 7, 5), grad=True)


def test_float32_products_keep_their_precision(agrees):  # pytorch/xla#8811
    agrees(nn.Linear(1024, 8), torch.randn(4, 1024), grad=True)


def test_recurrent_layers(agrees):  # google-ai-edge/litert-torch#808
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.rnn = nn.LSTMCell(3, 4), nn.LSTM(4, 5, 2, bidirectional=True)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[1], 4)
            steps = []
            for step in x:
                h, c = self.cell(step, (h, c))
                steps.append(h)
            return self.rnn(torch.stack(steps)), c

    agrees(Tagger(), torch.randn(5, 2, 3), grad=True, fullgraph=False)


def test_a_row_that_may_look_nowhere_gives_zeros(agrees):  # google/torchax
    mask = torch.rand(2, 1, 4, 6) > 0.3
    mask[0, :, 1] = False
    attend = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)  # noqa: E731
    agrees(attend, leaf(2, 3, 4, 8), leaf(2, 3, 6, 8), leaf(2, 3, 6, 8), mask, grad=True)


def test_attention_with_shared_key_heads_and_a_bias(agrees):  # llvm/torch-mlir#3690
    attend = lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b, enable_gqa=True)  # noqa: E731
    agrees(attend, leaf(2, 6, 3, 4), leaf(2, 2, 5, 4), leaf(2, 2, 5, 4), leaf(3, 5), grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_inference_path_of_a_transformer_encoder(agrees):  # google/torchax#12
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=False)
            self.encoder = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)

        def forward(self, x, padding):
            return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)

    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    agrees(Encoder().eval(), torch.randn(2, 4, 8), padding, fullgraph=False)


def test_rotary_embedding_by_complex_numbers(agrees):  # pytorch/pytorch#97562
    def fn(x, angles):
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = pairs * turns[:, None]
        return torch.view_as_real(turned).flatten(-2), turned.abs(), (turned * pairs.conj()).real

    agrees(fn, leaf(2, 5, 3, 8), torch.rand(5, 4) * 3, grad=True)


def test_a_loop_body_reads_tensors_from_outside(agrees):  # pytorch/xla#7839
    def fn(i, x):
        step = x * 0.5
        return while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, v.sin() + step), (i, x))

    agrees(fn, torch.tensor(0), torch.randn(3, 2))


def test_a_loop_passes_a_carry_on(agrees):  # pytorch/xla#8566
    def fn(x, y):
        def body(i, total, kept):
            return i + 2, total + kept * i, kept.clone()

        return while_loop(lambda i, total, kept: (total.sum() < 50) & (i < 20), body, (torch.tensor(1), x, y))

    agrees(fn, torch.zeros(3), torch.tensor([0.5, 1.0, 2.0]))


def test_a_loop_of_no_turns(agrees):  # pytorch/pytorch#146213
    def fn(c, a):
        start = torch.sin(a.view(-1, 1))
        _, out = while_loop(lambda c, v: v.abs().sum() < 0, lambda c, v: (c - 1, v + 1), (c, start))
        return out.sin_(), start.cos_()

    agrees(fn, torch.tensor(3), torch.randn(2, 1))


@pytest.mark.parametrize("sign", [1, -1])
def test_both_branches_of_a_condition(agrees, sign):  # google/torchax: the predicate is data
    def fn(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: (x @ w).relu(), lambda x, w: x.cos() * w[0], (x, w))

    agrees(fn, (torch.ones(2, 3) * sign).requires_grad_(), leaf(3, 3), grad=True)


def test_autocast_gives_the_dtypes_of_its_table():  # pytorch/pytorch#133924
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, w)
            sums = torch.linalg.vector_norm(y), y.cumsum(0), F.mse_loss(y, x[:, :4])
            return y, *sums, y.softmax(-1), F.layer_norm(y, (4,))

    x, w = torch.randn(3, 5), torch.randn(4, 5)
    for got, want in zip(torch.compile(fn, backend="tpu", fullgraph=True)(x, w), fn(x, w), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_autocast_regions_nest():  # pytorch/xla#5497
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Conv1d(3, 3, 2)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    full = self.a(low.float())
                return low, full, self.b(full), torch.bmm(full, low.mT.float()), full + low

    model, x = Block(), torch.randn(2, 3, 6)
    for got, want in zip(torch.compile(model, backend="tpu", fullgraph=True)(x), model(x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_noise_has_its_moments():  # google-ai-edge/litert-torch#678
    def fn(x):
        shifted, filled = torch.normal(3.0, 0.5, (20000,)), torch.empty(20000).uniform_(-3, 1)
        return torch.randn(2, 10000), shifted, torch.rand_like(x), filled

    normal, shifted, uniform, filled = torch.compile(fn, backend="tpu")(torch.empty(20000))
    wanted = ((normal, 0, 1), (shifted, 3, 0.5), (uniform, 0.5, 12**-0.5), (filled, -1, 4 * 12**-0.5))
    for got, mean, std in wanted:
        assert abs(got.mean() - mean) < 0.06 and abs(got.std() - std) < 0.06
    assert uniform.min() >= 0 and uniform.max() < 1 and normal.abs().max() > 3
    assert not torch.equal(normal[0], normal[1]) and abs((normal[0] * normal[1]).mean()) < 0.1
