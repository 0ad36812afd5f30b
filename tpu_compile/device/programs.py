"""Plans: a traced call compiled, with all that running it again takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tpu_compile.compiler import lower_graph, options_in_force, runtime
from tpu_compile.device import contents
from tpu_compile.device.calls import Call
from tpu_compile.device.generator import seed_from
from tpu_compile.device.numbers import Numbers
from tpu_compile.device.schemas import Schema
from tpu_compile.device.state import device
from tpu_compile.device.storage import Layout, TensorMaker, layout_of, maker
from tpu_compile.device.tracing import Fresh, Given, Source, Traced, isolated
from tpu_compile.errors import OutOfMemory
from tpu_compile.lowering.memory import write_window
from tpu_compile.lowering.program import Program, TensorSpec, dense_order, row_major
from tpu_compile.stats import counters

_KEPT_CONSTANTS = 1024


class Plan:
    """What a call with a certain key does. ``run`` takes any call with that key; the first compiles the program.

    The program's outputs are new tensors, in the order of their Fresh, then the contents of the cells in ``written``.
    ``results`` is how many they are; ``parts`` says that it writes a part of a cell only.
    ``recipe`` has a pair for each input: the place of a cell, or a function of the call that gives a host value.
    """

    __slots__ = (
        "_arranged",
        "_cells",
        "_checks",
        "_constants",
        "_execute",
        "_takes",
        "build",
        "name",
        "parts",
        "program",
        "recipe",
        "results",
        "traced",
        "writes",
    )

    def __init__(self, name: str, traced: Traced) -> None:
        """Lower the graph.

        Raises:
            UnsupportedOp, UnsupportedDtype: no rule for part of it.
        """
        self.name, self.traced = name, traced
        self.program = lower_graph(traced.graph, name, donate=True)
        self.build = _builder(traced.tree)
        self.recipe = tuple(_recipe(traced.sources[position]) for position in self.program.arguments)
        self.writes = tuple((cell, traced.new + i) for i, cell in enumerate(traced.written))
        self.results = traced.new + len(self.writes)
        self.parts = any(node.target is write_window for node in traced.graph.graph.nodes)
        self._execute: Any = None

    def compile(self) -> None:
        """Compile the program, or load it."""
        program, client = self.program, device.client
        compiled = runtime.executable(program, options_in_force())
        only_cells = all(take is None for _, take in self.recipe)
        self._cells = tuple(place for place, _ in self.recipe) if only_cells else None
        self._takes = tuple(_cell_taker(place) if take is None else _putter(take) for place, take in self.recipe)
        self._constants = tuple(client.put(t) for t in program.constants)
        self._arranged = arranger(program)
        self._checks = program.checks
        self._execute = compiled.executable.execute

    def run(self, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one call, as the mode in force does; returns what the op returns."""
        if device.runner is not None:
            return device.runner.run(self, call, schema, args, kwargs)
        return self.execute(call, schema, args, kwargs)

    def execute(self, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the program on one call; returns what the op returns."""
        if self._execute is None:
            self.compile()
        cells = call.cells
        if self._cells is not None:
            array, ready = device.array, contents.contents
            buffers = [b if (b := cells[i].buffer).__class__ is array else ready(cells[i]) for i in self._cells]
        else:
            buffers = [take(call) for take in self._takes]
        if self._constants:
            buffers.extend(self._constants)
        draws = self.traced.draws
        if draws:
            buffers.append(device.client.put(seed_from(call.generator, device.generator, draws)))
        try:
            outputs = self._execute(buffers)
        except OutOfMemory as error:
            error.add_note(contents.living())
            raise
        counters["executions"] += 1
        if self._checks:
            device.client.ready(outputs)
            for check in self._checks:
                check.function(contents.download(outputs[check.result]))
        if self._arranged is not None:
            outputs = self._arranged(outputs)
        for cell, index in self.writes:
            cells[cell].buffer = outputs[index]
        return self.build(outputs, schema, args, kwargs)


def arranger(program: Program) -> Callable[[list[Any]], list[Any]] | None:
    """What makes a program's results the graph's outputs, each a buffer of its own; None if they are that already."""
    mutated = dict(program.mutated)
    indices = [r.index if r.index is not None else mutated[r.argument] for r in program.results]  # type: ignore[index]
    if indices == list(range(len(indices))):
        return None
    # A value that a graph returns twice is one result of its program.
    again = [(place, program.outputs[i]) for place, i in enumerate(indices) if i in indices[:place]]
    copies = [(place, _copy(program_layout(spec))) for place, spec in again]

    def arranged(results: list[Any]) -> list[Any]:
        outputs = [results[i] for i in indices]
        for place, copy in copies:
            outputs[place] = copy(outputs[place])
        return outputs

    return arranged


def program_layout(spec: TensorSpec) -> Layout:
    """How a program lays out an input or output of this spec: in its order if it is dense, else row-major."""
    order = spec.order
    return layout_of(tuple([spec.shape[i] for i in order]) if order else spec.shape, spec.dtype)


# ---- inputs


Host = tuple[Any, torch.dtype]
"""A number, or a tuple of numbers, and the dtype that they have on the device."""
Take = Callable[[Call], Host]


def _recipe(source: Source | Numbers) -> tuple[int, Take | None]:
    """Where an input's buffer comes from at each call: the cell at a place, or what a function takes from the call."""
    if isinstance(source, Numbers):
        return 0, _numbers(source)
    place = source.place
    if source.kind == "cell":
        return place, None
    if source.kind == "start":
        return 0, lambda call: (call.starts[place], torch.int32)
    return 0, lambda call: (call.hosts[place].item(), call.hosts[place].dtype)


def _cell_taker(place: int) -> Callable[[Call], Any]:
    return lambda call: contents.contents(call.cells[place])


def _putter(take: Take) -> Callable[[Call], Any]:
    return lambda call: constant(*take(call))


def _numbers(source: Numbers) -> Take:
    places, dtype = source.places, source.dtype
    if len(places) == 1:
        (place,) = places
        return lambda call: (call.numbers[place], dtype)
    return lambda call: (tuple([call.numbers[i] for i in places]), dtype)


class _Constants:
    """Small host values that are on the device already. A value is told from its equals by type and sign."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        key = (value, dtype) if value else (str(value), dtype)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _KEPT_CONSTANTS:
                self._kept.clear()
            kept = self._kept[key] = device.client.put(torch.tensor(value, dtype=dtype, device="cpu"))
        return kept


constant = _Constants()
"""``constant(number or tuple, dtype)``: a buffer that holds it."""


# ---- outputs

Build = Callable[[list[Any], Schema, Sequence[Any], dict[str, Any]], Any]


def _builder(tree: Any) -> Build:
    """How a program's outputs become what the op returns."""
    if isinstance(tree, Given):
        name = tree.name
        return lambda outputs, schema, args, kwargs: schema.argument(name, args, kwargs)
    if isinstance(tree, Fresh):
        make, place = _maker(tree), tree.place
        return lambda outputs, schema, args, kwargs: make(outputs[place])
    if isinstance(tree, (tuple, list)):
        parts, kind = [_builder(item) for item in tree], type(tree)
        return lambda outputs, *call: kind([part(outputs, *call) for part in parts])
    return lambda outputs, schema, args, kwargs: tree


def _maker(fresh: Fresh) -> TensorMaker:
    """Tensors of a result's type. Strides that no dense memory has become row-major, as the program lays them out."""
    dense = dense_order(fresh.shape, fresh.stride) is not None
    return maker(fresh.shape, fresh.stride if dense else row_major(fresh.shape), fresh.dtype)


# ---- programs that no op asks for


@cache
def reinterpretation(source: Layout, target: Layout) -> Callable[[Any], Any]:
    """A function of one buffer: its bytes as another layout of as many."""

    def body(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        return (flat if source.dtype == target.dtype else flat.view(target.dtype)).reshape(target.dims)

    return single(body, source, f"reinterpret_{str(source.dtype)[6:]}_as_{str(target.dtype)[6:]}")


@cache
def widening(source: Layout, target: Layout) -> Callable[[Any], Any]:
    """A function of one buffer: a flat one with zeros added up to ``target``."""
    more = target.numel - source.numel
    return single(lambda x: torch.nn.functional.pad(x.reshape(-1), (0, more)), source, "widen")


def duplicate(buffer: Any, layout: Layout) -> Any:
    """A copy of a buffer."""
    return _copy(layout)(buffer)


@cache
def _copy(layout: Layout) -> Callable[[Any], Any]:
    return single(torch.clone, layout, "copy")


def single(body: Callable[[torch.Tensor], torch.Tensor], source: Layout, name: str) -> Callable[[Any], Any]:
    """A compiled function of one buffer of layout ``source``."""
    graph = isolated(lambda: _one_argument(body, source))
    program = lower_graph(graph, name)
    execute = runtime.executable(program, options_in_force()).executable.execute

    def run(buffer: Any) -> Any:
        counters["executions"] += 1
        return execute([buffer])[0]

    return run


def _one_argument(body: Callable[[torch.Tensor], torch.Tensor], source: Layout) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        fake = torch.empty(source.dims, dtype=source.dtype, device="cpu")
        return make_fx(lambda x: [body(x)])(fake)
