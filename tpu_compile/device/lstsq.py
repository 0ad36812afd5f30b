"""``linalg_lstsq``: which of its results are empty depends on the driver, and for some on the matrices' ranks."""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.device import fallback
from tpu_compile.device.schemas import schema_of

aten = torch.ops.aten
Tensor = torch.Tensor
_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def linalg_lstsq(x: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """``linalg_lstsq``, of all drivers by singular values. What torch refuses, it refuses on the CPU in its own words,
    and empty problems are left to it."""
    driver, vectors = driver or "gelsy", b.dim() == x.dim() - 1
    columns = b.unsqueeze(-1) if vectors else b
    if driver not in _DRIVERS or b.dtype != x.dtype or not _fit(x, columns):
        return fallback.run(schema_of(aten.linalg_lstsq.default), (x, b), {"rcond": rcond, "driver": driver})
    rows, unknowns = x.shape[-2:]
    if rcond is None or rcond < 0:
        rcond = torch.finfo(x.dtype).eps * (max(rows, unknowns) if rcond is None else 1)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    kept = values > rcond * values[..., :1]
    scaled = (left.mH @ columns) * torch.where(kept, 1 / values, 0)[..., None]
    solution = right.mH @ scaled
    rank, none = kept.sum(-1), values.new_empty(0)
    residuals = none
    if rows > unknowns and driver != "gelsy" and (driver == "gels" or bool((rank == unknowns).all())):
        residuals = (columns - x @ solution).abs().square().sum(-2)
    return (
        solution.squeeze(-1) if vectors else solution,
        residuals,
        rank.new_empty(0) if driver == "gels" else rank,
        values if driver in ("gelsd", "gelss") else none,
    )


def _fit(x: Tensor, columns: Tensor) -> bool:
    if x.dim() < 2 or x.dim() != columns.dim() or not x.numel() or not columns.numel():
        return False
    floats = x.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return floats and x.shape[:-1] == columns.shape[:-1]
