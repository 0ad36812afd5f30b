"""The call path of compiled code on `tpu` tensors: buffers go in as they are, results become new cells unseen.

Nothing is waited for and nothing crosses to the host, unless the graph itself takes or returns CPU tensors, or holds a
check that looks at a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile.calling import ArgumentPlan, Residency, ResultPlan
from tpu_compile.device import contents
from tpu_compile.device.glance import Glance, Seen
from tpu_compile.device.programs import duplicate
from tpu_compile.device.state import device
from tpu_compile.device.storage import Layout, TensorMaker, cell_of, layout_of, maker
from tpu_compile.errors import BadCall, OutOfMemory
from tpu_compile.lowering.program import Program, TensorSpec
from tpu_compile.stats import counters


def buffer_layout(spec: TensorSpec) -> Layout:
    """How a program lays out an input or output of this spec: in its order if it is dense, else row-major."""
    order = spec.order
    return layout_of(tuple([spec.shape[i] for i in order]) if order else spec.shape, spec.dtype)


class ResidentArgument:
    """How one `tpu` tensor becomes the buffer that the program expects."""

    __slots__ = ("_position", "_spec", "dtype", "layout", "shape", "stride")

    def __init__(self, spec: TensorSpec, position: int) -> None:
        self._spec, self._position = spec, position
        self.layout, self.dtype = buffer_layout(spec), spec.dtype
        self.shape = torch.Size(spec.shape)
        self.stride = spec.stride if spec.order is not None else TensorSpec.contiguous(spec.shape, spec.dtype).stride

    def buffer(self, t: torch.Tensor) -> Any:
        """The tensor's own buffer if it is laid out as the program expects; else that of a copy."""
        if self.resides(t):
            return cell_of(t).buffer  # type: ignore[union-attr]
        return self._laid_out(t)

    def resides(self, t: torch.Tensor) -> bool:
        """Whether the tensor's cell holds exactly what the program expects."""
        cell = getattr(t.untyped_storage(), "_tpu_cell", None)
        return (
            cell is not None
            and cell.layout is self.layout
            and contents.contents(cell) is not None
            and t.stride() == self.stride
            and t.shape == self.shape
            and not (t.is_conj() or t.is_neg())
        )

    def _laid_out(self, t: torch.Tensor) -> Any:
        cell = cell_of(t)
        if cell is None or t.shape != self.shape or t.dtype is not self.dtype:
            raise BadCall(
                f"argument {self._position} is {t.dtype}{list(t.shape)} on {t.device}; the program was compiled for "
                f"{self.dtype}{list(self.shape)} on tpu:0. Call the compiled function through torch.compile, whose "
                "guards recompile for another type.",
                "INVALID_ARGUMENT",
            )
        if t.stride() == self.stride and contents.covers(t, cell) is not None and not (t.is_conj() or t.is_neg()):
            if cell.layout is not self.layout:
                contents.seen_as(cell, t)
            return contents.contents(cell)
        counters["copied_arguments"] += 1
        copy = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="tpu").copy_(t.detach())
        return contents.contents(cell_of(copy))  # type: ignore[arg-type]


class ResidentPlan:
    """Everything a call of one Program does, where some arguments or results are `tpu` tensors."""

    def __init__(
        self, program: Program, executable: Any, client: Any, placed: Residency, guarded: frozenset[int] = frozenset()
    ) -> None:
        """``guarded``: positions of arguments whose sizes, strides and dtype the caller answers for."""
        self.program, self.executable = program, executable
        inputs = list(enumerate(zip(program.inputs, program.arguments, strict=True)))
        self._resident = {p: ResidentArgument(spec, p) for _, (spec, p) in inputs if p in placed.arguments}
        self._hosts = tuple(
            (index, p, ArgumentPlan(spec, p, client.put, keep=False).buffer)
            for index, (spec, p) in inputs
            if p not in placed.arguments
        )
        self._glance = self._at_a_glance(guarded)
        self._constants = tuple(_constant(t, client) for t in program.constants)
        self._donated = frozenset(program.donated)
        self._results: tuple[tuple[Any, int | None, int | None, object], ...] = tuple(
            (_exporter(program.outputs[r.index], client, i in placed.results), r.index, None, None)
            if r.index is not None
            else (None, None, r.argument, r.value)
            for i, r in enumerate(program.results)
        )
        self._numbers = tuple(i for i, r in enumerate(program.results) if r.number)
        self._mutated = tuple((p, r, self._writer(p, r, placed)) for p, r in program.mutated)
        self._direct = self._taken_over()
        self._apart = len({result for _, result in program.mutated}) == len(program.mutated)
        on_host = any(r.index is not None and i not in placed.results for i, r in enumerate(program.results))
        self._waits = on_host or bool(program.checks) or any(p not in placed.arguments for p, _ in program.mutated)
        self._execute, self._client = executable.execute, client

    def _writer(self, position: int, result: int, placed: Residency) -> Any:
        spec = self.program.outputs[result]
        if position not in placed.arguments:
            return None
        return ResidentArgument(spec, position), _maker(spec)

    def _at_a_glance(self, guarded: frozenset[int]) -> Glance:
        donated = {self.program.arguments[i] for i in self.program.donated if i < len(self.program.arguments)}
        return Glance(
            {position: argument.layout for position, argument in self._resident.items()},
            written=[position for position, _ in self.program.mutated if position in self._resident],
            donated=[position for position in self._resident if position in donated],
            guarded=guarded,
        )

    def _taken_over(self) -> tuple[int, ...] | None:
        """The results that overwrite an argument, if all of these are inputs that lie as the program writes them."""
        specs = dict(zip(self.program.arguments, self.program.inputs, strict=True))
        for position, result in self.program.mutated:
            spec = self.program.outputs[result]
            if position not in self._resident or spec.order is None or spec != specs[position]:
                return None
        return tuple(result for _, result in self.program.mutated)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program on one call's arguments; returns the graph's outputs."""
        if device.runner is not None:
            device.runner.flush()
        return self._run(arguments, self._glance.look(arguments))

    def again(self, arguments: Sequence[Any]) -> list[Any]:
        """Run it on the arguments of the last call, none of which was exchanged or changed its shape since."""
        if device.runner is not None:
            device.runner.flush()
        return self._run(arguments, self._glance.again() or self._glance.look(arguments))

    def _run(self, arguments: Sequence[Any], seen: Seen | None) -> list[Any]:
        buffers = self._looked_at(arguments) if seen is None else seen.buffers
        for index, position, take in self._hosts:
            buffers.insert(index, take(arguments[position]))
        if self._donated and not (seen is not None and seen.distinct and self._apart):
            self._separate(buffers)
        buffers.extend(self._constants)
        if self.program.random:
            buffers.append(self._client.put(device.generator.draw(self.program.draws)))
        direct = self._direct if seen is not None else None
        if direct is None:
            resident = [writer is not None and writer[0].resides(arguments[p]) for p, _, writer in self._mutated]
        try:
            outputs = self._execute(buffers)
        except OutOfMemory as error:
            error.add_note(contents.living())
            raise
        counters["executions"] += 1
        if self._waits or device.synchronous:
            self._client.ready(outputs)
            for check in self.program.checks:
                check.function(self._client.fetch(outputs[check.result]))
        if direct is None:
            for (position, result, writer), inside in zip(self._mutated, resident, strict=True):
                self._overwrite(arguments[position], outputs[result], writer, inside)
        elif direct and seen is not None:
            self._glance.write(seen, [outputs[result] for result in direct])
        return self._exported(arguments, outputs)

    def _looked_at(self, arguments: Sequence[Any]) -> list[Any]:
        """The buffers of `tpu` arguments, each looked at by itself; together the next time, if all fit."""
        if self._resident and all(argument.resides(arguments[p]) for p, argument in self._resident.items()):
            self._glance.learn(arguments)
        return [argument.buffer(arguments[p]) for p, argument in self._resident.items()]

    def _separate(self, buffers: list[Any]) -> None:
        """One buffer may not be passed twice if it is donated once: give the others a copy."""
        if len(set(map(id, buffers))) == len(buffers):
            return
        given = {id(buffers[i]) for i in self._donated}
        for i, buffer in enumerate(buffers):
            if i not in self._donated and id(buffer) in given:
                buffers[i] = duplicate(buffer, buffer_layout(self.program.inputs[i]))

    def _overwrite(self, t: torch.Tensor, buffer: Any, writer: Any, direct: bool) -> None:
        if writer is None:
            t.detach().copy_(self._client.fetch(buffer).view(t.shape))
        elif direct:
            cell = cell_of(t)
            assert cell is not None
            cell.buffer = buffer
        else:
            t.detach().copy_(writer[1](buffer))

    def _exported(self, arguments: Sequence[Any], outputs: list[Any]) -> list[Any]:
        made: dict[int, Any] = {}
        results: list[Any] = []
        for export, index, argument, value in self._results:
            if index is None:
                results.append(arguments[argument] if argument is not None else value)
            else:
                if index not in made:
                    made[index] = export(outputs[index])
                results.append(made[index])
        for i in self._numbers:
            results[i] = results[i].item()
        return results


def _exporter(spec: TensorSpec, client: Any, resident: bool) -> Callable[[Any], torch.Tensor]:
    if not resident:
        return ResultPlan(spec, client.fetch).tensor
    make = _maker(spec)
    if spec.order is not None:
        return make

    # Axes that an expanded result repeats hold one element.
    held = tuple(1 if not step else size for size, step in zip(spec.shape, spec.stride, strict=True))

    def restrided(buffer: Any) -> torch.Tensor:
        value = make(buffer)[tuple(slice(size) for size in held)]
        kept = torch.empty_strided(held, spec.stride, dtype=spec.dtype, device="tpu").copy_(value)
        return kept.as_strided(spec.shape, spec.stride)

    return restrided


def _maker(spec: TensorSpec) -> TensorMaker:
    """Tensors of a spec, on a buffer as the program lays it out."""
    stride = spec.stride if spec.order is not None else TensorSpec.contiguous(spec.shape, spec.dtype).stride
    return maker(spec.shape, stride, spec.dtype)


def _constant(t: torch.Tensor, client: Any) -> Any:
    cell = cell_of(t)
    with _disable_current_modes():  # AOTAutograd compiles under a FakeTensorMode, which refuses real tensors
        return client.put(t if cell is None else contents.to_cpu(t, cell))
