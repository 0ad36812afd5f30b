"""The call path: a plan made once for each executable, then bind, execute, unwrap. No logging and no allocation of
plans here.

CPU tensors come in and go out here; ``device/resident.py`` has the plan for `tpu` tensors. A tensor laid out as the
plan expects is lent to PJRT without a copy, and the call returns only when every result is ready: until then the
program may still be reading the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile.errors import BadCall
from tpu_compile.lowering.program import CARRIED, Program, TensorSpec
from tpu_compile.stats import counters


def draw_seed() -> torch.Tensor:
    """Two 64-bit words from torch's CPU generator: ``torch.manual_seed``, ``fork_rng`` and ``set_rng_state`` govern
    what comes next."""
    return torch.empty(2, dtype=torch.int64, device="cpu").random_().view(torch.uint64)


@dataclass(frozen=True)
class Residency:
    """Positions of the arguments, and of the graph's outputs, that are `tpu` tensors."""

    arguments: frozenset[int]
    results: frozenset[int]


class ArgumentPlan:
    """How one argument of the call becomes a PJRT buffer."""

    __slots__ = ("_kept", "_share", "dtype", "keep", "order", "position", "shape", "spec", "stride")

    def __init__(self, spec: TensorSpec, position: int, share: Callable[[torch.Tensor], Any], *, keep: bool) -> None:
        self.spec, self.position, self._share, self.keep = spec, position, share, keep
        self.shape, self.dtype = torch.Size(spec.shape), spec.dtype
        order = spec.order
        self.stride = spec.stride if order is not None else TensorSpec.contiguous(spec.shape, spec.dtype).stride
        self.order = None if order is None or order == tuple(range(len(order))) else order
        self._kept: tuple[int, Any] = (0, None)
        if self.dtype in CARRIED:
            self.keep, self._share = False, lambda t: share(t.to(CARRIED[t.dtype]))

    def buffer(self, t: torch.Tensor) -> Any:
        """The buffer of ``t``. A parameter's import is kept: as long as we hold it nobody else can get that address."""
        if self.keep:
            pointer, buffer = self._kept
            if (
                pointer == t.data_ptr()
                and pointer
                and t.stride() == self.stride
                and t.shape == self.shape
                and t.dtype is self.dtype
            ):
                return buffer
        return self._import(t)

    def _import(self, t: torch.Tensor) -> Any:
        if t.shape != self.shape or t.dtype is not self.dtype:
            raise BadCall(
                f"argument {self.position} is {t.dtype}{list(t.shape)}; the program was compiled for "
                f"{self.dtype}{list(self.shape)}. "
                "Call the compiled function through torch.compile, whose guards recompile for another type.",
                "INVALID_ARGUMENT",
            )
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        source = t
        if t.stride() != self.stride:
            t = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu").copy_(t.detach())
            counters["copied_arguments"] += 1
        buffer = self._share(t if self.order is None else t.permute(self.order))
        if self.keep and source is t:
            self._kept = (t.data_ptr(), buffer)
        return buffer


class ResultPlan:
    """How one PJRT buffer becomes the tensor that eager would have returned."""

    __slots__ = ("_back", "_fetch", "_gaps", "spec")

    def __init__(self, spec: TensorSpec, fetch: Callable[[Any], torch.Tensor]) -> None:
        self.spec = spec
        self._fetch = fetch if spec.dtype not in CARRIED else lambda buffer: fetch(buffer).to(spec.dtype)
        order = spec.order
        self._gaps = order is None
        plain = order is None or order == tuple(range(len(order)))
        self._back = None if plain else tuple(sorted(range(len(order or ())), key=(order or ()).__getitem__))

    def tensor(self, buffer: Any) -> torch.Tensor:
        """A tensor of the promised shape, dtype and strides."""
        t = self._fetch(buffer)
        if self._back is not None:
            t = t.permute(self._back)
        if self._gaps:
            t = _restride(t, self.spec)
        elif t.stride() != self.spec.stride:
            t = t.as_strided(self.spec.shape, self.spec.stride)
        return t


def _restride(t: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of ``t`` in memory with the strides that eager's view of a larger tensor has."""
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    strided.as_strided([1 if s == 0 else n for n, s in zip(spec.shape, spec.stride, strict=True)], spec.stride).copy_(
        t[tuple(slice(0, 1) if s == 0 else slice(None) for s in spec.stride)]
    )
    return strided


class CallPlan:
    """Everything a call of one Program does, decided beforehand."""

    def __init__(self, program: Program, executable: Any, client: Any, kept: frozenset[int] = frozenset()) -> None:
        self.program, self.executable = program, executable
        self._arguments = tuple(
            (position, ArgumentPlan(spec, position, client.share, keep=position in kept))
            for spec, position in zip(program.inputs, program.arguments, strict=True)
        )
        self._importers = tuple((position, plan.buffer) for position, plan in self._arguments)
        with _disable_current_modes():  # AOTAutograd compiles under a FakeTensorMode, which refuses real tensors
            self._constants = tuple(client.put(t) for t in program.constants)
        self._fetchers = tuple(ResultPlan(spec, client.fetch).tensor for spec in program.outputs)
        self._results = tuple((r.index, r.argument, r.value) for r in program.results)
        self._numbers = tuple(i for i, r in enumerate(program.results) if r.number)
        self._plain = all(r.index == i for i, r in enumerate(program.results)) and not self._numbers
        self._plain = self._plain and not program.mutated and not program.checks
        self._execute, self._ready, self._put = executable.execute, client.ready, client.put

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program on one call's arguments; returns the graph's outputs."""
        buffers = [take(arguments[position]) for position, take in self._importers]
        if self._constants:
            buffers.extend(self._constants)
        if self.program.random:
            buffers.append(self._put(draw_seed()))
        outputs = self._execute(buffers)
        counters["executions"] += 1
        self._ready(outputs)
        tensors = [fetch(buffer) for fetch, buffer in zip(self._fetchers, outputs, strict=True)]
        if self._plain:
            return tensors
        return self._unwrap(arguments, tensors)

    again = __call__
    """Run it on the arguments of the last call: nothing is saved here by knowing that."""

    def _unwrap(self, arguments: Sequence[Any], tensors: list[torch.Tensor]) -> list[Any]:
        for check in self.program.checks:
            check.function(tensors[check.result])
        for position, result in self.program.mutated:
            arguments[position].detach().copy_(tensors[result])
        results: list[Any] = [
            tensors[index] if index is not None else arguments[argument] if argument is not None else value
            for index, argument, value in self._results
        ]
        for i in self._numbers:
            results[i] = results[i].item()
        return results
