"""Decompositions of torch's solvers that fix what their saved LU factors hold.

torch factors the transpose of a real contiguous matrix, and its gradient formulas ask the matrix's strides which of the two
was factored. A rule sees no strides; a decomposition does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _is_transposed(A: Tensor) -> bool:
    return A.is_contiguous() and not A.is_complex()


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return aten.linalg_lu_factor_ex(A.mT if _is_transposed(A) else A)  # type: ignore[no-any-return]


def _parity(pivots: Tensor) -> Tensor:
    """1 or -1: whether the swaps are even or odd in number."""
    swapped = pivots != torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * (swapped.sum(-1) % 2)


def _linalg_det(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    LU, pivots, _ = _factors(A)
    return LU.diagonal(0, -2, -1).prod(-1) * _parity(pivots), LU, pivots


def _linalg_slogdet(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    LU, pivots, _ = _factors(A)
    diagonal = LU.diagonal(0, -2, -1)
    return diagonal.sgn().prod(-1) * _parity(pivots), diagonal.abs().log().sum(-1), LU, pivots


def _linalg_solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    LU, pivots, info = _factors(A)
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    result = aten.linalg_lu_solve(LU, pivots, B.unsqueeze(-1) if vector else B, left=left, adjoint=_is_transposed(A))
    return result.squeeze(-1) if vector else result, LU, pivots, info


DETERMINANTS: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: _linalg_det,
    aten._linalg_slogdet.default: _linalg_slogdet,
    aten._linalg_solve_ex.default: _linalg_solve_ex,
}
