"""What a file says of itself, as typed data: ``manifest.json`` read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.errors import BadCall
from tpu_compile.exporting import expressions, structure
from tpu_compile.exporting.expressions import Expression
from tpu_compile.exporting.programs import check_version, dtype_of, load_plain


@dataclass(frozen=True)
class Input:
    """One flat argument: a tensor (``dtype`` and ``shape``), an integer that may vary (``number``), or a fixed
    ``value``."""

    dtype: torch.dtype | None
    shape: tuple[Expression, ...]
    number: Expression
    value: Any

    def __str__(self) -> str:
        if self.dtype is not None:
            sizes = ",".join(map(expressions.text, self.shape))
            return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"
        return f"int {expressions.text(self.number)}" if self.number is not None else repr(self.value)


@dataclass(frozen=True)
class Symbol:
    """A size that each call decides, between ``least`` and ``most`` (None: no bound)."""

    name: str
    least: int
    most: int | None


@dataclass(frozen=True)
class Signature:
    """How the program is called and what it returns."""

    parameters: tuple[str, ...]
    called: structure.Tree
    returned: structure.Tree
    inputs: tuple[Input, ...]
    symbols: tuple[Symbol, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments of a call.

        Raises:
            BadCall: they are not those it was exported with, in number, names, nesting, type or plain value.
        """
        args, kwargs = self._arranged(args, kwargs)
        positional, named = self.called[2]
        leaves = [*structure.flatten(positional, args, "args"), *structure.flatten(named, kwargs, "kwargs")]
        for (where, given), wanted in zip(leaves, self.inputs, strict=True):
            _check(where, given, wanted)
        return [given for _, given in leaves]

    def _arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Arguments by position or by name as they were in the example call: both ways mean the same."""
        positional, named = self.called[2]
        count, keys = len(positional[2]), list(named[1])
        if (len(args), set(kwargs)) == (count, set(keys)) or max(len(args), count) > len(self.parameters):
            return args, kwargs
        by_name = dict(zip(self.parameters, args, strict=False))
        if set(by_name) & set(kwargs):
            return args, kwargs
        wanted = [*self.parameters[:count], *keys]
        by_name = {**self._fixed(wanted), **by_name, **kwargs}
        if set(by_name) != set(wanted):
            missing, extra = set(wanted) - set(by_name), set(by_name) - set(wanted)
            said = [f"lacks {', '.join(sorted(missing))}"] * bool(missing)
            said += [f"has {', '.join(sorted(extra))} beside them"] * bool(extra)
            raise BadCall(f"The program takes {', '.join(wanted)}; the call {' and '.join(said)}", "INVALID_ARGUMENT")
        return tuple(by_name[name] for name in wanted[:count]), {key: by_name[key] for key in keys}

    def _fixed(self, names: Sequence[str]) -> dict[str, Any]:
        """The plain values among the arguments, by name: a call may leave them out."""
        place, found = 0, {}
        for name, tree in zip(names, [*self.called[2][0][2], *self.called[2][1][2]], strict=True):
            if tree is None and (given := self.inputs[place]).dtype is None and given.number is None:
                found[name] = given.value
            place += structure.check(tree)
        return found

    def bind(self, flat: Sequence[Any]) -> dict[str, int]:
        """The symbols' numbers in one call.

        Raises:
            BadCall: a size that is another than the program's, or beyond its bounds.
        """
        sizes = list(self._sizes(flat))
        bindings = {e: actual for _, e, actual in sizes if isinstance(e, str)}
        for where, expression, actual in sizes:
            wanted = expressions.size(expression, bindings)
            if wanted != actual:
                named = "" if isinstance(expression, int) else f" ({expressions.text(expression)})"
                raise BadCall(f"{where} is {actual}; the program takes {wanted}{named}", "INVALID_ARGUMENT")
        for symbol in self.symbols:
            actual = bindings[symbol.name]
            if actual < symbol.least or (symbol.most is not None and actual > symbol.most):
                most = "" if symbol.most is None else f" to {symbol.most}"
                raise BadCall(
                    f"The size {symbol.name} is {actual}; the program takes {symbol.least}{most}", "INVALID_ARGUMENT"
                )
        return bindings

    def _sizes(self, flat: Sequence[Any]) -> Iterator[tuple[str, Expression, int]]:
        for i, (given, wanted) in enumerate(zip(flat, self.inputs, strict=True)):
            if wanted.dtype is not None:
                for axis, (expression, actual) in enumerate(zip(wanted.shape, given.shape, strict=True)):
                    yield f"axis {axis} of argument {i}", expression, int(actual)
            elif wanted.number is not None:
                yield f"argument {i}", wanted.number, int(given)


def _check(where: str, given: Any, wanted: Input) -> None:
    if wanted.dtype is not None:
        fits = isinstance(given, torch.Tensor) and given.dtype == wanted.dtype and given.dim() == len(wanted.shape)
        if fits and given.device.type != "cpu":
            raise BadCall(f"{where} is on {given.device}; an exported program takes CPU tensors: use .cpu()")
    elif wanted.number is not None:
        fits = type(given) is int
    else:
        fits = type(given) is type(wanted.value) and given == wanted.value
    if not fits:
        said = f"{given.dtype}{list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        raise BadCall(f"{where} is {said}; the program was exported for {wanted}", "INVALID_ARGUMENT")


@dataclass(frozen=True)
class StateEntry:
    """One of the model's tensors: its names, and where its contents are."""

    names: tuple[str, ...]
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ProgramEntry:
    """A program in the file: for which platform families and sizes, its member, and its record."""

    families: tuple[str, ...]
    sizes: Mapping[str, int]
    member: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class ExecutableEntry:
    """Machine code in the file: what it was compiled for, and of which program."""

    target: str
    family: str
    member: str
    program: int
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """All of ``manifest.json``. ``weights`` is the member's name, or that of a file beside this one."""

    name: str
    made_by: Mapping[str, str]
    signature: Signature
    state: tuple[StateEntry, ...]
    arguments: tuple[tuple[str, int], ...]
    weights: str
    weights_inside: bool
    weights_sha256: str
    programs: tuple[ProgramEntry, ...]
    unlowered: Mapping[str, str]
    graph: str | None
    constants: int
    executables: tuple[ExecutableEntry, ...]


def read(raw: Mapping[str, Any]) -> Manifest:
    """The manifest of a file.

    Raises:
        NewerFile: its programs are of a StableHLO that this jaxlib does not read.
        KeyError, TypeError, ValueError, AttributeError: it is malformed.
    """
    manifest = Manifest(
        name=str(raw["name"]),
        made_by={str(k): str(v) for k, v in raw["made_by"].items()},
        signature=_signature(raw["signature"]),
        state=tuple(
            StateEntry(tuple(map(str, s["names"])), str(s["kind"]), dtype_of(s["dtype"]), tuple(map(int, s["shape"])))
            for s in raw["state"]
        ),
        arguments=tuple((str(kind), int(index)) for kind, index in raw["arguments"]),
        weights=str(raw["weights"]["file"]),
        weights_inside=bool(raw["weights"]["included"]),
        weights_sha256=str(raw["weights"]["sha256"]),
        programs=tuple(
            ProgramEntry(tuple(map(str, p["families"])), _sizes(p["sizes"]), str(p["member"]), dict(p["record"]))
            for p in raw["programs"]
        ),
        unlowered={str(k): str(v) for k, v in raw["unlowered"].items()},
        graph=None if raw["graph"] is None else str(raw["graph"]),
        constants=int(raw["constants"]),
        executables=tuple(
            ExecutableEntry(str(e["target"]), str(e["family"]), str(e["member"]), int(e["program"]), dict(e["parts"]))
            for e in raw["executables"]
        ),
    )
    check_version(manifest.made_by["stablehlo"])
    _check_places(manifest)
    return manifest


def _check_places(manifest: Manifest) -> None:
    bounds = {"state": len(manifest.state), "input": len(manifest.signature.inputs)}
    if any(not 0 <= index < bounds[kind] for kind, index in manifest.arguments):
        raise ValueError("an argument that is neither of the call nor of the model")
    if any(not 0 <= e.program < len(manifest.programs) for e in manifest.executables):
        raise ValueError("an executable of no program")


def _sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(number) for name, number in raw.items()}


def _signature(raw: Mapping[str, Any]) -> Signature:
    inputs = tuple(map(_input, raw["inputs"]))
    if structure.check(raw["called"]) != len(inputs) or [t[0] for t in raw["called"][2]] != ["tuple", "dict"]:
        raise ValueError("a call that is not arguments and keywords")
    structure.check(raw["returned"])
    symbols = tuple(
        Symbol(str(name), int(least), None if most is None else int(most))
        for name, (least, most) in raw["symbols"].items()
    )
    return Signature(tuple(map(str, raw["parameters"])), raw["called"], raw["returned"], inputs, symbols)


def _input(raw: Mapping[str, Any]) -> Input:
    if "tensor" in raw:
        dtype, shape = raw["tensor"]
        return Input(dtype_of(dtype), tuple(shape), None, None)
    if "number" in raw:
        return Input(None, (), raw["number"], None)
    return Input(None, (), None, load_plain(raw["value"]))
