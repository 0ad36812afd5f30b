"""Random numbers without hidden state: before the partitioner sees a graph, every random op becomes a pure function of
a key.

``aten.bernoulli.p(x, p)`` turns into ``k = tpu_compile.rng_key(i); tpu_compile.bernoulli_p(k, x, p)``. A key is
int64[2]; that of draw ``i`` is
made from the seed, an argument of the program that is fresh at each call. A key is always saved for the backward,
never drawn again, so a
recomputed dropout sees its own mask. An op that was given a ``generator=`` stays as it is, and no rule lowers it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

RANDOM_OPS = (
    aten.rand.default,
    aten.rand_like.default,
    aten.randn.default,
    aten.randn_like.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randint_like.Tensor,
    aten.randperm.default,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.bernoulli.Tensor,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.normal.float_float,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.multinomial.default,
    aten.poisson.default,
    aten.binomial.default,
    aten._standard_gamma.default,
    aten.native_dropout.default,
    aten.rrelu_with_noise_functional.default,
)
"""Every aten op that draws. Their keyed twins are made from the schemas."""

_library = torch.library.Library("tpu_compile", "DEF")
_library.define("rng_key(int index) -> Tensor")
rng_key = torch.ops.tpu_compile.rng_key.default


@lru_cache(maxsize=1)
def keyed_ops() -> dict[Any, Any]:
    """aten's random overloads → our overloads that take a key in front."""
    return {op: _keyed(op) for op in RANDOM_OPS}


def _keyed(op: Any) -> Any:
    schema = op._schema
    base = schema.name.split("::")[1]
    name = f"{base}_{schema.overload_name}" if schema.overload_name else base
    signature = str(schema).split("(", 1)[1].replace("Generator? generator=None", "").replace("*, , ", "*, ")
    signature = re.sub(r"(, \*)?, \)", ")", signature)
    _library.define(f"{name}(Tensor key, {signature}")
    return getattr(torch.ops.tpu_compile, name).default


def functionalize_random(graph_module: GraphModule) -> None:
    """Replace random ops in place. Keys are numbered in graph order, so that a program's numbers depend on the program
    alone."""
    _functionalize(graph_module, 0)


def functionalize_subgraphs(graph_module: GraphModule) -> None:
    """Replace random ops of branches and loop bodies, with keys that follow those of the graph itself.

    Not for a backward: there torch runs a branch again to get at what it needs, and nothing says which of its draws
    were which. Those ops stay as they are, and no rule lowers them.
    """
    used = [n.args[0] for n in graph_module.graph.find_nodes(op="call_function", target=rng_key)]
    count = max(used, default=-1) + 1
    for _, inner in graph_module.named_modules():
        if isinstance(inner, GraphModule) and inner is not graph_module:
            count = _functionalize(inner, count)


def draws_numbers(graph_module: GraphModule) -> bool:
    """Whether a graph, or one inside it, makes keys."""
    inner = [m for m in graph_module.modules() if isinstance(m, GraphModule)]
    return any(m.graph.find_nodes(op="call_function", target=rng_key) for m in inner)


def _functionalize(graph_module: GraphModule, first: int) -> int:
    """Number keys from ``first``; returns the next number."""
    graph = graph_module.graph
    twins = keyed_ops()
    drawing = [n for n in graph.nodes if n.op == "call_function" and n.target in twins and _generator(n) is None]
    for index, node in enumerate(drawing, first):
        with graph.inserting_before(node):
            key = graph.call_function(rng_key, (index,))
            key.meta["val"] = _fake_key(node)
            key.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            kwargs = {k: v for k, v in node.kwargs.items() if k != "generator"}
            pure = graph.call_function(twins[node.target], (key, *_without_generator(node)), kwargs)
        pure.meta.update(node.meta)
        key.meta.update({k: node.meta[k] for k in ("stack_trace", "partitioner_tag", "ac_graph_id") if k in node.meta})
        node.replace_all_uses_with(pure)
        graph.erase_node(node)
    if drawing:
        graph_module.recompile()
    return first + len(drawing)


def _positional(node: Any) -> list[tuple[str, Any]]:
    names = [a.name for a in node.target._schema.arguments if not a.kwarg_only]
    return list(zip(names, node.args, strict=False))


def _generator(node: Any) -> Any:
    return dict(_positional(node)).get("generator", node.kwargs.get("generator"))


def _without_generator(node: Any) -> tuple[Any, ...]:
    return tuple(v for name, v in _positional(node) if name != "generator")


def _fake_key(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    with value.fake_mode:
        return torch.empty(2, dtype=torch.int64, device=value.device)
