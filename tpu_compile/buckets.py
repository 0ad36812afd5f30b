"""Sizes rounded up to a few, so that a few programs serve all: batch and sequence are padded, results cut back.

    encode = Buckets(model, batch=(1, 8, 32), sequence=(32, 128, 512), mask="attention_mask", budget=6)
    encode(input_ids=ids, attention_mask=mask)

Whether padding shows in the results depends on the model. So the first padded call of each bucket is also run eagerly
and unpadded, and the two are compared. What was called, and how much of it was padding: ``stats()["shapes"]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpu_compile.errors import BadCall, ConfigError, PaddingVisible
from tpu_compile.stats import shape_report
from tpu_compile.tolerances import TOLERANCE

_Sizes = tuple[int, int]
_SLACK = 4
"""Other sizes make XLA add in another order: as many times a dtype's tolerance."""


class Buckets:
    """A function or module, compiled for a few sizes. It runs under ``no_grad``, unless it is there to ``train``.

    Args:
        function: its tensor arguments have the batch on axis 0. Those with the first one's size on axis 1 have the
            sequence there.
        batch, sequence: sizes to round up to. Empty: that axis is not padded.
        mask: the name of the argument that says which tokens are real; padded with 0, and made (int64 [batch,
            sequence]) where a call does not give it.
        pad_value: what fills the other arguments along the sequence. Rows that fill the batch repeat the first one.
        pad_values: by name, what fills an argument along both: ``{"labels": -100}`` is what losses ignore.
        side: "right", or "left" for prompts that a model continues.
        train: keep gradients. The first padded call of a bucket is then compared in evaluation mode, eagerly.
        budget: how many sizes may be compiled. When they are used up, a call takes the least one that it fits into;
            one that fits none runs eagerly.
        options: as of ``torch.compile``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: Sequence[int] = (),
        sequence: Sequence[int] = (),
        mask: str | None = None,
        pad_value: int = 0,
        pad_values: Mapping[str, float] | None = None,
        side: str = "right",
        train: bool = False,
        budget: int = 16,
        options: dict[str, Any] | None = None,
    ) -> None:
        if side not in ("left", "right"):
            raise ConfigError(f'side={side!r}: expected "left" or "right"')
        self._function, self._mask, self._budget = function, mask, budget
        self._left, self._train = side == "left", train
        self._fill = _Fill(pad_value, {mask or "": 0}, dict(pad_values or {}))
        self._buckets = sorted(batch), sorted(sequence)
        self._compiled = torch.compile(function, backend="tpu", options=options or {})
        self._cuts: dict[Any, list[dict[int, int]]] = {}
        self._used: set[_Sizes] = set()
        name = getattr(function, "__qualname__", type(function).__name__)
        self._report: Counter[str] = shape_report(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns for these arguments.

        Raises:
            BadCall: no tensor argument has the axes that are padded.
            PaddingVisible: the padded result differs from the unpadded one.
        """
        with nullcontext() if self._train else torch.no_grad():
            sizes = _sizes((args, kwargs), 2 if self._buckets[1] else 1)
            padded = self._choose(sizes)
            if padded is None:
                self._report["eager"] += 1
                return self._function(*args, **kwargs)
            self._note(sizes, padded)
            given = self._masked(args, kwargs, sizes)
            if padded == sizes:
                return self._compiled(*args, **given)
            more, named = self._filled(args, given, sizes, padded)
            flat, tree = pytree.tree_flatten(self._compiled(*more, **named))
            shapes = tuple([t.shape if isinstance(t, torch.Tensor) else None for t in flat])
            filled = padded, tuple([n != p for n, p in zip(sizes, padded, strict=True)]), shapes
            if filled not in self._cuts:
                self._report["checked"] += 1
                got = self._eagerly(more, named) if self._train else flat
                self._cuts[filled] = _checked(got, self._eagerly(args, kwargs), sizes, padded, self._left)
            cuts = self._cuts[filled]
            whole = [_cut(t, cut, sizes, self._left) for t, cut in zip(flat, cuts, strict=True)]
            return pytree.tree_unflatten(whole, tree)

    def pad(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as a bucket's program takes them, its mask among them, for a step of your own
        (``train_step``). Whether padding shows there is not looked at.

        Raises:
            BadCall: no tensor argument has the axes that are padded, or the budget is used up.
        """
        sizes = _sizes((args, kwargs), 2 if self._buckets[1] else 1)
        padded = self._choose(sizes)
        if padded is None:
            raise BadCall(
                f"sizes {sizes} fit none of the {self._budget} that the budget allows: raise it, or add a bucket.",
                "RESOURCE_EXHAUSTED",
            )
        self._note(sizes, padded)
        return self._filled(args, self._masked(args, kwargs, sizes), sizes, padded)

    def _note(self, sizes: _Sizes, padded: _Sizes) -> None:
        self._used.add(padded)
        self._report[f"{padded[0]}x{padded[1]}" if self._buckets[1] else f"{padded[0]}"] += 1
        self._report["elements"] += sizes[0] * sizes[1]
        self._report["padded_elements"] += padded[0] * padded[1]

    def _eagerly(self, args: Any, kwargs: Any) -> list[Any]:
        """The results, uncompiled and without gradients. Where we train, in evaluation mode: without draws."""
        module = self._function if isinstance(self._function, torch.nn.Module) else torch.nn.Module()
        training = [m for m in module.modules() if m.training and self._train]
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in training):
            raise PaddingVisible("a batch norm that trains takes its statistics from padded places too: do not pad.")
        try:
            for m in training:
                m.training = False
            with torch.no_grad():
                return pytree.tree_leaves(self._function(*args, **kwargs))
        finally:
            for m in training:
                m.training = True

    def _choose(self, sizes: _Sizes) -> _Sizes | None:
        up = [next((b for b in buckets if b >= size), size) for buckets, size in zip(self._buckets, sizes, strict=True)]
        wanted = up[0], up[1]
        if wanted in self._used or len(self._used) < self._budget:
            return wanted
        fitting = [used for used in self._used if self._fits(sizes, used)]
        return min(fitting, key=lambda used: used[0] * used[1], default=None)

    def _fits(self, sizes: _Sizes, used: _Sizes) -> bool:
        """Whether sizes can be padded to ``used``: an axis without buckets stays as it is."""
        return all(n == u or (n < u and buckets) for n, u, buckets in zip(sizes, used, self._buckets, strict=True))

    def _masked(self, args: Any, kwargs: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
        """The named arguments with a mask among them, so that calls with and without one share their programs."""
        if not self._mask or self._mask in kwargs:
            return kwargs
        first = _tensors((args, kwargs))[0]
        return {**kwargs, self._mask: torch.ones(sizes, dtype=torch.int64, device=first.device)}

    def _filled(
        self, args: Any, kwargs: dict[str, Any], sizes: _Sizes, padded: _Sizes
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments at a bucket's size."""

        def fill(name: str, value: Any) -> Any:
            by_row, along = self._fill.rows.get(name), self._fill.of(name)
            return pytree.tree_map(lambda leaf: _pad(leaf, sizes, padded, along, by_row, self._left), value)

        return tuple([fill("", a) for a in args]), {name: fill(name, value) for name, value in kwargs.items()}


@dataclass(frozen=True)
class _Fill:
    """What fills arguments: in general, along the sequence by name, along sequence and batch by name."""

    general: float
    sequence: Mapping[str, float]
    rows: Mapping[str, float]

    def of(self, name: str) -> float:
        return self.rows.get(name, self.sequence.get(name, self.general) if name else self.general)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _sizes(arguments: Any, axes: int) -> _Sizes:
    """(batch, sequence) of a call; 1 for a sequence that nobody asked for."""
    first = next((t for t in _tensors(arguments) if t.dim() >= axes), None)
    if first is None:
        raise BadCall(f"no argument is a tensor of {axes} axes or more: there is nothing to pad", "INVALID_ARGUMENT")
    return first.shape[0], first.shape[1] if axes == 2 else 1


def _pad(value: Any, sizes: _Sizes, padded: _Sizes, fill: float, by_row: float | None, left: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sizes[0]:
        return value
    extra = padded[1] - sizes[1]
    if extra and value.dim() > 1 and value.shape[1] == sizes[1]:
        more = value.new_full((sizes[0], extra, *value.shape[2:]), fill)
        value = torch.cat([more, value] if left else [value, more], 1)
    rows = padded[0] - sizes[0]
    if not rows:
        return value
    first = value[:1] if by_row is None else torch.full_like(value[:1], by_row)
    return torch.cat([value, first.expand(rows, *value.shape[1:])])


def _checked(got: list[Any], wanted: list[Any], sizes: _Sizes, padded: _Sizes, left: bool) -> list[dict[int, int]]:
    """For each result, the axes that were padded and whether with the batch (0) or the sequence (1); the results
    without the padding are those wanted."""
    cuts = []
    for number, (ours, eager) in enumerate(zip(got, wanted, strict=True)):
        cut = _axes(number, ours, eager, sizes, padded)
        _compare(number, _cut(ours, cut, sizes, left), eager)
        cuts.append(cut)
    return cuts


def _axes(number: int, got: Any, wanted: Any, sizes: _Sizes, padded: _Sizes) -> dict[int, int]:
    if not isinstance(got, torch.Tensor):
        return {}
    cut: dict[int, int] = {}
    for axis, pair in enumerate(zip(got.shape, wanted.shape, strict=True)):
        kinds = [kind for kind in (0, 1) if pair == (padded[kind], sizes[kind])]
        if pair[0] != pair[1] and not kinds:
            raise PaddingVisible(
                f"result {number} has shape {list(got.shape)} with padding and {list(wanted.shape)} without: axis "
                f"{axis} is neither the batch nor the sequence. Leave the axis it is made from out of Buckets."
            )
        if pair[0] != pair[1]:
            cut[axis] = kinds[0]
    return cut


def _cut(value: Any, cut: dict[int, int], sizes: _Sizes, left: bool) -> Any:
    for axis, kind in cut.items():
        start = value.shape[axis] - sizes[1] if kind and left else 0
        value = value.narrow(axis, start, sizes[kind])
    return value


def _compare(number: int, got: Any, wanted: Any) -> None:
    if not isinstance(got, torch.Tensor):
        same, by = got == wanted, ""
    else:
        relative, absolute = (_SLACK * part for part in TOLERANCE.get(got.dtype, (0.0, 0.0)))
        same = torch.allclose(got.cpu(), wanted.cpu(), relative, absolute, equal_nan=True)
        by = "" if same else f" by up to {(got.cpu().double() - wanted.cpu().double()).abs().max():.2g}"
    if not same:
        raise PaddingVisible(
            f"result {number} differs{by} from the same call without padding. The function looks at padded places: "
            "name its mask (mask=...), sum with the mask instead of over everything, or pad only the batch."
        )


__all__ = ["Buckets"]
