"""``train_step``: forward, backward and a stock optimizer's step as one program, and the object that runs it.

Dynamo captures the model with its loss and guards what it reads; the optimizer is traced apart, on the gradients. Both
become one graph, whose result is the loss and which writes parameters, buffers and the optimizer's state in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpu_compile import stages, tracing
from tpu_compile.backend import check_options
from tpu_compile.config import scoped
from tpu_compile.errors import BadCall, ConfigError, LoweringError
from tpu_compile.training import meta, state
from tpu_compile.training.joint import Backend
from tpu_compile.training.recipe import Call, Recipe, current
from tpu_compile.training.variant import Variant

Tensor = torch.Tensor

_RECOMPILES = 256
"""How many kinds of batches one step may meet: each is a program of its own."""


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    remat: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    master_weights: bool = False,
    options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """A whole training step as one program: ``loss = step(inputs, *targets)``.

    The loss is ``loss_fn(model(inputs), *targets)``; a tuple of inputs is passed as ``model(*inputs)``, a dict as
    ``model(**inputs)``. The step writes parameters, buffers and the optimizer's state in place (on the `tpu` device
    their buffers are donated) and returns the loss, detached. ``.grad`` is neither read nor written.

    Args:
        optimizer: of ``torch.optim``. Its numbers (learning rate, weight decay, betas, momentum, ...) are arguments of
            the program: a scheduler, or assigning to ``param_groups``, causes no recompile.
        accumulate: cut every tensor of the batch into this many parts along its first axis, and run them one after
            another inside the program; the gradients are the mean over the parts.
        clip_norm: as ``torch.nn.utils.clip_grad_norm_`` over the optimizer's parameters.
        autocast: run model and loss under ``torch.autocast`` with this dtype (``torch.bfloat16``).
        remat: how much of the memory that activations would take may be used: near 0 computes nearly everything
            again, 1 nothing that is dear; None leaves it to XLA. ``torch.utils.checkpoint`` in the model is honoured in
            any case.
        scaler: a GradScaler: the loss is scaled, a step with gradients that are not finite is left out, and the scale
            is updated, all inside the program. Do not call its ``step`` or ``update``.
        master_weights: for bfloat16 or float16 parameters: the optimizer steps float32 masters, with float32 state, and
            the parameters are their roundings. The masters lie in the optimizer's state, and so in its ``state_dict``;
            its ``load_state_dict`` is exact from here on. A weight that you write yourself becomes the new master.
        options: as of ``torch.compile(options=...)``.

    Raises:
        LoweringError: the optimizer cannot be part of a program; the message names what to do instead.
        ConfigError: an argument is out of range.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: a whole number of parts, at least 1, was expected.")
    if remat is not None and not 0 < remat <= 1:
        raise ConfigError(f"remat={remat!r}: a part of the activations' memory, above 0 and at most 1, was expected.")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm={clip_norm!r}: a positive norm was expected.")
    state.check(optimizer)
    _check_model(model)
    if master_weights:
        state.load_exactly(optimizer)
    recipe = Recipe(model, loss_fn, optimizer, accumulate, clip_norm, autocast, remat, scaler, master_weights)
    return TrainStep(recipe, check_options(options or {}))


def _check_model(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise LoweringError(
                f"{name or type(module).__name__} makes sparse gradients, which no program holds. Make it with "
                "sparse=False."
            )


class _Stopped(Exception):
    """Ends a call that only traces, with the whole step's graph."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph


class TrainStep:
    """A training step as one program for each kind of batch. Made by ``train_step``; call it with a batch."""

    def __init__(self, recipe: Recipe, options: Mapping[str, Any]) -> None:
        self.recipe, self._scope = recipe, scoped(options)
        backend = Backend(recipe.name, recipe.remat, partial(Variant, recipe))
        function = tracing._fresh_copy(recipe.loss())
        compile_it: Any = torch.compile
        self._function = compile_it(
            function, backend=backend, fullgraph=True, dynamic=False, recompile_limit=_RECOMPILES
        )

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """Train on one batch; returns the loss.

        Raises:
            BadCall: with ``accumulate``, a tensor of the batch whose first axis cannot be cut into so many parts.
            UnsupportedOp: ops of the model that nothing lowers, with your lines.
            torch._dynamo.exc.Unsupported: the model's graph would break; the message says where.
        """
        loss: Tensor = self._enter((inputs, *targets), self._run)
        self.recipe.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks whether step ran
        for hook in self.recipe.optimizer._optimizer_step_post_hooks.values():
            hook(self.recipe.optimizer, (), {})
        return loss

    def trace(self, inputs: Any, *targets: Any) -> stages.Traced:
        """The step's graph for one kind of batch, without running anything; parameters and batch may be meta or fake
        tensors. ``.lower().compile()`` tells flops and memory; a program compiled for this machine can be called."""
        batch = (inputs, *targets)
        if meta.stands_in(self.recipe.model, batch):
            with meta.on_cpu(self.recipe.model, self.recipe.optimizer, batch) as (optimizer, fakes):
                return TrainStep(replace(self.recipe, optimizer=optimizer), {}).trace(*fakes)
        graph = None
        try:
            self._enter(batch, _stop)
        except _Stopped as stopped:
            graph = stopped.graph
        assert graph is not None, "a call that only traces ends where the graph would run"
        flat, in_tree = pytree.tree_flatten((batch, {}))
        found = tracing.Tracing(graph, self.recipe.name, {}, frozenset(), self._call_traced)
        return stages.Traced(graph, found, tuple(map(stages._info, flat)), in_tree)

    def _call_traced(self, inputs: Any, *targets: Any) -> Tensor:
        """What a compiled stage of ``trace`` calls: the step, run by the program of that stage."""
        run = tracing._running.get()
        assert run is not None, "a stage is called inside tracing.running"
        return self._enter((inputs, *targets), partial(_run_with, run))  # type: ignore[no-any-return]

    def _enter(self, batch: tuple[Any, ...], arrive: Callable[[Variant, tuple[Any, ...]], Any]) -> Any:
        flat, tree = pytree.tree_flatten(batch)
        parts = flat
        if self.recipe.accumulate > 1:
            parts = [_part(leaf, self.recipe.accumulate) for leaf in flat]
        token = current.set(Call(tuple(flat), tuple(parts), tree, arrive))
        try:
            with torch.enable_grad():
                return self._function(*pytree.tree_unflatten(parts, tree))
        finally:
            current.reset(token)

    def _run(self, variant: Variant, arguments: tuple[Any, ...]) -> Any:
        return variant.run(arguments, scope=self._scope)


def _stop(variant: Variant, arguments: tuple[Any, ...]) -> Any:
    raise _Stopped(variant.traced(arguments))


def _run_with(run: tracing.Run, variant: Variant, arguments: tuple[Any, ...]) -> Any:
    return variant.run(arguments, run)


def _part(leaf: Any, count: int) -> Any:
    """The first of ``count`` parts of a tensor along its first axis: Dynamo sees what one turn of the loop works on."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    if leaf.shape[0] % count:
        raise BadCall(
            f"accumulate={count}: a tensor of the batch has {leaf.shape[0]} rows, which is no multiple. Drop the rest "
            "of the last batch (DataLoader(drop_last=True)) or make the batch size a multiple.",
            "INVALID_ARGUMENT",
        )
    return leaf.narrow(0, 0, leaf.shape[0] // count)
