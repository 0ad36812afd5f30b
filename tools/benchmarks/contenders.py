"""The same network on every system, each as a call without arguments that returns when the result is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed, jax would first look for a TPU

import jax
import numpy as np
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from benchmarks import jax_models, torch_models
from benchmarks.timing import Call

TOLERANCE = 2e-4
"""Largest allowed difference to eager, as a part of the largest output: float32 through eight layers."""


def _precomputed(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Outputs of the right shapes, allocated once: what is left of a call when the graph itself takes no time."""
    outputs = graph.graph.output_node().args[0]
    specs = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]  # type: ignore[union-attr]
    ready = [
        torch.empty_strided(s.shape, s.stride(), dtype=s.dtype) if isinstance(s, torch.Tensor) else s for s in specs
    ]
    return make_boxed_func(lambda *arguments: ready)


null_aot = aot_autograd(fw_compiler=_precomputed)
"""A Dynamo backend that computes nothing: the floor under every backend that goes through AOTAutograd."""


def on_torch(model: torch.nn.Module, x: torch.Tensor, backend: Any) -> Call:
    """Under ``torch.no_grad()``, which costs each of them the same microsecond. ``backend=None`` is eager."""
    run = model if backend is None else torch.compile(model, backend=backend, dynamic=False)

    def call() -> Any:
        with torch.no_grad():
            return run(x)

    return call


def on_jax(model: torch.nn.Module, x: torch.Tensor, forward: jax_models.Forward, layout: str = "NCHW") -> Call:
    """``jax.jit`` with parameters and input resident, blocked: the most favourable way to call JAX."""
    parameters = {name: jax.numpy.asarray(value.detach().numpy()) for name, value in model.state_dict().items()}
    host = x.numpy().astype(np.int32) if x.dtype == torch.int64 else x.numpy()
    resident = jax.numpy.asarray(host if layout == "NCHW" else host.transpose(0, 2, 3, 1))
    jitted = jax.jit(forward)
    return lambda: jitted(parameters, resident).block_until_ready()


def contenders(name: str, backends: Mapping[str, str]) -> dict[str, Call]:
    """Eager, each of ``backends`` (shown name: backend), and JAX, checked to agree."""
    model, x = torch_models.build(name)
    calls = {"eager": on_torch(model, x, None)}
    calls |= {shown: on_torch(model, x, backend) for shown, backend in backends.items()}
    calls["jax"] = on_jax(model, x, jax_models.MODELS[name])
    if name == "resnet":
        calls["jax NHWC"] = on_jax(model, x, jax_models.RESNET_NHWC, "NHWC")
    agree(name, calls)
    return calls


def agree(name: str, calls: dict[str, Call]) -> None:
    """Every result equals eager's, or the benchmark ends: a fast wrong answer is not a time."""
    expected = np.asarray(calls["eager"]())
    scale = np.abs(expected).max()
    for system, call in calls.items():
        error = np.abs(np.asarray(call()) - expected).max() / scale
        if not error <= TOLERANCE:
            raise SystemExit(f"{name} on {system} differs from eager by {error:.1e} of its largest output")
