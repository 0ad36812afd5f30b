"""How far a compiled result may be from eager's: one table by dtype, for ``tpu-compile compare`` and for our tests.

Two right programs differ by the order of their sums (relative error about the square root of the number of terms, in
units of the last
place) and by the last bits of their functions. Nothing here is ever widened for one failure.
"""

from __future__ import annotations

import torch

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),  # far above 2e-16: eigenvectors and solves amplify rounding by their condition number
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (2e-4, 2e-4),  # 1000 units of the last place at 1: sums of a few hundred products, then a division
    torch.complex64: (3e-4, 3e-4),  # each product is four real ones
    torch.float16: (5e-3, 5e-3),  # five units of the last place: one rounding an op, a few ops deep
    torch.bfloat16: (3e-2, 3e-2),  # four units of the last place
}
"""dtype → (relative, absolute). Integers and bool must be equal."""


def tolerance(result: torch.dtype, given: torch.dtype | None = None) -> tuple[float, float]:
    """The tolerance of a result; at least that of the inputs' dtype, which bounds what the result can carry."""
    own = TOLERANCE.get(result, (0.0, 0.0))
    if given is None or not (result.is_floating_point or result.is_complex):
        return own
    return max(own, TOLERANCE.get(given, (0.0, 0.0)))
