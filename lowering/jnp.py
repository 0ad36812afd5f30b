"""Tier 2: a rule written as one jax.numpy function. For long-tail numerics: jax has them for every platform.

    @lowers_jnp(aten.linalg_cholesky_ex.default)
    def cholesky(x, *, upper=False, check_errors=False): ...

The function takes jax arrays for tensors and everything else as it is in the aten schema, and returns one array or a
tuple; results are converted to the promised dtypes. jax is imported when such a rule is first used (0.7 s), not before.

The function is traced without data and lowered for the platform family; no jax client is opened, which on a TPU host
would be a second owner of the chip. The module crosses into our MLIR context as bytecode, because an operation that is
cloned from another context crashes once its context is gone, and becomes private functions of the program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import func
from torch.utils import _pytree as pytree

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext, Refusal
from tpu_compile.lowering.program import TensorSpec
from tpu_compile.lowering.registry import RuleFunction, lowers


class LazyModule:
    """A module that is imported when an attribute of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


jax: Any = LazyModule("jax")
jnp: Any = LazyModule("jax.numpy")
lax: Any = LazyModule("jax.lax")
scipy: Any = LazyModule("jax.scipy")


def lowers_jnp(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a jax.numpy function as the rule of these overloads. ``self`` in a schema is called ``x``.

    Raises:
        ValueError: an overload has a rule already.
        TypeError: the signature is not the schema's.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        lowers(*ops, tier="jnp")(as_rule(function))
        return function

    return decorate


def as_rule(function: Callable[..., Any]) -> RuleFunction:
    """A rule that calls ``function``, lowered once for each combination of specs and static arguments."""

    @functools.wraps(function)
    def rule(ctx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
        return call(ctx, function, *args, **kwargs)

    signature = inspect.signature(function)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)
    rule.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
    return rule


def call(ctx: LoweringContext, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` on values, from inside any rule; the results get the dtypes of ``ctx.out``."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if hlo.is_value(leaf)]
    traced = Traced(function, structure, tuple(map(_spec, leaves)), ctx.family)
    name, types = _function(ctx, traced)
    results = list(func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands).results)
    promised = [spec for spec in ctx.outs if isinstance(spec, TensorSpec)]
    ready = iter([hlo.convert(r, spec.dtype) for r, spec in zip(results, promised, strict=True)])
    outs = tuple(next(ready) if isinstance(spec, TensorSpec) else spec for spec in ctx.outs)
    return outs if isinstance(ctx.out, tuple) else outs[0]


def _spec(leaf: Any) -> Any:
    return TensorSpec(tuple(hlo.shape(leaf)), hlo.dtype(leaf)) if hlo.is_value(leaf) else Static(repr(leaf), leaf)


@dataclass(frozen=True)
class Static:
    """An argument that is no tensor. Equal only if written alike: 1, 1.0 and True are three programs."""

    text: str
    value: Any = field(compare=False)


@dataclass(frozen=True)
class Traced:
    """What decides a jax module: the function, how its arguments nest, their specs or values, the platform family."""

    function: Callable[..., Any]
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    family: str


@dataclass(frozen=True)
class Crossing:
    """A lowered jax module as bytecode, and the FFI handlers it calls."""

    bytecode: bytes
    handlers: tuple[str, ...]


def _function(ctx: LoweringContext, traced: Traced) -> tuple[str, list[ir.Type]]:
    """(symbol, result types) of the private function that holds ``traced``; one a program, however often called."""
    if traced not in ctx.functions:
        crossing = lower_jax(traced)
        for handler in crossing.handlers:
            ctx.walk.need_ffi(handler)
        ctx.functions[traced] = merge(ctx, crossing.bytecode, traced.function.__name__)
    return ctx.functions[traced]


def merge(ctx: LoweringContext, source: bytes | str, name: str) -> tuple[str, list[ir.Type]]:
    """Parse a module into the program, its functions renamed and private; returns the symbol and types of ``main``."""
    module = ir.Module.parse(source)
    prefix = f"{name}_{len(ctx.functions)}"
    functions = [op.operation for op in module.body.operations]
    for op in functions:
        old = ir.StringAttr(op.attributes["sym_name"]).value
        new = prefix if old == "main" else f"{prefix}.{old}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
        op.attributes["sym_name"] = ir.StringAttr.get(new)
        op.attributes["sym_visibility"] = ir.StringAttr.get("private")
    for op in functions:
        ctx.module.body.append(op)
    entry = next(op for op in functions if ir.StringAttr(op.attributes["sym_name"]).value == prefix)
    return prefix, list(ir.FunctionType(ir.TypeAttr(entry.attributes["function_type"]).value).results)


# ---- in jax


@functools.lru_cache(maxsize=1024)
def lower_jax(traced: Traced) -> Crossing:
    """Trace and lower a function for one platform family. Raises Refusal where jax has no rule for that family."""
    from jax.interpreters import mlir

    with tracing():
        closed = jax.make_jaxpr(_on_arrays(traced))(*map(_array, _tensors(traced)))
        count = len(closed.in_avals)
        try:
            lowered = mlir.lower_jaxpr_to_module(
                traced.function.__name__,
                closed,
                num_const_args=0,
                in_avals=closed.in_avals,
                ordered_effects=[],
                donated_args=[False] * count,
                platforms=(traced.family,),
                backend=None,
                axis_context=mlir.ShardingContext(1),
                lowering_parameters=mlir.LoweringParameters(hoist_constants_as_args=False),
            )
        except NotImplementedError as error:
            raise Refusal(f"jax cannot lower it: {error}") from None
        return _crossing(lowered.module)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """jax's settings for a rule, whatever the user's are: 64-bit types exist, products are exact, shapes broadcast."""
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def _tensors(traced: Traced) -> list[TensorSpec]:
    return [leaf for leaf in traced.leaves if isinstance(leaf, TensorSpec)]


def _array(spec: TensorSpec) -> Any:
    return jax.ShapeDtypeStruct(spec.shape, dtypes.NUMPY[spec.dtype])


def _on_arrays(traced: Traced) -> Callable[..., list[Any]]:
    """The function of its tensors alone, with flat results."""

    def flat(*arrays: Any) -> list[Any]:
        supply = iter(arrays)
        leaves = [next(supply) if isinstance(leaf, TensorSpec) else leaf.value for leaf in traced.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, traced.structure)
        result = traced.function(*args, **kwargs)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return flat


def _crossing(module: Any) -> Crossing:
    """Bytecode without source lines and sharding hints (their dialect is not ours), and the FFI calls in it."""
    handlers: dict[str, None] = {}

    def look(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if target.endswith("_ffi"):
                handlers[target] = None
            if "sdy.sharding_rule" in op.attributes:
                del op.attributes["sdy.sharding_rule"]
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
    return Crossing(buffer.getvalue(), tuple(handlers))
