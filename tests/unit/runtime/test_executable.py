"""An executable's first calls, on a client that keeps nothing but what it is asked."""

from __future__ import annotations

from typing import Any

from tpu_compile.runtime.executable import Executable


class Results:
    def consume_with_handlers(self, handlers: list[Any], strict: bool) -> list[str]:
        return ["result"]


class Loaded:
    """jaxlib's LoadedExecutable, of a plugin that tells no sizes."""

    def __init__(self) -> None:
        self.asked = 0

    def get_output_memory_kinds(self) -> list[list[str]]:
        return [["device"]]

    def execute_sharded(self, buffers: list[Any]) -> Results:
        return Results()

    def get_compiled_memory_stats(self) -> Any:
        self.asked += 1
        raise RuntimeError("UNIMPLEMENTED: no memory statistics")


def test_sizes_are_asked_for_once_at_the_second_call_and_may_be_unknown() -> None:
    loaded = Loaded()
    executable = Executable("f", loaded, None, host_memory=True)
    asked = []
    for _ in range(4):
        assert executable.execute([]) == ["result"]
        asked.append(loaded.asked)
    assert asked == [0, 1, 1, 1]
