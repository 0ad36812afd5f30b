"""Hyperparameters as values of the program: stock optimizers, which compute with Python numbers, are traced with 0-dim
float64 tensors in their place.

Python computes such numbers in double precision, and so does the program. Where torch takes them only as numbers
(``alpha=``, ``value=``, ``lerp``'s weight), the same is written with tensors.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor


@dataclass(frozen=True)
class Decision:
    """A comparison that the optimizer's code made with a number: the program holds as long as it comes out the same."""

    place: int
    compare: str
    other: float
    outcome: bool

    def holds(self, numbers: Sequence[float]) -> bool:
        """Whether it comes out the same for other ``numbers``."""
        return bool(getattr(operator, self.compare)(numbers[self.place], self.other)) == self.outcome


class NumberArithmetic(TorchFunctionMode):
    """Inside, tensors that ``number`` made stand for Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, tuple[int, float] | None]] = {}
        self.decisions: list[Decision] = []

    def number(self, t: Tensor, known: tuple[int, float] | None = None) -> Tensor:
        """Declare ``t`` (0-dim, float64) a number. ``known``: its place among the arguments, and its value now."""
        self._known[id(t)] = (t, known)
        return t

    def is_number(self, value: Any) -> bool:
        """Whether ``value`` stands for a Python number."""
        return id(value) in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = name.strip("_") if name.startswith("__") else name
        if name == "item" and args[0].dim() == 0:
            return args[0] if self.is_number(args[0]) else self.number(args[0].to(torch.float64))
        if args and self.is_number(args[0]):
            if name == "to":
                return args[0]
            if name in ("ne", "eq", "lt", "le", "gt", "ge") and type(args[1]) in (int, float):
                return self._decide(name, args[0], args[1])
        if name == "square_":  # in place it has no functional twin of its own
            return args[0].mul_(args[0])
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        numbers = [t for t in tensors if self.is_number(t)]
        if not numbers:
            return func(*args, **kwargs)
        if len(numbers) == len(tensors):
            result = func(*args, **kwargs)
            return self.number(result) if isinstance(result, Tensor) else result
        return self._mixed(func, name, args, kwargs)

    def _decide(self, name: str, number: Tensor, other: float) -> bool:
        known = self._known[id(number)][1]
        if known is None:
            raise TypeError("the optimizer decides something by a number that the program computes")
        outcome = bool(getattr(operator, name)(known[1], other))
        self.decisions.append(Decision(known[0], name, other, outcome))
        return outcome

    def _mixed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        in_place = name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv")
        base = name.rstrip("_").removeprefix("i" if in_place and not name.endswith("_") else "").replace("true", "")
        formula = _FORMULAS.get(base)
        if formula is None:
            return func(*args, **kwargs)
        data = [a for a in args if isinstance(a, Tensor) and not self.is_number(a)]
        kind = data[0].dtype
        for other in data[1:]:
            kind = torch.promote_types(kind, other.dtype) if not in_place else kind
        wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
        result = formula(*(_cast(a, wide) for a in args), **{k: _cast(v, wide) for k, v in kwargs.items()})
        return args[0].copy_(result) if in_place else result.to(kind)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype != dtype else value


def _reverse(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, other: formula(other, x)


_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, other, alpha=1: x + other * alpha,
    "sub": lambda x, other, alpha=1: x - other * alpha,
    "mul": torch.mul,
    "div": torch.div,
    "radd": _reverse(torch.add),
    "rsub": lambda x, other, alpha=1: other - x * alpha,
    "rmul": _reverse(torch.mul),
    "rdiv": _reverse(torch.div),
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
    "lerp": lambda x, end, weight: torch.lerp(x, end, weight),
}
"""What torch computes, with tensors in the place of its numbers. 16-bit floats arrive in float32."""


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device="cpu")


@contextlib.contextmanager
def builtins_of(names: dict[str, Any], numbers: NumberArithmetic) -> Iterator[None]:
    """Let ``min`` and ``max`` in the functions of a module, whose globals are ``names``, take numbers that the program
    computes."""

    def choose(plain: Callable[..., Any], op: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
        def either(*values: Any, **kwargs: Any) -> Any:
            if len(values) != 2 or not any(isinstance(v, Tensor) for v in values):
                return plain(*values, **kwargs)
            return numbers.number(op(*map(_as_tensor, values)))

        return either

    with patch.dict(names, min=choose(min, torch.minimum), max=choose(max, torch.maximum)):
        yield
