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
from tpu_compile.device.storage import Cell, Layout, TensorMaker, layout_of, maker
from tpu_compile.device.tracing import Fresh, Given, Source, Traced, isolated
from tpu_compile.lowering.program import Program, TensorSpec
from tpu_compile.stats import counters

_KEPT_CONSTANTS = 4096


class Plan:
    """What a call with a certain key does. ``run`` takes any call with that key."""

    __slots__ = (
        "_build",
        "_cells",
        "_check",
        "_constants",
        "_draws",
        "_execute",
        "_layouts",
        "_takes",
        "_writes",
        "name",
    )

    def __init__(self, name: str, traced: Traced) -> None:
        self.name = name
        program = lower_graph(traced.graph, name, donate=True)
        compiled = runtime.executable(program, options_in_force())
        self._execute = compiled.executable.execute
        sources = [traced.sources[position] for position in program.arguments]
        only_cells = all(isinstance(s, Source) and s.kind == "cell" for s in sources)
        self._cells = tuple(s.place for s in sources) if only_cells else None
        self._takes = tuple(_taker(s) for s in sources)
        self._constants = tuple(compiled.client.put(t) for t in program.constants)
        self._draws = traced.draws if program.random else 0
        results = _results(program, traced)
        self._writes = tuple((cell, results[traced.new + i]) for i, cell in enumerate(traced.written))
        self._layouts = tuple(_buffer_layout(program.outputs[index]) for _, index in self._writes)
        self._build = _builder(traced.tree, program, results)
        self._check = program.checks

    def run(self, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the program on one call; returns what the op returns."""
        cells = call.cells
        if self._cells is not None:
            array = device.array
            buffers = [
                b if (b := cells[i].buffer).__class__ is array else contents.contents(cells[i]) for i in self._cells
            ]
        else:
            buffers = [take(call) for take in self._takes]
        if self._constants:
            buffers.extend(self._constants)
        if self._draws:
            seed = (
                device.generator.draw(self._draws) if call.generator is None else seed_from(call.generator, self._draws)
            )
            buffers.append(device.client.put(seed))
        outputs = self._execute(buffers)
        counters["executions"] += 1
        if self._check or device.synchronous:
            self._wait(outputs)
        for (cell, index), layout in zip(self._writes, self._layouts, strict=True):
            cells[cell].buffer = outputs[index]
            cells[cell].layout = layout
        return self._build(outputs, schema, args, kwargs)

    def _wait(self, outputs: list[Any]) -> None:
        device.client.ready(outputs)
        for check in self._check:
            check.function(contents.download(outputs[check.result]))


def _results(program: Program, traced: Traced) -> list[int]:
    """For each output of the graph, the program's result that holds it."""
    mutated = dict(program.mutated)
    indices = [r.index if r.index is not None else mutated[r.argument] for r in program.results]  # type: ignore[index]
    assert len(set(indices)) == len(indices), f"{program.name}: two results of one buffer"
    return indices


def _buffer_layout(spec: TensorSpec) -> Layout:
    order = spec.order if spec.stride else None
    return layout_of(tuple(spec.shape[i] for i in order) if order else spec.shape, spec.dtype)


# ---- inputs


def _taker(source: Source | Numbers) -> Callable[[Call], Any]:
    """Where an input's buffer comes from at each call."""
    if isinstance(source, Numbers):
        return _numbers(source)
    place = source.place
    if source.kind == "cell":
        return lambda call: contents.contents(call.cells[place])
    if source.kind == "start":
        return lambda call: constant(call.starts[place], torch.int32)
    return lambda call: constant(call.hosts[place].item(), call.hosts[place].dtype)


def _numbers(source: Numbers) -> Callable[[Call], Any]:
    places, dtype = source.places, source.dtype
    if len(places) == 1:
        (place,) = places
        return lambda call: constant(call.numbers[place], dtype)
    return lambda call: constant(tuple([call.numbers[i] for i in places]), dtype)


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
            kept = self._kept[key] = device.client.put(torch.tensor(value, dtype=dtype))
        return kept


constant = _Constants()
"""``constant(number or tuple, dtype)``: a buffer that holds it."""


# ---- outputs

Build = Callable[[list[Any], Schema, Sequence[Any], dict[str, Any]], Any]


def _builder(tree: Any, program: Program, results: Sequence[int]) -> Build:
    """How the program's results become what the op returns."""
    if isinstance(tree, Given):
        name = tree.name
        return lambda outputs, schema, args, kwargs: schema.argument(name, args, kwargs)
    if isinstance(tree, Fresh):
        make, index = _maker(tree, program, results)
        return lambda outputs, schema, args, kwargs: make(outputs[index])
    if isinstance(tree, (tuple, list)):
        parts, kind = [_builder(item, program, results) for item in tree], type(tree)
        return lambda outputs, *call: kind([part(outputs, *call) for part in parts])
    return lambda outputs, schema, args, kwargs: tree


def _maker(fresh: Fresh, program: Program, results: Sequence[int]) -> tuple[TensorMaker, int]:
    index = results[fresh.place]
    spec = program.outputs[index]
    stride = fresh.stride if spec.order is not None else TensorSpec.contiguous(fresh.shape, fresh.dtype).stride
    return maker(fresh.shape, stride, fresh.dtype), index


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
        fake = torch.empty(source.dims, dtype=source.dtype)
        return make_fx(lambda x: [body(x)])(fake)


def cells_of(tensors: Sequence[torch.Tensor]) -> list[Cell]:
    """The cells of `tpu` tensors."""
    return [t.untyped_storage()._tpu_cell for t in tensors]  # type: ignore[attr-defined]
