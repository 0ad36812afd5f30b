"""A stock optimizer's step inside a step of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpu_compile.errors import BadCall
from tpu_compile.training import state, update

Tensor = torch.Tensor


def functional_step(optimizer: torch.optim.Optimizer) -> FunctionalStep:
    """A step of a stock optimizer as tensor operations, for a compiled function of your own.

        update = tpu_compile.functional_step(optimizer)

        @torch.compile(backend="tpu", fullgraph=True)
        def step(x, y, numbers):
            grads, loss = torch.func.grad_and_value(my_loss)(dict(model.named_parameters()), x, y)
            update(list(grads.values()), numbers)
            return loss

        loss = step(x, y, update.numbers())

    Every parameter of the optimizer gets a gradient. Its state is made now.

    Raises:
        LoweringError: the optimizer's step cannot be traced.
    """
    state.check(optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    state.prime(optimizer, trained)
    return FunctionalStep(optimizer, trained)


class FunctionalStep:
    """See ``functional_step``."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> None:
        self._found = update.trace(optimizer, trained)
        self._optimizer, self._params = optimizer, list(trained)
        self._graph = self._found.graph
        places = [(optimizer.state[self._params[s.param]], s.key) for s in self._found.slots]
        pairs = list(zip(places, self._found.slots, strict=True))
        self._tensors = [place[key] for (place, key), slot in pairs if not slot.counter]
        self._counters = [[places[i][0][places[i][1]] for i in shared] for shared in self._found.counts]

    def numbers(self) -> Tensor:
        """Hyperparameters as they are now, and the steps counted so far (float64, on the CPU); counts one more. Ask for
        them outside the compiled function, once a step.

        Raises:
            BadCall: a hyperparameter that decided how the step was traced has changed: make a new one.
        """
        numbers = [float(place.read(self._optimizer.param_groups)) for place in self._found.places]
        if not all(decision.holds(numbers) for decision in self._found.decisions):
            raise BadCall(
                "a hyperparameter has become zero, or is no longer: call tpu_compile.functional_step again.",
                "FAILED_PRECONDITION",
            )
        counts = [shared[0].item() for shared in self._counters]
        for shared in self._counters:
            torch._foreach_add_(shared, 1)
        return torch.tensor([*numbers, *counts], dtype=torch.float64, device="cpu")

    def __call__(self, grads: Sequence[Tensor], numbers: Tensor) -> None:
        """Write parameters and state in place. ``grads``: one for each parameter, in the optimizer's order."""
        with torch.no_grad():
            results = self._graph(*self._params, *grads, *self._tensors, numbers)
            for target, result in zip([*self._params, *self._tensors], results, strict=True):
                target.copy_(result)
