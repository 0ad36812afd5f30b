"""The PJRT client: compiles and loads programs, and moves tensors in and out of its memory.

jaxlib's usual ways of making an array (DLPack import, ``disassemble_into_single_device_arrays``) give each array an
abstract value of JAX's, and so import all of jax: most of a second at the first call. Arrays here come from
``batched_device_put`` and from result handlers, with a sharding and an abstract value of our own, which nothing reads.
A test asserts that a compile and a call leave jax unimported.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import ml_dtypes
import numpy as np
import torch
from jaxlib import xla_client as xc
from torch.utils import dlpack

from tpu_compile.errors import BadCall, ConfigError, DeviceError
from tpu_compile.runtime import keys, plugin, status
from tpu_compile.runtime.compiling import compile_error, toolchain_parts, xla_compile_options
from tpu_compile.runtime.executable import Buffer, Executable, raise_forked
from tpu_compile.runtime.options import CompileOptions
from tpu_compile.stats import counters

_jax: Any = importlib.import_module("jaxlib._jax")  # no stubs: an import statement is now an error to mypy, now not
_device_put = xc.batched_device_put
_block = xc.batched_block_until_ready
_export = _jax.buffer_to_dlpack_managed_tensor
_to_numpy = xc.ArrayImpl._single_device_array_to_np_array_did_copy
_ZERO_COPY = xc.HostBufferSemantics.ZERO_COPY
_DURING_CALL = xc.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
_ALIGNMENT = 64
"""Bytes; PJRT copies what is aligned to less."""

_AVAL = SimpleNamespace(shape=(), dtype=np.dtype(np.float32), weak_type=False)
"""Every buffer's abstract value. PJRT has the real type; jaxlib only carries this one along."""

_FOREIGN: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    dtype: (torch.int16 if dtype.itemsize == 2 else torch.uint8, np.dtype(getattr(ml_dtypes, name)))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (dtype := getattr(torch, name))
}
"""Dtypes that torch does not hand to numpy itself: the integer that holds their bits, and numpy's name for them."""
_FROM_NUMPY = {numpy: (bits, dtype) for dtype, (bits, numpy) in _FOREIGN.items()}


class _OneDevice(xc.SingleDeviceSharding):  # type: ignore[misc]
    """The sharding of everything here, with the two members that ``batched_device_put`` asks jax's own class for."""

    memory_kind = None

    def _to_xla_hlo_sharding(self, ndim: int) -> Any:
        return xc.HloSharding.replicate()


class _Lost:
    """What a forked child has in place of jaxlib's client."""

    def __getattr__(self, name: str) -> NoReturn:
        raise_forked()


class Client:
    """One device of one platform.

    Attributes:
        platform: ``cpu``, ``tpu``, ``cuda`` or what a plugin calls itself.
        family: ``cpu``, ``tpu`` or ``cuda``: all that a lowering may know of the device.
        device_kind: the device's model, such as ``TPU v5 lite``.
        host_memory: buffers live in the host's memory, so that tensors cross without a copy.
        device: jaxlib's device.
    """

    def __init__(self, raw: Any, identity: Mapping[str, str]) -> None:
        self._raw = raw
        self._identity = dict(identity)
        self._executables: WeakSet[Executable] = WeakSet()
        self.device = raw.local_devices()[0]
        self.platform: str = raw.platform
        self.family = {"gpu": "cuda", "rocm": "cuda"}.get(self.platform, self.platform)
        self.device_kind: str = self.device.device_kind
        self.host_memory = self.family == "cpu"
        self._devices = xc.DeviceList((self.device,))
        self._device_list = [self.device]
        self._sharding = _OneDevice(self.device)
        self._result_handler = xc.array_result_handler(_AVAL, self._sharding, True, True)

    def __repr__(self) -> str:
        return f"Client({self.platform}, {self.device_kind})"

    # Programs

    def compile(self, bytecode: bytes, name: str, options: CompileOptions) -> Executable:
        """Compile and load a StableHLO program given as MLIR bytecode (or MLIR text).

        Raises:
            OutOfMemory: the program does not fit the device.
            ConfigError: an XLA option that does not exist, or a value that it cannot take.
            CompilationFailed: XLA rejected the program; its ``dump`` holds the program and the whole message.
        """
        try:
            loaded = self._raw.compile_and_load(bytecode, self._devices, self.compile_options(options))
        except (RuntimeError, ValueError) as error:
            raise compile_error(str(error), bytecode, name, options) from error
        return self._executable(name, loaded)

    def load(self, blob: bytes, name: str, options: CompileOptions) -> Executable:
        """Load what ``Executable.serialize`` gave.

        Raises:
            DeviceError: the bytes are not a program for this device.
        """
        try:
            loaded = self._raw.deserialize_executable(blob, self._devices, self.compile_options(options))
        except (RuntimeError, ValueError) as error:
            raise status.device_error(error, f"{name} cannot be loaded from its serialized form") from error
        return self._executable(name, loaded, blob)

    def _executable(self, name: str, loaded: Any, blob: bytes | None = None) -> Executable:
        executable = Executable(name, loaded, self._result_handler, blob, host_memory=self.host_memory)
        self._executables.add(executable)
        return executable

    def lose(self) -> None:
        """Forget the device, in a forked child: what would wait for ever raises instead."""
        self._raw = _Lost()
        for executable in self._executables:
            executable.lose()

    def compile_options(self, options: CompileOptions) -> Any:
        """jaxlib's CompileOptions for this device."""
        return xla_compile_options(options, self.family, [[self.device.id]])

    def hlo_text(self, bytecode: bytes) -> str:
        """A StableHLO program as HLO, as XLA reads it: nothing is optimised yet."""
        return str(_computation(bytecode).as_hlo_text())

    def hlo_cost_analysis(self, bytecode: bytes) -> dict[str, float]:
        """XLA's estimate for a StableHLO program that is not optimised yet, under JAX's names."""
        return dict(_jax.hlo_module_cost_analysis(self._raw, _computation(bytecode).as_hlo_module()))

    def key_parts(self, options: CompileOptions) -> dict[str, str]:
        """Everything besides the program that decides the binary, each with a label."""
        return {
            **self._identity,
            "platform": self.platform,
            "platform_version": self._raw.platform_version,
            "device_kind": self.device_kind,
            "device_assignment": f"[[{self.device.id}]] of {self._raw.device_count()}",
            **toolchain_parts(),
            **({"host_cpu": keys.host_cpu()} if self.family == "cpu" else {}),
            **options.key_parts(),
        }

    # Tensors

    def put(self, t: torch.Tensor) -> Buffer:
        """A copy of a CPU tensor on the device. The tensor may be overwritten at once.

        Raises:
            BadCall: the tensor is not dense and on the CPU, or has a dtype that PJRT lacks.
            OutOfMemory: it does not fit.
        """
        try:
            return self._copy(t)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _refused(t, error) from error

    def share(self, t: torch.Tensor) -> Buffer:
        """The memory of a CPU tensor as a buffer; a copy unless it is row-major, 64-byte aligned and the host's.

        The buffer keeps the memory alive. A program reads it while it runs: overwriting the tensor changes its results.

        Raises:
            BadCall, OutOfMemory: as ``put``.
        """
        try:
            if not self.host_memory or t.data_ptr() % _ALIGNMENT or not t.is_contiguous() or t.is_conj() or t.is_neg():
                return self._copy(t)
            return _device_put(_AVAL, self._sharding, [_as_numpy(t)], self._device_list, True, False, _ZERO_COPY, True)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _refused(t, error) from error

    def _copy(self, t: torch.Tensor) -> Buffer:
        array = _as_numpy(t.resolve_conj().resolve_neg())
        buffer = _device_put(_AVAL, self._sharding, [array], self._device_list, True, True, _DURING_CALL, True)
        counters["h2d_bytes"] += array.nbytes
        return buffer

    def fetch(self, buffer: Buffer) -> torch.Tensor:
        """A buffer as a CPU tensor, once it is computed: its own memory if that is the host's, else a copy.

        Raises:
            DeviceError: the program that makes the buffer failed, or the buffer was donated.
        """
        try:
            if self.host_memory:
                return dlpack.from_dlpack(_export(buffer, None))
            return _copy_to_host(buffer)
        except (RuntimeError, ValueError) as error:
            raise status.device_error(error, "A result cannot be fetched") from error

    def ready(self, buffers: Sequence[Buffer]) -> None:
        """Wait until all buffers are computed.

        Raises:
            DeviceError: a program that makes one of them failed.
        """
        try:
            _block(buffers)
        except (RuntimeError, ValueError) as error:
            raise status.device_error(error, "A program failed while it ran") from error


def _computation(bytecode: bytes) -> Any:
    return _jax.mlir.mlir_module_to_xla_computation(bytecode)


def _refused(t: torch.Tensor, error: Exception) -> DeviceError:
    what = f"A {t.dtype} tensor of shape {tuple(t.shape)} on {t.device}"
    # torch's own complaints (sparse, meta, another device) carry no status.
    if status.code(str(error)) == "UNKNOWN":
        return BadCall(f"{what} cannot become a buffer: {error}")
    return status.device_error(error, f"{what} cannot be put on the device")


def _as_numpy(t: torch.Tensor) -> np.ndarray[Any, Any]:
    if t.requires_grad:
        t = t.detach()
    foreign = _FOREIGN.get(t.dtype)
    return t.numpy() if foreign is None else t.view(foreign[0]).numpy().view(foreign[1])


def _copy_to_host(buffer: Buffer) -> torch.Tensor:
    array, _ = _to_numpy(buffer)
    counters["d2h_bytes"] += array.nbytes
    # jaxlib keeps the array it returns, read-only: the caller gets memory of his own.
    foreign = _FROM_NUMPY.get(array.dtype)
    if foreign is None:
        return torch.from_numpy(array.copy())
    bits, dtype = foreign
    return torch.from_numpy(array.view(np.int16 if bits is torch.int16 else np.uint8).copy()).view(dtype)


# The process's clients


class _Runtime:
    """The clients this process has opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, tuple[tuple[str, str], ...]], Client] = {}
        self._forked = False
        os.register_at_fork(after_in_child=self._lose)

    def _lose(self) -> None:
        self._lock = threading.Lock()
        self._forked = bool(self._clients)
        for client in self._clients.values():
            client.lose()

    def open(self, platform: str, options: Mapping[str, str]) -> Client:
        key = (platform or plugin.default_platform(), tuple(sorted(options.items())))
        with self._lock:
            if self._forked:
                raise_forked()
            if key not in self._clients:
                self._clients[key] = _open(key[0], options)
            return self._clients[key]


_runtime = _Runtime()


def open_client(platform: str, plugin_options: Mapping[str, str]) -> Client:
    """See ``tpu_compile.runtime.open_client``."""
    return _runtime.open(platform, plugin_options)


def _open(platform: str, options: Mapping[str, str]) -> Client:
    if platform != "cpu":
        return Client(*plugin.open_plugin(platform, options))
    if options:
        raise ConfigError(f"The embedded CPU client takes no plugin options, got {', '.join(options)}")
    # A call waits for its results anyway: on the calling thread it saves the hand-over to another, 20 of 26 µs for a
    # small program.
    identity = {"plugin": "embedded", "plugin_build": toolchain_parts()["jaxlib_build"]}
    return Client(xc.make_cpu_client(asynchronous=False), identity)


def register_custom_call(name: str, function: Any) -> None:
    """Register a typed FFI handler with the CPU client inside jaxlib, now or when it is opened."""
    if name not in xc.custom_call_targets("cpu"):
        xc.register_custom_call_target(name, function, "cpu", 1)
