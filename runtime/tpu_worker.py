"""The process that holds libtpu for ``topology.py``: compiles what comes in on stdin, answers on stdout.

The compile-only client takes a parsed module where every other client takes bytes: this is the one place outside
``lowering`` that parses MLIR.
"""

from __future__ import annotations

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

from tpu_compile.config import set_environment_default
from tpu_compile.runtime import plugin
from tpu_compile.runtime.executable import cost_analysis, memory_analysis
from tpu_compile.runtime.options import CompileOptions
from tpu_compile.runtime.topology import receive, send


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
    return described, text + compiled.serialize()


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
        try:
            reply, data = _REQUESTS[request["do"]](request, payload)
        except (RuntimeError, ValueError) as error:
            reply, data = {"error": str(error)}, b""
        send(outgoing, reply, data)


def _end_with(parent: int) -> None:
    """End when the process that asked is gone, also in the middle of a compile, which nobody waits for then."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    # Read when jaxlib and libtpu are loaded. Without the first three libtpu asks the cloud's metadata server who it is,
    # and hangs or aborts; without the fourth a machine-wide lock refuses a second process. They are for compile-only
    # use: a real TPU must never see them.
    set_environment_default(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TF_CPP_MIN_LOG_LEVEL="1",
    )
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Native code prints to file descriptor 1: the answers go to a copy of it, and prints to the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
