"""Products, grouped products and distances against eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.linear_cross_entropy  # registers its operators

aten = torch.ops.aten


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_long_sums(agrees: Any, dtype: torch.dtype) -> None:
    """In 16 bits a sum of 4096 that is not accumulated in float32 is off by far more than a rounding."""
    a, b = torch.full((2, 4096), 0.5, dtype=dtype), torch.full((4096, 3), 0.5, dtype=dtype)
    agrees(lambda a, b: (a @ b, torch.addmm(b[:3, :3].sum(0), a, b)), a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_integers(agrees: Any, dtype: torch.dtype) -> None:
    agrees(torch.mm, torch.arange(-10, 5, dtype=dtype).view(3, 5), torch.arange(20, dtype=dtype).view(5, 4))


@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_added_products(agrees: Any, beta: float) -> None:
    """With beta 0 the first operand is not read, NaN or not."""
    value = float("nan") if beta == 0 else 1.0
    options = {"beta": beta, "alpha": 2.5}
    a, b = leaf(2, 3, 4), leaf(2, 4, 5)
    agrees(lambda x, a, b: torch.addbmm(x, a, b, **options), torch.full((3, 5), value), a, b, grad=True)
    agrees(lambda x, a, b: torch.baddbmm(x, a, b, **options), torch.full((2, 3, 5), value), a, b, grad=True)
    agrees(lambda x, a, b: torch.addmm(x, a[0], b[0], **options), torch.full((5,), value), a, b, grad=True)
    agrees(lambda x, a, b: torch.addmv(x, a[0], b[0, :, 0], **options), torch.full((3,), value), a, b, grad=True)
    agrees(lambda x, a, b: torch.addr(x, a[0, 0], b[0, 0], **options), torch.full((4, 5), value), a, b, grad=True)


def test_nothing_to_sum(agrees: Any) -> None:
    agrees(torch.addmm, leaf(3, 5), leaf(3, 0), leaf(0, 5), grad=True)
    agrees(torch.bmm, leaf(0, 3, 4), leaf(0, 4, 5), grad=True)


def test_three_factors(agrees: Any) -> None:
    agrees(F.bilinear, leaf(3, 2, 4), leaf(3, 2, 5), leaf(6, 4, 5), leaf(6), grad=True)
    agrees(lambda a, b, c: torch.einsum("ij,kj,kl->il", a, b, c), leaf(3, 4), leaf(5, 4), leaf(5, 2), grad=True)


@pytest.mark.parametrize("use_gelu", [True, False])
def test_addmm_activation(agrees: Any, use_gelu: bool) -> None:
    x, a, b = leaf(5).detach(), leaf(3, 4).detach(), leaf(4, 5).detach()
    agrees(lambda x, a, b: torch._addmm_activation(x, a, b, use_gelu=use_gelu), x, a, b)


@pytest.mark.parametrize("ends", [[8, 8, 24, 32], [0, 0, 0, 32], [32, 32, 32, 32]], ids=str)
def test_grouped(agrees: Any, ends: list[int]) -> None:
    offsets, kind = torch.tensor(ends, dtype=torch.int32), torch.bfloat16
    x, y, matrices = leaf(32, 16, dtype=kind), leaf(32, 24, dtype=kind), leaf(4, 16, 24, dtype=kind)
    agrees(lambda a, b, o: torch._grouped_mm(a, b, offs=o), x.detach(), matrices.detach(), offsets)
    agrees(lambda a, b, o: torch._grouped_mm(a.T, b, offs=o), x.detach(), y.detach(), offsets)


def test_groups_longer_than_a_tile() -> None:
    """Against one product a group: several tiles a group, ends within a tile, rows behind the last group."""
    x, matrices, ends = leaf(1000, 8).detach(), leaf(4, 8, 16).detach(), [5, 400, 600, 900]
    offsets = torch.tensor(ends, dtype=torch.int32)
    run = torch.compile(lambda a, b, o: torch._grouped_mm(a, b, offs=o), backend="tpu", fullgraph=True)
    got = run(x.bfloat16(), matrices.bfloat16(), offsets).float()
    for group, (low, high) in enumerate(zip([0, *ends], ends, strict=False)):
        want = x[low:high].bfloat16().float() @ matrices[group].bfloat16().float()
        torch.testing.assert_close(got[low:high], want, rtol=1e-2, atol=1e-2)
    assert not got[900:].any()


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, math.inf])
def test_distances(agrees: Any, p: float) -> None:
    x, y = leaf(4, 3), leaf(5, 3)
    with torch.no_grad():
        y[0], y[1, 0] = x[0], x[1, 0]
    agrees(lambda a, b: torch.cdist(a, b, p), x, y, grad=True)
    agrees(lambda a: F.pdist(a, p), leaf(6, 3), grad=True)


def test_distances_of_broadcast_batches_and_of_nothing(agrees: Any) -> None:
    agrees(torch.cdist, leaf(2, 1, 4, 3), leaf(3, 5, 3), grad=True)
    agrees(torch.cdist, leaf(2, 0), leaf(4, 0), grad=True)
    agrees(F.pdist, torch.ones(4, 3).requires_grad_(), grad=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_linear_cross_entropy(agrees: Any, reduction: str) -> None:
    target = torch.tensor([0, 3, -100, 6, 2, 1, 5])
    x, matrix, bias = leaf(7, 4).detach(), leaf(8, 4).detach(), leaf(8).detach()
    common = (bias, None)
    if reduction == "none":
        whole = torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction
        agrees(lambda x, w, t: whole(x, w, t, *common, -100, 3, "compact", torch.float32), x, matrix, target)
    else:
        whole = torch.ops.torch_nn._linear_cross_entropy_batch_chunked
        rest = (reduction, -100, 0.0, 3, "compact", torch.float32, True, True, True, True)
        agrees(lambda x, w, t: whole(x, w, t, *common, *rest), x, matrix, target)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 0.25), (0, 1)])
def test_addbmm_rounds_after_every_matrix_in_16_bits(beta: float, alpha: float) -> None:
    x, a, b = (torch.randn(shape).bfloat16() for shape in ((3, 5), (6, 3, 4), (6, 4, 5)))
    x = x * torch.nan if beta == 0 else x
    compiled = torch.compile(lambda *t: torch.addbmm(*t, beta=beta, alpha=alpha), backend="tpu")
    assert torch.equal(compiled(x, a, b), torch.addbmm(x, a, b, beta=beta, alpha=alpha))
