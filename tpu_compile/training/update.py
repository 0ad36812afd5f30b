"""A stock optimizer's step as a functional graph of aten ops: traced once, with its numbers as arguments."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_compile.errors import LoweringError, TpuCompileError, plain
from tpu_compile.lowering.decompositions import decompositions
from tpu_compile.training import hyper, state
from tpu_compile.training.arithmetic import Decision, NumberArithmetic, builtins_of

aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True)
class Scaling:
    """What GradScaler's ``update`` does to the scale after a step."""

    growth: float
    backoff: float
    interval: int


@dataclass(frozen=True)
class Update:
    """A step of an optimizer, as a functional graph.

    Its placeholders: the trained parameters, their gradients, the tensors of ``slots`` that are no counters, with
    ``scaled`` the scale and its growth tracker, and the numbers (float64[n]): hyperparameters, then counters. Its
    results: the new parameters, the new tensors, and the new scale and tracker.

    Attributes:
        counts: for each distinct counter, the slots that share it.
        decisions: the program is this one as long as they hold for the hyperparameters.
    """

    graph: GraphModule
    places: tuple[hyper.Place, ...]
    slots: tuple[state.Slot, ...]
    counts: tuple[tuple[int, ...], ...]
    decisions: tuple[Decision, ...]
    scaled: bool


def trace(
    optimizer: torch.optim.Optimizer,
    trained: Sequence[Tensor],
    *,
    clip_norm: float | None = None,
    scaling: Scaling | None = None,
) -> Update:
    """Trace the optimizer's step on its parameters ``trained``, whose state exists. Parameters with a master in their
    state get its rounding.

    Raises:
        LoweringError: the step cannot be traced: it looks at values, or keeps state beside its tensors.
    """
    return _Trace(optimizer, trained, clip_norm, scaling).run()


class _Trace:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[Tensor],
        clip_norm: float | None,
        scaling: Scaling | None,
    ) -> None:
        self.optimizer, self.trained = optimizer, trained
        self.clip_norm, self.scaling = clip_norm, scaling
        self.places = hyper.places(optimizer.param_groups)
        self.slots = state.slots(optimizer, trained, counted_here=scaling is None)
        self.counts = _shared(self.slots, optimizer, trained)
        self.masters = {slot.param: i for i, slot in enumerate(self.slots) if slot.key == state.MASTER}
        self.numbers = NumberArithmetic()

    def run(self) -> Update:
        kind = type(self.optimizer).__name__
        with FakeTensorMode(), torch.no_grad(), torch._C._DisableAutocast():
            inputs = self._inputs()
            try:
                graph = make_fx(torch.func.functionalize(self._body), decomposition_table=decompositions())(*inputs)
            except TpuCompileError:
                raise
            except Exception as error:
                raise LoweringError(
                    f"{kind}.step cannot be traced: {plain(error)}\nUse torch.compile(model) with the optimizer in "
                    "eager, or an optimizer that decides nothing by the values of tensors."
                ) from error
        _drop_writes(graph.graph)
        self._take_counters(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        scaled = self.scaling is not None
        return Update(graph, self.places, self.slots, self.counts, tuple(self.numbers.decisions), scaled)

    def _inputs(self) -> list[Tensor]:
        kept = [self.optimizer.state[self.trained[s.param]][s.key] for s in self.slots if not s.counter]
        fakes = [_fake(t) for t in (*self.trained, *self.trained, *kept)]
        if self.scaling is not None:
            device = self.trained[0].device
            fakes += [torch.empty(1, device=device).view(()), torch.empty((), dtype=torch.int32, device=device)]
        return [*fakes, torch.empty(len(self.places) + len(self.counts), dtype=torch.float64, device="cpu")]

    def _body(self, *given: Tensor) -> list[Tensor]:
        count = len(self.trained)
        params, grads, rest = list(given[:count]), list(given[count : 2 * count]), list(given[2 * count : -1])
        numbers = [given[-1][i] for i in range(len(self.places) + len(self.counts))]
        scale = rest[-2:] if self.scaling else []
        tensors = self._state(rest, numbers)
        olds = [t.clone() for t in (*params, *tensors)] if self.scaling else []
        stepped = self._stepped(params, tensors)
        grads = [grad.to(p.dtype) for grad, p in zip(grads, stepped, strict=True)]
        found = self._unscale(grads, *scale[:1]) if self.scaling else None
        shadow = self._shadow(stepped, tensors, numbers)
        self._step(shadow, stepped, grads)
        self._check_state(shadow, stepped, tensors)
        for index in self.masters:
            params[index].copy_(stepped[index])
        results = [*params, *tensors]
        if self.scaling and found is not None:
            results = [torch.where(found != 0, old, new) for old, new in zip(olds, results, strict=True)]
            torch._amp_update_scale_(
                scale[0], scale[1], found, self.scaling.growth, self.scaling.backoff, self.scaling.interval
            )
        return [*results, *scale]

    def _state(self, rest: list[Tensor], numbers: list[Tensor]) -> list[Tensor]:
        """The tensor of each slot; a counter's is made of its number."""
        supply = iter(rest)
        counter = {slot: i for i, slots in enumerate(self.counts, len(self.places)) for slot in slots}
        made = []
        for index, slot in enumerate(self.slots):
            if slot.counter:
                like = self.optimizer.state[self.trained[slot.param]][slot.key]
                made.append(numbers[counter[index]].to(like.dtype, copy=True))
            else:
                made.append(next(supply))
        return made

    def _stepped(self, params: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """What the optimizer steps: the parameters, or their masters. A weight that is not its master's rounding has
        been written to since (``load_state_dict``): it is the new master."""
        stepped = params[:]
        for index, slot in self.masters.items():
            p, stepped[index] = params[index], tensors[slot]
            stepped[index].copy_(torch.where(tensors[slot].to(p.dtype) == p, tensors[slot], p.float()))
        return stepped

    def _unscale(self, grads: list[Tensor], scale: Tensor) -> Tensor:
        found = torch.zeros((), device=scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.double().reciprocal().float())
        return found

    def _shadow(self, params: list[Tensor], tensors: list[Tensor], numbers: list[Tensor]) -> torch.optim.Optimizer:
        """The optimizer, with traced tensors in the place of its parameters, its state and its numbers."""
        of = {id(p): traced for p, traced in zip(self.trained, params, strict=True)}
        shadow: torch.optim.Optimizer = object.__new__(type(self.optimizer))
        shadow.__dict__.update(vars(self.optimizer))
        groups = enumerate(self.optimizer.param_groups)
        shadow.param_groups = [self._group(i, group, of, numbers) for i, group in groups]
        shadow.state = defaultdict(dict)
        for p, traced in zip(self.trained, params, strict=True):
            shadow.state[traced] = dict(self.optimizer.state.get(p, {}))
        for slot, t in zip(self.slots, tensors, strict=True):
            shadow.state[params[slot.param]][slot.key] = t
        return shadow

    def _group(self, index: int, group: dict[str, Any], of: dict[int, Tensor], numbers: list[Tensor]) -> dict[str, Any]:
        new = {**group, "params": [of[id(p)] for p in group["params"] if id(p) in of]}
        new.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
        for i, place in enumerate(self.places):
            if place.group == index:
                value = self.numbers.number(numbers[i], (i, place.read(self.optimizer.param_groups)))
                new[place.key] = value if place.item is None else _with_item(new[place.key], place.item, value)
        for key, value in new.items():
            if isinstance(value, Tensor) and not self.numbers.is_number(value):
                raise LoweringError(
                    f"{key}={value!r} of the optimizer is a tensor. train_step takes numbers, and a change of one "
                    f"causes no recompile: write {key}={float(value)!r}."
                )
        return new

    def _step(self, shadow: torch.optim.Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
        step = inspect.unwrap(type(self.optimizer).step)
        with state.gradients(shadow, list(zip(params, grads, strict=True))):
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, self.clip_norm, foreach=False)
            with builtins_of(step.__globals__, self.numbers), self.numbers:
                step(shadow)

    def _check_state(self, shadow: torch.optim.Optimizer, params: list[Tensor], tensors: list[Tensor]) -> None:
        """Nothing but the known tensors has changed."""
        kind = type(self.optimizer).__name__
        known = {(slot.param, slot.key): t for slot, t in zip(self.slots, tensors, strict=True)}
        for index, p in enumerate(params):
            before = self.optimizer.state.get(self.trained[index], {})
            for key, value in shadow.state[p].items():
                same = value is known[index, key] if (index, key) in known else _equal(value, before.get(key))
                if not same:
                    raise LoweringError(
                        f"{kind} keeps state[{key!r}] in another way than stock optimizers: it is made in the first "
                        "step, replaced, or no tensor. Run one eager step before train_step, or write to it in place."
                    )

    def _take_counters(self, graph: GraphModule) -> None:
        """Take the new counters out of the results: each must be the old one plus 1, which the host knows."""
        output = graph.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        start = len(self.trained)
        for index, slot in reversed(list(enumerate(self.slots))):
            if slot.counter and not _is_next(results.pop(start + index)):
                raise LoweringError(f"{type(self.optimizer).__name__} does not count its steps one at a time.")
        output.args = (results,)


def _drop_writes(graph: torch.fx.Graph) -> None:
    """Functionalization writes to the inputs in the end; the same values are results."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        node.replace_all_uses_with(node.args[1])
        graph.erase_node(node)


def _fake(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _with_item(values: tuple[Any, ...], item: int, value: Any) -> tuple[Any, ...]:
    return (*values[:item], value, *values[item + 1 :])


def _equal(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


def _is_next(node: Any) -> bool:
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.args[1] != 1:
        return False
    old = node.args[0]
    return isinstance(old, Node) and old.target in (aten._to_copy.default, aten.clone.default)


def _shared(
    slots: Sequence[state.Slot], optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Counters that stand at the same number share one argument."""
    at: dict[float, list[int]] = {}
    for index, slot in enumerate(slots):
        if slot.counter:
            at.setdefault(float(optimizer.state[trained[slot.param]][slot.key]), []).append(index)
    return tuple(map(tuple, at.values()))
