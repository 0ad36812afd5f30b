"""Random programs, eager against compiled: mixed dtypes, views, in-place ops, reductions, broadcasting, indexing.

    python tools/fuzz.py [--graphs 500] [--seed 0]

A program that differs is shrunk and printed as a script that fails alone; the exit status is 1. A seed gives the same
program on every machine. Statements are drawn from ``TEMPLATES`` and tried in eager as they are drawn: what eager
refuses is dropped, so the table says nothing about shapes.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch._subclasses import FakeTensorMode

from tpu_compile.tolerances import tolerance

TEMPLATES: dict[str, tuple[str, ...]] = {
    "unary": tuple(
        "{a}.neg() {a}.abs() {a}.sign() {f}.exp() {f}.sigmoid() {f}.tanh() {f}.sin() {f}.cos() {f}.floor() {f}.round() "
        "{f}.trunc() {f}.relu() {f}.erf() {f}.expm1() {f}.abs().log1p() {f}.abs().sqrt() {f}.frac() {f}.isnan() "
        "{i}.bitwise_not() {a}.square() {f}.reciprocal() {a}.logical_not() {f}.atan() {f}.asinh() {a}.sgn() "
        "torch.nn.functional.gelu({f}) torch.nn.functional.silu({f}) torch.nn.functional.softplus({f}) "
        "{f}.nan_to_num() {f}.rsqrt() {a}.positive() {f}.signbit() {f}.logit(0.1)".split()
    ),
    "binary": (
        "{a} + {a}",
        "{a} - {a}",
        "{a} * {a}",
        "{a} / {a}",
        "{a} // {a}",
        "{a} % {a}",
        "torch.maximum({a}, {a})",
        "torch.minimum({a}, {a})",
        "{a} < {a}",
        "{a} >= {a}",
        "{a} == {a}",
        "{a} != {a}",
        "{i} & {i}",
        "{i} | {i}",
        "{i} ^ {i}",
        "{a}.logical_and({a})",
        "{a}.logical_xor({a})",
        "torch.add({a}, {a}, alpha={k})",
        "torch.fmod({a}, {a})",
        "torch.atan2({f}, {f})",
        "torch.copysign({f}, {a})",
        "torch.div({a}, {a}, rounding_mode='trunc')",
        "torch.hypot({f}, {f})",
        "torch.lerp({f0}, {f0}.flip(0), {s})",
        "torch.addcmul({f}, {f}, {f}, value={s})",
        "torch.xlogy({f}, {f}.abs())",
        "torch.rsub({a}, {a})",
    ),
    "scalar": (
        "{a} + {s}",
        "{a} * {s}",
        "{s} - {a}",
        "{a} / {s}",
        "{a} // {s}",
        "{a} % {s}",
        "{s} / {f}",
        "{a} > {s}",
        "{a} == {s}",
        "{a} ** {k}",
        "{f}.abs() ** {s}",
        "{i} << {k}",
        "{i} >> {k}",
        "{a}.clamp({s}, 2)",
        "{a}.clamp(max={s})",
        "torch.full_like({a}, {k})",
        "torch.ones_like({a}).cumsum({d})",
        "torch.tensor({s}) + {a}",
    ),
    "cast": (
        "{f}.nan_to_num(0, 9, -9).clamp(0, 100).to({t})",
        "{i}.to({t})",
        "{b}.to({t})",
        "{b}.float()",
        "{i}.double()",
        "{f}.bfloat16()",
        "{f}.half()",
        "{f}.float()",
    ),
    "reduce": (
        "{a}.sum({d})",
        "{a}.sum()",
        "{f}.mean({d}, keepdim=True)",
        "{a}.amax({d})",
        "{a}.amin({d}, keepdim=True)",
        "{a}.prod({d})",
        "{a}.any({d})",
        "{a}.all({d})",
        "{a}.argmax({d})",
        "{a}.argmin({d})",
        "{f}.var({d})",
        "{f}.std({d}, correction=0)",
        "{f}.logsumexp({d})",
        "{f}.softmax({d})",
        "{f}.log_softmax({d})",
        "{a}.cumsum({d})",
        "{a}.cumprod({d})",
        "{f}.norm(dim={d})",
        "{a}.count_nonzero({d})",
        "{a}.sort({d}, stable=True)[0]",
        "{a}.sort({d}, descending=True, stable=True)[1]",
        "{a}.median({d})[0]",
        "{a}.topk(1, {d})[0]",
        "{a}.cummax({d})[0]",
        "{a}.sum({d}, dtype=torch.float32)",
        "torch.nn.functional.layer_norm({f0}, {f0}.shape[-1:])",
    ),
    "view": (
        "{a}.t()",
        "{a}.transpose({d}, {d})",
        "{a}.unsqueeze({d})",
        "{a}.squeeze()",
        "{a}[0]",
        "{a}[..., 1:]",
        "{a}[::2]",
        "{a}[:, -1]",
        "{a}[..., None]",
        "{a}.flatten()",
        "{a}.reshape(-1, 2)",
        "{a}.view(-1)",
        "{a}.expand(2, *{a0}.shape)".replace("{a}", "{a0}"),
        "{a}.flip({d})",
        "{a}.roll({k}, {d})",
        "{a}.narrow({d}, 0, 1)",
        "{a}.select({d}, -1)",
        "{a}.diagonal()",
        "{a}.unfold({d}, 2, 1)",
        "{a}.movedim(0, -1)",
        "{a}.chunk(2, {d})[-1]",
        "{a}.split(1, {d})[0]",
        "{a}.contiguous()",
        "{a}.clone()",
        "{a}.mT",
        "{a}.tril({k})",
        "{a}.repeat(2, *[1] * {a0}.dim())".replace("{a}", "{a0}"),
        "torch.nn.functional.pad({a}, (1, 2), value={k})",
        "torch.cat([{a}, {a}], {d})",
        "torch.stack([{a}, {a}], {d})",
        "torch.cat([{a0}, {a0} * {s}], {d})",
        "torch.broadcast_tensors({a}, {a})[0]",
    ),
    "index": (
        "{a0}[{i} % {a0}.shape[0]]",
        "{a0}[:, {i} % {a0}.shape[1]]",
        "{a0}[{i} % {a0}.shape[0], {i} % {a0}.shape[1]]",
        "{a0}.index_select({d0}, ({i} % {a0}.shape[{d0}]).flatten())",
        "{a0}.gather({d0}, {a0}.argsort({d0}, stable=True))",
        "{a0}.scatter({d0}, {a0}.argsort({d0}, stable=True), {a})",
        "{a0}.scatter_add({d0}, {i} % {a0}.shape[{d0}], {a})",
        "{a0}.scatter_reduce({d0}, {i} % {a0}.shape[{d0}], {a}, 'amax')",
        "{a0}.index_add(0, ({i} % {a0}.shape[0]).flatten(), {a})",
        "{a0}.index_put(({i} % {a0}.shape[0],), {a}, accumulate=True)",
        "{a}.masked_fill({b}, {s})",
        "torch.where({b}, {a}, {a})",
        "torch.where({b}, {a}, {s})",
        "torch.where({a} > 0, {s}, {a})",
        "{a0}.take({i} % {a0}.numel())",
        "torch.nn.functional.one_hot({i} % 4, 4)",
        "torch.bucketize({f}, {f}.flatten().nan_to_num().sort()[0])",
        "torch.take_along_dim({a0}, {i} % {a0}.shape[0], 0)",
    ),
    "matmul": (
        "{f0} @ {f0}.mT",
        "{a} @ {a}",
        "torch.matmul({f}, {f})",
        "torch.einsum('ij,kj->ik', {f}, {f})",
        "torch.outer({f}.flatten(), {f}.flatten())",
        "torch.nn.functional.linear({f}, {f})",
        "torch.addmm({f}, {f}, {f}, beta={s})",
        "torch.bmm({f}, {f})",
    ),
    "in place": (
        "{a}.add_({a})",
        "{a}.mul_({s})",
        "{a}.sub_({a}, alpha={k})",
        "{f}.div_({a})",
        "{a}.zero_()",
        "{a}.fill_({k})",
        "{a}.copy_({a})",
        "{a}.clamp_(max={k})",
        "{f}.exp_()",
        "{f}.relu_()",
        "{a}.masked_fill_({b}, {k})",
        "{a}[0] = {k}",
        "{a}[..., :1] += {k}",
        "{a}[{b}] = {k}",
        "{a}[:, 0] = {a}",
        "{a}.transpose(0, 1).add_({k})",
        "{a}.t_()",
        "{a}.unsqueeze_(0)",
        "{a}.neg_()",
        "{a}.logical_not_()",
        "{a0}.index_add_(0, ({i} % {a0}.shape[0]).flatten(), {a})",
        "{i}.bitwise_xor_({i})",
    ),
}
DTYPES = "float32 float32 float32 float64 bfloat16 float16 int64 int64 int32 int16 int8 uint8 bool bool".split()
SHAPES = [(2, 3), (3, 2), (3, 3), (3,), (1,), (), (2, 1), (1, 3), (2, 3, 4), (4,), (2, 1, 4), (3, 4), (0, 3), (2, 2, 2)]
SCALARS = ["2", "-1", "0.5", "-1.5", "3", "0", "True", "1e-3", "7.25"]
_LARGEST = 2048
_ULP = {torch.float64: 2.0**-40, torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

Values = dict[str, Any]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fuzzed:
    """A program: statements over its inputs by name, and the names it returns."""

    inputs: tuple[tuple[str, torch.Tensor], ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]

    def source(self) -> str:
        """A function definition."""
        names = ", ".join(name for name, _ in self.inputs)
        body = "\n    ".join(self.lines)
        return f"def program({names}):\n    {body}\n    return {', '.join(self.returned)},\n"

    def copies(self) -> list[torch.Tensor]:
        """Fresh inputs: a program may write to them."""
        return [t.clone() for _, t in self.inputs]


def function(source: str, **names: Any) -> Callable[..., Any]:
    """The function that ``source`` defines."""
    scope = {"torch": torch, **names}
    exec(compile(source, "<fuzz>", "exec"), scope)
    made: Callable[..., Any] = scope["program"]
    return made


# ---- generating


def generate(seed: int, steps: int = 12) -> Fuzzed:
    """The program of a seed."""
    rng = random.Random(seed)
    inputs = tuple((f"x{i}", _tensor(rng)) for i in range(rng.randint(2, 5)))
    values: Values = {name: t.clone() for name, t in inputs}
    lines: list[str] = []
    for _ in range(rng.randint(3, steps)):
        line = _step(rng, values, f"v{len(lines)}")
        if line:
            lines.append(line)
    used = " ".join(line.partition(" = ")[2] or line for line in lines)
    made = [line.partition(" = ")[0] for line in lines if line.startswith("v")]
    leaves = [n for n in made if n in values and not re.search(rf"\b{n}\b", used)]
    return Fuzzed(inputs, tuple(lines) or ("pass",), tuple(leaves) or (inputs[0][0],))


def _tensor(rng: random.Random) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, rng.choice(DTYPES))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = rng.choice(SHAPES)
    if kind.is_floating_point:
        return (torch.randn(shape, generator=generator) * rng.choice([1, 1, 4])).to(kind)
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
    "i": lambda kind: not kind.is_floating_point and kind not in (torch.bool, torch.uint8),
    "b": lambda kind: kind is torch.bool,
}


def _choose(rng: random.Random, mark: str, values: Values) -> str | None:
    if mark in _KINDS:
        fitting = [n for n, v in values.items() if _KINDS[mark](v.dtype)]
        return rng.choice(fitting) if fitting else None
    if mark == "t":
        return f"torch.{rng.choice(DTYPES)}"
    return {"s": rng.choice(SCALARS), "d": str(rng.randint(-3, 2)), "k": str(rng.randint(0, 3))}[mark]


# ---- comparing


def on_tpu(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` with our backend."""
    return torch.compile(fn, backend="tpu", fullgraph=True, dynamic=False)


def fault(program: Fuzzed, compiler: Compile = on_tpu) -> str | None:
    """What is wrong with the compiled program; None if nothing is. Also after a call: what it left in its inputs."""
    fn, given, kept = function(program.source()), program.copies(), program.copies()
    want = [*fn(*given), *given]
    torch._dynamo.reset()
    try:
        got = [*compiler(function(program.source()))(*kept), *kept]
    except RuntimeError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if _captured(program) else None
    labels = [*program.returned, *(f"{name} after the call" for name, _ in program.inputs)]
    for label, w, g, promised in zip(labels, want, got, _promised(program, want), strict=True):
        if _apart(w, g) and _apart(promised, g):
            return f"{label}: strides {g.stride()} for {w.stride()}"
    doubtful = [i for i, (w, g) in enumerate(zip(want, got, strict=True)) if _differs(w, g, [])]
    others = list(_others(program)) if doubtful else []
    for i in doubtful:
        reason = _differs(want[i], got[i], [o[i] for o in others])
        if reason:
            return f"{labels[i]}: {reason}"
    return None


def _promised(program: Fuzzed, want: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results as FakeTensor has them: all that a backend knows. Its strides are not always eager's."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # torch.tensor(2) in a program is real
    given = [mode.from_tensor(t) for t in program.copies()]
    with contextlib.suppress(RuntimeError), mode:  # it refuses what depends on data
        return [*function(program.source())(*given), *given]
    return want


def _apart(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the strides differ; that of an axis of one element means nothing."""
    if want.shape != got.shape or not want.numel():
        return False
    return any(w != g for w, g, n in zip(want.stride(), got.stride(), want.shape, strict=True) if n > 1)


def _captured(program: Fuzzed) -> bool:
    """Whether torch itself makes a graph of it: Dynamo and FakeTensor refuse some programs that eager runs."""
    torch._dynamo.reset()
    try:
        torch.compile(function(program.source()), backend="aot_eager", fullgraph=True, dynamic=False)(*program.copies())
    except RuntimeError:
        return False
    return True


def _differs(want: Any, got: Any, others: Sequence[Any]) -> str | None:
    """The largest difference that neither the tolerance nor the spread of ``others`` explains."""
    for what in ("dtype", "shape"):
        if getattr(want, what) != getattr(got, what):
            return f"{what} {getattr(got, what)} for {getattr(want, what)}"
    if not want.is_floating_point():
        wrong = want != got
        for other in others:
            wrong &= other == want
        return f"{got[wrong].tolist()[:4]} for {want[wrong].tolist()[:4]}" if wrong.any() else None
    relative, absolute = tolerance(want.dtype)
    w, g = want.double(), got.double()
    allowed = absolute + relative * w.abs()
    finite = torch.isfinite(w)
    wrong = torch.where(finite, ~((g - w).abs() <= allowed), ~((g == w) | (g.isnan() & w.isnan())))
    for other in others:
        o = other.double()
        wrong &= torch.where(
            finite, ~((g - w).abs() <= allowed + 8 * (o - w).abs()), (o == w) | (o.isnan() & w.isnan())
        )
        wrong &= torch.isfinite(o) == finite
    return f"{g[wrong].tolist()[:4]} for {w[wrong].tolist()[:4]}" if wrong.any() else None


def _others(program: Fuzzed) -> Iterator[list[torch.Tensor]]:
    """Results of programs that are as right as eager's: in float64, and with every value moved by its last bits. Where
    they depart from eager, eager's own digits mean nothing."""
    wide = re.sub(r"torch\.b?float(16|32)", "torch.float64", program.source())
    wide = re.sub(r"\.(float|half|bfloat16)\(\)", ".double()", wide)
    given = [t.double() if t.is_floating_point() else t for t in program.copies()]
    with contextlib.suppress(RuntimeError):  # two operands may no longer agree in dtype; the moved ones remain
        yield [*function(wide)(*given), *given]
    moved = re.sub(r"^    (v\d+) = (.*)$", r"    \1 = moved(\2)", program.source(), flags=re.MULTILINE)
    for seed in range(4):
        move = _Move(seed)
        given = [move(t) for t in program.copies()]
        yield [*function(moved, moved=move)(*given), *given]


class _Move:
    """Moves floats by a few units of the last place. Views stay: they must go on sharing memory."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or t._is_view():
            return t
        noise = torch.rand(t.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return t.copy_(t.double() * (1 + noise * _ULP[t.dtype]))


# ---- shrinking


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
    """A script that shows eager's results and the compiled ones."""
    inputs = "".join(
        f"    torch.empty_strided({tuple(t.shape)}, {t.stride()}, dtype={t.dtype}).copy_(torch.tensor({t.tolist()})"
        f".reshape({tuple(t.shape)})),\n"
        for _, t in program.inputs
    )
    return (
        f"# {reason}\nimport torch\nfrom math import inf, nan\n\n\n{program.source()}\n\n"
        f"inputs = [\n{inputs}]\ncopies = [t.clone() for t in inputs]\n"
        'print("eager   ", program(*inputs), inputs)\n'
        'print("compiled", torch.compile(program, backend="tpu", fullgraph=True)(*copies), copies)\n'
    )


def run(seeds: Sequence[int], compiler: Compile = on_tpu, tell: Callable[[str], None] = print) -> list[str]:
    """Fuzz the programs of ``seeds``; returns (and tells) a reproducer for each that differs."""
    found = []
    for seed in seeds:
        program = generate(seed)
        reason = fault(program, compiler)
        if reason:
            small = shrink(program, lambda p: fault(p, compiler) is not None)
            found.append(f"# seed {seed}\n" + reproducer(small, fault(small, compiler) or reason))
            tell(found[-1])
    return found


@click.command()
@click.option("--graphs", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first graph; the next has the next one.")
def main(graphs: int, seed: int) -> None:
    """Compare random programs, eager and compiled."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs what FakeTensor refuses, beside raising it
    found = run(range(seed, seed + graphs))
    print(f"{graphs} graphs, {len(found)} wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
