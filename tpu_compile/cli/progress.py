"""What a long compile is doing: a line that lives on a terminal, one line a slow stage in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click

from tpu_compile.stats import on_event

_WORDS = {"lowering": "lowering", "xla": "XLA compiles", "load": "loading", "cache": "cache:"}
_SLOW = 5.0
"""Seconds; a log hears of stages that took longer."""


@contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on in the block, on stderr, where also goes what the user's own code prints: stdout is for the
    command's result. ``doing`` is said while none of our stages is at work; what the block is given says something
    else from then on."""
    watch = _Terminal(doing) if sys.stderr.isatty() else _Log()
    stop = on_event(watch.event)
    try:
        with watch, redirect_stdout(sys.stderr):
            yield watch.say
    finally:
        stop()


class _Log:
    """One line for each slow stage, when it has ended."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, doing: str) -> None:
        """A log hears of what took long, when it has ended."""

    def event(self, name: str, details: dict[str, Any]) -> None:
        if name == "stage/end" and details["seconds"] >= _SLOW:
            click.echo(f"tpu-compile: {_sentence(details)} took {details['seconds']:.1f} s", err=True)


class _Terminal:
    """A spinner, the stage and program at work, seconds, and how many programs came from where."""

    def __init__(self, doing: str) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._display = Progress(*columns, console=Console(stderr=True), transient=True)
        self._doing, self._compiled, self._cached = doing, 0, 0
        self._running: list[str] = []
        self._task = self._display.add_task(doing, total=None)

    def __enter__(self) -> None:
        self._display.start()

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def say(self, doing: str) -> None:
        self._doing = doing
        self._show(doing)

    def event(self, name: str, details: dict[str, Any]) -> None:
        if name == "stage/begin":
            self._running.append(_sentence(details))
        elif name == "stage/end":
            self._running = [each for each in self._running if each != _sentence(details)]
            self._compiled += details["stage"] == "xla"
            self._cached += details["stage"] == "load"
        self._show(", ".join(self._running) or self._doing)

    def _show(self, sentence: str) -> None:
        so_far = (
            f"  ({self._compiled} compiled, {self._cached} from the cache)" if self._compiled + self._cached else ""
        )
        self._display.update(self._task, description=sentence + so_far)


def _sentence(details: dict[str, Any]) -> str:
    return f"{_WORDS.get(details['stage'], details['stage'])} {details['program']}".strip()
