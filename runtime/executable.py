"""A compiled program on a device: run it, ask what it costs, turn it into bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeAlias

from tpu_compile.errors import DeviceError
from tpu_compile.runtime import status, temporaries

Buffer: TypeAlias = Any
"""An array on the device (jaxlib's ArrayImpl). Opaque: make it, pass it, fetch it."""


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes that a program needs on its device, by purpose. The names are JAX's."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    temp_size_in_bytes: int
    alias_size_in_bytes: int
    generated_code_size_in_bytes: int
    peak_memory_in_bytes: int
    host_argument_size_in_bytes: int
    host_output_size_in_bytes: int
    host_temp_size_in_bytes: int
    host_alias_size_in_bytes: int
    host_generated_code_size_in_bytes: int

    @property
    def held(self) -> int:
        """Bytes of arguments, results and temporaries together, those that share memory once. The peak is no measure of
        a TPU's HBM: it counts what lies in VMEM too."""
        own = self.argument_size_in_bytes + self.output_size_in_bytes - self.alias_size_in_bytes
        return own + self.temp_size_in_bytes


def memory_analysis(raw: Any) -> MemoryAnalysis:
    """The statistics of a loaded or compile-only executable."""
    stats = raw.get_compiled_memory_stats()
    return MemoryAnalysis(**{field.name: getattr(stats, field.name) for field in fields(MemoryAnalysis)})


def cost_analysis(raw: Any) -> dict[str, float]:
    """XLA's estimate: ``flops``, ``bytes accessed``, ``transcendentals``, … under JAX's names.

    A negative value says that XLA does not know (``optimal_seconds`` of a program with collectives): it is left out.
    """
    known = ((name, value) for name, value in raw.cost_analysis().items() if isinstance(value, (int, float)))
    return {name: float(value) for name, value in known if value >= 0}


def raise_forked(*_: object) -> NoReturn:
    """Say why nothing compiles or runs in a forked child."""
    raise DeviceError(
        "FAILED_PRECONDITION: this process was forked after its parent had opened the device, whose threads stayed "
        "behind. Start processes with the method 'spawn', or fork before the first compiled call.",
        "FAILED_PRECONDITION",
    )


class Executable:
    """A program loaded on one device. ``execute`` is the hot path: everything it touches is bound here once.

    Args:
        name: what errors call it.
        loaded: jaxlib's LoadedExecutable.
        result_handler: makes a Buffer of one result; see ``client.py`` for why it is not jaxlib's default way.
        blob: the bytes it was loaded from. The CPU client drops a program's code once loaded: serialized again, it
            gives bytes that load and then fail to run.
        host_memory: the device's memory is the host's.
    """

    def __init__(
        self, name: str, loaded: Any, result_handler: Any, blob: bytes | None = None, *, host_memory: bool = False
    ) -> None:
        self.name = name
        self._blob = blob
        self._loaded = loaded
        self._run: Callable[[list[Buffer]], Any] = self._first_run if host_memory else loaded.execute_sharded
        self._handlers = [result_handler] * len(loaded.get_output_memory_kinds()[0])

    def execute(self, buffers: list[Buffer]) -> list[Buffer]:
        """Start the program on ``buffers``; the results may still be being computed.

        Raises:
            BadCall: the wrong number or byte size of arguments, or one that was donated before.
            OutOfMemory: the results do not fit.
        """
        try:
            return self._run(buffers).consume_with_handlers(self._handlers, False)  # type: ignore[no-any-return]
        except (RuntimeError, TypeError) as error:
            raise status.call_error(error, self.name) from error

    def _first_run(self, buffers: list[Buffer]) -> Any:
        """What temporaries a program takes is looked up when it comes a second time: it takes XLA some milliseconds."""
        self._run = self._second_run
        return self._loaded.execute_sharded(buffers)

    def _second_run(self, buffers: list[Buffer]) -> Any:
        try:
            size = self._loaded.get_compiled_memory_stats().temp_size_in_bytes
        except RuntimeError:  # a plugin need not know
            size = 0
        self._run = temporaries.keeping(self._loaded.execute_sharded, size)
        return self._run(buffers)

    def lose(self) -> None:
        """Raise at the next call: this is a forked child, and the threads that would run the program are not here."""
        self._run = raise_forked

    def serialize(self) -> bytes:
        """The compiled program as bytes, for ``Client.load`` on the same kind of device."""
        if self._blob is not None:
            return self._blob
        try:
            return bytes(self._loaded.serialize())
        except RuntimeError as error:
            raise status.device_error(error, f"{self.name} cannot be serialized") from error

    def as_text(self) -> str:
        """The optimised HLO."""
        return "\n".join(module.to_string() for module in self._loaded.hlo_modules())

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate: ``flops``, ``bytes accessed``, ``transcendentals``, … under JAX's names."""
        return cost_analysis(self._loaded)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes the program needs on its device."""
        return memory_analysis(self._loaded)
