"""How often a loop of optimised HLO runs its body."""

from __future__ import annotations

from tpu_compile.targets.hlo import Computation, Instruction, Module


def turns(module: Module, computation: Computation, loop: Instruction) -> int:
    """Turns of a ``while`` that counts up by one to a constant, from a constant; else what XLA says, or 1."""
    found = _counted(module, computation, loop)
    return loop.trips if found is None else found


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    test = condition.root
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter, bound = (condition.by_name[name] for name in test.operands)
    if counter.opcode != "get-tuple-element":
        return None
    first = _initial(computation, loop, int(counter.attribute("index")))
    last = _number(bound)
    if bound.opcode == "get-tuple-element":
        last = _initial(computation, loop, int(bound.attribute("index")))
    return None if first is None or last is None else max(0, last - first)


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    """What a loop starts with at a place of its tuple, if that is a constant."""
    start = computation.by_name[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    value = computation.by_name[start.operands[index]]
    while value.opcode in ("copy", "bitcast", "convert") and value.operands:
        value = computation.by_name[value.operands[0]]
    return _number(value)


def _number(value: Instruction) -> int | None:
    literal = value.literal.strip("{} ")
    return int(literal) if value.opcode == "constant" and literal.lstrip("-").isdigit() else None
