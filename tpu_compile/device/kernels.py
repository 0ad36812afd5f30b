"""The generic kernel: one aten call is a small graph, lowered by the same rules as a compiled model, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from tpu_compile.device import fallback, outs, tracing
from tpu_compile.device.calls import Call, OtherDevice, Template
from tpu_compile.device.programs import Plan
from tpu_compile.device.schemas import schema_of
from tpu_compile.device.storage import cell_of
from tpu_compile.errors import UnsupportedDtype, UnsupportedOp

_ON_CPU = object()
"""In place of a plan: such calls run on the CPU."""
_INDEXED = frozenset({"index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"})
"""Operators that take CPU tensors, as indices, beside tensors of a device."""


class Kernel:
    """The kernel of one overload. ``plans`` maps keys to plans, to _ON_CPU, or, where an op computes with its numbers,
    to a table of the same by the numbers' values."""

    def __init__(self, op: OpOverload) -> None:
        self.schema = schema_of(op)
        self.plans: dict[Any, Any] = {}

    def function(self) -> Callable[..., Any]:
        """The kernel as torch calls it: an op repeated costs a look-up and an execute."""
        schema, plans, lifts = self.schema, self.plans, self.schema.lifts
        default_dtype, precision = torch.get_default_dtype, torch.get_float32_matmul_precision
        first, writes = self.first, bool(schema.written)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            call = Call()
            take, parts = call.take, call.parts
            try:
                if lifts:
                    for position, a in enumerate(args):
                        take((a,), position in lifts)
                else:
                    take(args)
                for name, a in kwargs.items():
                    parts.append(name)
                    take((a,), name in lifts)
            except OtherDevice as other:
                return self.across_devices(other, args, kwargs)
            parts += (default_dtype(), precision())
            if writes and len(call.starts) > len(call.cells):
                parts.append(tuple(call.starts))  # which of several windows on one cell are the same
            key = tuple(parts)
            plan = plans.get(key)
            if plan.__class__ is Plan:
                return plan.run(call, schema, args, kwargs)
            return first(plans, key, call, args, kwargs)

        kernel.__name__ = kernel.__qualname__ = str(schema.op)
        self.call = kernel
        return kernel

    def first(self, table: dict[Any, Any], key: Any, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call without a plan under its key: make one, or find that it has to run on the CPU."""
        schema, found = self.schema, table.get(key)
        if isinstance(found, dict):
            exact = tuple([(type(n), n if n else str(n)) for n in call.numbers])
            if isinstance(found.get(exact), Plan):
                return found[exact].run(call, schema, args, kwargs)
            return self.first(found, exact, call, args, kwargs)
        if found is _ON_CPU or call.mixed:
            return fallback.run(schema, args, kwargs)
        try:
            if schema.outs and outs.resize(schema, args, kwargs):
                return self.call(*args, **kwargs)
        except tracing.NotTraced as error:
            return fallback.run(schema, args, kwargs, error.reason)
        made = self.make(call, args, kwargs, constant=table is not self.plans)
        if isinstance(made, Exception):
            result = fallback.run(schema, args, kwargs, made)
            table[key] = _ON_CPU
            return result
        if made is None:
            table[key] = {}
            return self.call(*args, **kwargs)
        table[key] = made
        return made.run(call, schema, args, kwargs)

    def make(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any], constant: bool) -> Plan | Exception | None:
        """A plan; why there is none; or None if the call's numbers have to be constants of it."""
        schema = self.schema
        template = Template(call, args, kwargs, schema.lifts)
        try:
            traced = tracing.isolated(lambda: tracing.trace(schema, template, call, constant))
            return None if traced is None else Plan(_program_name(schema.op), traced)
        except (UnsupportedOp, UnsupportedDtype) as error:
            return error
        except tracing.NotTraced as error:  # on the CPU torch says what is wrong in its own words, or knows better
            return error.reason

    def across_devices(self, other: OtherDevice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call with tensors of two devices: indices move, anything else is an error in torch's words.

        A FakeTensor is neither: of an op without a meta function, torch finds the result's shape with zeros in its
        arguments' place.
        """
        if self.schema.base == "zeros_like" and isinstance(other.tensor, FakeTensor):
            return torch.zeros(other.tensor.shape, dtype=other.tensor.dtype, device="tpu")
        if self.schema.base in _INDEXED and other.tensor.device.type == "cpu":
            if cell_of(args[0]) is None:
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({args[0].device})"
                ) from None
            args, kwargs = tree_map(lambda t: t.to("tpu") if _is_host_index(t) else t, (args, kwargs))
            return self.call(*args, **kwargs)
        named = {**dict(zip(self.schema.names, args, strict=False)), **kwargs}
        name = next(n for n, value in named.items() if any(leaf is other.tensor for leaf in tree_leaves(value)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, tpu:0 and "
            f"{other.tensor.device}! (when checking argument for argument {name} in method {self.schema.op})"
        ) from None


def _is_host_index(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and cell_of(t) is None and not t.is_floating_point()


def _program_name(op: OpOverload) -> str:
    return str(op).replace(".", "_").removesuffix("_default")
