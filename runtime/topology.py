"""A TPU that is not there as a compile target: libtpu's compile-only client, in a worker process.

    target = topology("v5e:2x2")
    program = target.compile(bytecode, "graph 0", CompileOptions())
    program.as_text(), program.cost_analysis(), program.memory_analysis()

libtpu can hang or abort the process that loads it, and wants its environment set before: the worker is where that
happens. One worker serves all topologies of this process and is started again after a crash; ``workers(2)`` allows two.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any, NoReturn, TypeVar

from tpu_compile.errors import ConfigError, DeviceError, MissingDependency
from tpu_compile.runtime import plugin, status
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.runtime.options import CompileOptions

GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""What libtpu compiles for; it may know newer ones, and is asked."""

WORKER = "tpu_compile.runtime.tpu_worker"
_EXAMPLES = "v5e:1x1, v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x1, tpu7x:2x2x1"
_HEADER = struct.Struct("<QQ")
_TAIL = 3000
_GROWN = 2 << 30
"""Bytes of memory with which a worker is not kept: libtpu gives back little of what a compile took, and the next one
comes on top of it."""
_T = TypeVar("_T")
_Reply = tuple[dict[str, Any], bytes]


def topology(name: str) -> Topology:
    """A TPU slice by its name, ``<generation>:<chips>x<chips>[x<chips>]``.

    Raises:
        MissingDependency: libtpu is not installed.
        ConfigError: no such generation, or a grid that it does not come in.
        DeviceError: libtpu does not start, or crashed; the message ends with what it wrote.
    """
    library = plugin.libtpu()
    if library is None:
        raise MissingDependency("libtpu", "Compiling for a TPU", "'tpu-compile[tpu]'")
    # libtpu takes no name for the machine it believes to be on.
    reply, _ = _workers.request({"do": "open", "topology": name or " "}, b"", f"opening {name}")
    if "error" in reply:
        if status.code(reply["error"]) != "INVALID_ARGUMENT":
            raise status.device_error(RuntimeError(reply["error"]), f"opening {name}")
        raise ConfigError(
            f"No TPU topology is called {name!r}: {status.excerpt(reply['error']).rstrip('.')}. "
            f"Generations: {', '.join(GENERATIONS)}. Names look like {_EXAMPLES}."
        )
    return Topology(name, reply["device_kind"], reply["platform_version"], library.version, reply["devices"])


@dataclass(frozen=True)
class CompileOnlyExecutable:
    """A program compiled for a TPU that is not attached. It can be inspected and stored, not run.

    Args:
        name: what errors call it.
        text: the optimised, scheduled HLO.
        cost: XLA's estimate, by JAX's names.
        memory: bytes it needs on each chip.
        blob: the serialized executable, for ``Client.load`` where the TPU is.
    """

    name: str
    text: str
    cost: Mapping[str, float]
    memory: MemoryAnalysis
    blob: bytes

    def as_text(self) -> str:
        """The optimised, scheduled HLO."""
        return self.text

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate: ``flops``, ``bytes accessed``, ``optimal_seconds``, … under JAX's names."""
        return dict(self.cost)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes the program needs on each chip."""
        return self.memory

    def serialize(self) -> bytes:
        """The compiled program as bytes."""
        return self.blob


@dataclass(frozen=True)
class Topology:
    """A TPU slice to compile for.

    Args:
        name: such as ``v5e:2x2``.
        device_kind: the chip, such as ``TPU v5 lite``.
        platform_version: what libtpu says of its build.
        libtpu_version: its wheel's version.
        device_count: devices in the slice (two a chip on some generations).
    """

    name: str
    device_kind: str
    platform_version: str
    libtpu_version: str
    device_count: int
    platform: str = "tpu"
    family: str = "tpu"

    def compile(
        self, bytecode: bytes, name: str, options: CompileOptions, *, code: bool = True
    ) -> CompileOnlyExecutable:
        """Compile a StableHLO program given as MLIR bytecode (or MLIR text).

        Args:
            code: whether the serialized executable is wanted, which is most of the bytes.

        Raises:
            OutOfMemory: it does not fit the chip; ``needed`` and ``available`` are bytes.
            ConfigError: an XLA option that does not exist, or more partitions than the slice has devices.
            CompilationFailed: XLA rejected the program, or libtpu crashed over it.
        """
        reply, payload = self._asked(_workers.request, bytecode, name, options, code)
        cut = reply["text_bytes"]
        memory = MemoryAnalysis(**reply["memory"])
        return CompileOnlyExecutable(name, payload[:cut].decode(), reply["cost"], memory, payload[cut:])

    def hbm(self, bytecode: bytes, name: str, options: CompileOptions) -> int:
        """Bytes of HBM that a program's arguments, results and temporaries take, in a fraction of the time and memory
        of compiling it: the compiler is stopped when it has placed them, before it makes any code.

        Raises:
            OutOfMemory, ConfigError, CompilationFailed: as ``compile``.
        """
        reply, _ = self._asked(_workers.request_once, bytecode, name, options, False)
        return int(reply["hbm"])

    def _asked(
        self, ask: Callable[..., _Reply], bytecode: bytes, name: str, options: CompileOptions, code: bool
    ) -> _Reply:
        wanted = options.num_replicas * options.num_partitions
        if wanted > self.device_count:
            raise ConfigError(f"{self.name} has {self.device_count} devices, and the program is for {wanted}")
        request = {"do": "compile", "topology": self.name, "options": asdict(options), "code": code}
        doing = f"compiling {name} for {self.name}"
        reply, payload = _blaming(lambda: ask(request, bytecode, doing), bytecode, name, options)
        if "error" in reply:
            raise _compile_error(reply["error"], bytecode, name, options)
        return reply, payload

    def key_parts(self, options: CompileOptions) -> dict[str, str]:
        """Everything besides the program that decides the binary, each with a label."""
        from tpu_compile.runtime.compiling import toolchain_parts

        return {
            "plugin": f"tpu {self.libtpu_version}",
            "platform": self.platform,
            "platform_version": self.platform_version,
            "device_kind": self.device_kind,
            "topology": self.name,
            "device_assignment": f"{options.num_replicas}x{options.num_partitions} of {self.device_count}",
            **toolchain_parts(),
            **options.key_parts(),
        }


def _blaming(call: Callable[[], _T], bytecode: bytes, name: str, options: CompileOptions) -> _T:
    """``call``, with a crash of the worker reported as this program's failure to compile."""
    try:
        return call()
    except WorkerCrashed as error:
        raise _compile_error(str(error), bytecode, name, options) from error


def _compile_error(message: str, bytecode: bytes, name: str, options: CompileOptions) -> Exception:
    from tpu_compile.runtime.compiling import compile_error

    return compile_error(message, bytecode, name, options)


# The worker


class WorkerCrashed(DeviceError):
    """The process that holds libtpu ended while it worked; the message ends with what it wrote."""


class _Worker:
    """One process with libtpu in it, asked one thing at a time."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.resident = os.getpid(), 0
        self._written = 0  # what the log held when the last request had been answered
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _end)
        # Its own session: Ctrl-C is for the user's process, which then ends the worker. -P: the user's folder may
        # hold a file called like a module of ours.
        command = [sys.executable, "-P", "-m", WORKER, *arguments]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._stop = weakref.finalize(self, _end, self._process, self._log, self.pid)

    def request(self, header: Mapping[str, Any], payload: bytes, doing: str) -> _Reply:
        assert self._process.stdin and self._process.stdout
        try:
            send(self._process.stdin, header, payload)
            reply = receive(self._process.stdout)
            self._written = os.fstat(self._log.fileno()).st_size
            return reply
        except (BrokenPipeError, EOFError):
            self._crashed(doing)
        except BaseException:
            self._stop()  # an interrupted conversation cannot be taken up again
            raise

    def _crashed(self, doing: str) -> NoReturn:
        code = self._process.wait()
        self._log.seek(self._written)
        tail = _telling(self._log.read().decode(errors="replace").strip())
        self._stop()
        what = f"libtpu ended its process ({_describe(code)}) while {doing}"
        raise WorkerCrashed(f"ABORTED: {what}. It wrote:\n{tail}", "ABORTED")

    def end(self) -> None:
        self._stop()

    @property
    def alive(self) -> bool:
        return self._stop.alive and self._process.poll() is None


def _telling(log: str) -> str:
    """The end of a log; but what libtpu says of a signal stands above a stack that can be longer than that."""
    signal = log.rfind("*** SIG")
    return log[-_TAIL:] if signal < 0 else log[signal : signal + _TAIL]


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _end(process: subprocess.Popen[bytes], log: IO[bytes], owner: int) -> None:
    """End the worker and close what leads to it. A forked child only closes: the worker is its parent's."""
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # or Popen complains that nobody waited for it
    for stream in (process.stdin, process.stdout, log):
        if stream:
            stream.close()


class _Workers:
    """This process's workers, started when first needed; a forked child and a crash each get a new one."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.limit, self.memory, self._busy, self._largest = 1, 0, 0, 0
        self._idle: list[_Worker] = []
        self._changed = threading.Condition()

    def request(self, header: Mapping[str, Any], payload: bytes, doing: str) -> _Reply:
        with self._lent() as worker:
            return self._answered(worker, header, payload, doing)

    def request_once(self, header: Mapping[str, Any], payload: bytes, doing: str) -> _Reply:
        """The answer of a worker that is told a folder to write to, and answers once."""
        with tempfile.TemporaryDirectory(prefix="tpu-compile-") as folder, self._lent(folder) as worker:
            return self._answered(worker, header, payload, doing)

    def _answered(self, worker: _Worker, header: Mapping[str, Any], payload: bytes, doing: str) -> _Reply:
        reply, data = worker.request(header, payload, doing)
        worker.resident = reply.get("resident", worker.resident)
        self._largest = max(self._largest, worker.resident)
        return reply, data

    def _free(self) -> bool:
        """Whether one more may work. How much memory a compile takes is known after the first one."""
        fits = 0 < self._largest * (self._busy + 1) <= self.memory
        return not self._busy or (self._busy < self.limit and fits)

    @contextmanager
    def _lent(self, *arguments: str) -> Iterator[_Worker]:
        """A worker; with arguments one that is started with them, and ended."""
        with self._changed:
            self._changed.wait_for(self._free)
            self._busy += 1
            worker = self._idle.pop() if self._idle and not arguments else None
        try:
            if worker is None or not worker.alive:
                worker = _Worker(*arguments)
            yield worker
        finally:
            with self._changed:
                self._busy -= 1
                if worker and (arguments or worker.resident > _GROWN):
                    worker.end()
                elif worker and worker.alive:
                    self._idle.append(worker)
                self._changed.notify_all()

    def dismiss(self) -> None:
        """End the idle workers but the one that every process keeps."""
        with self._changed:
            spare, self._idle = self._idle[1:], self._idle[:1]
        for worker in spare:
            worker.end()


_workers = _Workers()


@contextmanager
def workers(count: int, memory: int) -> Iterator[None]:
    """Let ``count`` threads compile at once in the block, each in a process of its own, as long as these processes will
    take no more than ``memory`` bytes together."""
    before = _workers.limit, _workers.memory
    _workers.limit, _workers.memory = count, memory
    try:
        yield
    finally:
        _workers.limit, _workers.memory = before
        _workers.dismiss()


# The conversation: two lengths, a JSON header, a payload


def send(stream: IO[bytes], header: Mapping[str, Any], payload: bytes) -> None:
    """Write one message."""
    text = json.dumps(header).encode()
    left = memoryview(_HEADER.pack(len(text), len(payload)) + text + payload)
    while left:
        left = left[stream.write(left) :]
    stream.flush()


def receive(stream: IO[bytes]) -> _Reply:
    """Read one message.

    Raises:
        EOFError: the other side ended.
    """
    text_size, payload_size = _HEADER.unpack(_exactly(stream, _HEADER.size))
    return json.loads(_exactly(stream, text_size)), _exactly(stream, payload_size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        # Unbuffered pipes (a fork must not inherit half a message) give what there is.
        if not (chunk := stream.read(size - len(data))):
            raise EOFError
        data += chunk
    return bytes(data)
