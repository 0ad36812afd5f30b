"""Matrix products and convolutions in HLO: flops, passes of the matrix unit, and what padding wastes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from tpu_compile.targets.hlo import Computation, Instruction, Shape

_F32_PASSES = {"default": 1, "high": 3, "highest": 6}
"""A TPU multiplies bf16: f32 operands are split into one, two or three bf16 parts, and the significant products are
summed."""


@dataclass(frozen=True)
class Product:
    """One dot or convolution.

    Attributes:
        m, n, k: as one matrix product ``[m, k] x [k, n]`` (each of a batch, if there is one).
        batch: products side by side.
        flops: two for each multiply-add that reaches an element; positions in padding do not count.
        dtype: of the operands as they enter the matrix unit.
        passes: how often the matrix unit goes over it; f32 takes 1, 3 or 6.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int
    flops: int
    dtype: str
    passes: int
    where: str
    op: str

    def waste(self, unit: int) -> float:
        """The share of the matrix unit's work that goes into filling ``k`` and ``n`` up to ``unit`` and ``m`` to 8
        rows."""
        full = _up(self.m, 8) * _up(self.n, unit) * _up(self.k, unit)
        return 1 - self.m * self.n * self.k / full if full else 0.0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def product(computation: Computation, instruction: Instruction) -> Product | None:
    """What a ``convolution`` or ``dot`` multiplies; None for other instructions."""
    if instruction.opcode not in ("convolution", "dot"):
        return None
    left, right = (computation.by_name[name].shape for name in instruction.operands)
    sizes = _dot(instruction, left, right) if instruction.opcode == "dot" else _convolution(instruction, left, right)
    m, n, k, batch, flops = sizes
    precision = instruction.attribute("operand_precision").partition(",")[0] or "default"
    wide = "f32" in (left.dtype, right.dtype)
    return Product(
        instruction.name,
        *(m, n, k, batch, flops),
        "f32" if wide else left.dtype,
        _F32_PASSES.get(precision, 1) if wide else 1,
        instruction.where,
        instruction.op,
    )


def _dot(instruction: Instruction, left: Shape, right: Shape) -> tuple[int, int, int, int, int]:
    contracted = _axes(instruction.attribute("lhs_contracting_dims"))
    batched = _axes(instruction.attribute("lhs_batch_dims"))
    k, batch = prod(left.dims[a] for a in contracted), prod(left.dims[a] for a in batched)
    m = left.elements // max(1, k * batch)
    n = right.elements // max(1, k * batch)
    return m, n, k, batch, 2 * m * n * k * batch


def _axes(text: str) -> list[int]:
    return [int(axis) for axis in text.split(",") if axis]


def _convolution(instruction: Instruction, left: Shape, right: Shape) -> tuple[int, int, int, int, int]:
    """libtpu writes every product as a convolution; a batch is a spatial axis that is dilated so that each position
    meets one slice of the kernel."""
    lhs, rhs, out = re.split(r"_|->", instruction.attribute("dim_labels"))
    result = instruction.shape
    window = _window(instruction.attribute("window"), len(lhs) - 2)
    met, batch, taps = 1, 1, 1
    for axis, each in enumerate(window):
        digit = str(axis)
        inputs, outputs = left.dims[lhs.index(digit)], result.dims[out.index(digit)]
        kernel = right.dims[rhs.index(digit)]
        valid = _valid_pairs(inputs, outputs, kernel, *each)
        met *= valid
        if valid == outputs == kernel > 1:  # one slice a position: a batch
            batch *= outputs
        else:
            taps *= kernel
    groups = int(instruction.attribute("batch_group_count") or 1)
    inner = right.dims[rhs.index("i")]
    rows, columns = result.dims[out.index("b")], result.dims[out.index("f")]
    flops = 2 * rows * columns * inner * met // groups
    m = flops // max(1, 2 * batch * columns * inner * taps)
    return max(1, m), columns, inner * taps, batch, flops


def _window(text: str, rank: int) -> list[tuple[int, int, int, int]]:
    """(stride, padding before, input dilation, kernel dilation) of each spatial axis."""
    fields = dict(item.split("=") for item in text.split() if "=" in item)

    def numbers(name: str, otherwise: int) -> list[int]:
        return [int(each.split("_")[0]) for each in fields[name].split("x")] if name in fields else [otherwise] * rank

    return list(
        zip(numbers("stride", 1), numbers("pad", 0), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1), strict=True)
    )


def _valid_pairs(
    inputs: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int, kernel_dilation: int
) -> int:
    """Pairs of an output position and a kernel position that meet an element of the input, not padding or a hole."""
    length, count = (inputs - 1) * dilation + 1, 0
    for tap in range(kernel):
        offset = tap * kernel_dilation - padding
        if dilation == 1:
            first = max(0, -(offset // stride))
            last = min(outputs - 1, (length - 1 - offset) // stride)
            count += max(0, last - first + 1)
        else:
            count += sum(
                0 <= at < length and at % dilation == 0 for at in range(offset, offset + outputs * stride, stride)
            )
    return count
