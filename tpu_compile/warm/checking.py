"""``cache verify --check-contents``: stored executables against the same programs compiled anew.

Two compiles of one program differ in bytes that mean nothing, so both run on the same made-up arguments and every bit
of their results is compared. What can be checked is what this machine would load today: under the options in force,
with its program in the cache too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.cache import CacheStore
from tpu_compile.errors import DeviceError
from tpu_compile.executables import cache_key, options_in_force, runtime
from tpu_compile.lowering.program import Program
from tpu_compile.warm import record

_DTYPES = {
    **{"pred": torch.bool, "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64},
    **{"s8": torch.int8, "s16": torch.int16, "s32": torch.int32, "s64": torch.int64, "u8": torch.uint8},
    **{"u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64, "c64": torch.complex64, "c128": torch.complex128},
}
"""XLA's names. A program with an argument of another type is not checked."""
_PARAMETERS = re.compile(r"entry_computation_layout=\{\((.*?)\)->", re.DOTALL)
_PARAMETER = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Checked:
    """What was found out about one executable. ``fault`` is empty if it computes what a fresh compile computes."""

    name: str
    digest: str
    fault: str


def check(store: CacheStore) -> Iterator[Checked]:
    """Check every executable that this machine would load. Damaged entries are ``verify``'s to find."""
    options, client, seen = options_in_force(), runtime.client, set()
    for info in store.entries(of="program"):
        entry = store.look(info.header)
        program = _program(entry) if entry is not None else None
        kept = store.look(cache_key(program, options, client)) if program is not None else None
        if program is None or kept is None or kept.header.digest in seen:
            continue
        seen.add(kept.header.digest)
        fault = _fault(program, kept.payload, options, client)
        if fault is not None:
            yield Checked(kept.header.name, kept.header.digest, fault)


class _Unknown(list[torch.Tensor]):
    """In place of a graph's constants, which are in no cache: their contents do not matter here."""

    def __getitem__(self, place: Any) -> Any:
        return torch.empty(0, device="cpu")


def _program(entry: Any) -> Program | None:
    try:
        return record.load(entry.metadata["program"], entry.header.name, entry.payload, _Unknown())
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _fault(program: Program, payload: bytes, options: Any, client: Any) -> str | None:
    """None if nothing can be said."""
    try:
        if program.ffi_handlers:
            from tpu_compile.runtime import ffi

            ffi.register(program.ffi_handlers)
        stored = client.load(payload, program.name, options)
        fresh = client.compile(program.bytecode, program.name, options)
        arguments = _arguments(fresh.as_text())
        if arguments is None:
            return None
        ours, theirs = (_run(executable, arguments, client) for executable in (stored, fresh))
    except DeviceError as error:
        return f"the runtime refuses it: {error}"
    same = len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return "" if same else "it computes something else than its program compiled anew"


def _arguments(hlo: str) -> list[torch.Tensor] | None:
    """Tensors of every parameter's type, with contents that depend on nothing."""
    layout = _PARAMETERS.search(hlo)
    found = _PARAMETER.findall(re.sub(r"/\*.*?\*/", "", layout[1])) if layout else []
    if layout is None or any(kind not in _DTYPES for kind, _ in found):
        return None
    generator = torch.Generator().manual_seed(0)
    return [_filled(_DTYPES[kind], [int(n) for n in sizes.split(",") if n], generator) for kind, sizes in found]


def _filled(dtype: torch.dtype, sizes: list[int], generator: torch.Generator) -> torch.Tensor:
    numbers = torch.rand(sizes, generator=generator, device="cpu") * 4
    return (numbers - 2 if dtype.is_floating_point or dtype.is_complex else numbers).to(dtype)


def _run(executable: Any, arguments: list[torch.Tensor], client: Any) -> list[torch.Tensor]:
    results = executable.execute([client.put(t) for t in arguments])
    client.ready(results)
    return [client.fetch(buffer) for buffer in results]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (one, other)]
    return torch.equal(*bits)
