"""What ``estimate`` and ``advise`` compile again and again: a factory's model at one batch size after another, as
programs for a TPU, from shapes alone."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from tpu_compile import costs, stages
from tpu_compile.errors import ConfigError, nearest
from tpu_compile.lowering.program import Program

OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor")
"""Of ``torch.optim``; what ``--optimizer`` takes, in any case."""


@dataclass(frozen=True)
class Made:
    """What a factory returned, without numbers: every tensor is fake.

    Attributes:
        model: a module, a function, or a train step.
        batch: the batch size it was made for.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: int


@dataclass(frozen=True)
class Load:
    """A program for a TPU with what is needed to judge it.

    Attributes:
        items: tokens, or examples, of one run; ``unit`` says which.
        model_flops: of the model's products and convolutions, from torch's own formulas.
    """

    program: Program
    graph: GraphModule
    batch: int
    items: int
    unit: str
    model_flops: int


@dataclass
class Workload:
    """A model whose batch size can be chosen.

    Args:
        make: calls the user's factory for a batch size; None leaves the size to the factory.
        train: the program is a whole training step.
        optimizer: its name in ``torch.optim``.
    """

    make: Callable[[int | None], Made]
    train: bool = False
    optimizer: str = "AdamW"
    _loads: dict[int, Load] = field(default_factory=dict)
    _own: int | None = None
    _tracing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def own_batch(self) -> int:
        """The batch size that the factory chooses by itself."""
        if self._own is None:
            self._own = self.load(None).batch
        return self._own

    def load(self, batch: int | None) -> Load:
        """The program at a batch size, traced once; by one thread at a time."""
        with self._tracing:
            if batch is None or batch not in self._loads:
                made = self.make(batch)
                traced = trace(made, train=self.train, optimizer=self.optimizer)
                self._loads[made.batch] = loaded(made, traced)
                batch = made.batch
            return self._loads[batch]


def trace(made: Made, *, train: bool, optimizer: str) -> stages.Traced:
    """The graph of one run, or with ``train`` of forward, loss, backward and the optimizer's step."""
    # A model that warns once would end a graph there; nothing runs here, so nobody misses what it logs.
    loggers = {method for name, method in vars(logging.Logger).items() if callable(method) and name[0] != "_"}
    ignored = {*torch._dynamo.config.ignore_logging_functions, *loggers}
    with torch._dynamo.config.patch(ignore_logging_functions=ignored):
        return _traced(made, train, optimizer)


def _traced(made: Made, train: bool, optimizer: str) -> stages.Traced:
    from tpu_compile.training.step import TrainStep

    if isinstance(made.model, TrainStep):
        return made.model.trace(*made.args)
    if not train:
        return stages.trace(made.model, *made.args, **made.kwargs)
    traced: stages.Traced = _train_step(made, optimizer).trace((made.args, dict(made.kwargs)))
    return traced


def _train_step(made: Made, optimizer: str) -> Any:
    from tpu_compile.training.step import train_step

    if not isinstance(made.model, torch.nn.Module):
        raise ConfigError("--train needs a factory that returns a torch.nn.Module (or a tpu_compile.train_step).")
    model = made.model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    called = type(type(model).__name__, (_Called,), {})(model)  # programs are named after the model's class
    return train_step(called, loss_of, _optimizer(optimizer)(trained))


def _optimizer(name: str) -> Any:
    known = {each.lower(): each for each in OPTIMIZERS}
    if name.lower() not in known:
        raise ConfigError(f"--optimizer {name}: none of that name.{nearest(name, OPTIMIZERS)}")
    return getattr(torch.optim, known[name.lower()])


class _Called(torch.nn.Module):
    """A model that takes its arguments as one tuple and one dict."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.model(*args, **kwargs)


def loss_of(result: Any) -> torch.Tensor:
    """The loss in a model's result: its ``loss``, itself if it is one number, else the mean square of all of it."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    values = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if len(values) == 1 and values[0].numel() == 1:
        return values[0]
    return torch.stack([t.float().square().mean() for t in values]).sum()


def loaded(made: Made, traced: stages.Traced) -> Load:
    """The program of a traced workload."""
    items, unit = _items(made)
    bindings = traced.tracing.bindings
    flops = costs.product_flops(traced.graph_module, bindings)
    return Load(traced.for_target(), traced.graph_module, made.batch, items, unit, flops)


def _items(made: Made) -> tuple[int, str]:
    """Tokens if the first tensor holds integers in two axes (token ids), else examples."""
    first = _first(made.args, made.kwargs)
    if first is not None and first.dim() == 2 and not first.is_floating_point():
        return first.numel(), "tokens"
    return made.batch, "examples"


def _first(args: Any, kwargs: Any) -> torch.Tensor | None:
    return next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()), None)


# ---- factories


def from_factory(factory: Callable[..., Any]) -> Callable[[int | None], Made]:
    """What ``Workload`` calls: the factory on the meta device, its result made fake, at a batch size.

    A factory with a parameter ``batch`` is called with it. Of another, axis 0 of every tensor argument is resized whose
    size is that of the first one's axis 0.
    """
    takes_batch = "batch" in inspect.signature(factory).parameters

    def make(batch: int | None) -> Made:
        with torch.device("meta"):
            torch.manual_seed(0)
            made = factory(batch=batch) if takes_batch and batch is not None else factory()
        model, args, kwargs = (*made, {}) if len(made) == 2 else made
        model, args, kwargs = without_numbers(model, tuple(args), dict(kwargs))
        first = _first(args, kwargs)
        size = first.shape[0] if first is not None else 1
        if batch is not None and batch != size and not takes_batch:
            args, kwargs = tree_map(lambda t: _resized(t, size, batch), (args, kwargs))
            size = batch
        return Made(model, args, kwargs, size)

    return make


def _resized(value: Any, old: int, new: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != old:
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.new_empty((new, *value.shape[1:]))


def without_numbers(model: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The same with every tensor a fake one on the CPU, parameters and buffers of the model in place: AOTAutograd
    traces these as it does real ones, which it does not on the meta device."""
    from tpu_compile.training.step import TrainStep

    mode, known = FakeTensorMode(), {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            with mode:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            is_parameter = isinstance(value, torch.nn.Parameter)
            made = torch.nn.Parameter(made, value.requires_grad) if is_parameter else made
            known[id(value)] = value, made  # the old one too: its id must stay its own
        return known[id(value)][1]

    module = model.recipe.model if isinstance(model, TrainStep) else model
    seen: set[int] = set()
    if isinstance(module, torch.nn.Module):
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                held.update({name: fake(value) for name, value in held.items()})
            for value in list(vars(each).values()):
                _settle(value, fake, seen)
    if isinstance(model, TrainStep):
        for group in model.recipe.optimizer.param_groups:
            group["params"] = [fake(p) for p in group["params"]]
    return model, tree_map(fake, args), tree_map(fake, kwargs)


def _settle(holder: Any, fake: Callable[[Any], Any], seen: set[int]) -> None:
    """The same for objects that a module holds (a cache of keys and values, say): their tensors become fake ones, and
    where they say that they are on the meta device they are on the CPU now."""
    if id(holder) in seen or isinstance(holder, torch.nn.Module | type | torch.Tensor):
        return
    seen.add(id(holder))
    if isinstance(holder, list | tuple):
        for each in holder:
            _settle(each, fake, seen)
    elif hasattr(holder, "__dict__") and not type(holder).__module__.startswith(("torch.", "builtins")):
        for name, value in list(vars(holder).items()):
            if isinstance(value, torch.Tensor):
                setattr(holder, name, fake(value))
            elif isinstance(value, torch.device) and value.type == "meta":
                setattr(holder, name, torch.device("cpu"))
            else:
                _settle(value, fake, seen)
