"""Random programs: a seed gives the same one on every machine. Statements are tried in eager as they are drawn: what
eager refuses is dropped, so the templates say nothing about shapes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .templates import DTYPES, SCALARS, SHAPES, TEMPLATES

_LARGEST = 2048
_DIFFERENTIATED = 0.35
"""The share of programs whose gradients are compared too."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Fuzzed:
    """A program: statements over its inputs by name, the names it returns, and whether it is differentiated."""

    inputs: tuple[tuple[str, torch.Tensor], ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]
    grad: bool = False

    def source(self) -> str:
        """A function definition."""
        names = ", ".join(name for name, _ in self.inputs)
        body = "\n    ".join(self.lines)
        return f"def program({names}):\n    {body}\n    return {', '.join(self.returned)},\n"

    def copies(self) -> list[torch.Tensor]:
        """Fresh inputs: a program may write to them."""
        return [leaf(t, self.grad) for _, t in self.inputs]


def leaf(t: torch.Tensor, grad: bool) -> torch.Tensor:
    """A copy; with ``grad`` one to differentiate by, if its dtype has derivatives."""
    return t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex()))


def function(source: str, **names: Any) -> Callable[..., Any]:
    """The function that ``source`` defines."""
    scope = {"torch": torch, **names}
    exec(compile(source, "<fuzz>", "exec"), scope)
    made: Callable[..., Any] = scope["program"]
    return made


def outcome(program: Fuzzed, fn: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results, inputs as the call left them, and gradients, of a program run as ``fn``."""
    results = [*fn(*given)]
    return [*(t.detach() for t in (*results, *given)), *(gradients(results, given) if program.grad else ())]


def gradients(results: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of every input that has one, for cotangents that are cosines."""
    heads = [t for t in results if t.requires_grad]
    leaves = [t for t in given if t.requires_grad]
    pulls = [torch.arange(t.numel()).cos().reshape(t.shape).to(t.dtype) for t in heads]
    made = torch.autograd.grad(heads, leaves, pulls, allow_unused=True) if heads and leaves else [None] * len(leaves)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, made)]  # noqa: B905 - of one length


# ---- generating


def generate(seed: int, steps: int = 12) -> Fuzzed:
    """The program of a seed."""
    rng = random.Random(seed)
    inputs = tuple((f"x{i}", _tensor(rng)) for i in range(rng.randint(2, 5)))
    grad = rng.random() < _DIFFERENTIATED
    values: Values = {name: leaf(t, grad) for name, t in inputs}
    lines: list[str] = []
    for _ in range(rng.randint(3, steps)):
        line = _step(rng, values, f"v{len(lines)}")
        if line:
            lines.append(line)
    used = " ".join(line.partition(" = ")[2] or line for line in lines)
    made = [line.partition(" = ")[0] for line in lines if line.startswith("v")]
    leaves = [n for n in made if n in values and not re.search(rf"\b{n}\b", used)]
    program = Fuzzed(inputs, tuple(lines) or ("pass",), tuple(leaves) or (inputs[0][0],), grad)
    return program if _differentiable(program) else replace(program, grad=False)


def _differentiable(program: Fuzzed) -> bool:
    """Whether eager takes the gradients: it refuses where something saved was overwritten later."""
    try:
        outcome(program, function(program.source()), program.copies())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _tensor(rng: random.Random) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, rng.choice(DTYPES))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = rng.choice(SHAPES)
    if kind.is_floating_point or kind.is_complex:
        wide = torch.complex128 if kind.is_complex else torch.float64
        return (torch.randn(shape, generator=generator, dtype=wide) * rng.choice([1, 1, 4])).to(kind)
    return torch.randint(0 if kind in (torch.uint8, torch.bool) else -5, 6, shape, generator=generator).to(kind)


def _step(rng: random.Random, values: Values, name: str) -> str | None:
    """A statement that eager takes, run on ``values``; None if twenty draws gave none."""
    for _ in range(20):
        family = rng.choice(list(TEMPLATES))
        text = _fill(rng, rng.choice(TEMPLATES[family]), values)
        if text is None:
            continue
        line = text if family == "in place" else f"{name} = {text}"
        trial = dict(values)
        try:
            exec(line, {"torch": torch}, trial)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        if family == "in place":
            return line
        made = trial[name]
        if isinstance(made, torch.Tensor) and made.numel() <= _LARGEST and made.dim() <= 5:
            values[name] = made
            return line
    return None


def _fill(rng: random.Random, template: str, values: Values) -> str | None:
    """The template with a choice for each placeholder; one with a digit is the same everywhere in it."""
    chosen: dict[str, str] = {}
    for mark in dict.fromkeys(re.findall(r"\{\w+\}", template)):
        count = 1 if mark[2].isdigit() else template.count(mark)
        for _ in range(count):
            pick = _choose(rng, mark[1], values)
            if pick is None:
                return None
            chosen[mark] = pick
            template = template.replace(mark, pick, -1 if mark[2].isdigit() else 1)
    return template


_KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "a": lambda kind: True,
    "f": lambda kind: kind.is_floating_point,
    "c": lambda kind: kind.is_complex,
    "n": lambda kind: kind.is_floating_point or kind.is_complex,
    "i": lambda kind: kind in (torch.int64, torch.int32, torch.int16, torch.int8),
    "b": lambda kind: kind is torch.bool,
}


def _choose(rng: random.Random, mark: str, values: Values) -> str | None:
    if mark in _KINDS:
        fitting = [n for n, v in values.items() if _KINDS[mark](v.dtype)]
        return rng.choice(fitting) if fitting else None
    if mark == "t":
        return f"torch.{rng.choice(DTYPES)}"
    return {"s": rng.choice(SCALARS), "d": str(rng.randint(-3, 2)), "k": str(rng.randint(0, 3))}[mark]
