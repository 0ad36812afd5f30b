"""One aten call taken apart: what decides its program (the key), and what the program is run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.device import contents, memory
from tpu_compile.device.storage import Cell, Signature

Tensor = torch.Tensor


class OtherDevice(Exception):
    """A CPU tensor with dimensions stands among `tpu` tensors."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class Call:
    """The arguments of one call. ``parts`` is its key so far; ``cells`` are distinct; ``starts`` has one entry for
    each use of a tensor (None where its program needs none)."""

    __slots__ = ("cells", "generator", "hosts", "mixed", "numbers", "parts", "places", "starts")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.cells: list[Cell] = []
        self.places: dict[int, int] = {}
        self.starts: list[tuple[int, ...] | None] = []
        self.numbers: list[float | int] = []
        self.hosts: list[Tensor] = []
        self.generator: Any = None
        self.mixed = False

    def take(self, values: Sequence[Any], lift: bool = False) -> None:
        """Add arguments. With ``lift`` their numbers are data of the program, not a part of the key.

        This runs for every tensor of every op: one loop, and nothing looked up twice.
        """
        parts, places, cells, starts = self.parts, self.places, self.cells, self.starts
        parameter = torch.nn.Parameter
        for a in values:
            kind = a.__class__
            if kind is not Tensor and kind is not parameter and not isinstance(a, Tensor):
                self.other(a, kind, lift)
                continue
            try:
                cell = a.untyped_storage()._tpu_cell
            except AttributeError:
                self.host(a)
                continue
            layout = cell.layout
            if a.dtype is not layout.dtype:
                layout = self.retyped(a, cell)
            window = layout.windows.get((a.shape, a.stride(), a.storage_offset()))
            if window is None:
                window = layout.window(tuple(a.shape), tuple(a.stride()), a.storage_offset())
            identity = id(cell)
            if identity in places:
                place = places[identity]
            else:
                place = places[identity] = len(cells)
                cells.append(cell)
            parts.append(window.signature)
            parts.append(place)
            starts.append(window.start)
            if a.is_neg() or (layout.complex and a.is_conj()):
                parts.append((a.is_conj(), a.is_neg()))

    def other(self, a: Any, kind: type, lift: bool) -> None:
        """Add an argument that is no tensor."""
        parts = self.parts
        if kind is float or kind is int:
            if lift:
                parts.append(kind)
                self.numbers.append(a)
            else:
                parts.append((kind, a if a else str(a)))  # 0.0 and -0.0 are equal, and not the same
        elif kind is list or kind is tuple:
            parts.append(len(a))
            self.take(a, lift)
        elif isinstance(a, torch.Generator):
            parts.append(torch.Generator)
            self.generator = a
        else:
            parts.append(repr(a) if kind is complex else a)

    def retyped(self, a: Tensor, cell: Cell) -> Any:
        """The cell in the dtype of ``a``. One that this call uses in two dtypes goes to the CPU."""
        if id(cell) in self.places:
            self.mixed = True
            self.parts.append(object())  # no plan fits: what stands in the key is not what the tensor shows
            return cell.layout
        return contents.seen_as(cell, a)

    def host(self, a: Tensor) -> None:
        if a.dim() or a.device.type != "cpu":
            raise OtherDevice(a)
        self.parts.append(a.dtype)
        self.hosts.append(a)


# ---- the same, as a tree: what a trace needs


@dataclass(frozen=True)
class TensorUse:
    """A `tpu` tensor: which cell, what it shows of it, and which of the call's ``starts`` says where."""

    cell: int
    signature: Signature
    use: int
    conj: bool
    neg: bool


@dataclass(frozen=True)
class NumberUse:
    """A number that is data of the program: its place in the call's ``numbers``."""

    place: int
    kind: type


@dataclass(frozen=True)
class HostUse:
    """A 0-dim CPU tensor: its place in the call's ``hosts``."""

    place: int
    dtype: torch.dtype


class Template:
    """The arguments of a call with every tensor and every lifted number replaced by where it comes from.

    Raises:
        RuntimeError: they name another device of our type than the first, or pinned memory.
    """

    def __init__(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any], lifts: dict[Any, bool]) -> None:
        memory.check(None, None, kwargs.get("pin_memory"))
        self._call, self._uses, self._numbers, self._hosts = call, 0, 0, 0
        self.args = [self._leaf(a, lifts.get(i, False)) for i, a in enumerate(args)]
        self.kwargs = {k: self._leaf(v, lifts.get(k, False)) for k, v in kwargs.items()}

    def _leaf(self, a: Any, lift: bool) -> Any:
        if isinstance(a, Tensor):
            return self._tensor(a)
        if lift and type(a) in (int, float):
            self._numbers += 1
            return NumberUse(self._numbers - 1, type(a))
        if isinstance(a, (list, tuple)):
            return [self._leaf(item, lift) for item in a]
        if isinstance(a, torch.device):
            memory.check_index(a)
            return torch.device("cpu") if a.type == "tpu" else a
        return None if isinstance(a, torch.Generator) else a

    def _tensor(self, a: Tensor) -> TensorUse | HostUse:
        cell = getattr(a.untyped_storage(), "_tpu_cell", None)
        if cell is None:
            self._hosts += 1
            return HostUse(self._hosts - 1, a.dtype)
        window = cell.layout.window(tuple(a.shape), tuple(a.stride()), a.storage_offset())
        self._uses += 1
        return TensorUse(self._call.places[id(cell)], window.signature, self._uses - 1, a.is_conj(), a.is_neg())
