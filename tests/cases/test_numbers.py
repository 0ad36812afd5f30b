"""Reported faults: dtypes, promotion, integers, NaN, reductions. Each test names the public report it was drawn
from."""

from __future__ import annotations

import math

import pytest
import torch


def test_integers_to_negative_powers(agrees):  # pytorch/xla#6750: only 1 and -1 survive
    base = torch.tensor([-3, -2, -1, 0, 1, 2, 7], dtype=torch.int32)
    exponents = torch.tensor([-1, -2, -3, -1, -4, -1, 2])
    agrees(lambda b, e, s: (torch.pow(b, e), b**s), base, exponents, torch.tensor(-1))


def test_scans_and_sums_of_bool_count_in_int64(agrees):  # tenstorrent/tt-xla
    agrees(lambda m: (m.cumsum(1), m.sum(0), m.cumprod(0), m.cumsum(0, dtype=torch.int32)), torch.rand(4, 7) > 0.4)


def test_shifts_past_the_width(agrees):  # pytorch/xla: 0, or -1 for a negative number shifted right
    x = torch.tensor([1, -1, 5, -7, 2**31 - 1], dtype=torch.int32)
    amounts = torch.tensor([0, 1, 31, 32, 63], dtype=torch.int32)
    agrees(lambda x, n: (x << 40, x >> 40, x << n, x >> n), x, amounts)


def test_int64_keeps_all_its_bits(agrees):  # google/torchax
    def fn(x):
        return x + 1, x * 3, x // 7, x % 1000, x.sum(), torch.arange(2**33, 2**33 + 4), x > 2**35

    agrees(fn, torch.tensor([2**40 + 3, -(2**50) - 1, 2**62, 7]))


def test_integer_division_never_goes_through_a_float(agrees):  # tenstorrent/tt-xla#4568
    def fn(a, b):
        return a // b, torch.div(a, b, rounding_mode="trunc"), a % b, torch.fmod(a, b), a // 14

    a = torch.tensor([392, 378, 2**24 + 1, 2**53 + 1, -392, -5, 7 * (2**40 + 1)])
    agrees(fn, a, torch.tensor([14, 14, 3, 2, 14, 3, 7]))


def test_float_floor_division_is_the_floor_of_the_exact_quotient(agrees):  # pytorch/pytorch#197895
    def fn(a, b):
        return a // b, torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc"), a // 0.1

    a = torch.tensor([1.0, 0.5, 6.0, -1.0, 7.5, 1.0], dtype=torch.float64)
    agrees(fn, a, torch.tensor([0.1, 0.1, 0.2, 0.1, -2.5, 1 / 3], dtype=torch.float64))


def test_uint8_wraps_before_it_is_widened(agrees):  # pytorch/pytorch#105264
    def fn(x):
        return (x + x).to(torch.int16), (x * 3).float(), (-x).to(torch.int64), (x - 201) > 100

    agrees(fn, torch.tensor([128, 6, 0, 200, 255], dtype=torch.uint8))


def test_a_cast_to_a_low_precision_rounds_even_when_undone_at_once():  # pytorch/pytorch#176565
    def fn(x):
        return x.bfloat16().float(), x.half().float() * 3, (x.bfloat16() + 1).float()

    x = torch.randn(64) * 7
    for got, want in zip(torch.compile(fn, backend="tpu", fullgraph=True)(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_fill_values_and_scalars_choose_dtypes_as_torch_does(agrees):  # google/torchax#18
    def fn(ints, half, wide):
        made = torch.full((2,), 3), torch.full((2,), True), torch.full((2,), 2.5), torch.full_like(ints, 3.9)
        sums = ints / 2, ints + 1.5, half + wide, half - wide * 2, ints * wide, torch.add(ints, half, alpha=2)
        return made, sums, torch.sub(half, ints), ints.float() / half

    agrees(fn, torch.arange(4, dtype=torch.int32), torch.randn(4).half(), torch.tensor(2.0, dtype=torch.float64))


def test_addmm_with_beta_0_does_not_read_its_first_operand(agrees):  # pytorch/pytorch#93601
    def fn(c, a, b, v):
        unread = torch.full_like(c, math.nan)
        scaled = torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.addmm(v, a, b, beta=-1.5)
        return scaled, torch.addmm(unread, a, b, beta=0), torch.baddbmm(c[None], a[None], b[None], beta=2, alpha=0.25)

    agrees(fn, torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5), torch.randn(5))


def test_the_first_nan_wins(agrees):  # pytorch/pytorch#118358
    def fn(x):
        reduced = x.argmax(1), x.argmin(1), x.max(1), x.min(0), x.amax(), x.aminmax(dim=0)
        return reduced, x.clamp(-1, 1), torch.maximum(x, -x), torch.fmax(x, -x * 2), x.relu()

    x = torch.randn(4, 5)
    x[0, 3] = x[2, 1] = x[2, 4] = math.nan
    x[3, 0] = -math.inf
    agrees(fn, x)


def test_running_extremes_point_to_the_last_of_ties(agrees):  # pytorch/xla#8675
    def fn(x):
        return torch.cummax(x, 0), torch.cummin(x, 0), torch.cummax(x.float(), 1), torch.cummin(x[0], 0)

    agrees(fn, torch.tensor([[1, 1, 1, 2], [3, 1, 3, 0], [3, 0, 3, 2]]))


def test_medians_and_quantiles(agrees):  # pytorch/xla#5000: the lower of two middle values, NaN first
    def fn(x):
        y = x * 2
        return y.median(), y.median(1), y.nanmedian(), y.nanmedian(0), y[:3].kthvalue(2, 1), y[:2].quantile(0.3, 1)

    x = torch.randperm(24).view(4, 6).float()
    x[3, 2] = math.nan
    agrees(fn, x, calls=2)


@pytest.mark.filterwarnings("ignore:std")  # of one number: NaN, as eager says
def test_a_zero_dim_tensor_takes_dim_0_and_minus_1(agrees):  # pytorch/pytorch#193265
    def fn(x):
        whole = x.mean(0), x.cumsum(-1), x.max(0), x.softmax(0), x.sort(0), x.logsumexp(-1), x.std(), x.flip(0)
        return torch.tensor(5.0).cumsum(0), whole

    agrees(fn, torch.randn(()))


def test_any_and_all_of_uint8_stay_uint8(agrees):  # llvm/torch-mlir#2020
    def fn(x):
        octets = (x > 1).to(torch.uint8)
        over = torch.any(x, (0, 2)), x.all(1, keepdim=True), torch.all(x > -9, (0, 1)), octets.any(0)
        return x.any(), over, x.bool().amax(2), octets.all()

    agrees(fn, torch.randn(2, 3, 4).relu())


def test_special_functions_of_overlapping_slices(agrees):  # pytorch/pytorch#185702
    def fn(x):
        a, b, c = x[:, 1:6], x[:, :5], x[:, 2:]
        pieces = [torch.special.gammaln(a), torch.erf(b), torch.special.xlogy(c, a), torch.special.erfinv(b / 3)]
        return torch.stack(pieces), torch.stack(pieces, -1).sum(1), torch.digamma(a) - torch.special.i0e(c)

    agrees(fn, torch.rand(3, 7) + 0.1)


def test_tensor_literals_are_constants(agrees):  # pytorch/pytorch#178019
    def fn(x):
        table = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
        return x @ table, x + torch.tensor(3, dtype=torch.uint8), torch.as_tensor([2, 1, 0])[1:] + 1

    agrees(fn, torch.randn(3, 2), calls=2)


def test_large_tensor_literals_are_handed_to_the_program(agrees):
    def fn(x):
        return x @ torch.tensor([[float(i * j % 7) for i in range(64)] for j in range(64)])

    agrees(fn, torch.randn(3, 64), calls=2)
