"""What lowering returns: a frozen Program, and the specs that say how torch sees its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and strides (in elements) of a tensor as torch sees it. Values inside a program have no strides:
    ``()``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        """A row-major spec."""
        return TensorSpec(shape, dtype, row_major(shape))

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, ...] | None:
        """Axes from outermost to innermost in memory, if the strides are those of a dense tensor in that order; else
        None."""
        return dense_order(self.shape, self.stride)

    def __str__(self) -> str:
        return f"{SHORT.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.shape))}]"


CARRIED = {torch.complex32: torch.complex64}
"""Dtypes without an element type of their own, and the one that holds their values, rounded, inside a program and at
its ends."""

SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes ``order``."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True)
class Result:
    """One output of the graph: a result of the program (``index``; as a Python number if ``number``), an argument
    handed back (``argument``), or a Python ``value``."""

    index: int | None = None
    argument: int | None = None
    value: object = None
    number: bool = False


@dataclass(frozen=True)
class HostCheck:
    """A result of the program that a function of the host looks at after each call; what it raises reaches the user."""

    result: int
    function: Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Program:
    """A graph as StableHLO, with all that a caller needs to run it.

    ``inputs[i]`` is taken from call argument ``arguments[i]``; after them come ``constants`` and, if ``random``, a
    seed (u64[2]), of which it makes ``draws`` keys.
    A buffer holds an input or output densely in its spec's memory order: the program itself transposes. ``mutated``
    pairs a call
    argument with the result that replaces its contents; ``donated`` lists the inputs whose buffer such a result may
    take over.
    """

    name: str
    bytecode: bytes
    digest: str
    inputs: tuple[TensorSpec, ...]
    arguments: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    results: tuple[Result, ...]
    mutated: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    random: bool = False
    draws: int = 0
    ffi_handlers: tuple[str, ...] = ()
    ops_per_tier: tuple[tuple[str, int], ...] = ()
    ops: tuple[tuple[str, int], ...] = ()
    checks: tuple[HostCheck, ...] = ()


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch writes them (a size of 0 or 1 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The permutation under which (shape, stride) is row-major; None if there are gaps, overlaps or broadcast axes."""
    if any(size == 0 for size in shape):
        return tuple(range(len(shape)))
    axes = sorted(range(len(shape)), key=lambda i: (-stride[i] if shape[i] != 1 else 0, i))
    big = [i for i in axes if shape[i] != 1]
    step = 1
    for i in reversed(big):
        if stride[i] != step:
            return None
        step *= shape[i]
    if big == sorted(big):
        return tuple(range(len(shape)))
    return tuple([i for i in range(len(shape)) if shape[i] == 1] + big)
