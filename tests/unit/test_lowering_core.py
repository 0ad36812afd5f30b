"""Promotion, layouts, source lines and the registry's checks: no XLA, no model."""

from __future__ import annotations

import itertools

import pytest
import torch

from tpu_compile.lowering import dtypes
from tpu_compile.lowering.context import source_line
from tpu_compile.lowering.program import TensorSpec, dense_order, row_major
from tpu_compile.lowering.registry import OpRegistry

aten = torch.ops.aten
KINDS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
KINDS += [torch.complex64, torch.complex128]


@pytest.mark.parametrize(("a", "b"), list(itertools.product(KINDS, KINDS)))
def test_promotion_of_tensors_is_torch_s(a, b):
    for rank_a, rank_b in itertools.product((0, 1), (0, 1)):
        x, y = torch.ones([1] * rank_a, dtype=a), torch.ones([1] * rank_b, dtype=b)
        wanted = torch.result_type(x, y)
        if wanted != torch.complex32:  # StableHLO has no half-precision complex numbers
            assert dtypes.promote([(a, rank_a), (b, rank_b)]) == wanted


@pytest.mark.parametrize(("kind", "scalar"), list(itertools.product(KINDS, [True, 2, 2.5, 1j])))
def test_promotion_of_scalars_is_torch_s(kind, scalar):
    for rank in (0, 1):
        wanted = torch.result_type(torch.ones([1] * rank, dtype=kind), scalar)
        if wanted != torch.complex32:
            assert dtypes.promote([(kind, rank)], [scalar]) == wanted


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 1), (5,), (), (0, 3), (2, 1, 1, 3)])
def test_every_permutation_of_a_dense_tensor_is_recognised(shape):
    for order in itertools.permutations(range(len(shape))):
        t = torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
        found = dense_order(tuple(t.shape), t.stride())
        assert found is not None
        assert t.permute(found).is_contiguous()


@pytest.mark.parametrize(
    "t",
    [torch.empty(4, 6)[:, ::2], torch.empty(3, 1).expand(3, 4), torch.empty(9).as_strided((4, 4), (1, 1))],
    ids=["gaps", "expanded", "overlapping"],
)
def test_other_layouts_are_not_dense(t):
    assert dense_order(tuple(t.shape), t.stride()) is None


def test_row_major_strides_are_torch_s():
    for shape in [(2, 3), (0, 3), (1, 0, 2), (), (4, 1)]:
        assert row_major(shape) == torch.empty(shape).stride()
        assert str(TensorSpec.contiguous(shape, torch.bfloat16)) == f"bf16[{','.join(map(str, shape))}]"


def test_source_line_is_the_innermost_line_that_is_not_torch_s():
    trace = (
        'File "/home/me/model.py", line 12, in forward\n    return self.net(x)\n'
        f'File "{torch.__path__[0]}/nn/modules/linear.py", line 134, in forward\n    return F.linear(input, ...)\n'
    )
    line = source_line(trace)
    assert line is not None
    assert (line.file, line.line, line.function, line.code) == (
        "/home/me/model.py",
        12,
        "forward",
        "return self.net(x)",
    )
    assert source_line("") is None


def test_registry_refuses_a_second_rule_and_a_wrong_signature():
    registry = OpRegistry()
    registry.register(aten.relu.default, lambda ctx, x: x)
    with pytest.raises(ValueError, match="has a rule already"):
        registry.register(aten.relu.default, lambda ctx, x: x)
    with pytest.raises(TypeError, match="aten::cat"):
        registry.register(aten.cat.default, lambda ctx, x, dim=0: x)
    with pytest.raises(TypeError, match="aten::sum"):
        registry.register(aten.sum.dim_IntList, lambda ctx, x, keepdim, dim: x)
