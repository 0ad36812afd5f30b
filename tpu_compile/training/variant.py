"""A step for one kind of batch: its graph, its programs, and their call path."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tpu_compile import compiler, tracing
from tpu_compile.config import override
from tpu_compile.errors import LoweringError
from tpu_compile.lowering.picks import sum_picks
from tpu_compile.lowering.random import functionalize_subgraphs
from tpu_compile.training import hyper, state, update
from tpu_compile.training.joint import Joint
from tpu_compile.training.program import Batches, whole_step
from tpu_compile.training.recipe import Recipe, current

Tensor = torch.Tensor


class Variant:
    """The step for one kind of batch and state of the model, as Dynamo tells them apart."""

    def __init__(self, recipe: Recipe, joint: Joint) -> None:
        self.recipe, self.joint = recipe, joint
        self._programs: list[StepProgram] = []
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> list[Any]:
        """Where Dynamo's graph would run."""
        return [current.get().arrive(self, arguments)]

    def run(
        self, arguments: tuple[Any, ...], compiled: tracing.Run | None = None, scope: Mapping[str, Any] | None = None
    ) -> Tensor:
        """One step by the program that fits the optimizer as it is now, made if there is none.

        Args:
            compiled: an executable of that program; without one it is compiled.
            scope: the knobs to compile it with.
        """
        for program in self._programs:
            numbers = program.numbers(arguments)
            if numbers is not None:
                return program.run(arguments, numbers, compiled)
        with self._lock, override(**(scope or {})):
            program = self._make(arguments, compiled)
        numbers = program.numbers(arguments)
        assert numbers is not None, "a program fits what it was made for"
        return program.run(arguments, numbers, compiled)

    def _make(self, arguments: tuple[Any, ...], compiled: Any) -> StepProgram:
        """Trace the optimizer and compile the whole step."""
        trained = self._trained(arguments)
        self.recipe.prime(self.recipe.optimizer, [p for _, p in trained])
        found = self._update(self.recipe.optimizer, [p for _, p in trained])
        if compiled is None:
            graph = self._graph(found, [i for i, _ in trained], arguments)
            kept = frozenset(i for i, a in enumerate(arguments) if isinstance(a, torch.nn.Parameter))
            compiled = compiler.compile_graph(graph, self.recipe.name, kept=kept, one_graph=True)
        program = StepProgram(self.recipe, found, trained, self._batches(arguments), compiled)
        self._programs.insert(0, program)
        return program

    def traced(self, arguments: tuple[Any, ...]) -> torch.fx.GraphModule:
        """The whole step's graph; the optimizer stays as it is."""
        trained = self._trained(arguments)
        shadow = state.stand_in(self.recipe.optimizer)
        self.recipe.prime(shadow, [p for _, p in trained])
        found = self._update(shadow, [p for _, p in trained])
        return self._graph(found, [i for i, _ in trained], arguments)

    def _trained(self, arguments: tuple[Any, ...]) -> tuple[tuple[int, Tensor], ...]:
        """The optimizer's parameters that get a gradient, and which argument each is."""
        ours = {id(p) for group in self.recipe.optimizer.param_groups for p in group["params"] if p.requires_grad}
        pairs = zip(enumerate(arguments), self.joint.gradients, strict=True)
        trained = tuple((i, a) for (i, a), gradient in pairs if gradient is not None and id(a) in ours)
        if not trained:
            raise LoweringError(
                f"{self.recipe.name}: none of the optimizer's parameters has a part in the loss. Was the optimizer "
                "made with the parameters of this very model, after it was moved or converted?"
            )
        return trained

    def _names(self, arguments: tuple[Any, ...]) -> tuple[str, ...]:
        """What each argument is, as the user would write it."""
        model, call = self.recipe.model, current.get()
        known = {id(t): f"self.{name}" for name, t in (*model.named_parameters(), *model.named_buffers())}
        known.update({id(part): name for part, name in zip(call.parts, call.names, strict=True)})
        return tuple([known.get(id(a), name) for a, name in zip(arguments, self.joint.names, strict=True)])

    def _update(self, optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> update.Update:
        return update.trace(optimizer, trained, clip_norm=self.recipe.clip_norm, scaling=self.recipe.scaling())

    def _batches(self, arguments: tuple[Any, ...]) -> Batches | None:
        if self.recipe.accumulate == 1:
            return None
        whole = current.get().whole
        return Batches(self.recipe.accumulate, {i: whole[id(a)] for i, a in enumerate(arguments) if id(a) in whole})

    def _graph(self, found: update.Update, trained: list[int], arguments: tuple[Any, ...]) -> torch.fx.GraphModule:
        joint = replace(self.joint, names=self._names(arguments))
        graph = whole_step(joint, found, trained, self._batches(arguments))
        functionalize_subgraphs(graph)
        sum_picks(graph)
        return graph


class StepProgram:
    """A compiled step, and what it is given beside the model's arguments."""

    def __init__(
        self,
        recipe: Recipe,
        found: update.Update,
        trained: tuple[tuple[int, Tensor], ...],
        batches: Batches | None,
        compiled: Any,
    ) -> None:
        self.recipe, self.update, self.trained, self.batches = recipe, found, trained, batches
        self._compiled, self._optimizer = compiled, recipe.optimizer
        self._signature = hyper.signature(self._optimizer.param_groups)
        first, parameter = trained[0]  # once more: itemgetter returns a tuple only of two or more
        self._pick = operator.itemgetter(*(i for i, _ in trained), first)
        self._known = (*(p for _, p in trained), parameter)
        self._checked: list[float] = []
        self._find_state()

    def _find_state(self) -> None:
        """Look up where the state lies: ``load_state_dict`` makes a new one."""
        slots, self._state = self.update.slots, self._optimizer.state
        places = [(self._state[self.trained[s.param][1]], s.key) for s in slots]
        self._tensors = [place for place, slot in zip(places, slots, strict=True) if not slot.counter]
        self._counters = [[places[i] for i in shared] for shared in self.update.counts]

    def numbers(self, arguments: tuple[Any, ...]) -> list[float] | None:
        """Hyperparameters and counters for one step; None if the program is not what the optimizer would do now."""
        if not all(map(operator.is_, self._pick(arguments), self._known)):
            return None
        if hyper.signature(self._optimizer.param_groups) != self._signature:
            return None
        if self._optimizer.state is not self._state:
            trained = [p for _, p in self.trained]
            if state.slots(self._optimizer, trained, self.recipe.scaling() is None) != self.update.slots:
                return None
            self._find_state()
        groups = self._optimizer.param_groups
        numbers = [place.read(groups) for place in self.update.places]
        if numbers != self._checked:
            if not all(decision.holds(numbers) for decision in self.update.decisions):
                return None
            self._checked = numbers
        return self._with_counts(numbers)

    def _with_counts(self, numbers: list[float]) -> list[float] | None:
        """``numbers`` and one for each counter, if those that share an argument still stand at the same number."""
        numbers = numbers[:]
        for shared in self._counters:
            found = {place[key].item() for place, key in shared}
            if len(found) != 1:
                return None
            numbers.append(found.pop())
        return numbers

    def run(self, arguments: tuple[Any, ...], numbers: list[float], compiled: tracing.Run | None = None) -> Tensor:
        """One step. ``compiled``: another executable of the same program."""
        given = list(arguments)
        if self.batches is not None:
            whole = current.get().whole
            for i in self.batches.whole:
                given[i] = whole[id(given[i])]
        given += [place[key] for place, key in self._tensors]
        given += self.recipe.scales()
        given.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        (loss,) = (compiled or self._compiled)(given)
        counted = [place[key] for shared in self._counters for place, key in shared]
        if counted:
            torch._foreach_add_(counted, 1)
        return loss  # type: ignore[no-any-return]
