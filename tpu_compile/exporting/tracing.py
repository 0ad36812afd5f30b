"""A model as one functional graph, through ``torch.export``: what its arguments are, what it writes to, and how its
results nest. The graph is made by the same AOTAutograd set-up as the backend's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from tpu_compile import capture
from tpu_compile.errors import ExportError
from tpu_compile.exporting import structure
from tpu_compile.lowering.picks import sum_picks
from tpu_compile.lowering.random import functionalize_random, functionalize_subgraphs

aten = torch.ops.aten
_STATE = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)


@dataclass(frozen=True)
class State:
    """A parameter, buffer or lifted constant of the model, under every name it has."""

    names: tuple[str, ...]
    kind: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Exportable:
    """A model as a graph.

    Attributes:
        graph: functional aten ops with FakeTensor metadata.
        arguments: what each placeholder is: ``("state", index)`` or ``("input", index of a flat argument)``.
        inputs: each flat argument's fake tensor, symbolic number or plain value.
        example: the flat arguments it was traced with.
        parameters: names of the model's positional parameters, as far as they are known.
        ranges: each symbol's least and largest value (None if there is none).
        names: what the user calls a symbol, where he named it.
    """

    name: str
    graph: GraphModule
    state: tuple[State, ...]
    arguments: tuple[tuple[str, int], ...]
    inputs: tuple[Any, ...]
    example: tuple[Any, ...]
    called: structure.Tree
    returned: structure.Tree
    parameters: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    names: Mapping[str, str] = field(default_factory=dict)


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Exportable:
    """See ``tpu_compile.export``.

    Raises:
        ExportError: the model does what a file cannot describe.
    """
    if isinstance(model, (str, Path)):
        model = torch.export.load(model)
    name, parameters = _name(model), _parameters(model)
    if isinstance(model, torch.export.ExportedProgram):
        program = model
        args, kwargs = (args, kwargs) if args or kwargs else program.example_inputs or ((), {})
    else:
        module = getattr(model, "_orig_mod", model)
        module = module if isinstance(module, torch.nn.Module) else _Function(module)
        with torch.no_grad():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    found = _Reading(program, name).exportable((args, kwargs), parameters)
    return replace(found, names=dict(_names(found, args, kwargs, dynamic_shapes)))


def _names(
    found: Exportable, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[tuple[str, str]]:
    """What the user calls each symbol: the name of its ``Dim``."""
    given: Any = (*args, *kwargs.values())
    if isinstance(dynamic_shapes, Mapping):
        given = dict(zip((*found.parameters[: len(args)], *kwargs), given, strict=False))
        dynamic_shapes = {name: dynamic_shapes.get(name) for name in given}
    if dynamic_shapes is None or len(given) != len(dynamic_shapes):
        return
    leaves = pytree.tree_structure(given).flatten_up_to(type(given)(dynamic_shapes))
    for value, axes in zip(found.inputs, leaves, strict=True):
        for axis, dim in axes.items() if isinstance(axes, Mapping) else enumerate(axes or ()):
            size = value.shape[axis] if isinstance(value, torch.Tensor) else None
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and isinstance(dim, torch.export.Dim):
                yield size.node.expr.name, dim.__name__


class _Function(torch.nn.Module):
    """A function as a module, with its own signature; the module whose method it is comes along, with its tensors."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function if _has_signature(function) else lambda *args, **kwargs: function(*args, **kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner


def _has_signature(function: Any) -> bool:
    try:
        inspect.signature(function)
    except ValueError:  # torch's own functions, written in C++
        return False
    return True


def _name(model: Any) -> str:
    if isinstance(model, torch.export.ExportedProgram):
        return "program"
    model = getattr(model, "_orig_mod", model)
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")


def _parameters(model: Any) -> tuple[str, ...]:
    """Names of what may be given by position, up to a ``*args``."""
    call = getattr(model, "_orig_mod", model)
    call = call.forward if isinstance(call, torch.nn.Module) else call
    if isinstance(model, torch.export.ExportedProgram) or not _has_signature(call):
        return ()
    return tuple(p.name for p in inspect.signature(call).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)


class _Captured(Exception):
    """Ends AOTAutograd's work once the graph is there."""


class _Reading:
    """One ExportedProgram being read."""

    def __init__(self, program: Any, name: str) -> None:
        self.program, self.name = program, name
        self.graph_module: GraphModule = torch.fx.GraphModule(program.graph_module, _copy(program.graph_module.graph))
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")  # the copy may have renamed some
        self.specs = dict(zip(placeholders, program.graph_signature.input_specs, strict=True))

    def exportable(self, called: Any, parameters: tuple[str, ...]) -> Exportable:
        placeholders = list(self.specs)
        users = [n for n, spec in self.specs.items() if spec.kind is InputKind.USER_INPUT]
        example, spec = pytree.tree_flatten(called)
        if len(example) != len(users):
            raise ExportError(f"{self.name} was exported with {len(users)} arguments, {len(example)} were given")
        inputs = tuple(n.meta.get("val", given) for n, given in zip(users, example, strict=True))
        state, places = self._state([n for n in placeholders if n not in users])
        self._write_mutations()
        self._own_results()
        arguments = []
        for node in placeholders:
            if not node.users:
                self.graph_module.graph.erase_node(node)
            else:
                arguments.append(("input", users.index(node)) if node in users else ("state", places[node]))
        self.graph_module.recompile()
        return Exportable(
            self.name,
            self._functional(),
            state,
            tuple(arguments),
            inputs,
            tuple(example),
            structure.describe(spec),
            structure.describe(self.program.call_spec.out_spec),
            parameters,
            dict(self._ranges()),
        )

    # ---- what the model holds

    def _state(self, nodes: list[Node]) -> tuple[tuple[State, ...], dict[Node, int]]:
        """The model's tensors, tied ones once; their placeholders become one."""
        found: dict[Any, int] = {}
        states: list[State] = []
        firsts: list[Node] = []
        places: dict[Node, int] = {}
        for node in nodes:
            spec = self.specs[node]
            if spec.kind not in _STATE:
                raise ExportError(f"{self.name} holds a {spec.kind.name.lower()} ({spec.target}), which no file can")
            t = self._tensor(spec.target)
            index = found.setdefault(_identity(t), len(states))
            if index == len(states):
                states.append(State((spec.target,), _STATE[spec.kind], t))
                firsts.append(node)
            else:
                states[index] = State((*states[index].names, spec.target), states[index].kind, t)
                node.replace_all_uses_with(firsts[index])
            places[node] = index
        return tuple(states), places

    def _tensor(self, target: str) -> torch.Tensor:
        found = self.program.state_dict.get(target)
        t = self.program.constants.get(target) if found is None else found
        if not isinstance(t, torch.Tensor):
            raise ExportError(f"{self.name} holds {target}, a {type(t).__name__}, which no file can")
        if t.is_sparse or t.is_quantized or type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise ExportError(f"{self.name}'s {target} is no plain dense tensor; a file holds only those")
        return t

    # ---- what the model does

    def _write_mutations(self) -> None:
        """Results that are new contents of arguments, as writes to them; the program's other results stay."""
        graph, signature = self.graph_module.graph, self.program.graph_signature
        output = graph.output_node()
        written = {spec.target or spec.arg.name: node for node, spec in self.specs.items()}
        results = []
        for item, spec in zip(output.args[0], signature.output_specs, strict=True):  # type: ignore[arg-type]
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(item)
            elif spec.kind in _WRITES:
                with graph.inserting_before(output):
                    graph.call_function(aten.copy_.default, (written[spec.target], item))
            else:
                raise ExportError(f"{self.name} has a result of kind {spec.kind.name.lower()}, which no file can hold")
        output.args = (tuple(results),)

    def _own_results(self) -> None:
        """Each result in memory of its own: a file keeps no views between what it returns and what it was given."""
        graph = self.graph_module.graph
        output = graph.output_node()
        with graph.inserting_before(output):
            output.args = (tuple(self._owned(item) for item in output.args[0]),)  # type: ignore[union-attr]

    def _owned(self, item: Any) -> Any:
        if not isinstance(item, Node) or not isinstance(item.meta.get("val"), torch.Tensor):
            return item
        clone = self.graph_module.graph.call_function(aten.clone.default, (item,))
        clone.meta.update({k: v for k, v in item.meta.items() if k in ("stack_trace", "nn_module_stack")})
        return clone

    def _functional(self) -> GraphModule:
        """The graph as AOTAutograd makes it for the backend."""
        made: list[GraphModule] = []

        def keep(graph: GraphModule, kind: str) -> Any:
            made.append(graph)
            return lambda arguments: (_ for _ in ()).throw(_Captured())

        examples = [n.meta["val"] for n in self.graph_module.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            capture.aot_graphs(self.graph_module, examples, keep)
        (graph,) = made
        functionalize_random(graph)
        functionalize_subgraphs(graph)
        sum_picks(graph)
        return graph

    def _ranges(self) -> Iterator[tuple[str, tuple[int, int | None]]]:
        for symbol, bounds in self.program.range_constraints.items():
            lower, upper = int(bounds.lower), bounds.upper
            yield symbol.name, (lower, int(upper) if upper.is_Integer else None)


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    fresh = torch.fx.Graph()
    fresh.output(fresh.graph_copy(graph, {}))
    return fresh


def _identity(t: torch.Tensor) -> Any:
    """Equal for two names of one tensor."""
    return (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)
