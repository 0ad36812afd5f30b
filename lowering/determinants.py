"""Decompositions of torch's determinants, which also return the LU factors that their gradient reads.

torch factors the transpose of a real contiguous matrix, and the gradient's formula asks the matrix's strides which of
the two was factored. A rule sees no strides; a decomposition does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    transposed = A.is_contiguous() and not A.is_complex()
    return aten.linalg_lu_factor_ex(A.mT if transposed else A)


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


DETERMINANTS: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: _linalg_det,
    aten._linalg_slogdet.default: _linalg_slogdet,
}
