"""The call plan refuses or repairs what PJRT's execute would silently misread: it checks byte sizes only."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import tpu_compile
from tpu_compile.compiler import CompiledGraph


@pytest.fixture
def plan() -> CompiledGraph:
    """x * 10 + arange(8), compiled for a row-major f32[4,8], called below torch's guards."""
    made: list[CompiledGraph] = []

    def compiler(graph_module, _):
        made.append(CompiledGraph(graph_module, "scale"))
        return made[-1]

    torch.compile(lambda x: x * 10 + torch.arange(8.0), backend=aot_autograd(fw_compiler=compiler))(torch.zeros(4, 8))
    return made[0]


def test_a_transposed_buffer_is_made_row_major(plan):
    x = torch.randn(8, 4).t()
    (got,) = plan([x])
    torch.testing.assert_close(got, x * 10 + torch.arange(8.0))
    assert tpu_compile.stats()["copied_arguments"] == 1


@pytest.mark.parametrize("wrong", [torch.ones(4, 8, dtype=torch.int32), torch.ones(8, 4), torch.ones(32)])
def test_another_dtype_or_shape_of_the_same_size_is_refused(plan, wrong):
    with pytest.raises(tpu_compile.BadCall, match=r"compiled for torch\.float32"):
        plan([wrong])


def test_an_unaligned_buffer_is_copied(plan):
    x = torch.randn(33)[1:].view(4, 8)
    torch.testing.assert_close(plan([x])[0], x * 10 + torch.arange(8.0))


def test_conjugate_and_negative_bits_are_resolved():
    f = torch.compile(lambda x: x * 2, backend="tpu")
    x = torch.randn(4, dtype=torch.complex64)
    torch.testing.assert_close(f(x.conj()), x.conj() * 2)
    torch.testing.assert_close(f(x.conj().imag), x.conj().imag * 2)
