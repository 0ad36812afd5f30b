"""torch-mlir as tier 3 and as a second lowering of whole graphs; a worker that dies or hangs is a refusal."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import tpu_compile
from tpu_compile.comparing.runs import Subject
from tpu_compile.comparing.verdict import compare
from tpu_compile.lowering import torch_mlir
from tpu_compile.lowering.context import Refusal, make_context
from tpu_compile.lowering.ops.by_torch_mlir import VERIFIED
from tpu_compile.lowering.registry import registry

from ..conftest import RunPython

aten = torch.ops.aten
TORCH_MLIR = {"lowering": "torch-mlir"}


def second(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="tpu", options=TORCH_MLIR, **options)


# ---- single ops, by themselves


def _convolution(transposed: bool, stride: int, dilation: int, groups: int, bias: bool) -> Any:
    weight = torch.randn(4, 4 // groups, 3, 3)
    b = torch.randn(4) if bias else None
    tail = [stride] * 2, [1, 1], [dilation] * 2, transposed, [0, 0], groups, False, False, False, False
    return aten._convolution.default, (torch.randn(2, 4, 8, 9), weight, b, *tail)


CALLS = [
    _convolution(False, 1, 1, 1, True),
    _convolution(False, 2, 2, 2, False),
    _convolution(True, 1, 1, 1, True),
    _convolution(True, 2, 1, 2, False),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_verified_ops_are_right(call: Any) -> None:
    op, args = call
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> Any:
        full = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            full[place] = tensor
        return op(*full)

    got = torch.compile(fn, backend="tpu", fullgraph=True)(*(args[i] for i in places))
    torch.testing.assert_close(got, fn(*(args[i].clone() for i in places)), rtol=1e-4, atol=1e-4)
    assert tpu_compile.stats()["ops_torch_mlir"] == 1


def test_every_verified_op_is_tested_and_none_is_known_to_be_wrong() -> None:
    assert {op for op, _ in CALLS} == set(VERIFIED)
    wrong = (aten.remainder, aten.avg_pool3d, aten.take)
    assert not {op.overloadpacket for op in VERIFIED} & set(wrong)
    assert all(rule.tier != "torch_mlir" for op, rule in registry.items() if getattr(op, "overloadpacket", 0) in wrong)


def test_without_torch_mlir_the_tier_is_absent_and_the_option_says_what_to_install(run_python: RunPython) -> None:
    run_python(
        """
        import importlib.util, torch
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "torch_mlir" else find(name, *rest)
        import tpu_compile
        from tpu_compile.lowering.registry import registry
        assert registry.get(torch.ops.aten._convolution.default) is None
        torch.compile(lambda x: x + 1, backend="tpu")(torch.ones(2))
        try:
            torch.compile(lambda x: x + 2, backend="tpu", options={"lowering": "torch-mlir"})(torch.ones(2))
        except tpu_compile.MissingDependency as error:
            assert "pip install torch-mlir" in str(error)
        else:
            raise AssertionError("nothing was said")
        """
    )


# ---- whole graphs


def test_a_model_and_its_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    got = second(model, fullgraph=True)(x)
    torch.testing.assert_close(got, model(x))
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), list(model.parameters())), wanted)
    stats = tpu_compile.stats()
    assert stats["ops_torch_mlir"] == 2 and stats["ops_native"] == 0


@pytest.mark.parametrize("training", [True, False])
def test_ops_that_torch_mlir_does_not_know_are_taken_apart(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(training)
    comparison = compare(Subject(model, (torch.randn(2, 3, 8, 8),), {}), calls=2, grad=True, against="torch-mlir")
    assert not comparison.departing, comparison.departing
    assert {d.name for d in comparison.differences} >= {"call 2: buffer 1.running_var", "call 1: gradient of 1.weight"}


def test_writes_numbers_constants_and_symbolic_sizes_stay_in_place() -> None:
    def fn(x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.add_(1)
        return x @ x.T + torch.tensor([2.0, 1.0]).sum(), x.shape[0] * 2

    run, seen = second(fn, dynamic=True), torch.zeros(2)
    for n in (3, 5):
        x = torch.randn(n, 4)
        out, size = run(x, seen)
        torch.testing.assert_close(out, x @ x.T + 3)
        assert size == 2 * n
    assert seen.tolist() == [2, 2]


def test_the_two_lowerings_are_kept_apart() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2

    x = torch.randn(4)
    for options, tier in ((None, "ops_native"), (TORCH_MLIR, "ops_torch_mlir")):
        torch._dynamo.reset()
        tpu_compile.reset_stats()
        torch.testing.assert_close(torch.compile(fn, backend="tpu", options=options)(x), fn(x))
        assert tpu_compile.stats()[tier] > 0


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_it_cannot_lower_is_an_error_with_the_line_never_eager(fullgraph: bool) -> None:
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"linalg_qr.*test_torch_mlir\.py"):
        second(lambda x: torch.linalg.qr(x)[1], fullgraph=fullgraph)(torch.eye(3))
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"does not know tpu_compile\.rng_key"):
        second(lambda x: torch.rand_like(x), fullgraph=fullgraph)(torch.eye(3))


# ---- the worker


def _worker(code: str, seconds: float = 30) -> torch_mlir.Worker:
    return torch_mlir.Worker(seconds, (sys.executable, "-c", code))


def test_an_abort_is_a_refusal_with_its_message_and_the_next_request_a_new_worker() -> None:
    says = "print('LLVM ERROR: no such thing', file=sys.stderr, flush=True)"
    worker = _worker(f"import os, sys; sys.stdin.readline(); {says}; os.abort()")
    for _ in range(2):
        with pytest.raises(Refusal, match=r"died with status -6: LLVM ERROR: no such thing"):
            worker.ask("{}")


def test_a_hang_is_a_refusal_and_ends_the_worker() -> None:
    worker = _worker("import time; time.sleep(600)", seconds=0.5)
    with pytest.raises(Refusal, match=r"gave no answer in 0\.5 s"):
        worker.ask("{}")
    assert worker._process is None


def test_an_unknown_operation_in_the_answer_is_a_refusal() -> None:
    kind = "tensor<2xf32>"
    text = f"func.func @main(%a: {kind}) -> {kind} {{ %0 = math.exp %a : {kind} return %0 : {kind} }}"
    with make_context() as context:
        context.load_all_available_dialects()
        module = torch_mlir.ir.Module.parse(text)
        assert torch_mlir._foreign(module) == ["math.exp"]
