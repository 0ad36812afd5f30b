"""Loss and gradients as one graph: what Dynamo and AOTAutograd make of a model and its loss, before it is cut in
two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from tpu_compile import capture
from tpu_compile.errors import LoweringError, TpuCompileError
from tpu_compile.lowering.decompositions import WhenNeeded
from tpu_compile.lowering.random import functionalize_random
from tpu_compile.lowering.recompute import asks_for_recomputation, recompute_late
from tpu_compile.scanning import fold_layers

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """Loss and gradients of a model, as one functional graph.

    Its placeholders are the model's arguments, then the gradient of the loss; its results the loss, then for each
    argument its gradient, or None. Buffers are written to by ``copy_``.

    Attributes:
        names: what each argument is, as the user would write it.
    """

    name: str
    graph: GraphModule
    names: tuple[str, ...]

    @property
    def placeholders(self) -> list[Node]:
        """The arguments, then the gradient of the loss."""
        return list(self.graph.graph.find_nodes(op="placeholder"))

    @property
    def loss(self) -> Node:
        """The loss."""
        results: Any = self.graph.graph.output_node().args[0]
        return results[0]  # type: ignore[no-any-return]

    @property
    def gradients(self) -> tuple[Node | None, ...]:
        """For each argument its gradient, or None."""
        results: Any = self.graph.graph.output_node().args[0]
        return tuple(results[1:])


class _Found(Exception):
    """Ends AOTAutograd where it would cut the graph in two."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = graph


class Backend:
    """A Dynamo backend: ``runner(joint)`` is what a call of the traced function comes to."""

    def __init__(self, name: str, remat: float | None, runner: Callable[[Joint], Callable[..., Any]]) -> None:
        self._name, self._remat, self._runner = name, remat, runner

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Called by Dynamo."""
        try:
            return torch._dynamo.disable(self._runner(self._joint(graph_module, example_inputs)))
        except TpuCompileError as error:
            raise capture.through_dynamo(error)  # noqa: B904 -- the same error

    def _joint(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Joint:
        sources = tuple(capture._source(node) for node in graph_module.graph.find_nodes(op="placeholder"))
        _check_loss(graph_module)
        found = self._through_autograd(graph_module, example_inputs)
        placeholders = found.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(sources) + 1:
            raise LoweringError(
                f"{self._name}: two arguments of the model share memory and one of them is written to. Pass a copy "
                "(.clone()) of one of them, or train with torch.compile(model) in a loop of your own."
            )
        for node, name in zip(placeholders, sources, strict=False):
            node.meta["argument"] = name
        return Joint(self._name, found, sources)

    def _through_autograd(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
        run: Any = aot_module_simplified
        fold_layers(graph_module)
        try:
            with functorch_config.patch(unlift_effect_tokens=True):
                run(
                    graph_module,
                    example_inputs,
                    fw_compiler=_unreached,
                    bw_compiler=_unreached,
                    inference_compiler=_unreached,
                    partition_fn=self._partition,
                    decompositions=WhenNeeded(),
                    keep_inference_input_mutations=True,
                )
        except _Found as found:
            return found.graph
        raise AssertionError("AOTAutograd did not ask for a partition of a graph with gradients")

    def _partition(self, joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        functionalize_random(joint)
        if self._remat is None and not asks_for_recomputation(joint):
            raise _Found(joint)
        with functorch_config.patch(activation_memory_budget=1.0 if self._remat is None else self._remat):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        recompute_late(backward, {f"primals_{i + 1}" for i in kwargs["static_lifetime_input_indices"] or ()})
        raise _Found(rejoined(forward, backward, kwargs["num_fwd_outputs"]))


def _unreached(*_: Any) -> Any:
    raise AssertionError("AOTAutograd was to end at its partition")


def _check_loss(graph_module: GraphModule) -> None:
    """The one result of the traced function is a scalar that depends on a parameter."""
    results: Any = graph_module.graph.output_node().args[0]
    values = [r.meta.get("example_value") if isinstance(r, Node) else r for r in results]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or values[0].numel() != 1 or values[0].is_complex():
        got = ", ".join(f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else repr(v) for v in values)
        raise LoweringError(f"train_step needs one real number as the loss; loss_fn returned {got or 'no tensor'}.")
    if not values[0].requires_grad:
        raise LoweringError(
            "the loss depends on no parameter that requires a gradient: look for .detach(), torch.no_grad() or "
            "requires_grad_(False) in the model and loss_fn."
        )


def rejoined(forward: GraphModule, backward: GraphModule, results: int) -> GraphModule:
    """Forward and backward as one graph again, recomputations included."""
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    saved = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    given: list[Any] = []
    for node in forward.graph.nodes:
        if node.op == "output":
            given = list(node.args[0])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    by_name = {node.name: copy for node, copy in copies.items()}
    inside: dict[Node, Node] = {}
    tangents = [n for name, n in saved.items() if name not in by_name]
    last = graph.find_nodes(op="placeholder")[-1]
    for node in tangents:
        with graph.inserting_after(last):
            inside[node] = last = graph.node_copy(node)
    gradients: list[Any] = []
    for node in backward.graph.nodes:
        if node.op == "output":
            gradients = list(torch.fx.map_arg(node.args[0], inside.__getitem__))
        elif node not in inside:
            inside[node] = by_name[node.name] if node.op == "placeholder" else graph.node_copy(node, inside.__getitem__)
    graph.output((*(copies[n] for n in given[:results]), *gradients))
    return GraphModule({**_modules(forward), **_modules(backward)}, graph)


def _modules(graph_module: GraphModule) -> dict[str, Any]:
    """What the graph's ``get_attr`` nodes name."""
    names = {str(n.target) for n in graph_module.graph.find_nodes(op="get_attr")}
    return {name: getattr(graph_module, name) for name in names}
