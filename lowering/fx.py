"""The walk: an FX graph of aten ops becomes a StableHLO Program, one rule a node, every result checked against
FakeTensor."""

from __future__ import annotations

import hashlib
import io
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import func
from torch.fx import GraphModule, Node

from tpu_compile.config import config
from tpu_compile.errors import Gap, LoweringError, RuleMismatch, UnsupportedDtype, UnsupportedOp
from tpu_compile.lowering import dtypes, hlo, layers, numbers
from tpu_compile.lowering.aliasing import memory_of
from tpu_compile.lowering.context import Layout, LoweringContext, Refusal, SourceLine, make_context
from tpu_compile.lowering.debug import DebugChecks
from tpu_compile.lowering.gaps import ASSERTIONS, SYMBOLIC, attribute, evaluated, missing, unsupported, where
from tpu_compile.lowering.program import HostCheck, Program, Result, TensorSpec, inverse
from tpu_compile.lowering.random import rng_key
from tpu_compile.lowering.registry import registry

aten = torch.ops.aten
Bindings = Mapping[Any, int]

EMBED_BYTES = 4096
"""Tensor constants up to this size become constants of the program; larger ones are passed in, so that the program
stays small."""


def bind(graph: torch.fx.Graph, arguments: Sequence[Any]) -> dict[Any, int]:
    """Numbers for the graph's symbols, from the sizes and integers of one call's ``arguments``."""
    bindings: dict[Any, int] = {}
    placeholders = (n for n in graph.nodes if n.op == "placeholder")
    for node, argument in zip(placeholders, arguments, strict=True):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            bindings[value.node.expr] = int(argument)
        elif isinstance(value, torch.Tensor) and isinstance(argument, torch.Tensor):
            for symbolic, actual in zip(value.shape, argument.shape, strict=True):
                if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                    bindings[symbolic.node.expr] = int(actual)
    return bindings


@dataclass
class _Input:
    """A program argument while its block is being built."""

    spec: TensorSpec
    position: int
    value: ir.Value
    mutated_by: int | None = None


@dataclass
class GraphWalk:
    """Lowers one graph. ``env`` maps nodes to values, tuples of values, or Python numbers."""

    graph_module: GraphModule
    bindings: Bindings
    ctx: LoweringContext = field(init=False)
    block: Any = field(init=False)
    env: dict[Node, Any] = field(default_factory=dict)
    gaps: list[tuple[Node, Gap]] = field(default_factory=list)
    inputs: list[_Input] = field(default_factory=list)
    constants: list[tuple[torch.Tensor, ir.Value]] = field(default_factory=list)
    outputs: list[tuple[TensorSpec, ir.Value]] = field(default_factory=list)
    places: dict[tuple[Node | None, TensorSpec, ir.Value], int] = field(default_factory=dict)
    mutations: list[tuple[Node, ir.Value]] = field(default_factory=list)
    ffi: dict[str, None] = field(default_factory=dict)
    checks: list[tuple[ir.Value, Callable[[torch.Tensor], object]]] = field(default_factory=list)
    debug: DebugChecks | None = field(default_factory=lambda: DebugChecks() if config.debug_checks else None)
    tiers: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    locations: dict[tuple[Any, SourceLine | None], ir.Location] = field(default_factory=dict)
    turns: list[ir.Value | int] = field(default_factory=list)
    node: Node | None = None
    caller: Node | None = None  # the node of the whole graph whose subgraph is being lowered
    _seed: ir.Value | None = None

    # ---- what rules may use

    @property
    def seed(self) -> ir.Value:
        if self._seed is None:
            self._seed = self.block.add_argument(hlo.tensor_type((2,), torch.uint64), ir.Location.unknown())
        return self._seed

    def layout(self, argument: int) -> Layout:
        assert self.node is not None
        value = self.node.args[argument].meta["val"]  # type: ignore[union-attr]
        shape, stride = tuple(map(self.number, value.shape)), tuple(map(self.number, value.stride()))
        return Layout(shape, stride, self.number(value.storage_offset()))

    def need_ffi(self, handler: str) -> None:
        self.ffi[handler] = None

    def host_check(self, value: ir.Value, check: Callable[[torch.Tensor], object]) -> None:
        if ir.InsertionPoint.current.block == self.block:
            self.checks.append((value, check))

    def loop(self, carries: Sequence[Any], condition: Callable[..., Any], body: Callable[..., Any]) -> list[Any]:
        return (self.debug.loop if self.debug else hlo.while_)(carries, condition, body)

    def case(self, index: Any, branches: Sequence[Callable[[], Any]], types: Sequence[ir.Type]) -> list[Any]:
        return (self.debug.case if self.debug else hlo.case)(index, branches, types)

    def subgraph(self, graph_module: GraphModule, arguments: Sequence[Any]) -> list[Any]:
        outer_module, outer_env = self.graph_module, self.env
        self.graph_module, self.env = graph_module, {}
        outer_where, outer_out, outer_caller = self.ctx.where, self.ctx.out, self.caller
        self.caller = self.caller or self.node
        try:
            placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
            self.env.update(zip(placeholders, arguments, strict=True))
            for node in graph_module.graph.nodes:
                if node.op == "output":
                    flat, _ = torch.utils._pytree.tree_flatten(self.resolve(node.args[0]))
                    return flat
                if node.op != "placeholder":
                    self.visit(node)
            raise AssertionError("a graph without output")
        finally:
            self.graph_module, self.env = outer_module, outer_env
            self.ctx.where, self.ctx.out, self.caller = outer_where, outer_out, outer_caller

    # ---- specs

    def number(self, value: Any) -> Any:
        """A Python number: itself, or a symbolic one with the bindings put in."""
        if isinstance(value, SYMBOLIC):
            expression = value.node.expr
            bound = expression.xreplace(self.bindings) if hasattr(expression, "xreplace") else expression
            if getattr(bound, "free_symbols", None):
                raise LoweringError(
                    f"the size {expression} is not decided by the graph's arguments, at {self.ctx.where}"
                )
            return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](bound)
        return value

    def spec(self, value: torch.Tensor, *, strided: bool = False) -> TensorSpec:
        """The TensorSpec of a fake tensor."""
        shape = tuple(value.shape)
        stride = tuple(value.stride()) if strided else ()
        if value._has_symbolic_sizes_strides:
            shape, stride = tuple(map(self.number, shape)), tuple(map(self.number, stride))
        return TensorSpec(shape, value.dtype, stride)

    def specs(self, value: Any) -> Any:
        """``spec`` over tuples and lists; numbers are bound, the rest is kept."""
        if isinstance(value, torch.Tensor):
            return self.spec(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.specs, value))
        if isinstance(value, numbers.SYMBOLIC):  # of an op: every other number is known before
            return TensorSpec((), numbers.KINDS[type(value)])
        return self.number(value)

    # ---- nodes

    def resolve(self, argument: Any) -> Any:
        """A node's argument with nodes replaced by their values and symbols by numbers."""
        if isinstance(argument, Node):
            return self.env[argument]
        if isinstance(argument, (list, tuple)):
            return [self.resolve(a) for a in argument]
        if isinstance(argument, dict):
            return {k: self.resolve(v) for k, v in argument.items()}
        if isinstance(argument, slice):
            return slice(*map(self.resolve, (argument.start, argument.stop, argument.step)))
        return self.number(argument)

    def visit(self, node: Node) -> None:
        """Lower one node that is neither placeholder nor output."""
        if node.op == "get_attr":
            self.env[node] = self.attribute(node)
        elif node.target is operator.getitem and isinstance(items := self.resolve(node.args[0]), (tuple, list)):
            self.env[node] = items[self.resolve(node.args[1])]
        elif evaluated(node) and any(self.learned(n) for n in node.all_input_nodes):
            self.env[node] = numbers.compute(node.target, self.resolve(node.args))
        elif evaluated(node):
            self.env[node] = self.number(node.meta["val"])
        elif node.target in ASSERTIONS:
            self.env[node] = None
        else:
            self.call(node)

    def learned(self, node: Node) -> bool:
        """Whether a node is a number that only the running program knows."""
        return isinstance(node.meta.get("val"), numbers.SYMBOLIC) and isinstance(self.env.get(node), ir.Value)

    def call(self, node: Node) -> None:
        """Run the rule of a node, at the user's line, and check what it returns."""
        rule = registry.get(node.target)
        assert rule is not None, f"missing() let {node.target} through"
        ctx = self.ctx
        promised = self.specs(node.meta.get("val"))
        ctx.where, ctx.out, self.node = where(node), promised, node
        try:
            with self.location(node, ctx.where):
                args, kwargs = self.resolve(node.args), {k: self.resolve(v) for k, v in node.kwargs.items()}
                result = rule.function(ctx, *args, **kwargs)
                self.check(node, promised, result)
                if self.debug:
                    self.debug.after(node.target, ctx.where, args, kwargs, result)
            self.tiers[rule.tier] += 1
            self.ops[str(node.target)] += 1
        except (Refusal, UnsupportedDtype) as refusal:
            reason, hint = (refusal.reason, refusal.hint) if isinstance(refusal, Refusal) else (str(refusal), "")
            self.gaps.append((self.caller or node, Gap(str(node.target), reason, str(ctx.where or ""), hint)))
            result = self.stand_in(promised)
        if node.target is aten.copy_.default:
            self.mutations.append((node, result))
        self.env[node] = result

    def location(self, node: Node, line: SourceLine | None) -> ir.Location:
        """The op's name at the user's line; the layers of a model share them."""
        known = self.locations.get((node.target, line))
        if known is None:
            child = ir.Location.file(line.file, line.line, 0) if line else None
            known = self.locations[node.target, line] = ir.Location.name(str(node.target), childLoc=child)
        return known

    def check(self, node: Node, promised: Any, result: Any) -> None:
        """Raise RuleMismatch unless ``result`` has the types FakeTensor promised."""
        if isinstance(promised, tuple):
            if not isinstance(result, (tuple, list)) or len(result) != len(promised):
                raise RuleMismatch(f"{node.target} gave {result!r} for {len(promised)} results, at {self.ctx.where}")
            for p, r in zip(promised, result, strict=True):
                self.check(node, p, r)
        elif isinstance(promised, TensorSpec):
            wanted = hlo.tensor_type(promised.shape, promised.dtype)
            if getattr(result, "type", None) != wanted:
                given = getattr(result, "type", type(result))
                raise RuleMismatch(
                    f"the rule of {node.target} gave {given}, FakeTensor promises {wanted}, at {self.ctx.where}"
                )

    def stand_in(self, promised: Any) -> Any:
        """Zeros in place of a refused op's results, so that the walk can go on and find the graph's other gaps."""
        if isinstance(promised, tuple):
            return tuple(map(self.stand_in, promised))
        if isinstance(promised, TensorSpec):
            return hlo.full(0, promised.dtype, promised.shape)
        return promised

    def attribute(self, node: Node) -> Any:
        """A subgraph as it is; a tensor constant as a constant, or as an argument of the program if it is large."""
        value = attribute(self.graph_module, str(node.target))
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() * value.dtype.itemsize <= EMBED_BYTES:
            return hlo.dense(dtypes.to_numpy(value), value.dtype)
        for known, argument in self.constants:
            if known is value:
                return argument
        argument = self.block.add_argument(hlo.tensor_type(value.shape, value.dtype), ir.Location.unknown())
        self.constants.append((value, argument))
        return argument

    # ---- the ends of the graph

    def placeholder(self, node: Node, position: int) -> None:
        """A tensor argument arrives as its dense memory; what torch sees is a transpose of it."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.env[node] = self.number(value)
            return
        if not node.users:
            return
        spec = self.spec(value, strided=True)
        order = spec.order or tuple(range(len(spec.shape)))
        argument = self.block.add_argument(
            hlo.tensor_type([spec.shape[i] for i in order], spec.dtype), ir.Location.name(node.name)
        )
        self.inputs.append(_Input(spec, position, argument))
        self.env[node] = hlo.transpose(argument, inverse(order))

    def output(self, spec: TensorSpec, value: ir.Value, owner: Node | None = None) -> int:
        """Add a result of the program, laid out as torch will see it.

        The same memory, that of ``owner``, twice is one result. The same value is not: a tensor and its clone are two
        to write into.
        """
        key = owner, spec, value
        if key not in self.places:
            self.places[key] = len(self.outputs)
            self.outputs.append((spec, value))
        return self.places[key]

    def results(self, node: Node) -> list[Result]:
        """One Result for each entry of the graph's output."""
        positions = {n: i for i, n in enumerate(n for n in self.graph_module.graph.nodes if n.op == "placeholder")}
        results = []
        for item in node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]:
            if isinstance(item, Node) and item.op == "placeholder":
                results.append(Result(argument=positions[item]))
            elif isinstance(item, Node) and item.target is aten.copy_.default and item.args[0] in positions:
                results.append(Result(argument=positions[item.args[0]]))
            elif isinstance(item, Node) and isinstance(item.meta.get("val"), torch.Tensor):
                spec = self.spec(item.meta["val"], strided=True)
                results.append(Result(index=self.output(spec, self.env[item], memory_of(item))))
            elif isinstance(item, Node) and self.learned(item):
                spec = TensorSpec.contiguous((), hlo.dtype(self.env[item]))
                results.append(Result(index=self.output(spec, self.env[item]), number=True))
            else:
                results.append(Result(value=self.resolve(item)))
        return results


def lower(
    graph_module: GraphModule, name: str, *, family: str, bindings: Bindings | None = None, donate: bool = False
) -> Program:
    """Lower a functional graph of aten ops whose nodes carry FakeTensor metadata.

    Args:
        graph_module: the graph; in-place ops only as ``copy_`` into placeholders.
        name: the module's name; part of its text, not of its digest.
        family: the platform family ("cpu", "tpu", "cuda") that platform-dependent rules are chosen for.
        bindings: sympy symbols to numbers, for a graph with symbolic sizes.
        donate: let a mutated argument's buffer be taken over by its new contents.

    Raises:
        UnsupportedOp: with every gap of the graph.
        LoweringError: a symbolic size that the arguments do not decide.
        RuleMismatch: a rule broke its promise (our bug).
    """
    gaps = missing(graph_module)
    if gaps:
        raise unsupported(gaps, name)
    loops = layers.Loops(graph_module, name) if config.scan_layers and not config.debug_checks else None
    if loops:
        try:
            return _lower(graph_module, name, family, bindings, donate, loops)
        except UnsupportedOp:  # the nodes of a loop's body are not the graph's: once more, to name those
            pass
    return _lower(graph_module, name, family, bindings, donate, None)


def _lower(
    graph_module: GraphModule,
    name: str,
    family: str,
    bindings: Bindings | None,
    donate: bool,
    loops: layers.Loops | None,
) -> Program:
    with make_context(), ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        for count in ("mhlo.num_partitions", "mhlo.num_replicas"):
            module.operation.attributes[count] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
        walk = GraphWalk(graph_module, bindings or {})
        walk.ctx = LoweringContext(family, module, walk)
        return _build(walk, module, name, donate, loops)


def _build(walk: GraphWalk, module: ir.Module, name: str, donate: bool, loops: layers.Loops | None = None) -> Program:
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("main", ir.FunctionType.get([], []), visibility="public")
    walk.block = function.add_entry_block()
    with ir.InsertionPoint(walk.block):
        results: list[Result] = []
        position = 0
        for node in walk.graph_module.graph.nodes:
            if node.op == "placeholder":
                walk.placeholder(node, position)
                position += 1
            elif node.op == "output":
                results = walk.results(node)
            elif loops is None or not loops.lower(walk, node):
                walk.visit(node)
        if walk.gaps:
            raise unsupported(walk.gaps, name)
        mutated = _mutations(walk)
        table = walk.debug.table() if walk.debug else None
        if table:
            walk.host_check(*table)
        checks = [HostCheck(walk.output(_dense(value), value), check) for value, check in walk.checks]
        returned = [hlo.transpose(value, spec.order or range(len(spec.shape))) for spec, value in walk.outputs]
        terminator = func.ReturnOp(returned)
    return _finish(walk, module, function, terminator, name, results, mutated, checks, donate)


def _dense(value: ir.Value) -> TensorSpec:
    return TensorSpec.contiguous(tuple(hlo.shape(value)), hlo.dtype(value))


def _mutations(walk: GraphWalk) -> list[tuple[int, int]]:
    """(position, result) of each argument that a trailing ``copy_`` overwrites; the last one wins."""
    by_node = {n: i for i, n in enumerate(n for n in walk.graph_module.graph.nodes if n.op == "placeholder")}
    last: dict[Any, ir.Value] = {node.args[0]: value for node, value in walk.mutations}
    mutated = []
    for target, value in last.items():
        spec = walk.spec(target.meta["val"], strided=True)
        walk.outputs.append((spec if spec.order else TensorSpec.contiguous(spec.shape, spec.dtype), value))
        mutated.append((by_node[target], len(walk.outputs) - 1))
    return mutated


def _finish(
    walk: GraphWalk,
    module: ir.Module,
    function: func.FuncOp,
    terminator: func.ReturnOp,
    name: str,
    results: list[Result],
    mutated: list[tuple[int, int]],
    checks: list[HostCheck],
    donate: bool,
) -> Program:
    seed = [walk._seed] if walk._seed is not None else []
    arguments = [*(i.value for i in walk.inputs), *(v for _, v in walk.constants), *seed]
    _reorder_arguments(walk.block, arguments)
    types = ir.FunctionType.get([a.type for a in walk.block.arguments], [v.type for v in terminator.operands])
    function.attributes["function_type"] = ir.TypeAttr.get(types)
    donated = _donate(walk, function, mutated, len(arguments)) if donate else ()
    module.operation.verify()
    return Program(
        name=name,
        bytecode=bytecode(module.operation),
        digest=digest(module),
        inputs=tuple(i.spec for i in walk.inputs),
        arguments=tuple(i.position for i in walk.inputs),
        outputs=tuple(spec for spec, _ in walk.outputs),
        results=tuple(results),
        mutated=tuple(mutated),
        donated=donated,
        constants=tuple(t for t, _ in walk.constants),
        random=walk._seed is not None,
        draws=_draws(walk.graph_module),
        ffi_handlers=tuple(sorted(walk.ffi)),
        ops_per_tier=tuple(sorted(walk.tiers.items())),
        ops=tuple(sorted(walk.ops.items())),
        checks=tuple(checks),
    )


def _draws(graph_module: GraphModule) -> int:
    """How many keys a graph makes, those of its loops and branches included."""
    graphs = [m.graph for m in graph_module.modules() if isinstance(m, GraphModule)]
    return sum(len(graph.find_nodes(op="call_function", target=rng_key)) for graph in graphs)


def _reorder_arguments(block: Any, wanted: list[ir.Value]) -> None:
    """Block arguments appear in the order in which they were asked for; put inputs first, then constants, then the
    seed."""
    if list(block.arguments) == wanted:
        return
    for value in wanted:
        fresh = block.add_argument(value.type, ir.Location.unknown())
        value.replace_all_uses_with(fresh)
    for _ in wanted:
        block.erase_argument(0)


def _donate(walk: GraphWalk, function: func.FuncOp, mutated: list[tuple[int, int]], count: int) -> tuple[int, ...]:
    """Alias each overwritten argument with the result that holds its new contents."""
    index_of = {item.position: index for index, item in enumerate(walk.inputs)}
    attributes = [ir.DictAttr.get({}) for _ in range(count)]
    donated = []
    for position, result in mutated:
        index = index_of.get(position)
        if index is not None and walk.inputs[index].spec.order is not None:
            i32 = ir.IntegerType.get_signless(32)
            attributes[index] = ir.DictAttr.get({"tf.aliasing_output": ir.IntegerAttr.get(i32, result)})
            donated.append(index)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return tuple(donated)


def bytecode(operation: Any) -> bytes:
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    return buffer.getvalue()


def digest(module: ir.Module) -> str:
    """SHA-256 of the program without its source lines and its name: moving code or renaming a model changes no key."""
    bare = module.operation.clone()
    bare.attributes["sym_name"] = ir.StringAttr.get("program")
    passmanager.PassManager.parse("builtin.module(strip-debuginfo)", context=module.context).run(bare)
    return hashlib.sha256(bytecode(bare)).hexdigest()


def text(bytecode: bytes, *, locations: bool = False) -> str:
    """A Program's bytecode as StableHLO text."""
    with make_context():
        module = ir.Module.parse(bytecode)
        return module.operation.get_asm(enable_debug_info=locations, large_elements_limit=64)
