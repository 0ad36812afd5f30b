"""Runs one operator of torch's op_db compiled and eager, and says how they differ. Used by the tests and by
tools/coverage.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from tpu_compile.tolerances import tolerance

NOT_OURS = ("sparse", "nested", "jiterator")
"""Operators on layouts that torch.compile does not capture."""

SHAPES_ONLY = frozenset(
    """rand randn randint rand_like randn_like randint_like normal normal.in_place normal.number_mean bernoulli
    multinomial uniform exponential geometric log_normal cauchy nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout.with_train
    nn.functional.rrelu nn.functional.scaled_dot_product_attention.dropout svd_lowrank pca_lowrank
    empty empty_like new_empty empty_strided new_empty_strided empty_permuted""".split()
)
"""Random or undefined values: shape and dtype are compared."""

UP_TO_SIGN = frozenset("svd linalg.svd linalg.eigh linalg.eig svd_lowrank pca_lowrank geqrf linalg.lstsq".split())
"""Defined up to signs or phases of a basis: magnitudes are compared."""


def name_of(op: Any) -> str:
    """``"variant.name"``, as the harness of the field writes it."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPS = {name_of(op): op for op in op_db if not any(word in name_of(op) for word in NOT_OURS)}


def supports(name: str, dtype: torch.dtype, grad: bool) -> bool:
    """Whether torch itself runs this operator so on the CPU."""
    op = OPS[name]
    if dtype not in op.supported_dtypes("cpu"):
        return False
    return not grad or (op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Tensor leaves."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def fresh(tree: Any) -> Any:
    """Copies that share nothing with the sample."""
    return tree_map(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, tree
    )


def gradients(result: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the sum of all differentiable outputs."""
    heads = [t for t in tensors(result) if t.requires_grad]
    total = sum((t.abs() if t.is_complex() else t).sum() for t in heads)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def check(
    name: str, dtype: torch.dtype, *, grad: bool, samples: int, fullgraph: bool = True, backend: str = "tpu"
) -> int:
    """Compare eager and compiled on the first ``samples`` samples; returns how many eager could run. Raises at the
    first difference."""
    op = OPS[name]
    compared = 0
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _first(op.sample_inputs("cpu", dtype, requires_grad=grad), samples):
            arguments, keywords = (sample.input, *sample.args), dict(sample.kwargs)
            want = _eager(op, arguments, keywords, grad)
            if want is None:
                continue
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda *a, **k: op.op(*a, **k), backend=backend, fullgraph=fullgraph, dynamic=False
            )
            compare(name, dtype, want, _run(compiled, arguments, keywords, grad))
            compared += 1
    return compared


def _first(samples: Any, count: int) -> Iterator[Any]:
    for _, sample in zip(range(count), samples, strict=False):
        yield sample


def _eager(op: Any, arguments: Any, keywords: Any, grad: bool) -> Any:
    """Eager's answer, or None where torch itself refuses the sample."""
    try:
        return _run(op.op, arguments, keywords, grad)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def _run(fn: Any, arguments: Any, keywords: Any, grad: bool) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
    args, kwargs = fresh((arguments, keywords))
    result = fn(*args, **kwargs)
    return result, gradients(result, [t for t in tensors((args, kwargs)) if t.requires_grad]) if grad else ()


def compare(name: str, dtype: torch.dtype, want: Any, got: Any) -> None:
    """Values, dtypes and shapes of results and gradients; a missing gradient is a zero one."""
    wanted, given = tensors(want[0]), tensors(got[0])
    assert len(wanted) == len(given), f"{len(given)} tensors for {len(wanted)}"
    if not wanted:
        assert str(want[0]) == str(got[0])
    for w, g in zip([*wanted, *want[1]], [*given, *got[1]], strict=True):
        if w is None or g is None:
            present = g if w is None else w
            assert present is None or present.abs().max() == 0, "a gradient is missing"
            continue
        assert (w.shape, w.dtype) == (g.shape, g.dtype), f"{g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}"
        if name in SHAPES_ONLY or OPS[name].name in SHAPES_ONLY:
            continue
        if OPS[name].name in UP_TO_SIGN:
            w, g = w.abs(), g.abs()
        rtol, atol = tolerance(w.dtype, dtype)
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True)
