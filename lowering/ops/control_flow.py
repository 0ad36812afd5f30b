"""Higher-order operators: branches, loops, scans, and regions that are called. Their graphs are lowered inside the
region of a StableHLO case or while, which may read every value of the program around it.

A program of a loop does not grow with its length. A random op in a loop's body draws anew at every turn: the turn is
folded into its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo
from torch.fx import GraphModule

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.program import TensorSpec
from tpu_compile.lowering.random import draws_numbers
from tpu_compile.lowering.registry import lowers, registry

hop = torch.ops.higher_order


def tensors(ctx: LoweringContext) -> list[TensorSpec]:
    """The specs of the op's results that are values of the program: tensors, and numbers that only it learns."""
    return [spec for spec in ctx.outs if isinstance(spec, TensorSpec)]


def assemble(ctx: LoweringContext, values: Sequence[Value]) -> Any:
    """The op's results: a value for each spec, anything else as it was promised."""
    supply = iter(values)
    results = tuple(next(supply) if isinstance(spec, TensorSpec) else spec for spec in ctx.outs)
    return results if isinstance(ctx.out, tuple) else results[0]


def as_value(x: Any, kind: torch.dtype | None = None) -> Value:
    """A Python number as a 0-dim value; a value as it is."""
    if hlo.is_value(x):
        return x
    return hlo.scalar(x, kind or {bool: torch.bool, int: torch.int64, float: torch.float64}[type(x)])


def flat_results(
    ctx: LoweringContext, graph: GraphModule, arguments: Sequence[Any], specs: Sequence[TensorSpec]
) -> list[Value]:
    """Lower ``graph`` where we stand; its results that are values, or numbers where ``specs`` wants a value."""
    results = [r for r in ctx.walk.subgraph(graph, arguments) if r is not None]
    return [as_value(r, spec.dtype) for r, spec in zip(results, specs, strict=True)]


def predicate(x: Any) -> Value:
    """A 0-dim bool of a tensor of one element, or a number."""
    x = as_value(x)
    return hlo.reshape(hlo.convert(x, torch.bool), [])


@contextmanager
def turn(ctx: LoweringContext, count: Value | int) -> Iterator[None]:
    """Inside the block, keys of random ops are made from ``count`` too."""
    ctx.walk.turns.append(count)
    try:
        yield
    finally:
        ctx.walk.turns.pop()


# ---- branches


@lowers(hop.cond)
def cond(ctx: LoweringContext, pred: Any, true_graph: GraphModule, false_graph: GraphModule, operands: Any) -> Any:
    specs = tensors(ctx)
    if not specs:
        return assemble(ctx, [])
    if not hlo.is_value(pred):
        return assemble(ctx, flat_results(ctx, true_graph if pred else false_graph, operands, specs))
    types = [hlo.tensor_type(spec.shape, spec.dtype) for spec in specs]
    branches = [lambda g=graph: flat_results(ctx, g, operands, specs) for graph in (false_graph, true_graph)]
    return assemble(ctx, ctx.walk.case(hlo.convert(predicate(pred), torch.int32), branches, types))


# ---- loops


@lowers(hop.while_loop)
def while_loop(
    ctx: LoweringContext, cond_fn: GraphModule, body_fn: GraphModule, carried_inputs: Any, additional_inputs: Any
) -> Any:
    specs = [spec for spec in ctx.outs if spec is not None]
    carries = [as_value(c) for c in carried_inputs]
    count = [hlo.scalar(0, torch.int64)] if draws_numbers(body_fn) or draws_numbers(cond_fn) else []

    def condition(*state: Value) -> Value:
        with turn(ctx, state[-1]):
            (result,) = ctx.walk.subgraph(cond_fn, [*state[: len(carries)], *additional_inputs])
        return predicate(result)

    def body(*state: Value) -> list[Value]:
        with turn(ctx, state[-1]):
            new = flat_results(ctx, body_fn, [*state[: len(carries)], *additional_inputs], specs)
        return [*new, *(stablehlo.add(c, hlo.scalar(1, torch.int64)) for c in state[len(carries) :])]

    return assemble(ctx, ctx.walk.loop([*carries, *count], condition, body)[: len(carries)])


def element(x: Value, index: Value) -> Value:
    """``x[index]`` along the first axis."""
    zero = hlo.full_like(index, 0)
    sizes = hlo.shape(x)
    piece = hlo.dynamic_slice(x, [index, *[zero] * (len(sizes) - 1)], [1, *sizes[1:]])
    return hlo.reshape(piece, sizes[1:])


def put_element(x: Value, value: Value, index: Value) -> Value:
    """``x`` with ``x[index] = value`` along the first axis."""
    zero = hlo.full_like(index, 0)
    return hlo.dynamic_update_slice(x, hlo.reshape(value, [1, *hlo.shape(value)]), [index, *[zero] * hlo.rank(value)])


def sweep(
    ctx: LoweringContext,
    length: int,
    carries: Sequence[Value],
    outputs: Sequence[TensorSpec],
    step: Callable[[Value, list[Value]], tuple[list[Value], list[Value]]],
) -> list[Value]:
    """``carries, ys = step(i, carries)`` for i below ``length``; returns the last carries and the stacked ys."""
    buffers = [hlo.full(0, spec.dtype, spec.shape) for spec in outputs]
    start = hlo.scalar(0, torch.int32)

    def body(i: Value, *state: Value) -> list[Value]:
        with turn(ctx, i):
            new, ys = step(i, list(state[: len(carries)]))
        stacked = [put_element(b, y, i) for b, y in zip(state[len(carries) :], ys, strict=True)]
        return [stablehlo.add(i, hlo.scalar(1, torch.int32)), *new, *stacked]

    def condition(i: Value, *_: Value) -> Value:
        return hlo.compare(i, hlo.scalar(length, torch.int32), "LT")

    return ctx.walk.loop([start, *carries, *buffers], condition, body)[1:]


@lowers(hop.scan)
def scan(ctx: LoweringContext, combine_fn: GraphModule, init: Any, xs: Any, additional_inputs: Any) -> Any:
    specs = tensors(ctx)
    inner = [*specs[: len(init)], *map(row, specs[len(init) :])]

    def step(i: Value, state: list[Value]) -> tuple[list[Value], list[Value]]:
        arguments = [*state, *(element(x, i) for x in xs), *additional_inputs]
        results = flat_results(ctx, combine_fn, arguments, inner)
        return results[: len(init)], results[len(init) :]

    return assemble(ctx, sweep(ctx, hlo.shape(xs[0])[0], list(init), specs[len(init) :], step))


def row(spec: TensorSpec) -> TensorSpec:
    """The spec of one element along the first axis."""
    return TensorSpec(spec.shape[1:], spec.dtype)


@lowers(hop.map_impl)
def map_impl(ctx: LoweringContext, f: GraphModule, xs: Any, pos_args: Any) -> Any:
    specs = tensors(ctx)

    def step(i: Value, _: list[Value]) -> tuple[list[Value], list[Value]]:
        return [], flat_results(ctx, f, [*(element(x, i) for x in xs), *pos_args], [row(spec) for spec in specs])

    return assemble(ctx, sweep(ctx, hlo.shape(xs[0])[0], [], specs, step))


@lowers(hop.associative_scan)
def associative_scan(ctx: LoweringContext, combine_fn: GraphModule, xs: Any, additional_inputs: Any) -> Any:
    """One element after another: the combining graph is made for single elements."""
    specs = tensors(ctx)
    rows = [row(spec) for spec in specs]
    starts = [hlo.full(0, spec.dtype, spec.shape) for spec in rows]

    def step(i: Value, state: list[Value]) -> tuple[list[Value], list[Value]]:
        elements = [element(x, i) for x in xs]
        combined = flat_results(ctx, combine_fn, [*state, *elements, *additional_inputs], rows)
        first = hlo.compare(i, hlo.full_like(i, 0), "EQ")
        new = [hlo.select(first, e, c) for e, c in zip(elements, combined, strict=True)]
        return new, new

    return assemble(ctx, sweep(ctx, hlo.shape(xs[0])[0], starts, specs, step)[len(starts) :])


# ---- regions that are called


@lowers(hop.invoke_subgraph)
def invoke_subgraph(ctx: LoweringContext, subgraph: GraphModule, identifier: str | None, *operands: Any) -> Any:
    """Each call draws its own random numbers: the same graph may be called many times."""
    if not draws_numbers(subgraph):
        return inline(ctx, subgraph, operands)
    number = ctx.functions.setdefault("calls", iter(range(2**31)))
    with turn(ctx, next(number)):
        return inline(ctx, subgraph, operands)


def inline(ctx: LoweringContext, graph: GraphModule, operands: Sequence[Any]) -> Any:
    """The results of ``graph`` as the op's own."""
    return assemble(ctx, flat_results(ctx, graph, operands, tensors(ctx)))


@lowers(hop.wrap_with_set_grad_enabled)
def wrap_with_set_grad_enabled(ctx: LoweringContext, enable_grad: bool, wrapped_func: GraphModule, *args: Any) -> Any:
    return inline(ctx, wrapped_func, args)


@lowers(hop.wrap_with_autocast)
def wrap_with_autocast(
    ctx: LoweringContext, device_type: str, dtype: Any, enabled: bool, cache: Any, wrapped_func: GraphModule, *args: Any
) -> Any:
    return inline(ctx, wrapped_func, args)


@lowers(hop.tag_activation_checkpoint)
def tag_activation_checkpoint(ctx: LoweringContext, gmod: GraphModule, *args: Any, **kwargs: Any) -> Any:
    return inline(ctx, gmod, args)


@lowers(hop.strict_mode)
def strict_mode(ctx: LoweringContext, callable: GraphModule, operands: Any) -> Any:
    return inline(ctx, callable, operands)


@lowers(hop.hints_wrapper)
def hints_wrapper(ctx: LoweringContext, body_fn: GraphModule, args: Any, kwargs: Any, hints: Any) -> Any:
    return inline(ctx, body_fn, args)


@lowers(hop.out_dtype)
def out_dtype(ctx: LoweringContext, op: Any, output_dtype: torch.dtype, *args: Any) -> Any:
    """``op`` computed in ``output_dtype``, which is wider than its operands."""
    rule = registry.get(op)
    if rule is None:
        ctx.refuse(f"{op}, which it wraps, has no rule")
    return rule.function(ctx, *(hlo.convert(a, output_dtype) if hlo.is_value(a) else a for a in args))
