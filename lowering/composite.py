"""Operators lowered through torch's own Python: a function is traced on fake tensors, its graph lowered in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.decompositions import decompositions


def lower_traced(ctx: LoweringContext, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The flat results of ``function(*args)``; values among ``args`` are tensors to it, at any depth of nesting."""
    leaves, structure = pytree.tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if hlo.is_value(leaf)]

    def on_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return function(*pytree.tree_unflatten(filled, structure))

    values = [leaves[i] for i in places]
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(hlo.shape(v), dtype=hlo.dtype(v), device="cpu") for v in values]
        graph = make_fx(on_tensors, decomposition_table=decompositions())(*fakes)
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(getattr(graph, node.target), "constant", None)
        if constant is not None:  # a number written out in the function, known although it is fake
            setattr(graph, node.target, constant)
    return ctx.walk.subgraph(graph, values)
