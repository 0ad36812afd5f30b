"""The process that holds libtpu for ``topology.py``: compiles what comes in on stdin, answers on stdout.

    python -m tpu_compile.runtime.tpu_worker             compiles
    python -m tpu_compile.runtime.tpu_worker FOLDER      says how much memory one program takes, and ends

The second has XLA write what it does into FOLDER, and answers when it has placed the program's buffers: after that
comes the code of each fusion, which takes most of a compile's time and memory, and decides nothing about the buffers.

The compile-only client takes a parsed module where every other client takes bytes: this is the one place outside
``lowering`` that parses MLIR.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any

from tpu_compile.config import environment, set_environment, set_environment_default
from tpu_compile.runtime import plugin
from tpu_compile.runtime.executable import MemoryAnalysis, cost_analysis, memory_analysis
from tpu_compile.runtime.options import CompileOptions
from tpu_compile.runtime.topology import receive, send

_M_ARENA_MAX = -8


@cache
def _api() -> Any:
    from jaxlib import xla_client as xc

    api = xc.load_pjrt_plugin_dynamically("tpu", plugin.find("tpu").path)
    xc.initialize_pjrt_plugin("tpu")  # without it libtpu aborts the process at the first topology
    return api


@cache
def _topology(name: str) -> tuple[Any, list[Any]]:
    from jaxlib import xla_client as xc

    found: Any = xc.make_c_api_device_topology(_api(), name, **_host_bounds(name))
    return found, found._make_compile_only_devices()


def _host_bounds(name: str) -> dict[str, list[int]]:
    """libtpu divides a slice into hosts of 2x2x1 chips: one smaller than a host has to be declared a host itself."""
    grid = re.fullmatch(r"[^:]+:(\d+)x(\d+)(?:x(\d+))?", name)
    if not grid:
        return {}
    sizes = [int(size or 1) for size in grid.groups()]
    return {"chips_per_host_bounds": sizes} if sizes[0] * sizes[1] * sizes[2] < 4 else {}


@cache
def _context() -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    context, upstream = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(upstream)
    context.append_dialect_registry(upstream)
    context.load_all_available_dialects()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def _parse(bytecode: bytes) -> Any:
    from jaxlib.mlir import ir

    with _context():
        try:
            return ir.Module.parse(bytecode)
        except ir.MLIRError as error:
            raise ValueError(str(error)) from error


def _open(request: Mapping[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
    found, devices = _topology(request["topology"])
    return {
        "device_kind": devices[0].device_kind,
        "platform_version": found.platform_version,
        "devices": len(devices),
    }, b""


def _compile(request: Mapping[str, Any], bytecode: bytes) -> tuple[dict[str, Any], bytes]:
    from jaxlib import xla_client as xc

    from tpu_compile.runtime.compiling import xla_compile_options

    given = request["options"]
    options = CompileOptions(**{**given, "xla_options": tuple(map(tuple, given["xla_options"]))})
    _, devices = _topology(request["topology"])
    parts = options.num_partitions
    used = devices[: options.num_replicas * parts]
    assignment = [[device.id for device in used[i : i + parts]] for i in range(0, len(used), parts)]
    what = _parse(bytecode), xc.DeviceList(tuple(used)), xla_compile_options(options, "tpu", assignment)
    compiled = devices[0].client.compile(*what)
    text = "\n".join(module.to_string() for module in compiled.hlo_modules()).encode()
    memory = asdict(memory_analysis(compiled))
    described = {"cost": cost_analysis(compiled), "memory": memory, "text_bytes": len(text), "resident": _resident()}
    return described, text + compiled.serialize() if request["code"] else text


def _placed(folder: Path) -> int | None:
    """Bytes of HBM of the buffers of the program that is being compiled, once all of them have their place."""
    first = next(iter(sorted(folder.glob("module_*.before_optimizations.txt"))), None)
    program = first.name.partition(".")[2].removesuffix(".before_optimizations.txt") if first else ""
    if not program or not list(folder.glob(f"module_*.{program}.after_optimizations_after_buffer_assignment.txt")):
        return None
    (report,) = folder.glob(f"module_*.{program}.after_optimizations-memory-usage-report.txt")  # written before that
    found = re.search(r"\(color=0\)\s+Total bytes: (\d+)", report.read_text())
    return int(found[1]) if found else None


def _answer_when_placed(folder: Path, outgoing: IO[bytes]) -> None:
    """Answer, and end the process, as soon as memory is known. A compile cannot be stopped in another way."""
    while (hbm := _placed(folder)) is None:
        time.sleep(0.05)
    if _answer.acquire(blocking=False):
        send(outgoing, {"hbm": hbm, "resident": _resident()}, b"")
        os._exit(0)


_answer = threading.Lock()
"""Held by whoever answers in a process that answers once."""


def _resident() -> int:
    """The most memory that this process has held, in bytes.

    Linux alone has a libtpu. ``ru_maxrss`` would not do: a process inherits there what its parent held at the fork.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024  # type: ignore[index]


_REQUESTS = {"open": _open, "compile": _compile}


def serve(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    while True:
        try:
            request, payload = receive(incoming)
        except EOFError:
            return
        send(outgoing, *_replied(request, payload))


def _replied(request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return _REQUESTS[request["do"]](request, payload)
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}, b""


def serve_memory(folder: Path, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer one request to compile with what its buffers take, or with the error."""
    request, payload = receive(incoming)
    threading.Thread(target=_answer_when_placed, args=(folder, outgoing), daemon=True).start()
    reply, _ = _replied(request, payload)
    if "memory" in reply:  # compiled before the other thread saw it
        reply["hbm"] = MemoryAnalysis(**reply["memory"]).held
    if _answer.acquire(blocking=False):
        send(outgoing, reply, b"")


def _end_with(parent: int) -> None:
    """End when the process that asked is gone, also in the middle of a compile, which nobody waits for then."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _one_arena() -> None:
    """Let glibc's malloc keep one heap. With one for each of libtpu's threads a quarter of the memory of a compile was
    free, and lay in heaps that nobody used any more."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


if __name__ == "__main__":
    _one_arena()
    # Read when jaxlib and libtpu are loaded. Without the first three libtpu asks the cloud's metadata server who it is,
    # and hangs or aborts; without the last a machine-wide lock, which the user's process may hold, refuses this one.
    # They are for compile-only use: a real TPU must never see them.
    set_environment_default(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TF_CPP_MIN_LOG_LEVEL="1",
    )
    set_environment(ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder:
        set_environment(XLA_FLAGS=f"{environment('XLA_FLAGS')} --xla_dump_to='{folder}' --xla_dump_hlo_as_text")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Native code prints to file descriptor 1: the answers go to a copy of it, and prints to the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if folder:
        serve_memory(folder, sys.stdin.buffer, answers)
    else:
        serve(sys.stdin.buffer, answers)
