"""``torch.tpu``: the device's functions, under the names that ``torch.cuda`` has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.config import config
from tpu_compile.device.meter import meter as _meter
from tpu_compile.device.state import device as _state
from tpu_compile.device.untraced import outside_graphs

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_mode",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "mode",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_mode",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

_Device = torch.device | str | int | None
default_generator = _state.generator
_initialized = True
"""Activation checkpointing saves the random state of devices that say so."""


def is_available() -> bool:
    """True: without a TPU the device runs on the CPU client, or on the plugin that TPU_COMPILE_PLATFORM names."""
    return True


def is_initialized() -> bool:
    """True: what needs a client opens it."""
    return True


def init() -> None:
    """Open the client now instead of at the first tensor."""
    if not _state.opened:
        _state.open()


def _is_in_bad_fork() -> bool:
    return False


# ---- which device


def device_count() -> int:
    """1: a process has one tpu device."""
    return 1


def current_device() -> int:
    """0."""
    return 0


def set_device(device: _Device) -> None:
    """Nothing to choose.

    Raises:
        RuntimeError: another index than 0.
    """
    _index(device)


def _index(device: _Device) -> int:
    index = device if isinstance(device, int) else torch.device(device or "tpu").index or 0
    if index not in (0, -1):
        raise RuntimeError(
            f"The process has one tpu device, tpu:0; index {index} does not exist. Start one process for each device."
        )
    return 0


class device(contextlib.AbstractContextManager[None]):
    """``with torch.tpu.device(0):`` does nothing, and refuses other indices."""

    def __init__(self, device: _Device) -> None:
        _index(device)

    def __exit__(self, *_: object) -> None:
        return None


class device_of(device):
    """The same, for the device of a tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class DeviceProperties:
    """``total_memory`` in bytes, 0 where the platform does not say."""

    name: str
    platform: str
    total_memory: int


def get_device_properties(device: _Device = None) -> DeviceProperties:
    """What the client says of its device."""
    _index(device)
    client = _state.client
    return DeviceProperties(client.device_kind, client.platform, int(_client_memory().get("bytes_limit", 0)))


def get_device_name(device: _Device = None) -> str:
    """The device's kind, such as ``TPU v5 lite`` or ``cpu``."""
    return get_device_properties(device).name


def get_device_capability(device: _Device = None) -> dict[str, Any]:
    """Nothing: what CUDA's compute capability decides is decided by XLA here."""
    _index(device)
    return {}


# ---- waiting


@outside_graphs
def synchronize(device: _Device = None) -> None:
    """Wait until everything that was asked of the device is done.

    Raises:
        DeviceError: a program failed meanwhile.
    """
    _index(device)
    if _state.opened:
        from tpu_compile.device import waiting

        waiting.synchronize()


class Stream:
    """The device runs everything in one order: all streams are that one."""

    def __init__(self, device: _Device = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("tpu", _index(device))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        synchronize()
        return True

    def wait_event(self, event: Event) -> None:
        return None

    def wait_stream(self, stream: Stream) -> None:
        return None

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """A point in the device's order. With ``enable_timing`` recording one waits for it."""

    def __init__(self, device: _Device = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.device = torch.device("tpu", _index(device))
        self._timing, self._time = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        if self._timing:
            synchronize()
            self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        return None

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events that were made with ``enable_timing``."""
        if not (self._time and end_event._time):
            raise RuntimeError("Both events must be made with enable_timing=True and recorded before.")
        return (end_event._time - self._time) * 1e3


def current_stream(device: _Device = None) -> Stream:
    """The one stream."""
    return Stream(device)


def default_stream(device: _Device = None) -> Stream:
    """The one stream."""
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Nothing to choose."""


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """``with torch.tpu.stream(s):`` does nothing."""
    yield


# ---- memory


@outside_graphs
def memory_allocated(device: _Device = None) -> int:
    """Bytes of all living storages."""
    _index(device)
    return _meter.bytes


@outside_graphs
def max_memory_allocated(device: _Device = None) -> int:
    """The most bytes that storages had at once."""
    _index(device)
    return _meter.peak


@outside_graphs
def memory_reserved(device: _Device = None) -> int:
    """Bytes that the client has taken, where it says; else those of the storages."""
    return int(_client_memory().get("bytes_reserved", _meter.bytes))


@outside_graphs
def max_memory_reserved(device: _Device = None) -> int:
    """The most bytes that the client has taken, where it says; else the storages' peak."""
    return int(_client_memory().get("peak_bytes_in_use", _meter.peak))


@outside_graphs
def memory_stats(device: _Device = None) -> dict[str, int]:
    """The counts above under CUDA's names, and what the client says under its own."""
    return {
        "allocated_bytes.all.current": _meter.bytes,
        "allocated_bytes.all.peak": _meter.peak,
        "allocation.all.current": _meter.cells,
        "allocation.all.allocated": _meter.made,
        **{name: int(value) for name, value in _client_memory().items()},
    }


def _client_memory() -> dict[str, Any]:
    return (_state.client.device.memory_stats() or {}) if _state.opened else {}


@outside_graphs
def reset_peak_memory_stats(device: _Device = None) -> None:
    """Start the peaks anew."""
    _meter.peak = _meter.bytes


def empty_cache() -> None:
    """Nothing to give back: a buffer is freed when its last tensor dies."""


# ---- random numbers


@outside_graphs
def manual_seed(seed: int) -> None:
    """Start the device's sequence of random numbers that belongs to ``seed``."""
    default_generator.manual_seed(seed)


@outside_graphs
def manual_seed_all(seed: int) -> None:
    """The same: there is one device."""
    default_generator.manual_seed(seed)


@outside_graphs
def seed() -> None:
    """Start a sequence from the system's entropy."""
    default_generator.seed()


@outside_graphs
def seed_all() -> None:
    """The same: there is one device."""
    default_generator.seed()


@outside_graphs
def initial_seed() -> int:
    """The seed of the sequence in use."""
    return default_generator.initial_seed()


@outside_graphs
def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The generator's state, as a uint8 CPU tensor."""
    _index(device)
    return default_generator.get_state()


@outside_graphs
def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Continue from a state that ``get_rng_state`` gave."""
    _index(device)
    default_generator.set_state(new_state)


@outside_graphs
def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices: one."""
    return [get_rng_state()]


@outside_graphs
def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Continue from what ``get_rng_state_all`` gave."""
    for state in new_states:
        set_rng_state(state)


# ---- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("tpu")`` takes."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True."""
    return True


# ---- modes


@outside_graphs
def get_mode() -> str:
    """``strict``, ``debug`` or ``defer``."""
    return _state.mode or config.eager_mode


@outside_graphs
def set_mode(mode: str, *, nans: bool = False) -> None:
    """How eager ops run from now on; see ``mode``."""
    from tpu_compile.device import modes

    modes.choose(mode, nans)


@contextlib.contextmanager
def mode(name: str, *, nans: bool = False) -> Iterator[None]:
    """``with torch.tpu.mode("defer"):``

    ``strict``: each op runs at once, without waiting for it. ``debug``: each is waited for, indices are checked (with
    ``nans`` results too), and what fails is raised at its line. ``defer``: ops are noted down, and run as one program
    when something is read.
    """
    before = get_mode()
    set_mode(name, nans=nans)
    try:
        yield
    finally:
        set_mode(before)
