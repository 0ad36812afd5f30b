"""Random programs, eager against compiled; and that the fuzzer would see a wrong rule."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from jaxlib.mlir.dialects import stablehlo

from tools import fuzzing as fuzz
from tpu_compile.lowering.registry import registry

pytestmark = pytest.mark.filterwarnings("ignore")  # eager's own, of programs nobody would write


@pytest.mark.parametrize("seed", range(10))
def test_a_few_programs(seed):
    assert not fuzz.run([seed])


@pytest.mark.full
@pytest.mark.parametrize("start", range(10, 510, 50))
def test_five_hundred_programs(start):
    assert not fuzz.run(range(start, start + 50))


def test_a_seed_is_a_program():
    first, second = fuzz.generate(7), fuzz.generate(7)
    assert first.source() == second.source() != fuzz.generate(8).source()
    assert all(a.equal(b) for (_, a), (_, b) in zip(first.inputs, second.inputs, strict=True))


def test_a_wrong_rule_is_found_and_shrunk_to_its_line(monkeypatch):
    wrong = lambda ctx, x: stablehlo.sine(stablehlo.add(x, x))  # noqa: E731
    sin = torch.ops.aten.sin.default
    right = registry.get(sin)
    program = fuzz.Fuzzed(
        (("x0", torch.linspace(0, 1, 6).reshape(2, 3)), ("x1", torch.ones(3))),
        ("v0 = x0 * 2", "v1 = v0.t()", "x1.add_(1)", "v3 = v1.sin()", "v4 = v3 + 1", "v5 = x1 - 1"),
        ("v4", "v5"),
    )
    assert fuzz.fault(program) is None
    registry.register(sin, wrong, replace=True)
    try:
        small = fuzz.shrink(program, lambda p: fuzz.fault(p) is not None)
        reason = fuzz.fault(small)
    finally:
        registry.register(sin, right.function, right.tier, replace=True)
    assert len(small.lines) <= 2 and any("sin()" in line for line in small.lines), small.source()
    assert reason and fuzz.fault(small) is None
    assert small.source() in fuzz.reproducer(small, reason)


def test_a_wrong_gradient_is_found():
    backward = torch.ops.aten.tanh_backward.default
    right = registry.get(backward)
    inputs = (("x0", torch.linspace(0, 1, 6)), ("x1", torch.arange(3)))
    program = fuzz.Fuzzed(inputs, ("v0 = x0.tanh()", "v1 = x1 * 2"), ("v0", "v1"), grad=True)
    assert fuzz.fault(program) is None
    registry.register(backward, lambda ctx, grad_output, output: grad_output, replace=True)
    try:
        assert "gradient of x0" in (fuzz.fault(program) or "")
        assert fuzz.fault(replace(program, grad=False)) is None
    finally:
        registry.register(backward, right.function, right.tier, replace=True)


def test_complex_numbers_are_compared_by_their_size_and_shown_by_the_reproducer(capsys):
    z = torch.tensor([3 + 4j, complex("nan+infj")])
    program = fuzz.Fuzzed((("x0", z),), ("v0 = x0.conj() * 2",), ("v0",), grad=True)
    assert fuzz.fault(program) is None
    other = fuzz.function("def program(x0):\n    return x0 * 2,\n")
    assert "(6-8j)" in (fuzz.fault(program, lambda fn: other) or "")
    exec(fuzz.reproducer(program, "shown"), {})
    eager, compiled = (re.sub(r", grad_fn=\S+>", "", line) for line in capsys.readouterr().out.splitlines())
    assert eager.removeprefix("eager   ") == compiled.removeprefix("compiled") and "6.-8.j" in eager


def test_among_the_programs_are_gradients_and_complex_numbers():
    programs = [fuzz.generate(seed) for seed in range(20)]
    assert any(p.grad for p in programs) and not all(p.grad for p in programs)
    assert any(t.is_complex() for p in programs for _, t in p.inputs)


def test_what_eager_itself_does_not_know_is_no_fault():
    """sin of 1e8 in float32 has no right digits; rounding it differently is not wrong."""
    program = fuzz.Fuzzed((("x0", torch.tensor([1e8])),), ("v0 = x0 * 3.0000001", "v1 = v0.sin()"), ("v1",))
    moved = fuzz.Fuzzed(program.inputs, ("v0 = x0 * 3.0000002", "v1 = v0.sin()"), ("v1",))
    assert fuzz.fault(program, lambda fn: fuzz.function(moved.source())) is None
    other = fuzz.Fuzzed(program.inputs, ("v1 = x0.sin() + 50",), ("v1",))
    assert fuzz.fault(program, lambda fn: fuzz.function(other.source())) is not None


def test_strides_that_faketensor_has_otherwise_than_eager_are_no_fault():
    inputs = (("x0", torch.ones(2, 3, dtype=torch.bool).t()), ("x1", torch.ones(1, dtype=torch.float64)))
    assert fuzz.fault(fuzz.Fuzzed(inputs, ("v0 = x0 // x1",), ("v0",))) is None
    product = fuzz.Fuzzed(inputs, ("v0 = x0 * x1",), ("v0",))
    contiguous = fuzz.function("def program(x0, x1):\n    return (x0 * x1).contiguous(),\n")
    assert "strides" in (fuzz.fault(product, lambda fn: contiguous) or "")
