"""A ``Program`` as JSON beside its portable artifact, and back. A file decides neither the digest, which is computed,
nor what is called: a program's custom calls must be handlers that jaxlib carries or XLA's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tpu_compile.errors import DamagedFile, ExportError, NewerFile
from tpu_compile.lowering import portable
from tpu_compile.lowering.program import HostCheck, Program, Result, TensorSpec

Record = dict[str, Any]

_LINALG = torch.ops.aten._linalg_check_errors
_XLAS_OWN = frozenset(
    """
    Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement
    LuDecomposition Qr Eigh ProductOfElementaryHouseholderReflectors ApproxTopK tpu_custom_call
    """.split()
)
"""Custom calls that XLA and the TPU's compiler take themselves: none is code of the host. The last is a Mosaic
kernel."""


def dump(program: Program) -> Record:
    """All of a program but its name, its bytecode and its constants.

    Raises:
        ExportError: a check of the host that a file cannot name.
    """
    return {
        "inputs": list(map(dump_spec, program.inputs)),
        "arguments": list(program.arguments),
        "outputs": list(map(dump_spec, program.outputs)),
        "results": [_dump_result(r) for r in program.results],
        "mutated": [list(pair) for pair in program.mutated],
        "donated": list(program.donated),
        "random": program.random,
        "draws": program.draws,
        "ffi_handlers": list(program.ffi_handlers),
        "ops": dict(program.ops),
        "checks": [_dump_check(c) for c in program.checks],
    }


def load(record: Mapping[str, Any], name: str, artifact: bytes, constants: Sequence[torch.Tensor]) -> Program:
    """The program of a record.

    Raises:
        DamagedFile: it makes a call that no exported program makes.
        KeyError, TypeError, ValueError, AttributeError: the record is malformed.
    """
    found = portable.read(artifact)
    handlers = tuple(map(str, record["ffi_handlers"]))
    _allow(found.custom_calls, handlers)
    return Program(
        name=name,
        bytecode=found.bytecode,
        digest=found.digest,
        inputs=tuple(map(load_spec, record["inputs"])),
        arguments=tuple(map(int, record["arguments"])),
        outputs=tuple(map(load_spec, record["outputs"])),
        results=tuple(map(_load_result, record["results"])),
        mutated=tuple((int(position), int(result)) for position, result in record["mutated"]),
        donated=tuple(map(int, record["donated"])),
        constants=tuple(constants),
        random=bool(record["random"]),
        draws=int(record["draws"]),
        ffi_handlers=handlers,
        ops=tuple((str(op), int(count)) for op, count in record["ops"].items()),
        checks=tuple(map(_load_check, record["checks"])),
    )


def check_version(written: str) -> None:
    """Refuse artifacts of a version that this jaxlib does not read.

    Raises:
        NewerFile: they are newer.
        ValueError: that is no version.
    """
    if tuple(map(int, written.split("."))) > tuple(map(int, portable.version().split("."))):
        raise NewerFile(
            f"The program is StableHLO {written}, and this jaxlib reads up to {portable.version()}. Upgrade jaxlib, or "
            "export again with this one."
        )


def _allow(calls: frozenset[str], handlers: tuple[str, ...]) -> None:
    if handlers:
        from tpu_compile.runtime import ffi

        unknown = set(handlers) - set(ffi.available())
        if unknown:
            raise DamagedFile(f"It names custom calls that jaxlib has no handler for: {', '.join(sorted(unknown))}")
    foreign = calls - _XLAS_OWN - set(handlers)
    if foreign:
        names = ", ".join(sorted(foreign))
        raise DamagedFile(f"Its program makes custom calls that no exported program makes: {names}")


def dump_spec(spec: TensorSpec) -> list[Any]:
    """Dtype, shape, strides."""
    return [dtype_name(spec.dtype), list(spec.shape), list(spec.stride)]


def load_spec(record: Sequence[Any]) -> TensorSpec:
    """The inverse of ``dump_spec``."""
    name, shape, stride = record
    return TensorSpec(tuple(map(int, shape)), dtype_of(name), tuple(map(int, stride)))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ValueError, AttributeError: there is none.
    """
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _dump_result(result: Result) -> Any:
    if result.index is not None:
        return {"number" if result.number else "index": result.index}
    if result.argument is not None:
        return {"argument": result.argument}
    return {"value": dump_plain(result.value, "the model returns")}


def _load_result(record: Mapping[str, Any]) -> Result:
    ((kind, content),) = record.items()
    return _RESULTS[kind](content)


_RESULTS: dict[str, Callable[[Any], Result]] = {
    "index": lambda index: Result(index=int(index)),
    "number": lambda index: Result(index=int(index), number=True),
    "argument": lambda position: Result(argument=int(position)),
    "value": lambda value: Result(value=load_plain(value)),
}


def dump_plain(value: Any, where: str) -> Any:
    """A value that is no tensor.

    Raises:
        ExportError: it is none that JSON can say exactly.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise ExportError(f"{where} {value!r}, a {type(value).__name__}: a file holds tensors, numbers, text and None")


def load_plain(value: Any) -> Any:
    """The inverse of ``dump_plain``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _PLAIN[kind](content)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "dtype": dtype_of,
    "device": torch.device,
}


def _dump_check(check: HostCheck) -> Record:
    function = check.function
    if isinstance(function, partial) and function.func is _LINALG and not function.args:
        return {"linalg_errors": check.result, **function.keywords}
    raise ExportError(f"a check that the program asks of the host ({function}) cannot be written to a file")


def _load_check(record: Mapping[str, Any]) -> HostCheck:
    api_name, is_matrix = str(record["api_name"]), bool(record["is_matrix"])
    return HostCheck(int(record["linalg_errors"]), partial(_LINALG, api_name=api_name, is_matrix=is_matrix))
