"""The stages of a compile, one at a time, under JAX's names.

    traced = tpu_compile.trace(model, x)       Dynamo and AOTAutograd: a functional graph of aten ops
    lowered = traced.lower()                   a StableHLO program
    compiled = lowered.compile()               an executable
    compiled(x)                                what torch.compile(model, backend="tpu") returns under no_grad

Inference only. The graph is the very one that the backend makes, so that both share their cache entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tpu_compile import compiler, costs, tracing
from tpu_compile.backend import check_options
from tpu_compile.calling import CallPlan
from tpu_compile.config import override
from tpu_compile.errors import BadCall, ConfigError, nearest
from tpu_compile.lowering import fx
from tpu_compile.lowering.program import Program, TensorSpec
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.targets.compiling import compile_for


def trace(fn: Any, *args: Any, **kwargs: Any) -> Traced:
    """Capture a computation as a graph of aten ops, without running it.

    Args:
        fn: a function, an ``nn.Module``, a ``torch.export.ExportedProgram``, or the path of a ``.pt2`` file. Without
            arguments an exported program is traced on its example inputs. Its dynamic sizes stay symbolic.
        args, kwargs: example arguments: their types, shapes and strides decide the program, and so do the values of
            arguments that are no tensors.

    Raises:
        LoweringError: ``fn`` runs no tensor operation, or asks for gradients.
        torch._dynamo.exc.Unsupported: the graph would break; the message says where.
    """
    fn, args, kwargs = tracing.callable_and_arguments(fn, args, kwargs)
    found = tracing.capture_call(fn, args, kwargs)
    flat, in_tree = pytree.tree_flatten((args, kwargs))
    return Traced(found.graph, found, tuple(map(_info, flat)), in_tree)


def _info(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return TensorSpec(tuple(value.shape), value.dtype, tuple(value.stride()))


def _no_dialect(dialect: str, known: tuple[str, ...], stage: str) -> ConfigError:
    return ConfigError(f"{stage} has no text in dialect {dialect!r}.{nearest(dialect, known)}")


@dataclass(frozen=True)
class Traced:
    """A computation as a functional graph of aten ops with FakeTensor metadata.

    Attributes:
        graph_module: the graph; parameters and buffers are arguments of it.
        args_info: a TensorSpec for each tensor of the flat arguments, and the values of the others.
        in_tree: how ``(args, kwargs)`` nest.
    """

    graph_module: GraphModule
    tracing: tracing.Tracing
    args_info: tuple[Any, ...]
    in_tree: Any

    def as_text(self, dialect: str = "fx") -> str:
        """The graph as readable Python."""
        if dialect != "fx":
            raise _no_dialect(dialect, ("fx",), "a traced computation")
        return fx_text(self.graph_module)

    def lower(self, family: str = "") -> Lowered:
        """The graph as StableHLO.

        Args:
            family: what kind of device for: ``cpu``, ``tpu``, ``cuda``. Empty: the platform in force.

        Raises:
            UnsupportedOp: with every op that nothing lowers and its line.
        """
        found = self.tracing
        return Lowered(compiler.lower_graph(found.graph, found.name, dict(found.bindings), family), self, family)

    def for_target(self, bindings: Mapping[Any, int] | None = None) -> Program:
        """The program of a TPU that holds the arguments: what it overwrites is donated.

        Args:
            bindings: other numbers for the graph's symbolic sizes.
        """
        found = self.tracing
        return compiler.lower_graph(found.graph, found.name, dict(bindings or found.bindings), "tpu", donate=True)


@dataclass(frozen=True)
class Lowered:
    """A StableHLO program, for one binding of the graph's symbolic sizes."""

    program: Program
    traced: Traced
    family: str = ""

    @property
    def args_info(self) -> tuple[Any, ...]:
        """See ``Traced``."""
        return self.traced.args_info

    @property
    def in_tree(self) -> Any:
        """See ``Traced``."""
        return self.traced.in_tree

    def as_text(self, dialect: str = "stablehlo") -> str:
        """The program in a dialect: ``stablehlo``, ``hlo`` (as XLA reads it, not yet optimised) or ``fx``."""
        if dialect == "fx":
            return self.traced.as_text()
        if dialect == "stablehlo":
            return fx.text(self.program.bytecode)
        if dialect == "hlo":
            return compiler.runtime.client.hlo_text(self.program.bytecode)  # type: ignore[no-any-return]
        raise _no_dialect(dialect, ("stablehlo", "hlo", "fx"), "a lowered program")

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate before optimisation: ``flops``, ``bytes accessed``, ``transcendentals``, …"""
        return compiler.runtime.client.hlo_cost_analysis(self.program.bytecode)  # type: ignore[no-any-return]

    def compile(self, options: Mapping[str, Any] | None = None, *, target: str = "") -> Compiled:
        """Load the program from the cache, or compile it.

        Args:
            options: as of ``torch.compile(options=...)``.
            target: a TPU slice that need not be attached, such as ``v5e:2x2``. The result cannot be called.

        Raises:
            CompilationFailed: XLA rejected it.
            OutOfMemory: the target's chips do not hold it.
        """
        with override(**check_options(options or {})):
            chosen = compiler.options_in_force()
            if target:
                there = compile_for(target, self.traced.for_target(), chosen)
                return Compiled(self.traced.graph_module, there, self._bindings, self.traced)
            built = compiler.runtime.executable(self.program, chosen)
            return Compiled(self.traced.graph_module, built, self._bindings, self.traced, self._runner(built))

    @property
    def _bindings(self) -> Mapping[Any, int]:
        return self.traced.tracing.bindings

    def _runner(self, built: compiler.Compiled) -> tracing.Run:
        found = self.traced.tracing
        if found.bindings:  # each other binding gets an executable of its own when it is met
            return compiler.CompiledGraph(found.graph, found.name, found.kept)
        placed = compiler.residency(found.graph)
        if placed is not None:
            from tpu_compile.device.resident import ResidentPlan

            return ResidentPlan(built.program, built.executable, built.client, placed)
        return CallPlan(built.program, built.executable, built.client, found.kept)


@dataclass(frozen=True)
class Compiled:
    """An executable with the graph it was made from. It can be called if it was made by ``trace``; those that a
    ``compiler.record()`` block saw are called by the function they belong to."""

    graph_module: GraphModule
    built: compiler.Compiled
    bindings: Mapping[Any, int]
    traced: Traced | None = None
    run: tracing.Run | None = None

    @property
    def name(self) -> str:
        """What errors and the cache call it."""
        return self.built.program.name

    @property
    def program(self) -> Program:
        """What was compiled."""
        return self.built.program

    @property
    def origin(self) -> str:
        """Where the executable came from: ``memory``, ``disk`` or ``xla``."""
        return self.built.origin

    def as_text(self, dialect: str = "hlo") -> str:
        """The program in a dialect: ``hlo`` (optimised), ``stablehlo`` or ``fx``."""
        if dialect == "fx":
            return fx_text(self.graph_module)
        if dialect == "stablehlo":
            return fx.text(self.program.bytecode)
        if dialect == "hlo":
            return self.built.executable.as_text()  # type: ignore[no-any-return]
        raise _no_dialect(dialect, ("hlo", "stablehlo", "fx"), "a compiled program")

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate: ``flops``, ``bytes accessed``, ``transcendentals``, …"""
        return self.built.executable.cost_analysis()  # type: ignore[no-any-return]

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes that the program needs on its device."""
        return self.built.executable.memory_analysis()  # type: ignore[no-any-return]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What each input of the program is, as the user would write it: ``self.linear.weight``."""
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        names = [n.meta.get("argument", n.name) for n in placeholders]
        return tuple(names[position] for position in self.program.arguments)

    @property
    def overwritten(self) -> dict[str, str]:
        """Each argument that the program writes to: its buffer is donated to the new contents, or why it is not."""
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        return {
            placeholders[position].meta.get("argument", placeholders[position].name): self._donation(
                position, placeholders[position].meta["val"]
            )
            for position, _ in self.program.mutated
        }

    def _donation(self, position: int, value: torch.Tensor) -> str:
        given = self.program.arguments
        if position not in given:
            return "not donated: its old contents are never read, so it is no input"
        index = given.index(position)
        if index in self.program.donated:
            return "donated"
        if value.device.type == "cpu":
            return "not donated: the memory of a CPU tensor is its owner's; the result is copied into it"
        assert self.program.inputs[index].order is None, "a dense device tensor that is overwritten is donated"
        return "not donated: its strides leave gaps or overlap"

    def node_costs(self) -> list[costs.NodeCost]:
        """An estimate for each op of the graph, with the user's line; largest first."""
        return costs.node_costs(self.graph_module, self.bindings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, under ``no_grad``. Buffers and arguments that ``fn`` writes to are written to.

        Raises:
            BadCall: the arguments are not those it was traced with, in type, shape or value (of what is no tensor).
        """
        if self.run is None or self.traced is None:
            why = "was compiled for a target" if self.traced else "belongs to a function of torch.compile"
            raise BadCall(f"{self.name} {why}: it can be inspected, not called.", "FAILED_PRECONDITION")
        try:
            with torch.no_grad(), tracing.running(self.run):
                return self.traced.tracing.function(*args, **kwargs)
        except tracing.NotAsTraced:
            raise BadCall(f"{self.name} {_departure(self.traced, args, kwargs)}", "INVALID_ARGUMENT") from None


def _departure(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How a call differs from the one that was traced."""
    flat, tree = pytree.tree_flatten_with_path((args, kwargs))
    if tree != traced.in_tree:
        return "was traced with arguments of another number, names or nesting than it was called with. Trace it anew."
    for (path, given), known in zip(flat, traced.args_info, strict=True):
        given = _info(given)
        if type(given) is not type(known) or given != known:
            where = ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])  # type: ignore[attr-defined]
            return f"was traced with {where} = {known}, called with {given}. Trace it anew for other arguments."
    return "reads something beside its arguments (an attribute, a global) that has changed. Trace it anew."


def recorded(lowering: compiler.Lowering, target: str = "") -> Compiled:
    """What a ``compiler.record()`` block saw, as a stage; compiled anew for ``target`` if one is named."""
    if not target:
        return Compiled(lowering.graph, lowering.compiled, lowering.bindings)
    program = compiler.lower_graph(lowering.graph, lowering.name, dict(lowering.bindings), "tpu", donate=True)
    built = compile_for(target, program, compiler.options_in_force())
    return Compiled(lowering.graph, built, lowering.bindings)


def fx_text(graph_module: GraphModule) -> str:
    """A graph as readable Python, with the user's lines."""
    return graph_module.print_readable(print_output=False)


__all__ = ["Compiled", "Lowered", "Traced", "recorded", "trace"]
