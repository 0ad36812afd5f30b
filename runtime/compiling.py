"""What a compile is told and what its failure says, for every client: jaxlib's CompileOptions, and typed errors.

Apart from ``client.py`` because the worker that compiles for an absent TPU uses it too, and loads no torch.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
from jaxlib import xla_client as xc

from tpu_compile.config import config, environment
from tpu_compile.errors import CompilationFailed, ConfigError, DeviceError
from tpu_compile.runtime import keys, status
from tpu_compile.runtime.options import CompileOptions

_PINNED: dict[str, dict[str, bool]] = {
    "cpu": {"xla_cpu_enable_fast_math": False, "xla_cpu_enable_fast_min_max": False},
    "cuda": {"xla_gpu_enable_fast_min_max": False},
}
"""Options that keep NaN and infinity as torch has them, whatever XLA's defaults become; XLA_FLAGS may name them."""

_BLAMES_AN_OPTION = ("No such compile option", "While setting option", "into flag xla_")


def xla_compile_options(options: CompileOptions, family: str, assignment: list[list[int]]) -> Any:
    """jaxlib's CompileOptions. ``assignment``: device ids, [replica][partition]."""
    result = xc.CompileOptions()
    result.device_assignment = xc.DeviceAssignment.create(np.array(assignment, dtype=np.int32))
    result.env_option_overrides = list(_overrides(options, family).items())
    build = result.executable_build_options
    for target in (result, build):
        target.num_replicas, target.num_partitions = options.num_replicas, options.num_partitions
    build.use_spmd_partitioning = build.use_shardy_partitioner = options.num_partitions > 1
    if options.optimization_level >= 0:
        build.optimization_level = options.optimization_level
    return result


def _overrides(options: CompileOptions, family: str) -> dict[str, bool | str]:
    named = keys.flags(environment("XLA_FLAGS"))
    pinned = {"xla_allow_excess_precision": False, **_PINNED.get(family, {})}
    given = {name: _option_value(text) for name, text in options.xla_options}
    if options.excess_precision:
        given.setdefault("xla_allow_excess_precision", True)
    return {**{name: value for name, value in pinned.items() if name not in named}, **given}


def _option_value(text: str) -> bool | str:
    """XLA parses numbers out of text itself, but takes a truth value only as one."""
    return {"true": True, "false": False}.get(text.strip().lower(), text)


@cache
def toolchain_parts() -> dict[str, str]:
    """The compiler that this process has loaded and the flags that the environment gives it, labelled for the cache
    key."""
    return {
        "jaxlib": jaxlib.__version__,  # not what is installed: an upgrade does not reach a running process
        "jaxlib_build": keys.library_build(str(keys.largest_library(Path(jaxlib.__file__).parent))),
        "xla_flags": keys.flags_part("XLA_FLAGS"),
        "libtpu_init_args": keys.flags_part("LIBTPU_INIT_ARGS"),
    }


def compile_error(message: str, bytecode: bytes, name: str, options: CompileOptions) -> DeviceError | ConfigError:
    """The error of a failed compile. Keeps the program and the message in a folder, unless an option is to blame."""
    if any(words in message for words in _BLAMES_AN_OPTION):
        return ConfigError(f"xla_options={dict(options.xla_options)}: {status.excerpt(message)}")
    if "No FFI handler registered" in message:
        message += "\nThe handlers that runtime.ffi registers reach only the CPU client inside jaxlib, not a plugin's."
    folder = _dump(bytecode, message, name)
    where = status.source_line(message)
    what = f"XLA could not compile {name}{f' ({where})' if where else ''}"
    text = f"{what}: {status.excerpt(message)}\nThe program and the message: {folder}"
    code = status.code(message)
    if code == "RESOURCE_EXHAUSTED":
        return status.out_of_memory(text, message, folder)
    return CompilationFailed(text, code, folder)


def _dump(bytecode: bytes, message: str, name: str) -> str:
    parent = config.dump_to or None
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    readable = "".join(c if c.isalnum() else "_" for c in name)[:60]
    folder = Path(tempfile.mkdtemp(prefix=f"tpu_compile-{readable}-", dir=parent))
    (folder / ("program.mlirbc" if bytecode[:4] == b"ML\xefR" else "program.mlir")).write_bytes(bytecode)
    (folder / "error.txt").write_text(message)
    return str(folder)
