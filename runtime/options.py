"""What a compile can be told, as plain data: it crosses layers and belongs in the cache key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileOptions:
    """How XLA compiles one program.

    Args:
        excess_precision: let XLA drop f32 → bf16 → f32 round trips.
        xla_options: (name, value) pairs of XLA's own options, values as text.
        optimization_level: XLA's effort, 0 to 3; -1 leaves it to XLA.
        num_replicas: copies of the program that run side by side.
        num_partitions: parts that one copy of the program is split into.
    """

    excess_precision: bool = False
    xla_options: tuple[tuple[str, str], ...] = ()
    optimization_level: int = -1
    num_replicas: int = 1
    num_partitions: int = 1

    def key_parts(self) -> dict[str, str]:
        """Every field as labelled text, the same for equal options whatever order they were given in."""
        return {
            "excess_precision": str(self.excess_precision),
            "xla_options": " ".join(f"{name}={value}" for name, value in sorted(self.xla_options)),
            "optimization_level": str(self.optimization_level),
            "num_replicas": str(self.num_replicas),
            "num_partitions": str(self.num_partitions),
        }
