"""Every error this package raises on purpose. The class is what the user can do about it; the message says what, where
and how to fix it.

TpuCompileError                   (RuntimeError)
├── LoweringError                 the graph cannot become StableHLO
│   ├── UnsupportedOp             ops without a rule; `.gaps` lists all of them, with the user's lines
│   ├── UnsupportedDtype          a dtype the platform or StableHLO does not have
│   └── RuleMismatch              a rule's result is not what FakeTensor promised: our bug, please report
├── DeviceError                   PJRT refused; `.code` is its status
│   ├── OutOfMemory               RESOURCE_EXHAUSTED: a smaller program or a larger chip; torch.OutOfMemoryError too
│   ├── CompilationFailed         XLA rejected the program; `.dump` is the folder that holds it
│   ├── PluginNotFound            no PJRT plugin for the platform asked for; lists what was looked for and where
│   └── BadCall                   arguments that do not fit the compiled program
├── DebugCheckFailed              the program ran, and `debug_checks` found what eager would not have computed
│   ├── IndexOutOfRange           (IndexError) an index beyond its axis; names the op, the range and the line
│   └── NonFiniteResult           (FloatingPointError) the first op that made a NaN or an infinity
├── ExportError                   a model that cannot be written to a file, or a file that cannot serve as asked
│   ├── DamagedFile               it is not what was written: copy it again, or export again
│   └── NewerFile                 made by a newer version: upgrade, or export again with this one
├── PaddingVisible                a function looks at what `Buckets` padded: name its mask, or pad less
├── CacheError                    never escapes a normal call: only `tpu-compile cache …` shows it
├── MissingDependency             an optional package is not installed; the message holds the pip line
└── ConfigError                   an unknown or malformed option or knob; names the nearest known one

TpuCompileWarning                 (UserWarning) something was asked for that has no effect, or runs slower than it could
└── CacheWarning                  a cache fault that cost a recompile; once for each kind and process
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class TpuCompileError(RuntimeError):
    """Base of every error raised by tpu_compile."""


class LoweringError(TpuCompileError):
    """The graph cannot be turned into StableHLO."""


@dataclass(frozen=True)
class Gap:
    """One thing a graph needs and no tier knows: the op, the reason, and the user's line."""

    op: str
    reason: str
    where: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n      fix: {self.hint}" if self.hint else ""
        return f"{self.op}: {self.reason}\n      at {self.where or 'an op with no source line'}{hint}"


class UnsupportedOp(LoweringError):
    """Ops that no tier lowers. ``gaps`` holds every one of the graph, not only the first; ``nodes`` their FX nodes, in
    the same order."""

    def __init__(self, gaps: Iterable[Gap], graph: str = "", nodes: Iterable[Any] = ()) -> None:
        self.gaps, self.nodes = tuple(gaps), tuple(nodes)
        title = f"{len(self.gaps)} op{'s' * (len(self.gaps) != 1)} of graph {graph or '<unnamed>'} cannot be lowered:"
        fix = "Drop fullgraph=True to run these on the CPU, between compiled parts, or write a rule: tpu_compile.lowers"
        super().__init__("\n  - ".join([title, *dict.fromkeys(map(str, self.gaps))]) + "\n" + fix)


class UnsupportedDtype(LoweringError):
    """A dtype that StableHLO or the chosen platform does not have."""


class RuleMismatch(LoweringError):
    """A rule produced another type than FakeTensor promised. This is a bug of tpu_compile."""


class DeviceError(TpuCompileError):
    """PJRT refused. ``code`` is the status it gave (``"INVALID_ARGUMENT"``, …)."""

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class OutOfMemory(DeviceError):
    """The device does not hold the program or its buffers. ``needed`` and ``available`` are bytes, 0 where PJRT is
    silent."""

    def __init__(
        self, message: str, code: str = "RESOURCE_EXHAUSTED", dump: str = "", needed: int = 0, available: int = 0
    ) -> None:
        super().__init__(message, code)
        self.dump, self.needed, self.available = dump, needed, available


class CompilationFailed(DeviceError):
    """XLA rejected a program. ``dump`` is the folder with its StableHLO and the full message."""

    def __init__(self, message: str, code: str = "UNKNOWN", dump: str = "") -> None:
        super().__init__(message, code)
        self.dump = dump


class PluginNotFound(DeviceError):
    """No PJRT plugin for the platform that was asked for."""


class BadCall(DeviceError):
    """Arguments that do not fit the compiled program: another dtype, shape or stride order than it was compiled for."""


class DebugCheckFailed(TpuCompileError):
    """What the ``debug_checks`` knob found in the values of one call."""


class IndexOutOfRange(DebugCheckFailed, IndexError):
    """An index that points beyond its axis."""


class NonFiniteResult(DebugCheckFailed, FloatingPointError):
    """A NaN or infinity, at the op that made it of finite operands."""


class ExportError(TpuCompileError):
    """A model that cannot be exported, or an exported program that cannot be used as asked."""


class DamagedFile(ExportError):
    """A file that is not what ``tpu_compile.export`` wrote."""


class NewerFile(ExportError):
    """A file of a newer version of tpu_compile, or with a program of a newer StableHLO."""


class PaddingVisible(TpuCompileError):
    """A result of ``Buckets`` is not that of the same call without padding."""


class CacheError(TpuCompileError):
    """The cache directory or an entry cannot be used. A compile treats it as a miss; only the cache commands show
    it."""


class TpuCompileWarning(UserWarning):
    """Something that was asked for has no effect here, or runs slower than it could."""


class CacheWarning(TpuCompileWarning):
    """The cache could not be read or written; the program was, or will be, compiled instead."""


class MissingDependency(TpuCompileError):
    """An optional package is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(
            f"{needed_for} needs {package}, which is not installed. Install it with:  pip install {install}"
        )
        self.package = package


class ConfigError(TpuCompileError):
    """An option or knob that does not exist, or a value it cannot take."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"``, or the list of what exists when nothing is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."


def plain(error: BaseException) -> str:
    """What an error says, without what Dynamo appends for its own developers."""
    return str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0].strip()
