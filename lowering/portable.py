"""Programs as portable artifacts: StableHLO in its versioned form (VHLO), which later and somewhat older releases read.

CHLO has no versioned form. Each of its operations is wrapped in a composite called like it, over the StableHLO it
stands for: XLA recognises those it has an instruction for (``erf``, ``top_k``) and takes the others apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import func, stablehlo

from tpu_compile.lowering import fx
from tpu_compile.lowering.context import make_context


@dataclass(frozen=True)
class Readable:
    """What an artifact holds: StableHLO bytecode, its digest (as of ``Program``), and the custom calls it makes."""

    bytecode: bytes
    digest: str
    custom_calls: frozenset[str]


def version() -> str:
    """The newest version that this jaxlib reads."""
    return str(stablehlo.get_current_version())


def written_version() -> str:
    """The version that is written: what jaxlib releases of the last twelve weeks read too."""
    weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    return str(stablehlo.get_version_from_compatibility_requirement(weeks))


def write(bytecode: bytes, *, source_lines: bool = True) -> bytes:
    """A program as an artifact of ``written_version()``."""
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        _wrap_chlo(module)
        _passes(source_lines).run(module.operation)
        return bytes(stablehlo.serialize_portable_artifact(module, written_version()))


def read(artifact: bytes) -> Readable:
    """An artifact as StableHLO.

    Raises:
        ValueError: it is damaged, or of a version that this jaxlib does not read.
    """
    with make_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        module.operation.verify()
        calls = frozenset(
            ir.StringAttr(op.attributes["call_target_name"]).value
            for op in _operations(module.operation)
            if op.name == "stablehlo.custom_call"
        )
        return Readable(fx.bytecode(module.operation), fx.digest(module), calls)


def _passes(source_lines: bool) -> passmanager.PassManager:
    _register_passes()
    strip = "" if source_lines else ",strip-debuginfo"
    return passmanager.PassManager.parse(f"builtin.module(func.func(chlo-legalize-to-stablehlo){strip})")


@lru_cache(maxsize=1)
def _register_passes() -> None:
    stablehlo.register_stablehlo_passes()


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _wrap_chlo(module: ir.Module) -> None:
    symbols = ir.SymbolTable(module.operation)
    functions: dict[Any, str] = {}
    for op in [op for op in _operations(module.operation) if op.name.startswith("chlo.")]:
        attributes = {name: op.attributes[name] for name in op.attributes}
        operands, results = [v.type for v in op.operands], [v.type for v in op.results]
        key = (op.name, tuple(map(str, (*operands, "->", *results))), str(attributes))
        if key not in functions:
            functions[key] = symbols.insert(_decomposition(module, op, operands, results)).value
        _replace(op, functions[key], attributes)


def _decomposition(module: ir.Module, op: Any, operands: list[ir.Type], results: list[ir.Type]) -> func.FuncOp:
    with ir.InsertionPoint(module.body), op.location:
        function = func.FuncOp(op.name, ir.FunctionType.get(operands, results), visibility="private")
    with ir.InsertionPoint(function.add_entry_block()) as point, op.location:
        inner = op.clone(ip=point)
        for index, argument in enumerate(function.arguments):
            inner.operation.operands[index] = argument
        func.ReturnOp(list(inner.operation.results))
    return function


def _replace(op: Any, function: str, attributes: dict[str, ir.Attribute]) -> None:
    with ir.InsertionPoint(op), op.location:
        composite = ir.Operation.create(
            "stablehlo.composite",
            results=[v.type for v in op.results],
            operands=list(op.operands),
            attributes={
                "name": ir.StringAttr.get(op.name),
                "composite_attributes": ir.DictAttr.get(attributes),
                "decomposition": ir.FlatSymbolRefAttr.get(function),
                "version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
            },
        )
    for old, new in zip(op.results, composite.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
