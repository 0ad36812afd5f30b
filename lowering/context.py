"""What a rule may know beside its arguments, and the process's way of making MLIR contexts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import torch
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, stablehlo

import tpu_compile

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_TORCH, _OURS = torch.__path__[0], tpu_compile.__path__[0]


class Refusal(Exception):
    """Raised by ``LoweringContext.refuse``; the walk turns it into a Gap with the user's line."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


@dataclass
class LoweringContext:
    """Handed to every rule. ``out`` is what FakeTensor promises for the op being lowered: a TensorSpec, a tuple of
    them (None where an
    output is absent), or a Python number. ``walk`` lowers subgraphs and hands out the program's seed."""

    family: str
    module: ir.Module
    walk: Walk
    out: Any = None
    functions: dict[Any, Any] = field(default_factory=dict)
    where: SourceLine | None = None

    @property
    def outs(self) -> tuple[Any, ...]:
        """``out`` as a tuple."""
        return self.out if isinstance(self.out, tuple) else (self.out,)

    def refuse(self, reason: str, hint: str = "") -> NoReturn:
        """Say that these arguments are beyond the rule: the op goes to the next tier."""
        raise Refusal(reason, hint)


@dataclass(frozen=True)
class Layout:
    """Sizes, strides and storage offset of a tensor, in elements. Only ops that speak of memory (``as_strided``) ask
    for it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Walk(Protocol):
    """The part of the graph walk that rules may use."""

    @property
    def seed(self) -> ir.Value:
        """The program's seed, u64[2]; asking for it makes the program take one."""

    @property
    def turns(self) -> list[ir.Value | int]:
        """Counters of the loops we stand in, outermost first; random ops draw anew at every turn."""

    def subgraph(self, graph_module: torch.fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
        """Lower a graph inline on ``arguments``; returns its flat outputs."""

    def loop(
        self, carries: Sequence[ir.Value], condition: Callable[..., ir.Value], body: Callable[..., Any]
    ) -> list[ir.Value]:
        """``hlo.while_``, for a condition and a body that are graphs: ``debug_checks`` looks into them."""

    def case(self, index: ir.Value, branches: Sequence[Callable[[], Any]], types: Sequence[ir.Type]) -> list[ir.Value]:
        """``hlo.case``, likewise."""

    def number(self, value: Any) -> Any:
        """A size of the graph as a number; anything that is not symbolic as it is."""

    def layout(self, argument: int) -> Layout:
        """Where the elements of the current op's tensor argument lie in memory, as torch sees it."""

    def need_ffi(self, handler: str) -> None:
        """Say that the program calls an FFI handler, which the runtime must register before loading it."""

    def host_check(self, value: ir.Value, check: Callable[[torch.Tensor], object]) -> None:
        """Show ``value`` to ``check`` after every call, before anything is returned: what it raises reaches the user.
        Inside a region (a loop's body, a branch) it is not seen."""


def make_context() -> ir.Context:
    """A fresh MLIR context that knows StableHLO, CHLO and what they stand on.

    Other dialects are loaded when something parsed into it needs them: loading all of them takes 1.4 ms a context.
    """
    context = ir.Context()
    context.append_dialect_registry(_upstream_dialects())
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    context.dialects["func"]  # an op built in Python needs its dialect loaded
    return context


@lru_cache(maxsize=1)
def _upstream_dialects() -> ir.DialectRegistry:
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    return registry


@dataclass(frozen=True)
class SourceLine:
    """Where the user wrote an op."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


@lru_cache(maxsize=65536)
def source_line(stack_trace: str) -> SourceLine | None:
    """The innermost frame of an FX stack trace that is not torch's own (nor ours); torch's if there is no other."""
    found = (SourceLine(m["file"], int(m["line"]), m["function"], m["code"]) for m in _FRAME.finditer(stack_trace))
    frames = [f for f in found if not f.file.startswith(_OURS)]
    mine = [f for f in frames if not f.file.startswith(_TORCH)]
    best = mine or frames
    return best[-1] if best else None
