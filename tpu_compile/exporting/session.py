"""A loaded program's calls: the model's tensors stay on the device, those that are written to are donated and replaced,
and random ops draw anew from torch's generator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_compile.calling import ArgumentPlan, ResultPlan, draw_seed
from tpu_compile.executables import Compiled
from tpu_compile.exporting.manifest import StateEntry
from tpu_compile.lowering.program import Program, TensorSpec
from tpu_compile.stats import counters


class Store:
    """The model's tensors: as they were read, and on the device once a program has asked for them."""

    def __init__(self, entries: Sequence[StateEntry], tensors: Sequence[torch.Tensor]) -> None:
        self.entries, self._tensors = entries, list(tensors)
        self._buffers: dict[int, tuple[TensorSpec, Any]] = {}
        self.lock = threading.Lock()
        """Held during a call of a program that writes to some."""

    def buffer(self, index: int, spec: TensorSpec, client: Any, *, written: bool) -> Any:
        """A tensor on the device. One that is ``written`` to gets memory of its own: the program takes it over."""
        known = self._buffers.get(index)
        if known is None or known[0] != spec:
            put = client.put if written else client.share
            known = spec, ArgumentPlan(spec, index, put, keep=False).buffer(self.tensor(index))
            self._buffers[index] = known
        return known[1]

    def replace(self, index: int, spec: TensorSpec, buffer: Any) -> None:
        """Take the new contents that a program has left."""
        self._buffers[index] = spec, buffer

    def tensor(self, index: int, fetch: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
        """A tensor's contents as they are now; a copy if ``fetch`` takes them from the device."""
        if fetch is None or index not in self._buffers:
            return self._tensors[index]
        spec, buffer = self._buffers[index]
        return ResultPlan(spec, fetch).tensor(buffer).clone()


class Plan:
    """Everything a call of one program does, decided beforehand.

    ``arguments``: what each of the program's call arguments is: ``("state", index)`` or ``("input", index)``.
    """

    def __init__(self, built: Compiled, arguments: Sequence[tuple[str, int]], store: Store) -> None:
        self.built, self._store = built, store
        program, client = built.program, built.client
        self._places = [arguments[position] for position in program.arguments]
        written = {arguments[position] for position, _ in program.mutated}
        self._written = frozenset(index for kind, index in written if kind == "state")
        self._inputs = tuple(
            (kind, index, spec, ArgumentPlan(spec, index, client.share, keep=False) if kind == "input" else None)
            for (kind, index), spec in zip(self._places, program.inputs, strict=True)
        )
        self._constants = tuple(client.put(t) for t in program.constants)
        self._mutated = tuple((*arguments[position], result) for position, result in program.mutated)
        self._kept = frozenset(result for kind, _, result in self._mutated if kind == "state")
        self._results = tuple(ResultPlan(spec, client.fetch).tensor for spec in program.outputs)
        self._arguments = tuple(arguments)

    @property
    def program(self) -> Program:
        """What runs."""
        return self.built.program

    def __call__(self, flat: Sequence[Any]) -> list[Any]:
        """Run it on the flat arguments of a call; returns the flat results."""
        if not self._written:
            return self._run(flat)
        with self._store.lock:
            return self._run(flat)

    def _run(self, flat: Sequence[Any]) -> list[Any]:
        built, program, store = self.built, self.built.program, self._store
        buffers = [
            store.buffer(index, spec, built.client, written=index in self._written)
            if plan is None
            else plan.buffer(flat[index].detach())
            for kind, index, spec, plan in self._inputs
        ]
        buffers.extend(self._constants)
        if program.random:
            buffers.append(built.client.put(draw_seed()))
        outputs = built.executable.execute(buffers)
        counters["executions"] += 1
        built.client.ready(outputs)
        tensors = [None if i in self._kept else fetch(outputs[i]) for i, fetch in enumerate(self._results)]
        for check in program.checks:
            check.function(tensors[check.result])  # type: ignore[arg-type]
        self._write(flat, outputs, tensors)
        return [self._result(r, flat, tensors) for r in program.results]

    def _write(self, flat: Sequence[Any], outputs: Sequence[Any], tensors: Sequence[Any]) -> None:
        for kind, index, result in self._mutated:
            if kind == "state":
                self._store.replace(index, self._layout(result), outputs[result])
            else:
                flat[index].detach().copy_(tensors[result])

    def _layout(self, result: int) -> TensorSpec:
        return self.built.program.outputs[result]

    def _result(self, result: Any, flat: Sequence[Any], tensors: Sequence[Any]) -> Any:
        if result.index is not None:
            return tensors[result.index].item() if result.number else tensors[result.index]
        if result.argument is None:
            return result.value
        kind, index = self._arguments[result.argument]
        return flat[index] if kind == "input" else self._store.tensor(index, self.built.client.fetch)
