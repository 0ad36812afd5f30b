"""A smaller program that fails too, and the script that shows it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .programs import Fuzzed, function, gradients


def shrink(program: Fuzzed, fails: Callable[[Fuzzed], bool]) -> Fuzzed:
    """A smaller program that fails too: fewer results, fewer statements, values given instead of computed."""
    for name in program.returned:
        if fails(replace(program, returned=(name,))):
            program = replace(program, returned=(name,))
            break
    at = len(program.lines) - 1
    while at >= 0:
        for smaller in _without(program, at):
            if fails(smaller):
                program = smaller
                break
        at = min(at, len(program.lines)) - 1
    text = " ".join((*program.lines, *program.returned))
    return replace(program, inputs=tuple(i for i in program.inputs if re.search(rf"\b{i[0]}\b", text)))


def _without(program: Fuzzed, at: int) -> Iterator[Fuzzed]:
    """The program without one statement; its value, if it is needed, becomes an input."""
    rest = (*program.lines[:at], *program.lines[at + 1 :]) or ("pass",)
    name = program.lines[at].partition(" = ")[0]
    if not re.fullmatch(r"v\d+", name) or not re.search(rf"\b{name}\b", " ".join((*rest, *program.returned))):
        yield replace(program, lines=rest)
    elif any(re.search(rf"\b{name}\b", line) for line in rest):
        (value,) = function(replace(program, lines=program.lines[: at + 1], returned=(name,)).source())(
            *program.copies()
        )
        yield replace(program, lines=rest, inputs=(*program.inputs, (name, value.detach().clone())))


def reproducer(program: Fuzzed, reason: str) -> str:
    """A script that shows eager's results and the compiled ones, and what each leaves in its inputs."""
    inputs = "".join(
        f"    torch.empty_strided({tuple(t.shape)}, {t.stride()}, dtype={t.dtype}).copy_(torch.tensor({t.tolist()})"
        f".reshape({tuple(t.shape)})),\n"
        for _, t in program.inputs
    )
    shown = "gradients(results, given)" if program.grad else "given"
    mark = "t.requires_grad_(t.is_floating_point() or t.is_complex())" if program.grad else "t"
    return f"""# {reason}
import torch
from math import inf, nan

infj, nanj = complex(0, inf), complex(0, nan)


{program.source()}

{inspect.getsource(gradients)}

def show(name, fn, given):
    given = [{mark} for t in given]
    results = fn(*given)
    print(name, results, {shown})


inputs = [
{inputs}]
copies = [t.clone() for t in inputs]
show("eager   ", program, inputs)
show("compiled", torch.compile(program, backend="tpu", fullgraph=True), copies)
"""
