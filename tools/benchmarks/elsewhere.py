"""A contender in another interpreter: a process that waits for its turn, so that it is measured in the same moments as
all others."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("peer.py")


class _Ended(Exception):
    """Why the other interpreter measures nothing."""


class Elsewhere:
    """``peer.py`` on one network. Called, it makes a call or two there; ``per_call`` is timed there.

    Attributes:
        system: what it calls itself.
        first: seconds that its first call took.
    """

    def __init__(self, python: str, name: str) -> None:
        self._python = python
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- it is the process's as long as that lives
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen([python, str(PROGRAM), name], text=True, **pipes)
        except OSError as error:
            raise _Ended(f"PyTorch/XLA: {python} does not start ({error.strerror})") from error
        said = self._read()
        self.system, self.first = said["system"], said["first"]

    def _read(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["it wrote nothing"]
        raise _Ended(f"PyTorch/XLA: {self._python} ended with status {status}: {last[0]}")

    def per_call(self, seconds: float) -> float:
        """Seconds a call takes, of those made for about ``seconds``."""
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._read())

    def __call__(self) -> None:
        self.per_call(0.0)

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()


class Peers:
    """Starts contenders of one interpreter; ``skipped`` says which could not be had, and why."""

    def __init__(self, python: str | None = None) -> None:
        self._python = python
        self.skipped: list[str] = []

    @contextmanager
    def on(self, name: str) -> Iterator[dict[str, Elsewhere]]:
        """The contender on one network, by its system's name; none if there is no such interpreter."""
        found: dict[str, Elsewhere] = {}
        if self._python:
            try:
                peer = Elsewhere(self._python, name)
                found[peer.system] = peer
            except _Ended as why:
                self.skipped.append(str(why))
        try:
            yield found
        finally:
            for peer in found.values():
                peer.close()
