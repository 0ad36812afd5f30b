"""Ops whose result's size only the values tell: one program counts, the host reads the number, and another program
fills the result. Where it can, that one has room for a few more elements, so that near sizes share a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor
_SMALL = 64


def room(count: int, most: int) -> int:
    """A size from ``count`` to ``most``: at most a quarter larger than needed, and one of four for each power of 2."""
    if most <= _SMALL:
        return most
    step = max(_SMALL // 4, 1 << max(count.bit_length() - 3, 0))
    return min(most, -(-count // step) * step)


def out_variant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` with ``out=``."""

    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


# ---- what a mask picks


def _places(mask: Tensor) -> tuple[Tensor, int]:
    """The positions of what is not zero, row by row, followed by zeros; and how many there are."""
    count = int(mask.count_nonzero().item())
    return aten.nonzero_static(mask, size=room(count, mask.numel()), fill_value=0), count


def nonzero(x: Tensor) -> Tensor:
    """``nonzero``, with the strides that it has on the CPU: a column is contiguous."""
    places, count = _places(x)
    return places[:count].t().contiguous().as_strided((count, x.dim()), (1, count))


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """``masked_select``."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    values, where = torch.broadcast_tensors(x, mask)
    places, count = _places(where.reshape(-1))
    return values.reshape(-1)[places[:, 0]][:count] if count else x.new_empty(0)


def index(generic: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of ``index.Tensor``: masks become positions, and ``generic`` takes those."""

    def run(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices) or not _fits(x, indices):
            return generic(x, indices)
        first = indices[0]
        if first is not None and first.dim() and all(i is None for i in indices[1:]):
            places, count = _places(first.to(x.device))
            return generic(x, list(places.unbind(1)))[:count]
        return generic(x, _positions(x, indices))

    return run


def _positions(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i in indices:
        masks = i is not None and i.dtype in (torch.bool, torch.uint8)
        found += nonzero(i.to(x.device)).unbind(1) if masks else [i]  # type: ignore[union-attr]
    return found


def _fits(x: Tensor, indices: Sequence[Tensor | None]) -> bool:
    """Whether every mask has the sizes of the axes that it stands for; if not, torch says so on the CPU."""
    axis = 0
    for i in indices:
        if i is None or i.dtype not in (torch.bool, torch.uint8):
            axis += 1
        elif tuple(i.shape) != tuple(x.shape[axis : axis + i.dim()]):
            return False
        else:
            axis += i.dim()
    return axis <= x.dim()


def tensor_split(x: Tensor, where: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """``tensor_split`` at places, or into a number of parts, that are on the device too."""
    places = where.tolist()
    return torch.tensor_split(x, places, dim)


# ---- equal values


def unique2(
    x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``_unique2``: always sorted."""
    values, order = x.reshape(-1).sort(stable=True)
    starts, group = _runs(_differs(values[:, None]))
    inverse = torch.empty_like(group).scatter_(0, order, group).reshape(x.shape) if return_inverse else _none(x)
    return values[starts], inverse, _lengths(starts, x.numel()) if return_counts else _none(x)


def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    """``_unique``."""
    return unique2(x, sorted, return_inverse)[:2]


def unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``unique_consecutive``."""
    if dim is not None:
        return unique_dim_consecutive(x, dim, return_inverse, return_counts)
    flat = x.reshape(-1)
    starts, group = _runs(_differs(flat[:, None]))
    inverse = group.reshape(x.shape) if return_inverse else _none(x)
    return flat[starts], inverse, _lengths(starts, x.numel()) if return_counts else _none(x)


def by_rows(generic: Callable[..., Any], rows: Callable[..., Any]) -> Callable[..., Any]:
    """``rows`` for tensors with elements; what an empty one gives, or why it does not, ``generic`` leaves to torch."""

    def run(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        return rows(x, dim, *args, **kwargs) if x.numel() else generic(x, dim, *args, **kwargs)

    return run


def unique_dim(
    x: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``unique_dim`` of a tensor with elements: always sorted."""
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    inverse, order = _row_ranks(rows)
    starts, _ = _runs(_differs(inverse[order][:, None]))
    counts = _lengths(starts, len(rows)) if return_counts else _none(x)
    return _picked(x, dim, rows, order[starts]), inverse if return_inverse else _none(x), counts


def unique_dim_consecutive(
    x: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``unique_dim_consecutive`` of a tensor with elements."""
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    starts, group = _runs(_differs(rows))
    counts = _lengths(starts, len(rows)) if return_counts else _none(x)
    return _picked(x, dim, rows, starts), group if return_inverse else _none(x), counts


def _picked(x: Tensor, dim: int, rows: Tensor, places: Tensor) -> Tensor:
    """Some rows as ``x`` has them, laid out in memory as on the CPU."""
    others = x.movedim(dim, 0).shape[1:]
    return rows[places].reshape(len(places), *others).movedim(0, dim)


def _none(x: Tensor) -> Tensor:
    """What stands for a result that nobody asked for."""
    return torch.empty(0, dtype=torch.int64, device=x.device)


def _differs(rows: Tensor) -> Tensor:
    """For each row whether it is another than the one before; the first is."""
    other = (rows[1:] != rows[:-1]).any(1)
    return torch.cat([torch.ones(min(len(rows), 1), dtype=torch.bool, device=rows.device), other])


def _runs(first: Tensor) -> tuple[Tensor, Tensor]:
    """Where runs begin, and the number of the run that each element is in."""
    return nonzero(first)[:, 0], first.cumsum(0) - 1


def _lengths(starts: Tensor, total: int) -> Tensor:
    return torch.cat([starts[1:], starts.new_full((min(len(starts), 1),), total)]) - starts


def _row_ranks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rank of each row in the order of its elements, equal for equal rows; and the rows' order.

    Columns are ranked, then pairs of ranks: the logarithm of the number of columns decides how often.
    """
    ranks, order = _ranks(rows)
    count = len(rows)
    while ranks.shape[1] > 1:
        if ranks.shape[1] % 2:
            ranks = torch.nn.functional.pad(ranks, (0, 1))
        ranks, order = _ranks(ranks[:, ::2] * count + ranks[:, 1::2])
    return ranks[:, 0], order[:, 0]


def _ranks(columns: Tensor) -> tuple[Tensor, Tensor]:
    values, order = columns.sort(stable=True, dim=0)
    steps = torch.nn.functional.pad((values[1:] != values[:-1]).long(), (0, 0, 1, 0)).cumsum(0)
    return torch.empty_like(order).scatter_(0, order, steps), order


# ---- counts


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``bincount``.

    Raises:
        RuntimeError: not one-dimensional, negative, or weights of another shape, in torch's words.
    """
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if x.dim() == 1 and not x.numel():
        return torch.zeros(minlength, dtype=torch.int64, device=x.device)
    least, most = torch.stack(x.aminmax()).tolist() if x.dim() == 1 else (-1, -1)
    if least < 0 or x.is_floating_point():
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    if weights is None:
        added = torch.ones_like(x, dtype=torch.int64)
    else:
        added = weights if weights.dtype is torch.float32 else weights.double()
    return added.new_zeros(max(most + 1, minlength)).scatter_add_(0, x.long(), added)


def repeat_interleave(repeats: Tensor, output_size: int | None = None) -> Tensor:
    """``repeat_interleave.Tensor``: each position as often as ``repeats`` says.

    Raises:
        RuntimeError: not one-dimensional, not of integers, or negative, in torch's words.
    """
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if not repeats.numel():
        return torch.empty_like(repeats)
    ends = repeats.cumsum(0)
    total, least = torch.stack([ends[-1], repeats.min().long()]).tolist()
    if least < 0:
        raise RuntimeError("repeats can not be negative")
    if output_size is not None and output_size != total:
        raise RuntimeError("allocated size does not match required size")
    places = torch.arange(room(total, 2**62), device=repeats.device)
    return torch.searchsorted(ends, places, right=True).to(repeats.dtype)[:total]
