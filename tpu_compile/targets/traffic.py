"""How much of HBM an instruction reads and writes: whole arrays, or only the part that it looks at."""

from __future__ import annotations

from tpu_compile.targets.hlo import Computation, Instruction, Module

_PARTIAL = frozenset(("slice", "dynamic-slice", "gather"))
_IN_PLACE = frozenset(("dynamic-update-slice", "scatter"))
_SAME_MEMORY = frozenset(("bitcast", "reshape", "transpose"))


def moved(module: Module, computation: Computation, each: Instruction) -> int:
    """Bytes between HBM and the core, tiles filled up. What lies in VMEM does not count."""
    inner = module.computations[each.called[0]] if each.opcode == "fusion" else None
    total = 0
    for position, name in enumerate(each.operands):
        operand = computation.by_name[name]
        sizes = [shape.padded_bytes for shape in operand.results if shape.space == 0 and shape.bits]
        read = sum(sizes)
        if inner is not None and read:
            read = min(read, _read(module, inner, position, read))
        elif each.opcode in _PARTIAL and position == 0:
            read = min(read, each.shape.padded_bytes)
        elif each.opcode in _IN_PLACE and position == 0:
            read = 0
        total += read
    return total + _written(computation, each, inner)


def _read(module: Module, computation: Computation, position: int, whole: int) -> int:
    """How much of its parameter a fusion reads."""
    parameter = next(
        (e for e in computation.instructions if e.opcode == "parameter" and e.literal == str(position)), None
    )
    return whole if parameter is None else _uses(module, computation, parameter.name, whole)


def _uses(module: Module, computation: Computation, name: str, whole: int) -> int:
    total = 0
    for user in computation.instructions:
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.opcode in _PARTIAL and first:
            total += user.shape.padded_bytes
        elif user.opcode in _IN_PLACE and first:
            continue
        elif user.opcode in _SAME_MEMORY and not user.root:
            total += _uses(module, computation, user.name, whole)
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            total += _read(module, inner, user.operands.index(name), whole)
        else:
            return whole
    return min(total, whole)


def _written(computation: Computation, each: Instruction, inner: Computation | None) -> int:
    outer = [shape.padded_bytes for shape in each.results if shape.space == 0 and shape.bits]
    if each.opcode in _IN_PLACE:
        return _update(computation, each)
    if inner is None or len(outer) != 1:
        return sum(outer)
    root = inner.root
    while root.opcode in ("bitcast", "reshape") and root.operands:
        root = inner.by_name[root.operands[0]]
    return min(outer[0], _update(inner, root)) if root.opcode in _IN_PLACE else outer[0]


def _update(computation: Computation, each: Instruction) -> int:
    """The part that an update in place writes."""
    operand = computation.by_name[each.operands[1 if each.opcode == "dynamic-update-slice" else -1]]
    return operand.shape.padded_bytes
