"""The table of lowering rules: which function lowers which aten overload, in which tier.

    @lowers(aten.cat.default)
    def cat(ctx, tensors, dim=0): ...

A rule takes the context, then the arguments exactly as in the aten schema (same names, same defaults), tensors as MLIR
values, and returns one
value or a tuple. ``@elementwise`` rules see their operands already broadcast and promoted. A second rule for one
overload, or a
signature that is not the schema's, raises when the module is imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_compile.lowering import dtypes, hlo

RuleFunction = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one overload is lowered. ``tier`` is "native" or "jnp"."""

    function: RuleFunction
    tier: str


class OpRegistry:
    """Overloads (or higher-order operators) to rules. Families under ``lowering/ops`` are imported at the first
    look-up."""

    def __init__(self) -> None:
        self._rules: dict[Any, Rule] = {}
        self._named: dict[str, Rule] = {}
        self._loaded = False

    def register(self, op: Any, function: RuleFunction, tier: str = "native", *, replace: bool = False) -> None:
        """Add a rule; raises ValueError if the overload has one, or TypeError if the signature is not the schema's.

        An operator of a package that may not be imported is given by its name, ``"package::operator"``.
        """
        if isinstance(op, str):
            if op in self._named and not replace:
                raise ValueError(f"{op} has a rule already: {self._named[op].function.__qualname__}")
            self._named[op] = Rule(function, tier)
            return
        if op in self._rules and not replace:
            raise ValueError(f"{op} has a rule already: {self._rules[op].function.__qualname__}")
        if isinstance(op, OpOverload):
            _check_signature(op, function)
        self._rules[op] = Rule(function, tier)

    def get(self, op: Any) -> Rule | None:
        """The rule for an overload, or None."""
        if not self._loaded:
            self.load()
        rule = self._rules.get(op)
        if rule is None and isinstance(op, OpOverload) and op.name() in self._named:
            named = self._named[op.name()]
            self.register(op, named.function, named.tier)
            return named
        return rule

    def load(self) -> None:
        """Import every family. A family that fails to import fails every look-up, not only the first."""
        from tpu_compile.lowering import ops

        for module in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."):
            importlib.import_module(module.name)
        self._loaded = True

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:
            self.load()
        return iter(self._rules)

    def registered(self) -> Iterator[tuple[Any, Rule]]:
        """What was registered so far, operators or their names, without importing the families."""
        return iter([*self._rules.items(), *self._named.items()])

    def items(self) -> Iterator[tuple[Any, Rule]]:
        """Every overload with its rule."""
        return ((op, self._rules[op]) for op in self)


registry = OpRegistry()


def _check_signature(op: OpOverload, function: RuleFunction) -> None:
    """Positional arguments must stand in the schema's order under the schema's names; what the schema lacks needs a
    default."""
    accepted = {p.name: p for p in list(inspect.signature(function).parameters.values())[1:]}
    kinds = {p.kind for p in accepted.values()}
    ordered = [p.name for p in accepted.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    fits = inspect.Parameter.VAR_POSITIONAL in kinds
    if not fits:
        positional = [_python_name(a.name) for a in op._schema.arguments if not a.kwarg_only]
        keywords = [_python_name(a.name) for a in op._schema.arguments if a.kwarg_only]
        swallows = inspect.Parameter.VAR_KEYWORD in kinds
        extra = [p for name, p in accepted.items() if name not in (*positional, *keywords)]
        fits = (
            ordered[: len(positional)] == positional[: len(ordered)]
            and (swallows or (set(positional) | set(keywords)) <= set(accepted))
            and all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra)
        )
    if not fits:
        raise TypeError(f"rule {function.__qualname__} takes ({', '.join(accepted)}), but {op} is {op._schema}")


def _python_name(name: str) -> str:
    return {"self": "x", "from": "from_", "lambda": "lambda_"}.get(name, name)


def lowers(*ops: Any, tier: str = "native") -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of these overloads. ``self`` in a schema is called ``x`` here.

    Raises:
        ValueError: an overload has a rule already.
        TypeError: the signature is not the schema's.
    """

    def decorate(function: RuleFunction) -> RuleFunction:
        for op in ops:
            registry.register(op, function, tier)
        return function

    return decorate


def elementwise(
    *ops: Any, compute: str = "result", opmath: bool = True, wide: tuple[str, ...] = ()
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule whose tensor operands (and Python scalars in their place) arrive broadcast to the result's
    shape, in one dtype.

    ``compute="result"``: that dtype is the result's. ``"operands"``: it is torch's promotion of the operands
    (comparisons, is_nan, …).
    ``opmath``: 16-bit floats are computed in float32 and rounded once, as torch does; switch it off where the body is
    a single correctly rounded operation.
    ``wide``: operands whose scalars, 0-dim ones too, keep float32 precision beside 16-bit floats (torch's ``mul`` and
    ``div``); elsewhere a scalar is rounded to 16 bits first, as torch does.
    The result is converted to the dtype that FakeTensor promises.
    """

    def decorate(function: RuleFunction) -> RuleFunction:
        for op in ops:
            registry.register(op, _elementwise_rule(op, function, compute, opmath, wide))
        return function

    return decorate


def _elementwise_rule(
    op: OpOverload, function: RuleFunction, compute: str, opmath: bool, wide: tuple[str, ...]
) -> RuleFunction:
    operand_names = [_python_name(a.name) for a in op._schema.arguments if _is_operand(a)]
    places = {_python_name(a.name): i for i, a in enumerate(op._schema.arguments)}
    operands = [(name, places[name]) for name in operand_names]

    @functools.wraps(function)
    def rule(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        out = ctx.out
        given = [args[i] if i < len(args) else kwargs.get(name) for name, i in operands]
        common = out.dtype if compute == "result" else _promoted(given)
        widened = any(name in wide and _is_scalar(value) for (name, _), value in zip(operands, given, strict=True))
        kind = dtypes.opmath(common) if opmath or widened else common
        new_args, new_kwargs = list(args), dict(kwargs)
        for (name, i), value in zip(operands, given, strict=True):
            if value is None:
                continue
            ready = operand(value, kind, out.shape, kind if name in wide else common)
            if i < len(args):
                new_args[i] = ready
            else:
                new_kwargs[name] = ready
        return hlo.convert(function(ctx, *new_args, **new_kwargs), out.dtype)

    return rule


def operand(value: Any, kind: torch.dtype, shape: Any, through: torch.dtype | None = None) -> hlo.Value:
    """A tensor or Python scalar as a value of dtype ``kind`` and the given shape, rounded to ``through`` on the way."""
    if hlo.is_value(value):
        rounded = value if through is None else hlo.convert(value, through)
        return hlo.broadcast(hlo.convert(rounded, kind), shape)
    if through is not None and through != kind:
        value = torch.tensor(value, dtype=through, device="cpu").item()
    return hlo.full(value, kind, shape)


def _is_scalar(value: Any) -> bool:
    return value is not None and (not hlo.is_value(value) or hlo.rank(value) == 0)


def _promoted(values: list[Any]) -> torch.dtype:
    tensors = [(hlo.dtype(v), hlo.rank(v)) for v in values if hlo.is_value(v)]
    return dtypes.promote(tensors, [v for v in values if v is not None and not hlo.is_value(v)])


def _is_operand(argument: torch.Argument) -> bool:
    """Tensors, and the ``other`` of a Scalar overload (which stands where a tensor could)."""
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    return kind == "Tensor" or (kind in ("number", "Scalar") and argument.name in _SCALAR_OPERANDS)


_SCALAR_OPERANDS = frozenset({"self", "other", "exponent", "min", "max", "value", "end", "weight"})
