"""Programs for a TPU against those of JAX: one network here, all of them with `python tools/tpu_quality.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL: dict[str, dict[str, Any]] = {
    "sdpa-4k": {"heads": 2, "tokens": 16},
    "moe-block": {"width": 64, "tokens": 8},
    "kv-decode": {"layers": 1, "width": 512, "batch": 2, "places": 16},
    "llama-block": {"width": 512, "tokens": 8},
    "llama-block-train": {"width": 512, "tokens": 8},
    "bert-base": {"layers": 1, "batch": 2, "tokens": 8},
    "resnet50-train": {"depths": (1, 2), "batch": 2, "size": 32},
}


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def filled(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape) * 0.1 if t.is_floating_point() else torch.ones(t.shape, dtype=t.dtype)


TRAINED = ("llama-block-train", "resnet50-train")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in TRAINED)) for n in SMALL])
def test_twins_compute_the_same(name):
    """Figures of two networks that differ would say nothing: here both run, with numbers, in float32."""
    import jax
    from quality import jax_twins, torch_models

    torch.manual_seed(0)
    case = torch_models.build(name, torch.float32, **SMALL[name])
    given = {n: filled(t) for n, t in case.parameters.items()}, *map(filled, case.inputs)
    with jax.enable_x64(True):
        theirs = jax.tree.leaves(
            jax.jit(jax_twins.TWINS[name])(*jax.tree.map(lambda t: jax.numpy.array(t.numpy()), given))
        )
        theirs = [torch.from_dlpack(array) for array in theirs]
    with torch.no_grad():
        returned = case.function(*given)
    if case.written:  # JAX returns what the module has written
        returned = returned, tuple(given[1 + i] for i in case.written)
    ours = jax.tree.leaves(returned)
    assert len(ours) == len(theirs)
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["sdpa-4k", *(pytest.param(n, marks=pytest.mark.full) for n in ("moe-block", "kv-decode", "llama-block"))]
)
def test_programs_for_a_tpu_are_no_worse(name, tmp_path):
    from quality.measure import measured

    row = measured(name, "v5e:1x1", tmp_path)
    assert row.ratio("cycles") <= 1.02 and row.ratio("peak_bytes") <= 1.02, row
    assert measured(name, "v5e:1x1", tmp_path) == row, "from the folder, what was measured"
