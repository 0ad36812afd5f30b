"""One aten call as a functional graph: cells come in, new tensors and the new contents of written cells go out.

The fake tensors of a trace are CPU tensors: where torch's meta functions and decompositions ask for the device (the
strides of a result, what batch_norm saves), the answer is then the CPU's, and so is what the user sees.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_compile.device import numbers
from tpu_compile.device.calls import Call, HostUse, NumberUse, Template, TensorUse
from tpu_compile.device.fakes import TraceMode
from tpu_compile.device.numbers import Numbers
from tpu_compile.device.schemas import Schema
from tpu_compile.lowering.decompositions import decompositions
from tpu_compile.lowering.foreach import IN_PLACE
from tpu_compile.lowering.memory import WHOLE, read_window, write_window
from tpu_compile.lowering.program import dense_order
from tpu_compile.lowering.random import functionalize_random, rng_key

aten = torch.ops.aten
T = TypeVar("T")
_MOST_INTEGERS = 24


@dataclass(frozen=True)
class Source:
    """Where an input of a traced graph comes from: ``kind`` is "cell", "start", "float", "int" or "host"."""

    kind: str
    place: int


@dataclass(frozen=True)
class Traced:
    """A functional graph. Its results are ``new`` tensors, then the contents of the cells ``written`` to.

    ``tree`` is the op's result with every new tensor replaced by a Fresh, and every written argument by a Given.
    ``kinds`` names the dtype of the inputs that hold the call's numbers, by "float" and "int".
    """

    graph: GraphModule
    sources: tuple[Source | Numbers, ...]
    tree: Any
    new: int
    written: tuple[int, ...]
    draws: int


@dataclass(frozen=True)
class Fresh:
    """A new tensor among an op's results: its place, and the type that FakeTensor promises."""

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Given:
    """A result that is an argument of the call."""

    name: str


class NotTraced(Exception):
    """torch does not trace a call: its arguments are wrong, or only their values tell the result's shape. ``reason`` is
    what it raised."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def isolated(work: Callable[[], T]) -> T:
    """``work()`` in a thread of its own: a kernel runs under whatever dispatch state its caller has (autocast,
    functorch's transforms, excluded keys), and a trace must see none of it."""
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            with torch.no_grad():
                outcome.append((context.run(work), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="tpu_compile-trace")
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


_OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """FakeTensor logs a traceback for every call that it refuses, before it raises what the user gets to see."""
    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _fake_tensor_log.addFilter(elsewhere)
    try:
        yield
    finally:
        _fake_tensor_log.removeFilter(elsewhere)


def trace(schema: Schema, template: Template, call: Call, constant: bool = False) -> Traced | None:
    """The graph of one call. Its numbers become inputs; with ``constant`` they are built in.

    Returns:
        None if the trace computes with one of the numbers, so that they have to be built in.

    Raises:
        NotTraced: FakeTensor refuses the call.
    """
    if constant or not call.numbers:
        return _Trace(schema, template, call, call.numbers).run()
    if sum(type(n) is int for n in call.numbers) > _MOST_INTEGERS:
        return None
    first, second = (_Trace(schema, template, call, numbers.stand_ins(call.numbers, i)) for i in (0, 1))
    traced, other = first.run(), second.run()
    lifted = numbers.lift(traced.graph, other.graph, first.numbers, second.numbers)
    if lifted is None:
        return None
    return replace(traced, sources=(*traced.sources, *lifted))


class _Trace:
    """One trace of one call, with the given values in place of its numbers."""

    def __init__(self, schema: Schema, template: Template, call: Call, values: Sequence[float | int]) -> None:
        self.schema, self.template, self.call, self.numbers = schema, template, call, values
        self.written: list[TensorUse] = []
        for name in schema.written:
            given = schema.argument(name, template.args, template.kwargs)
            uses = [use for use in _leaves(given) if isinstance(use, TensorUse)]
            self.written += [use for use in uses if not use.signature.nothing]
        if any(
            s == 0 and n > 1 for u in self.written for n, s in zip(u.signature.size, u.signature.stride, strict=True)
        ):
            raise RuntimeError(_OVERLAP)

    def run(self) -> Traced:
        mode = TraceMode()
        with mode, torch._C._DisableAutocast(), quiet():
            inputs, sources = self._inputs()
            table = decompositions()
            try:
                graph = make_fx(torch.func.functionalize(self._body), decomposition_table=table)(*inputs)
            except Exception as error:
                raise NotTraced(error) from error
        _forget_overwritten(graph.graph)
        graph.graph.eliminate_dead_code()
        cells = tuple(dict.fromkeys(use.cell for use in self.written))
        _donate(graph.graph, cells, self.fresh)
        functionalize_random(graph)
        graph.recompile()
        draws = sum(node.target is rng_key for node in graph.graph.nodes)
        return Traced(graph, tuple(sources), self.tree, self.fresh, cells, draws)

    def _inputs(self) -> tuple[list[torch.Tensor], list[Source]]:
        """A fake for each distinct cell, for each start that a use has, and for each 0-dim CPU tensor."""
        call, signatures = self.call, {use.cell: use.signature for use in self._uses()}
        inputs = [_fake(signatures[i].layout.dims, signatures[i].layout.dtype) for i in range(len(call.cells))]
        sources = [Source("cell", i) for i in range(len(call.cells))]
        self._start: dict[int, int] = {}
        for place, start in enumerate(call.starts):
            if start is not None:
                self._start[place] = len(inputs)
                inputs.append(_fake((len(start),), torch.int32))
                sources.append(Source("start", place))
        self._first_host = len(inputs)
        for place, t in enumerate(call.hosts):
            inputs.append(torch.empty((), dtype=t.dtype, device="cpu"))
            sources.append(Source("host", place))
        return inputs, sources

    def _uses(self) -> Iterator[TensorUse]:
        for leaf in _leaves([self.template.args, list(self.template.kwargs.values())]):
            if isinstance(leaf, TensorUse):
                yield leaf

    def _body(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        self._values: dict[Any, torch.Tensor] = {}
        args = _map(self.template.args, lambda leaf: self._value(leaf, inputs))
        kwargs = {k: _map(v, lambda leaf: self._value(leaf, inputs)) for k, v in self.template.kwargs.items()}
        result = self._apply(args, kwargs)
        return [*self._results(result), *self._contents(inputs)]

    def _apply(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        step = IN_PLACE.get(self.schema.op)
        if step is None:
            return self.schema.op(*args, **kwargs)
        after = dict(zip(self.schema.written, step(*args, **kwargs), strict=False))
        for name, values in after.items():
            for target, value in zip(self.schema.argument(name, args, kwargs), values, strict=True):
                target.copy_(value)
        return None

    def _value(self, leaf: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if isinstance(leaf, NumberUse):
            return self.numbers[leaf.place]
        if isinstance(leaf, HostUse):
            return inputs[self._first_host + leaf.place]
        if not isinstance(leaf, TensorUse):
            return leaf
        key = self._identity(leaf)
        if key not in self._values:
            self._values[key] = self._read(leaf, inputs)
        return self._values[key]

    def _identity(self, use: TensorUse) -> Any:
        """Equal for two uses of what is the same tensor."""
        return use.cell, use.signature, self.call.starts[use.use], use.conj, use.neg

    def _read(self, use: TensorUse, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        base, signature = inputs[use.cell], use.signature
        if signature.plain and use not in self.written and not use.conj and not use.neg:
            return base
        size, stride, mode = signature.size, signature.stride, signature.mode
        value: torch.Tensor = read_window(base, self._start_of(use, inputs), size, stride, mode)
        value = value.conj_physical() if use.conj else value
        return value.neg() if use.neg else value

    def _start_of(self, use: TensorUse, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        place = self._start.get(use.use)
        return None if place is None else inputs[place]

    def _results(self, result: Any) -> list[torch.Tensor]:
        """New tensors in the order of their Fresh; notes the tree."""
        new: list[torch.Tensor] = []
        self.tree = _results_tree(self.schema.returned, result, new, {id(v) for v in self._values.values()})
        self.fresh = len(new)
        return new

    def _contents(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the written cells hold afterwards."""
        after: dict[int, torch.Tensor] = {}
        done = set()
        for use in self.written:
            if self._identity(use) in done:
                continue
            done.add(self._identity(use))
            value, signature = self._value(use, inputs), use.signature
            value = value.neg() if use.neg else value
            value = value.conj_physical() if use.conj else value
            size, stride, mode = signature.size, signature.stride, signature.mode
            if mode == WHOLE:
                order = dense_order(size, stride)
                after[use.cell] = value.permute(order).reshape(signature.layout.dims).contiguous()
            else:
                base = after.get(use.cell, inputs[use.cell])
                after[use.cell] = write_window(base, value, self._start_of(use, inputs), size, stride, mode)
        return list(after.values())


def _fake(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(dims), dtype=dtype, device="cpu")


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    return [_map(item, function) for item in tree] if isinstance(tree, list) else function(tree)


def _results_tree(returned: Sequence[str | None], result: Any, new: list[torch.Tensor], known: set[int]) -> Any:
    """``result`` with a Given for each written argument and a Fresh, added to ``new``, for each other tensor."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.resolve_conj().resolve_neg()
        if id(value) in known:
            value = value.clone()
        known.add(id(value))
        new.append(value)
        return Fresh(len(new) - 1, tuple(value.shape), tuple(value.stride()), value.dtype)

    if not returned:
        return None
    if len(returned) == 1:
        return Given(returned[0]) if returned[0] else _map(list(result) if isinstance(result, tuple) else result, leaf)
    return tuple(Given(n) if n else _map(r, leaf) for n, r in zip(returned, result, strict=True))


_VALUE_IGNORED = frozenset(
    {
        *(aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default),
        *(aten.uniform.default, aten.normal_functional.default, aten.exponential.default, aten.geometric.default),
        *(aten.cauchy.default, aten.log_normal.default, aten.bernoulli.p, aten.bernoulli.Tensor),
        *(aten.random.default, aten.random.to, getattr(aten.random, "from")),
    }
)
"""Ops whose first argument lends its shape only."""


def _forget_overwritten(graph: torch.fx.Graph) -> None:
    """Give ops that overwrite a tensor an empty one in its place: what it held needs no reading, nor even to exist."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _VALUE_IGNORED:
            like = node.args[0].meta["val"]
            with graph.inserting_before(node):
                empty = graph.call_function(aten.empty.memory_format, (list(like.shape),), {"dtype": like.dtype})
            empty.meta["val"] = like
            node.update_arg(0, empty)


def _donate(graph: torch.fx.Graph, cells: Sequence[int], new: int) -> None:
    """Write new contents into the cells that the graph reads, so that their buffers are taken over. A cell that is only
    written is no input at all: its contents are a plain result."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    results = list(output.args[0])
    for place, cell in enumerate(cells):
        base = placeholders[cell]
        if base.users and not (len(base.users) == 1 and output in base.users):
            with graph.inserting_before(output):
                copied = graph.call_function(aten.copy_.default, (base, results[new + place]))
            copied.meta["val"] = base.meta["val"]
            results[new + place] = copied
    output.args = (results,)
