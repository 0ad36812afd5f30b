"""``tpu_compile.load``: an exported file as something to call."""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path
from typing import Any

import torch

from tpu_compile import compiler
from tpu_compile.errors import DamagedFile, DeviceError, ExportError
from tpu_compile.executables import Compiled
from tpu_compile.exporting import graphs, manifest, programs, structure, weights
from tpu_compile.exporting.archive import Archive
from tpu_compile.exporting.manifest import ExecutableEntry, Manifest, ProgramEntry
from tpu_compile.exporting.session import Plan, Store
from tpu_compile.lowering import fx
from tpu_compile.lowering.program import Program

log = logging.getLogger("tpu_compile")

_ELSEWHERE = frozenset({"topology", "device_assignment", "plugin", "plugin_build"})
"""Parts of a key that differ between a machine that has a TPU and one that compiled for it."""


def load(path: str | Path, *, weights: str | Path | None = None, host_code: bool = False) -> LoadedProgram:
    """Open a file of ``tpu_compile.export``, ready to be called. The model's code is not needed.

    Opening a file runs nothing of it: it is JSON, StableHLO and tensors, all checked. An executable for a TPU in it is
    used if it is for this device and these versions; else XLA compiles the StableHLO, as for any program, through the
    cache.

    Args:
        weights: where the weights are that the file refers to; by default, beside it. Their SHA-256 must be the one
            that the file names.
        host_code: also use an executable for this CPU, which is machine code that runs with your rights when the
            program is called: say so only for files you trust as you trust a program.

    Raises:
        DamagedFile: it is not what was written, or no such file.
        NewerFile: it was made by a newer version, or with a newer StableHLO.
        ExportError: its weights are not there, or it has no program for this platform.
    """
    archive = Archive(Path(path))
    found: Manifest = archive.reading(lambda: manifest.read(archive.manifest))
    tensors = archive.reading(lambda: _tensors(archive, found, weights))
    return LoadedProgram(archive, found, tensors, host_code=host_code)


def _tensors(archive: Archive, found: Manifest, path: str | Path | None) -> list[torch.Tensor]:
    file = archive.view(found.weights) if found.weights_inside else _beside(archive, found, path)
    named = weights.read(file)
    state = [weights.restored(named[s.names[0]], s.dtype, s.shape) for s in found.state]
    first = len(state)
    return [*state, *(named[f"constant.{i}"] for i in range(first, first + found.constants))]


def _beside(archive: Archive, found: Manifest, path: str | Path | None) -> memoryview:
    place = Path(path) if path is not None else archive.path.with_name(Path(found.weights).name)
    try:
        contents = bytearray(place.read_bytes())
    except OSError as error:
        raise ExportError(
            f"{archive.path} takes its weights from {place}: {error}. Say where they are: load(..., weights=PATH)."
        ) from error
    if hashlib.sha256(contents).hexdigest() != found.weights_sha256:
        raise DamagedFile(f"{place} does not hold the weights that {archive.path} was written with")
    return memoryview(contents)


class LoadedProgram:
    """A program from a file. It keeps what the model keeps: buffers that a call writes to are there in the next.

    Calls of a program that writes to its buffers take turns; others may run side by side.
    """

    def __init__(self, archive: Archive, found: Manifest, tensors: list[torch.Tensor], *, host_code: bool) -> None:
        self.manifest = found
        self._archive, self._host_code = archive, host_code
        self._constants, state = tensors, tensors[: len(found.state)]
        self._store = Store(found.state, state)
        self._programs = [self._program(entry) for entry in found.programs]
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._lock = threading.Lock()
        self._options = compiler.options_in_force()

    def __repr__(self) -> str:
        return f"LoadedProgram({self.manifest.name} from {self._archive.path})"

    def _program(self, entry: ProgramEntry) -> Program:
        def read() -> Program:
            constants = [self._constants[i] for i in entry.record["constants"]]
            artifact = bytes(self._archive.view(entry.member))
            return programs.load(entry.record, self.manifest.name, artifact, constants)

        return self._archive.reading(read)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, as the model would be called.

        Raises:
            BadCall: the arguments are not those it was exported for.
        """
        signature = self.manifest.signature
        flat = signature.flatten(args, kwargs)
        bindings = signature.bind(flat)
        results = self._plan(bindings)(flat)
        return structure.build(signature.returned, iter(results))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's parameters, buffers and constants as they are now, under all their names; CPU tensors."""
        fetch = compiler.runtime.client.fetch
        with self._store.lock:
            tensors = [self._store.tensor(i, fetch) for i in range(len(self.manifest.state))]
        return {n: t for entry, t in zip(self.manifest.state, tensors, strict=True) for n in entry.names}

    def as_text(self, dialect: str = "stablehlo") -> str:
        """Its (first) program as ``stablehlo``, or as ``hlo`` that is not yet optimised."""
        if dialect == "stablehlo":
            return fx.text(self._programs[0].bytecode)
        if dialect == "hlo":
            return compiler.runtime.client.hlo_text(self._programs[0].bytecode)  # type: ignore[no-any-return]
        raise ExportError(f"an exported program has no text in dialect {dialect!r}; say 'stablehlo' or 'hlo'")

    @property
    def origins(self) -> dict[tuple[int, ...], str]:
        """Where the executable for each binding of the sizes came from: ``file``, ``memory``, ``disk`` or ``xla``."""
        return {sizes: plan.built.origin for sizes, plan in self._plans.items()}

    def _plan(self, bindings: dict[str, int]) -> Plan:
        sizes = tuple(bindings.values())
        plan = self._plans.get(sizes)
        if plan is None:
            with self._lock:
                plan = self._plans.get(sizes) or Plan(self._built(bindings), self.manifest.arguments, self._store)
                self._plans[sizes] = plan
        return plan

    def _built(self, bindings: dict[str, int]) -> Compiled:
        """An executable: the file's if it fits this machine, else through the cache."""
        family = compiler.runtime.client.family
        index = self._stored(family, bindings)
        if index is None:
            return compiler.runtime.executable(self._refined(bindings, family), self._options)
        for entry in self.manifest.executables:
            if entry.program == index and (built := self._from_file(entry, self._programs[index])):
                return built
        return compiler.runtime.executable(self._programs[index], self._options)

    def _stored(self, family: str, bindings: dict[str, int]) -> int | None:
        """The stored program for a platform and sizes. Those that call no handlers of the host run anywhere."""
        fitting = [i for i, entry in enumerate(self.manifest.programs) if entry.sizes == bindings]
        for i in fitting:
            if family in self.manifest.programs[i].families:
                return i
        if family not in self.manifest.unlowered:
            for i in fitting:
                if not self._programs[i].ffi_handlers:
                    return i
        if self.manifest.graph is None:
            reason = self.manifest.unlowered.get(family, f"its operators need handlers that {family} does not have")
            raise ExportError(f"{self._archive.path} has no program for {family}: {reason}")
        return None

    def _refined(self, bindings: dict[str, int], family: str) -> Program:
        """The symbolic graph lowered for one binding of its sizes."""
        assert self.manifest.graph is not None, "only a file with sizes that vary comes here"
        record = self._archive.json(self.manifest.graph)

        def read() -> torch.fx.GraphModule:
            constants = [self._constants[i] for i in record["constants"]]
            return graphs.load(record["nodes"], constants, bindings)

        graph = self._archive.reading(read)
        return compiler.lower_graph(graph, self.manifest.name, {}, family, donate=True)

    def _from_file(self, entry: ExecutableEntry, program: Program) -> Compiled | None:
        client = compiler.runtime.client
        if entry.family != client.family or (entry.family == "cpu" and not self._host_code):
            return None
        here = {k: v for k, v in client.key_parts(self._options).items() if k not in _ELSEWHERE}
        if any(entry.parts.get(label) != part for label, part in here.items()):
            return None
        key = compiler.cache_key(program, self._options, client)
        try:
            loaded = client.load(bytes(self._archive.view(entry.member)), program.name, self._options)
        except DeviceError as error:
            log.warning("%s: its executable for %s is not used: %s", self._archive.path, entry.target, error)
            return None
        return Compiled(program, loaded, key, client, "file")
