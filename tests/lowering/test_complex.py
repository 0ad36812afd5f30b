"""Complex numbers against eager: branch cuts, signed zeros, powers of 0, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.lowering.edges import assert_same, compiled

_PARTS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-3, 20.0)
FUNCTIONS = """exp exp2 log log2 log10 sin cos tan sinh cosh tanh asin acos asinh acosh sqrt sigmoid expm1
    angle neg conj_physical reciprocal""".split()
DIFFERENTIABLE = """tanh sigmoid exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh asin acos atan asinh acosh
    atanh sqrt rsqrt reciprocal square abs angle sgn""".split()


def grid(dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.tensor([complex(a, b) for a in _PARTS for b in _PARTS], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_functions_keep_to_their_side_of_the_cut(dtype: torch.dtype) -> None:
    x = grid(dtype)
    x = x[x != 0]
    for name in FUNCTIONS:
        torch._dynamo.reset()
        fn = getattr(torch, name)
        atol = 1e-6 if dtype == torch.complex64 else 1e-14
        got, want = torch.view_as_real(compiled(fn, x) + 0j), torch.view_as_real(fn(x) + 0j)
        torch.testing.assert_close(
            got, want, rtol=1e-5 if atol == 1e-6 else 1e-12, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_zero_parts_survive_infinite_ones() -> None:
    x = torch.tensor([complex(0, math.inf), complex(0, 0), complex(-0.0, 0.0)])

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.sin(x), torch.cos(x), torch.sinh(x[1:]), torch.cosh(x[1:])]

    assert_same(compiled(fn, x), fn(x))


def test_magnitude_neither_overflows_nor_loses_infinity() -> None:
    x = torch.tensor([complex(1e30, 1e30), complex(1e-30, 1e-30), complex(math.inf, math.nan), 3 + 4j, 0j])
    assert_same(compiled(torch.abs, x), torch.abs(x), ulps=4)
    a, b = torch.tensor([1e30, math.inf, 3.0, 0.0]), torch.tensor([1e30, math.nan, 4.0, 0.0])
    assert_same(compiled(torch.hypot, a, b), torch.hypot(a, b), ulps=4)


def test_powers() -> None:
    x = torch.tensor([0j, 1 + 1j, -1 + 0.5j, 2j, -3 + 0j])

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        scalars = (0, 1, 2, 3, 0.5, 2.5, 1 + 2j)
        return [*(x[1:] ** s for s in scalars), *(x[1:] ** s for s in (-1, -2, -0.5)), x**2, x**2.5, 2**x]

    for g, w in zip(compiled(fn, x), fn(x), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_parts() -> None:
    pairs, real, imag = torch.randn(3, 2), torch.randn(3), torch.randn(3)

    def fn(pairs: torch.Tensor, real: torch.Tensor, imag: torch.Tensor) -> list[torch.Tensor]:
        z = torch.complex(real, imag)
        return [
            torch.view_as_complex(pairs),
            z,
            torch.view_as_real(z),
            z.real,
            z.imag,
            z.conj() * 2,
            torch.polar(real.abs(), imag),
        ]

    for g, w in zip(compiled(fn, pairs, real, imag), fn(pairs, real, imag), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_gradients_conjugate() -> None:
    torch.manual_seed(0)
    z, w = (torch.randn(20, dtype=torch.complex64) for _ in range(2))
    for name in DIFFERENTIABLE:
        torch._dynamo.reset()
        results = []
        for fn in (getattr(torch, name), torch.compile(getattr(torch, name), backend="tpu", fullgraph=True)):
            x = z.clone().requires_grad_()
            out = fn(x)
            results.append(torch.autograd.grad(out, x, w if out.is_complex() else w.real)[0])
        torch.testing.assert_close(results[1], results[0], rtol=3e-4, atol=3e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("grad", [False, True])
def test_the_parts_of_a_conjugate_are_views_of_negatives(agrees: Any, grad: bool) -> None:
    z = torch.randn(2, 3, dtype=torch.complex64, requires_grad=grad)
    agrees(lambda z: (z.conj().imag.clone(), z.conj().imag * 2, z.mH.imag, z.conj().abs()), z, grad=grad)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_pairs_of_halves_are_a_complex32(agrees: Any) -> None:
    x = torch.randn(3, 2).half()
    agrees(lambda x: torch.view_as_real(torch.view_as_complex(x)), x)
    agrees(lambda x: torch.view_as_real(torch.complex(x, x * 2)), x)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("op", [torch.abs, torch.real, torch.isfinite], ids=lambda op: op.__name__)
def test_real_results_of_a_complex32_are_halves(agrees: Any, op: Any) -> None:
    agrees(op, torch.tensor([3 + 4j, 0.5j, -2.0]).to(torch.complex32))
