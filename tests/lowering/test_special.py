"""Special functions against eager, and against exact values where eager is the less exact one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.lowering.edges import assert_same, compiled

special = torch.special
UNARY = """i0 i0e i1 i1e ndtr ndtri log_ndtr erfcx entr airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 digamma gammaln""".split()
POLYNOMIALS = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v""".split()
CLOSE = {torch.float32: (2e-4, 1e-5), torch.float64: (1e-7, 1e-9)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_one_argument(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-20, 20, 161), torch.tensor([0.0, 1e-3, 0.3, 0.9, 1.0, 60.0, math.nan])]).to(dtype)
    fns = {name: getattr(special, name) for name in UNARY}
    got = compiled(lambda x: {name: fn(x) for name, fn in fns.items()}, x)
    rtol, atol = CLOSE[dtype]
    for name, fn in fns.items():
        torch.testing.assert_close(
            got[name], fn(x), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_polynomials_of_a_degree_that_is_data(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -1.0, -0.7, 0.0, 0.3, 0.9, 1.0, 1.5], dtype=dtype)[:, None]
    n = torch.tensor([-1.0, 0, 1, 2, 5, 8, 12, 2.7], dtype=dtype)[None]
    fns = {name: getattr(special, name) for name in POLYNOMIALS}
    got = compiled(lambda x, n: {name: fn(x, n) for name, fn in fns.items()}, x, n)
    rtol, atol = CLOSE[dtype]
    for name, fn in fns.items():
        torch.testing.assert_close(got[name], fn(x, n), rtol=rtol, atol=atol, msg=lambda m, k=name: f"{k}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zeta_and_polygamma_left_of_zero(dtype: torch.dtype) -> None:
    """Fractions below 0 are climbed out of term by term; whole numbers there are poles."""
    x = torch.tensor([-20.5, -7.3, -2.5, -1.0, 0.0, 0.4, 1.0, 3.0, 30.0], dtype=dtype)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        orders = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 6.0], dtype=dtype)[:, None]
        return [special.zeta(orders, x[None]), *(torch.polygamma(n, x) for n in (0, 2, 3))]

    rtol, atol = CLOSE[dtype]
    for g, w in zip(compiled(fn, x), fn(x), strict=True):
        torch.testing.assert_close(g, w, rtol=20 * rtol, atol=atol, equal_nan=True)


def test_digamma_at_its_pole_has_the_sign_of_the_side() -> None:
    x = torch.tensor([0.0, -0.0, -1.0])
    assert_same(compiled(torch.digamma, x), torch.digamma(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_incomplete_gamma_ends_for_every_argument(dtype: torch.dtype) -> None:
    scipy: Any = pytest.importorskip("scipy.special")
    sizes = [0.0, 1e-3, 0.5, 1, 5, 9.9, 10, 100, 499, 501, 5e3, 9999, 1.1e4, 65000, 1e8, 1e30, math.inf, -1.0]
    a = torch.tensor(sizes, dtype=dtype)[:, None]
    x = torch.tensor([*sizes, *(s * 1.05 for s in sizes), *(s * 0.9 for s in sizes)], dtype=dtype)[None]
    p, q = compiled(lambda a, x: (special.gammainc(a, x), special.gammaincc(a, x)), a, x)
    for got, exact in ((p, scipy.gammainc), (q, scipy.gammaincc)):
        want = torch.as_tensor(exact(a.double().numpy(), x.double().numpy()))
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_results_are_float32_ones_rounded_once(dtype: torch.dtype) -> None:
    x = torch.linspace(0.05, 0.95, 64).to(dtype)
    names = "i0 i1 i1e ndtr erfcx log_ndtr digamma bessel_j0".split()
    fns = {name: getattr(special, name) for name in names}
    got = compiled(lambda x: {name: fn(x) for name, fn in fns.items()}, x)
    want = {name: fn(x.float()).to(dtype) for name, fn in fns.items()}
    for name in names:
        assert_same(got[name], want[name], ulps=1, what=name)
