"""Random programs, eager against compiled: making them, judging them, making them smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .judging import Compile, fault, on_tpu
from .programs import Fuzzed, function, generate
from .shrinking import reproducer, shrink

__all__ = ["Fuzzed", "fault", "function", "generate", "reproducer", "run", "shrink"]


def run(seeds: Sequence[int], compiler: Compile = on_tpu, tell: Callable[[str], None] = print) -> list[str]:
    """Fuzz the programs of ``seeds``; returns (and tells) a reproducer for each that differs."""
    found = []
    for seed in seeds:
        program = generate(seed)
        reason = fault(program, compiler)
        if reason:
            small = shrink(program, lambda p: fault(p, compiler) is not None)
            found.append(f"# seed {seed}\n" + reproducer(small, fault(small, compiler) or reason))
            tell(found[-1])
    return found
