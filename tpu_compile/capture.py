"""What we ask of Dynamo and AOTAutograd, private names included: one function a question, each with a probe test."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._dynamo import disable
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, TangentAOTInput
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule

from tpu_compile import asynchronous, compiler, views
from tpu_compile.compiler import compile_graph
from tpu_compile.config import config
from tpu_compile.errors import TpuCompileError
from tpu_compile.lowering.decompositions import WhenNeeded
from tpu_compile.lowering.derivatives import join_derivatives
from tpu_compile.lowering.picks import sum_picks
from tpu_compile.lowering.program import dense_order
from tpu_compile.lowering.random import functionalize_random, functionalize_subgraphs
from tpu_compile.lowering.recompute import asks_for_recomputation, recompute_late
from tpu_compile.lowering.saving import stack_saved
from tpu_compile.scanning import fold_layers
from tpu_compile.warm.autograd import Keeper


def one_graph() -> bool:
    """Whether the user said ``fullgraph=True``. Dynamo tells it only while the forward compiles."""
    try:
        return bool(InstructionTranslator.current_tx().one_graph)
    except AttributeError:  # no translator is at work: AOTAutograd was called by hand
        return False


def frame_name() -> str:
    """What Dynamo is compiling, as an identifier: the module's class, or the function's name."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return "graph"
    module = next((v for v in translator.f_locals.values() if isinstance(v, torch.nn.Module)), None)
    if module is not None:
        return type(module).__name__
    name = translator.f_code.co_qualname.replace("<locals>.", "")
    return "_".join(re.findall(r"\w+", name)[-2:]) or "graph"


def optimizer_step() -> tuple[Any, Any] | None:
    """Which optimizer (a weak reference) Dynamo is compiling a method of, and the method's code; None if it compiles
    something else."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    optimizer = translator.f_locals.get("self")
    return (weakref.ref(optimizer), translator.f_code) if isinstance(optimizer, torch.optim.Optimizer) else None


def note_break() -> None:
    """Tell the recorder where and why the graph that is being compiled ends, if it does not end with its function."""
    try:
        reason = InstructionTranslator.current_tx().output.compile_subgraph_reason
    except AttributeError:
        return
    if reason is not None and reason.graph_break:
        line = reason.user_stack[-1] if reason.user_stack else None
        where = f"{line.filename}:{line.lineno}: " if line else ""
        compiler.note_break(where + reason.reason.partition("\n")[0])


def through_dynamo(error: TpuCompileError) -> TpuCompileError:
    """``error``, of a subclass that Dynamo hands to the user as it is: others arrive wrapped in
    BackendCompilerFailed."""
    cls = type(error)
    if not isinstance(error, ShortenTraceback):
        error.__class__ = type(
            cls.__name__, (cls, ShortenTraceback), {"__module__": cls.__module__, "__doc__": cls.__doc__}
        )
        for name in ("first_useful_frame", "frame_exec_strategy", "_torch_dynamo_tracer_output"):
            setattr(error, name, None)  # what its constructor would have set
    return error


def static_arguments(graph: torch.fx.Graph, kind: str) -> frozenset[int]:
    """Positions of the arguments that stay the same memory from call to call: parameters and buffers."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    static = frozenset(getattr(metadata, "static_input_indices", None) or ())
    if kind != "backward":
        return static
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    saved = {i: re.fullmatch(r"primals_(\d+)", name) for i, name in enumerate(names)}
    return frozenset(i for i, match in saved.items() if match and int(match[1]) - 1 in static)


def forget_donated_buffers() -> None:
    """Say that the backward takes over no saved tensor, as torch does when it compiles one for a graph that is kept:
    one that was compiled ahead would refuse ``retain_graph``."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = metadata.bw_donated_idxs if metadata is not None else None
    if donated is not None:
        donated.clear()  # the list is shared by the metadata of subclasses


def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """torch's min-cut partitioner, on a graph whose random ops have become pure functions of saved keys. Where
    activations are to be computed again, the backward does so only when it needs them."""
    functionalize_random(joint)
    budget = min(config.activation_memory_budget, functorch_config.activation_memory_budget)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    _save_densely(forward, backward, kwargs["num_fwd_outputs"])
    if budget < 1 or asks_for_recomputation(joint):
        static = kwargs.get("static_lifetime_input_indices") or ()
        recompute_late(backward, {f"primals_{index + 1}" for index in static})
    if config.scan_layers:
        stack_saved(forward, backward, kwargs["num_fwd_outputs"])
    return forward, backward


def _save_densely(forward: GraphModule, backward: GraphModule, returned: int) -> None:
    """Have what the forward saves for the backward fill its memory: as a view of something larger (a third of GPT-2's
    queries, keys and values), which is not saved, it would be laid out with gaps by the one and without by the
    other."""
    output = forward.graph.output_node()
    results, readers = list(output.args[0]), {n.name: n for n in backward.graph.find_nodes(op="placeholder")}  # type: ignore[arg-type]
    for place, node in enumerate(results[returned:], returned):
        reader = readers.get(getattr(node, "name", ""))
        if reader is None or node.op == "placeholder" or not _has_gaps(node.meta.get("val")):
            continue
        with forward.graph.inserting_after(node):
            results[place] = dense = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
        dense.meta = {**node.meta, "val": node.meta["val"].clone()}
        with backward.graph.inserting_before(reader):
            argument = backward.graph.placeholder(dense.name)
        argument.meta = {**reader.meta, "val": dense.meta["val"]}
        reader.replace_all_uses_with(argument)
        backward.graph.erase_node(reader)
    output.args = (tuple(results),)
    forward.recompile()
    backward.recompile()


def _has_gaps(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in (*value.shape, *value.stride())):
        return False
    return dense_order(tuple(value.shape), value.stride()) is None


def aot_graphs(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    compile_one: Callable[[GraphModule, str], Any],
    keeper: Keeper | None = None,
) -> Any:
    """A Dynamo graph through AOTAutograd, set up as this backend needs it.

    ``compile_one(graph, kind)`` makes each of its graphs callable; kind is "forward", "backward" or "inference".
    ``keeper``: keeps what AOTAutograd makes, or has kept it.
    """

    names = [_source(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    fold_layers(graph_module)

    def compiler(kind: str, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        _drop_tokens(graph, len(inputs))
        join_derivatives(graph)
        for node in graph.graph.find_nodes(op="placeholder"):
            node.meta["argument"] = _argument(node, names)
        return compile_one(graph, kind)

    forward, backward, inference = (partial(compiler, kind) for kind in ("forward", "backward", "inference"))
    run: Any = aot_module_simplified
    aot = partial(
        run,
        fw_compiler=keeper.keeping(forward) if keeper else forward,
        bw_compiler=keeper.keeping(backward, _undisturbed) if keeper else _undisturbed(backward),
        inference_compiler=keeper.keeping(inference) if keeper else inference,
        partition_fn=partition,
        decompositions=WhenNeeded(),
        keep_inference_input_mutations=True,
    )
    nested = any(isinstance(argument, (list, tuple, dict)) for argument in example_inputs)
    # unlifted tokens are no arguments of a program
    with functorch_config.patch(unlift_effect_tokens=True), keeper.active() if keeper else nullcontext():
        if nested:
            return disable(flatten_graph_inputs(graph_module, example_inputs, aot))
        return disable(aot(graph_module, example_inputs))


def _undisturbed(compile_backward: Callable[[GraphModule, Sequence[Any]], Any]) -> Any:
    """Dynamo looks neither into the compiler of a backward, which runs when the user asks for gradients, nor into its
    result."""
    return lambda graph, inputs: disable(disable(compile_backward)(graph, inputs))


def _drop_tokens(graph_module: GraphModule, arguments: int) -> None:
    """Remove the token of an effect inside a branch: torch drops that effect, and forgets to take its token, an
    argument and a result that come first, out of the graph."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    tokens = placeholders[: len(placeholders) - arguments]
    for token in tokens:
        graph_module.graph.erase_node(token)
    if tokens:
        output = graph_module.graph.output_node()
        output.args = (tuple(output.args[0][len(tokens) :]),)  # type: ignore[index, arg-type]
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()


def _source(node: torch.fx.Node) -> str:
    """Where Dynamo takes an argument of its graph from, as the user would write it: ``self.linear.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name
    local = re.sub(r"L\['(\w+)'\]", r"\1", source.name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", local)


def _argument(node: torch.fx.Node, names: Sequence[str]) -> str:
    """What an argument of one of AOTAutograd's graphs is."""
    what = node.meta.get("desc")
    if isinstance(what, PlainAOTInput) and what.idx < len(names):
        return names[what.idx]
    if isinstance(what, TangentAOTInput):
        return f"gradient of result {getattr(what.output, 'idx', node.name)}"
    return f"saved {node.name}" if what is None else node.name


def compile_captured(graph_module: GraphModule, name: str, kind: str, one_graph: bool, keeper: Keeper | None) -> Any:
    """Compile one of AOTAutograd's graphs. A backward that is made for a ``keeper`` may never be called."""
    if keeper is not None and kind == "backward":
        forget_donated_buffers()
    functionalize_random(graph_module)
    if kind != "backward":
        functionalize_subgraphs(graph_module)
    sum_picks(graph_module)
    tail = views.take(graph_module)
    kept = static_arguments(graph_module.graph, kind)
    lazy = kind == "backward" and keeper is not None and not keeper.ahead_of_time
    make = partial(compile_graph, graph_module, name, kept=kept, one_graph=one_graph, lazy=lazy)
    later = config.async_compile and asynchronous.runs_eagerly(graph_module)
    compiled = asynchronous.WhenReady(graph_module, make) if later else make()
    return compiled if tail is None else views.Replayed(compiled, tail)
