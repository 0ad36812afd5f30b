"""A fault as a program of a few lines that fails by itself: a part of the graph, its inputs from a seed or a file."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from tpu_compile.comparing.bisection import Culprit
from tpu_compile.comparing.interpreted import EagerRun
from tpu_compile.comparing.measure import measure
from tpu_compile.compiler import compile_graph
from tpu_compile.config import override
from tpu_compile.errors import LoweringError
from tpu_compile.tolerances import tolerance

_LITERAL = 8
"""Elements; a tensor this small is written into the program."""


@dataclass(frozen=True)
class Reproducer:
    """What was written. ``fails``: the program, run here, did fail."""

    program: Path
    inputs: Path | None
    fails: bool


def write(culprit: Culprit, folder: Path, found_by: str) -> Reproducer:
    """Write ``reproduce_<op>.py`` (and ``.pt``, if its inputs cannot come from a seed) and run it.

    Raises:
        LoweringError: the part holds a higher-order operator, whose subgraphs are no lines of Python.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"reproduce_{culprit.op.replace('.', '_')}.py"
    seeded = _seeded(culprit.arguments)
    made = _made_by(seeded) if _departs(culprit, _evaluate(seeded)) else None
    saved = None if made is not None else program.with_suffix(".pt")
    if saved is not None:
        torch.save([a for a in culprit.arguments if isinstance(a, torch.Tensor)], saved)
        seeded, made = _saved(culprit.arguments), ['x = torch.load(__file__.removesuffix(".py") + ".pt")']
    program.write_text(_source(culprit, made or [], seeded, found_by))
    return Reproducer(program, saved, _fails(program))


# ---- inputs


def _seeded(arguments: Sequence[Any]) -> list[str]:
    """An expression for each argument: small ones as they are, others drawn with the same shape, strides and range."""
    return [_drawn(a) if isinstance(a, torch.Tensor) else code(a) for a in arguments]


def _saved(arguments: Sequence[Any]) -> list[str]:
    place = iter(range(len(arguments)))
    return [f"x[{next(place)}]" if isinstance(a, torch.Tensor) else code(a) for a in arguments]


def _drawn(t: torch.Tensor) -> str:
    dense = t.is_contiguous()
    if not t.numel():
        return f"torch.empty({list(t.shape)}, dtype={t.dtype})"
    if t.numel() <= _LITERAL and dense and not t.is_complex():
        return f"torch.tensor({_literal(t.tolist())}, dtype={t.dtype})"
    shape, dtype = list(t.shape), t.dtype
    if dtype.is_floating_point or dtype.is_complex:
        positive = not dtype.is_complex and bool((t >= 0).all())
        text = f"torch.{'rand' if positive else 'randn'}({shape}).to({dtype})"
    elif dtype is torch.bool:
        text = f"torch.rand({shape}) < 0.5"
    else:
        text = f"torch.randint({int(t.min())}, {int(t.max()) + 1}, {shape}, dtype={dtype})"
    return text if dense else f"torch.empty_strided({shape}, {list(t.stride())}, dtype={dtype}).copy_({text})"


def _literal(values: Any) -> str:
    return f"[{', '.join(map(_literal, values))}]" if isinstance(values, list) else code(values)


def _evaluate(expressions: Sequence[str]) -> list[Any]:
    torch.manual_seed(0)
    return [eval(text, {"torch": torch}) for text in expressions]


def _made_by(expressions: Sequence[str]) -> list[str]:
    return ["torch.manual_seed(0)"] if any("rand" in text for text in expressions) else []


def _departs(culprit: Culprit, arguments: Sequence[Any]) -> bool:
    """Whether the part departs on these arguments too, as it does on the model's own."""
    with override(cache=False):
        got = compile_graph(culprit.graph, "reproducer")(list(arguments))
    want = EagerRun(culprit.graph).outputs(arguments)
    return any(not measure("", w, g).agrees for w, g in zip(want, got, strict=True))


# ---- the program


def _source(culprit: Culprit, made: Sequence[str], arguments: Sequence[str], found_by: str) -> str:
    inputs = culprit.graph.graph.find_nodes(op="placeholder")
    names = [n.name for n in inputs]
    relative, absolute = _limits(culprit)
    line = culprit.where.replace('"""', "…")
    lines = [
        f'"""{culprit.op} departs from eager torch: {culprit.difference.problem}.',
        "",
        f"Found by `{found_by}` in graph {culprit.name}" + (f", at {line}" if line else "") + ".",
        '"""',
        "",
        "import torch",
        "",
        *made,
        *(f"{name} = {text}" for name, text in zip(names, arguments, strict=True)),
        "",
        "",
        f"def fn({', '.join(names)}):",
        *(f"    {line}" for line in _body(culprit)),
        "",
        "",
        f"want = fn({', '.join(names)})",
        f'got = torch.compile(fn, backend="tpu", fullgraph=True)({", ".join(names)})',
        f"torch.testing.assert_close(got, want, rtol={relative:g}, atol={absolute:g}, equal_nan=True)",
        'print("compiled and eager agree")',
    ]
    return "\n".join(lines) + "\n"


def _limits(culprit: Culprit) -> tuple[float, float]:
    """The tolerance, with that on the scale of the result as a number."""
    wanted = [t for t in EagerRun(culprit.graph).outputs(culprit.arguments) if isinstance(t, torch.Tensor)]
    limits = [(*tolerance(t.dtype), t.abs().double().nan_to_num(0, 0, 0).max().item()) for t in wanted if t.numel()]
    return max((r for r, _, _ in limits), default=0.0), max((a * scale for _, a, scale in limits), default=0.0)


def _body(culprit: Culprit) -> list[str]:
    lines = []
    for node in culprit.graph.graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {_call(node)}")
        elif node.op == "get_attr":
            constant = getattr(culprit.graph, str(node.target))
            if not isinstance(constant, torch.Tensor):
                raise LoweringError(f"{culprit.op} takes subgraphs, which a reproducer of a few lines cannot hold.")
            lines.append(f"{node.name} = torch.tensor({_literal(constant.tolist())}, dtype={constant.dtype})")
        elif node.op == "output":
            results = [r.name for r in node.args[0] if r is not None]
            lines.append(f"return {', '.join(results)}")
    return lines


def _call(node: Node) -> str:
    if node.target is operator.getitem:
        return f"{code(node.args[0])}[{code(node.args[1])}]"
    if not isinstance(node.target, OpOverload):
        raise LoweringError(f"{node.target} takes subgraphs, which a reproducer of a few lines cannot hold.")
    keywords = [f"{name}={code(value)}" for name, value in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join([*map(code, node.args), *keywords])})"


def code(value: Any) -> str:
    """A node's argument as Python."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(code, value)) + ("," if isinstance(value, tuple) and len(value) == 1 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


def _fails(program: Path) -> bool:
    """Run the program in this process, where the rules are those that departed."""
    torch._dynamo.reset()
    try:
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__", "__file__": str(program)})
    except AssertionError:
        return True
    return False
