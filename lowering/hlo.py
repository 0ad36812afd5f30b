"""StableHLO, one helper an operation, named as StableHLO names it. Values are MLIR SSA values; dtypes are torch's;
shapes are lists of ints.

Helpers take what rules have at hand (Python ints for axes, torch dtypes, Python scalars) and return values. None of
them knows aten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes

Value: TypeAlias = ir.Value
Dims = Sequence[int]

_HIGH = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}
_INT32_MAX = 2**31 - 1


# ---- types


def is_value(x: object) -> bool:
    """Whether an operand is an MLIR value (else it is a Python number)."""
    return isinstance(x, ir.Value)


def shape(x: Value) -> list[int]:
    """The shape of ``x``."""
    return x.type.shape


def rank(x: Value) -> int:
    """The number of axes of ``x``."""
    return x.type.rank


def dtype(x: Value) -> torch.dtype:
    """The torch dtype of ``x``."""
    return dtypes.from_element_type(x.type.element_type)


def tensor_type(sizes: Dims, element: torch.dtype) -> ir.RankedTensorType:
    """The MLIR type of a tensor."""
    return ir.RankedTensorType.get(sizes, dtypes.element_type(element))


def numel(x: Value) -> int:
    """How many elements ``x`` has."""
    return math.prod(shape(x))


# ---- constants


def scalar(value: Any, element: torch.dtype) -> Value:
    """A 0-dim constant. Integers wrap to the dtype's range, as torch's fill does."""
    kind = dtypes.NUMPY.get(element)
    if kind is None:
        dtypes.element_type(element)
    if dtypes.is_integer(element):
        array = np.array(int(value) & (2 ** (8 * element.itemsize) - 1), np.uint64).astype(kind)
    else:
        with np.errstate(over="ignore"):
            array = np.array(value).astype(kind)
    return dense(array, element)


def dense(array: np.ndarray, element: torch.dtype) -> Value:
    """A constant holding ``array``, which has ``element``'s numpy dtype."""
    mlir_type = dtypes.element_type(element)
    carrier = np.ascontiguousarray(array)
    if carrier.dtype.kind == "V" or carrier.dtype.name in ("bfloat16", *_FLOAT8):
        carrier = carrier.view(np.uint16 if carrier.itemsize == 2 else np.uint8)
    return stablehlo.constant(ir.DenseElementsAttr.get(carrier, type=mlir_type, shape=array.shape))


_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def full(value: Any, element: torch.dtype, sizes: Dims) -> Value:
    """A tensor of one Python number."""
    return broadcast_in_dim(scalar(value, element), sizes, ())


def full_like(x: Value, value: Any) -> Value:
    """A tensor of one Python number, shaped and typed like ``x``."""
    return full(value, dtype(x), shape(x))


def iota(sizes: Dims, axis: int, element: torch.dtype = torch.int32) -> Value:
    """Counts 0, 1, … along ``axis``."""
    return stablehlo.iota(tensor_type(sizes, element), axis)


# ---- shape


def broadcast_in_dim(x: Value, sizes: Dims, dims: Dims) -> Value:
    """``x``'s axis i becomes axis ``dims[i]`` of a tensor of ``sizes``; sizes of 1 are repeated."""
    sizes = list(sizes)
    if shape(x) == sizes:
        return x
    return stablehlo.broadcast_in_dim(tensor_type(sizes, dtype(x)), x, list(dims))


def broadcast(x: Value, sizes: Dims) -> Value:
    """numpy's broadcasting: axes are aligned at the right."""
    offset = len(sizes) - rank(x)
    return broadcast_in_dim(x, sizes, range(offset, len(sizes)))


def reshape(x: Value, sizes: Dims) -> Value:
    """Row-major reshape; ``sizes`` holds no -1."""
    sizes, before = list(sizes), made_by(x, stablehlo.ReshapeOp)
    x = before.operand if before else x
    return x if shape(x) == sizes else stablehlo.reshape(tensor_type(sizes, dtype(x)), x)


def transpose(x: Value, order: Dims) -> Value:
    """Result axis i is ``x``'s axis ``order[i]``. Permutations of permutations become one, also through axes of size 1:
    XLA merges the first into the product that made its operand, whatever the second would have made of both."""
    order, sizes = list(order), shape(x)
    if before := made_by(x, stablehlo.TransposeOp):
        return transpose(before.operand, [before.permutation[i] for i in order])
    if before := made_by(x, stablehlo.ReshapeOp):
        old = shape(before.operand)
        wide, known = ([i for i, n in enumerate(each) if n != 1] for each in (sizes, old))
        if [sizes[i] for i in wide] == [old[i] for i in known]:
            moved = [i for i, n in enumerate(old) if n == 1] + [known[wide.index(i)] for i in order if sizes[i] != 1]
            return reshape(transpose(before.operand, moved), [sizes[i] for i in order])
    return x if order == list(range(len(order))) else stablehlo.transpose(x, order)


def made_by(x: Value, kind: Any) -> Any:
    """The operation that made ``x``, if it is of this kind."""
    op = getattr(x.owner, "opview", None)
    return op if isinstance(op, kind) else None


def unsqueeze(x: Value, axis: int) -> Value:
    """Insert an axis of size 1 at ``axis`` (non-negative)."""
    sizes = shape(x)
    return reshape(x, [*sizes[:axis], 1, *sizes[axis:]])


def squeeze(x: Value, axes: Dims) -> Value:
    """Drop the given (size 1) axes."""
    drop = set(axes)
    return reshape(x, [s for i, s in enumerate(shape(x)) if i not in drop])


def move_axis(x: Value, source: int, destination: int) -> Value:
    """Move one axis, keep the order of the others."""
    order = [i for i in range(rank(x)) if i != source]
    order.insert(destination, source)
    return transpose(x, order)


def slice_(x: Value, start: Dims, limit: Dims, stride: Dims | None = None) -> Value:
    """``x[start:limit:stride]`` on every axis."""
    sizes = shape(x)
    if list(start) == [0] * len(sizes) and list(limit) == sizes and (stride is None or all(s == 1 for s in stride)):
        return x
    return stablehlo.slice(x, list(start), list(limit), list(stride or [1] * len(sizes)))


def slice_axis(x: Value, axis: int, start: int, limit: int, stride: int = 1) -> Value:
    """``x[start:limit:stride]`` on one axis."""
    sizes = shape(x)
    starts, limits, strides = [0] * len(sizes), list(sizes), [1] * len(sizes)
    starts[axis], limits[axis], strides[axis] = start, max(start, limit), stride
    return slice_(x, starts, limits, strides)


def pad(x: Value, value: Any, low: Dims, high: Dims, interior: Dims | None = None) -> Value:
    """Pad with a Python number or a 0-dim value; negative amounts crop."""
    if not any(low) and not any(high) and not any(interior or ()):
        return x
    fill = value if is_value(value) else scalar(value, dtype(x))
    return stablehlo.pad(x, fill, list(low), list(high), list(interior or [0] * rank(x)))


def concatenate(xs: Sequence[Value], axis: int) -> Value:
    """Join along ``axis``."""
    return xs[0] if len(xs) == 1 else stablehlo.concatenate(list(xs), axis)


def reverse(x: Value, axes: Dims) -> Value:
    """Flip the given axes."""
    return stablehlo.reverse(x, list(axes)) if len(axes) else x


def dynamic_slice(x: Value, starts: Sequence[Value], sizes: Dims) -> Value:
    """A window of ``sizes`` at 0-dim integer ``starts``, clamped into range."""
    return stablehlo.dynamic_slice(x, list(starts), list(sizes))


def dynamic_update_slice(x: Value, update: Value, starts: Sequence[Value]) -> Value:
    """``x`` with ``update`` written at 0-dim integer ``starts``, clamped into range."""
    return stablehlo.dynamic_update_slice(x, update, list(starts))


# ---- elementwise


def convert(x: Value, element: torch.dtype) -> Value:
    """torch's ``.to(dtype)``: to bool asks "is it nonzero", floats truncate towards 0 and wrap into small integers,
    complex drops its imaginary part."""
    source = dtype(x)
    if source == element:
        return x
    if element == torch.complex32:  # its values live in complex64, each part rounded
        parts = (stablehlo.real(x), stablehlo.imag(x)) if source.is_complex else (x, full_like(x, 0))
        return stablehlo.complex(*(convert(convert(p, torch.float16), torch.float32) for p in parts))
    if source.is_complex and not element.is_complex:
        return compare(x, full_like(x, 0), "NE") if element == torch.bool else convert(stablehlo.real(x), element)
    if element == torch.bool:
        return compare(x, full_like(x, 0), "NE")
    if source.is_floating_point and dtypes.is_integer(element) and element.itemsize < 4:
        return stablehlo.convert(
            tensor_type(shape(x), element), stablehlo.convert(tensor_type(shape(x), torch.int32), x)
        )
    if element.is_complex and not source.is_complex:
        part = convert(x, dtypes.real(element))
        return stablehlo.complex(part, full_like(part, 0))
    if element == torch.float8_e4m3fn:  # it has no infinity: torch saturates, XLA's conversion gives NaN
        x = x if source.is_floating_point else convert(x, torch.float32)
        x = stablehlo.minimum(stablehlo.maximum(x, full_like(x, -448)), full_like(x, 448))
    return stablehlo.convert(tensor_type(shape(x), element), x)


def bitcast_convert(x: Value, element: torch.dtype) -> Value:
    """The same bits read as a dtype of the same width."""
    return x if dtype(x) == element else stablehlo.bitcast_convert(tensor_type(shape(x), element), x)


def compare(a: Value, b: Value, direction: str) -> Value:
    """``direction`` is EQ, NE, GE, GT, LE or LT; floats compare as IEEE says (NaN is equal to nothing)."""
    return stablehlo.compare(a, b, stablehlo.ComparisonDirectionAttr.get(direction))


def select(predicate: Value, a: Value, b: Value) -> Value:
    """``where(predicate, a, b)``; all shapes equal, or a 0-dim predicate."""
    return stablehlo.select(predicate, a, b)


def clamp(x: Value, low: Value, high: Value) -> Value:
    """``min(max(x, low), high)``; the bounds may be 0-dim."""
    return stablehlo.clamp(low, x, high)


def is_nan(x: Value) -> Value:
    """Where ``x`` is NaN (floats and complex)."""
    return compare(x, x, "NE")


# ---- reductions

COMBINERS: dict[str, Callable[[Value, Value], Value]] = {
    "add": stablehlo.add,
    "multiply": stablehlo.multiply,
    "maximum": stablehlo.maximum,
    "minimum": stablehlo.minimum,
    "and": stablehlo.and_,
    "or": stablehlo.or_,
    "xor": stablehlo.xor,
    "second": lambda a, b: b,
}


def lowest(element: torch.dtype) -> Any:
    """The identity of maximum: -inf, or the smallest integer."""
    if element == torch.bool:
        return False
    return -math.inf if element.is_floating_point else torch.iinfo(element).min


def highest(element: torch.dtype) -> Any:
    """The identity of minimum: inf, or the largest integer."""
    if element == torch.bool:
        return True
    return math.inf if element.is_floating_point else torch.iinfo(element).max


def identity(combiner: str, element: torch.dtype) -> Any:
    """The neutral element of a combiner, as a Python number."""
    if combiner == "maximum":
        return lowest(element)
    if combiner == "minimum":
        return highest(element)
    if combiner == "and":
        return True if element == torch.bool else -1
    return {"add": 0, "multiply": 1, "or": 0, "xor": 0, "second": 0}[combiner]


def region(op: Any, index: int, types: Sequence[ir.Type], body: Callable[..., Any]) -> None:
    """Fill region ``index`` of ``op`` with a block of ``types`` whose returned values are ``body(*arguments)``."""
    block = op.operation.regions[index].blocks.append(*types)
    with ir.InsertionPoint(block):
        result = body(*block.arguments)
        stablehlo.return_(list(result) if isinstance(result, (tuple, list)) else [result])


def reduce_n(xs: Sequence[Value], inits: Sequence[Value], axes: Dims, body: Callable[..., Any]) -> list[Value]:
    """Variadic reduce: ``body(*accumulators, *elements)`` returns the new accumulators."""
    drop = set(axes)
    kept = [s for i, s in enumerate(shape(xs[0])) if i not in drop]
    types = [tensor_type(kept, dtype(x)) for x in xs]
    op = stablehlo.ReduceOp(types, list(xs), list(inits), ir.DenseI64ArrayAttr.get(list(axes)))
    element_types = [tensor_type((), dtype(x)) for x in xs]
    region(op, 0, [*element_types, *element_types], body)
    return list(op.results)


def reduce(x: Value, axes: Dims, combiner: str, init: Any = None) -> Value:
    """Fold the given axes (non-negative, dropped from the result) with a named combiner."""
    element = dtype(x)
    start = scalar(identity(combiner, element) if init is None else init, element)
    if not len(axes):
        return x if init is None else COMBINERS[combiner](x, broadcast(start, shape(x)))
    return reduce_n([x], [start], axes, COMBINERS[combiner])[0]


def int_matrix(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    """An n×2 (or empty) i64 attribute, as padding wants it."""
    array = np.array(rows, np.int64).reshape(len(rows), 2)
    return ir.DenseIntElementsAttr.get(array, type=ir.IntegerType.get_signless(64), shape=array.shape)


def sort(xs: Sequence[Value], axis: int, less: Callable[..., Value], stable: bool = True) -> list[Value]:
    """Sort several tensors together; ``less(a0, b0, a1, b1, …)`` says whether a comes before b."""
    op = stablehlo.SortOp(
        [x.type for x in xs],
        list(xs),
        dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), axis),
        is_stable=ir.BoolAttr.get(stable),
    )
    types = [tensor_type((), dtype(x)) for x in xs for _ in range(2)]
    region(op, 0, types, less)
    return list(op.results)


# ---- products


def precision_config(*operands: Value) -> ir.ArrayAttr:
    """``torch.get_float32_matmul_precision()`` for float32 operands; the hardware's own for the rest."""
    wide = any(dtype(x) in (torch.float32, torch.float64, torch.complex64, torch.complex128) for x in operands)
    level = _HIGH[torch.get_float32_matmul_precision()] if wide else "DEFAULT"
    return ir.ArrayAttr.get([stablehlo.PrecisionAttr.get(level)] * len(operands))


def dot_general(
    a: Value, b: Value, contract: tuple[Dims, Dims], batch: tuple[Dims, Dims] = ((), ()), out: torch.dtype | None = None
) -> Value:
    """Result axes: batch, ``a``'s free axes, ``b``'s free axes. 16-bit floats accumulate in f32 inside XLA; ``out``
    widens the result."""
    a_shape, b_shape = shape(a), shape(b)
    free_a = [s for i, s in enumerate(a_shape) if i not in contract[0] and i not in batch[0]]
    free_b = [s for i, s in enumerate(b_shape) if i not in contract[1] and i not in batch[1]]
    sizes = [a_shape[i] for i in batch[0]] + free_a + free_b
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(batch[0]),
        rhs_batching_dimensions=list(batch[1]),
        lhs_contracting_dimensions=list(contract[0]),
        rhs_contracting_dimensions=list(contract[1]),
    )
    return stablehlo.dot_general(
        tensor_type(sizes, out or dtype(a)), a, b, numbers, precision_config=precision_config(a, b)
    )


# ---- indexing


def index_operand(index: Value, limit: int) -> Value:
    """``index`` as i32 where ``limit`` allows: i64 is emulated on a TPU."""
    if limit <= _INT32_MAX and dtype(index) != torch.int32:
        return convert(index, torch.int32)
    return index


def wrap_negative(index: Value, size: int) -> Value:
    """Python's negative indices: -1 is ``size - 1``."""
    negative = compare(index, full_like(index, 0), "LT")
    return select(negative, stablehlo.add(index, full_like(index, size)), index)


def gather(
    x: Value,
    indices: Value,
    *,
    offset_dims: Dims,
    collapsed: Dims,
    start_index_map: Dims,
    slice_sizes: Dims,
    operand_batching: Dims = (),
    indices_batching: Dims = (),
    index_vector_dim: int | None = None,
    sorted_: bool = False,
    element: torch.dtype | None = None,
) -> Value:
    """stablehlo.gather; ``indices``' last axis is the index vector unless said otherwise. Out-of-range starts are
    clamped."""
    numbers = stablehlo.GatherDimensionNumbers.get(
        offset_dims=list(offset_dims),
        collapsed_slice_dims=list(collapsed),
        operand_batching_dims=list(operand_batching),
        start_indices_batching_dims=list(indices_batching),
        start_index_map=list(start_index_map),
        index_vector_dim=rank(indices) - 1 if index_vector_dim is None else index_vector_dim,
    )
    return stablehlo.gather(
        x, indices, numbers, ir.DenseI64ArrayAttr.get(list(slice_sizes)), indices_are_sorted=sorted_
    )


def scatter(
    xs: Sequence[Value],
    indices: Value,
    updates: Sequence[Value],
    body: str | Callable[..., Any],
    *,
    update_window_dims: Dims,
    inserted: Dims,
    scatter_dims: Dims,
    input_batching: Dims = (),
    indices_batching: Dims = (),
    index_vector_dim: int | None = None,
    unique: bool = False,
) -> list[Value]:
    """stablehlo.scatter; out-of-range updates are dropped. ``body(*old, *new)`` or a combiner's name (``"second"``
    overwrites)."""
    numbers = stablehlo.ScatterDimensionNumbers.get(
        update_window_dims=list(update_window_dims),
        inserted_window_dims=list(inserted),
        input_batching_dims=list(input_batching),
        scatter_indices_batching_dims=list(indices_batching),
        scattered_dims_to_operand_dims=list(scatter_dims),
        index_vector_dim=rank(indices) - 1 if index_vector_dim is None else index_vector_dim,
    )
    op = stablehlo.ScatterOp(
        [x.type for x in xs],
        list(xs),
        indices,
        list(updates),
        numbers,
        indices_are_sorted=ir.BoolAttr.get(False),
        unique_indices=ir.BoolAttr.get(unique),
    )
    types = [tensor_type((), dtype(x)) for x in xs]
    region(op, 0, [*types, *types], COMBINERS[body] if isinstance(body, str) else body)
    return list(op.results)


# ---- random bits


def rng_bit_generator(state: Value, sizes: Dims, element: torch.dtype) -> Value:
    """Philox bits as uint32 or uint64. ``state`` is u64[3]: the key, then the counter's low and high word; a counter
    yields 128 bits."""
    algorithm = stablehlo.RngAlgorithmAttr.get("PHILOX")
    return stablehlo.rng_bit_generator(state.type, tensor_type(sizes, element), algorithm, state)[1]


# ---- control flow


def while_(carries: Sequence[Value], condition: Callable[..., Value], body: Callable[..., Any]) -> list[Value]:
    """Repeat ``body(*carries)`` while ``condition(*carries)`` (a 0-dim bool) holds."""
    types = [c.type for c in carries]
    op = stablehlo.WhileOp(types, list(carries))
    region(op, 0, types, condition)
    region(op, 1, types, body)
    return list(op.results)


def case(index: Value, branches: Sequence[Callable[[], Any]], types: Sequence[ir.Type]) -> list[Value]:
    """Run branch number ``index`` (i32, 0-dim; out of range runs the last)."""
    op = stablehlo.CaseOp(list(types), index, len(branches))
    for i, branch in enumerate(branches):
        region(op, i, (), branch)
    return list(op.results)


def optimization_barrier(xs: Sequence[Value]) -> list[Value]:
    """Keep XLA from moving or merging work across this point."""
    return list(stablehlo.OptimizationBarrierOp(list(xs)).results)
