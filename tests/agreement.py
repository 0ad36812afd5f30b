"""``agrees``: run a function eagerly and compiled on equal arguments, and compare everything a user can see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

import tpu_compile

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
TOLERANCE |= {torch.complex128: TOLERANCE[torch.float64], torch.complex64: TOLERANCE[torch.float32]}
"""rtol and atol by dtype: sums in another order, and functions that are right to an ulp or two."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def compare(want: Any, got: Any, what: str, strides: bool = True, scale: float = 1) -> None:
    """Values, dtype, shape, device and strides of every tensor; equality of everything else."""
    want_leaves, want_tree = tree_flatten(want)
    got_leaves, got_tree = tree_flatten(got)
    assert want_tree == got_tree, f"{what}: {got_tree} for {want_tree}"
    for w, g in zip(want_leaves, got_leaves, strict=True):
        if not isinstance(w, torch.Tensor):
            assert w == g, f"{what}: {g!r} for {w!r}"
            continue
        tolerance = TOLERANCE.get(w.dtype, 0)
        torch.testing.assert_close(
            g, w, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
        assert g.dtype == w.dtype and g.device == w.device and g.requires_grad == w.requires_grad, what
        if strides:
            assert g.stride() == w.stride(), f"{what}: strides {g.stride()} for {w.stride()}"


@pytest.fixture
def agrees() -> Callable[..., dict[str, float]]:
    """``agrees(fn, *args, grad=False, calls=1, **compile_options) -> stats``.

    ``fn`` may be a module; arguments, parameters and buffers are compared after every call, gradients with ``grad``.
    """

    def check(
        fn: Any, *args: Any, grad: bool = False, calls: int = 1, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, float]:
        # One copy of both: arguments that share memory, or belong to the module, go on doing so.
        eager_fn, eager_args, eager_kwargs = copy.deepcopy((fn, args, kwargs or {}))
        options.setdefault("fullgraph", True)
        compiled = torch.compile(fn, backend="tpu", **options)
        tpu_compile.reset_stats()
        for call in range(calls):
            want, got = eager_fn(*eager_args, **eager_kwargs), compiled(*args, **(kwargs or {}))
            compare(want, got, f"result of call {call}")
            if grad:
                for result in (want, got):
                    sum(
                        (t.float() * torch.linspace(1, 2, t.numel()).view(t.shape)).sum()
                        for t in _tensors(result)
                        if t.requires_grad
                    ).backward()
            compare(eager_args, args, f"arguments after call {call}")
            mine, theirs = _state(fn, args), _state(eager_fn, eager_args)
            # A gradient that is 0 in exact arithmetic (a bias before a normalisation) is noise of the others' size.
            grads = [t.grad for t in theirs if t.grad is not None and t.grad.numel()]
            scale = max((g.abs().max().item() for g in grads), default=1)
            for w, g in zip(theirs, mine, strict=True):
                compare(w.detach(), g.detach(), f"state after call {call}")
                if grad:
                    compare(w.grad, g.grad, f"gradient after call {call}", strides=False, scale=max(scale, 1))
        counters = tpu_compile.stats()
        assert counters["executions"] > 0, "nothing ran on the device"
        return counters

    return check


def _state(fn: Any, args: Any) -> list[torch.Tensor]:
    own = [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []
    return own + [t for t in _tensors(args) if t.is_leaf and t.requires_grad]
