"""Ops that are a few others: the same as torch's own kernels, compiled and on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tpu_compile

Tensor = torch.Tensor

WINDOWS = [torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.kaiser_window]


@pytest.fixture(autouse=True)
def _nothing_on_the_cpu():
    with tpu_compile.override(fallback="error"):
        yield


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.__name__)
@pytest.mark.parametrize("periodic", [True, False])
def test_windows(window: Callable[..., Tensor], periodic: bool) -> None:
    for length in (0, 1, 2, 7, 8):
        for dtype in (None, torch.float64, torch.float16, torch.bfloat16):
            wide = torch.promote_types(dtype or torch.float32, torch.float32)  # torch rounds each step in 16 bits
            want = window(length, periodic, dtype=wide).to(dtype or torch.float32)
            torch.testing.assert_close(window(length, periodic, dtype=dtype, device="tpu").cpu(), want)
    compiled = torch.compile(lambda x: x * window(9, periodic), backend="tpu", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(9)), window(9, periodic))


def test_a_window_of_integers_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        torch.hamming_window(5, dtype=torch.int64, device="tpu")


def test_windows_with_numbers_of_their_own() -> None:
    cases = (torch.hamming_window, (0.5,)), (torch.hamming_window, (0.5, 0.4)), (torch.kaiser_window, (4.0,))
    for window, numbers in cases:
        torch.testing.assert_close(window(9, False, *numbers, device="tpu").cpu(), window(9, False, *numbers))


LABELS = torch.tensor([[1, 2, -1, 0, 0], [0, -1, 3, 3, 3], [-1, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
"""The first -1 ends a row's labels."""
DIFFERENTIABLE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "hardshrink": (F.hardshrink, (torch.tensor([-2.0, -0.5, 0.2, 0.5, 3.0]),)),
    "softshrink": (F.softshrink, (torch.tensor([-2.0, -0.5, 0.2, 0.5, 3.0]),)),
    "conv_tbc": (lambda *a: torch.conv_tbc(*a, 1).sin(), (torch.rand(5, 2, 3), torch.rand(2, 3, 4), torch.rand(4))),
}
for reduction in ("none", "mean", "sum"):
    for p in (1, 2):
        DIFFERENTIABLE[f"multi_margin_loss-{p}-{reduction}"] = (
            lambda x, w, y, p=p, reduction=reduction: F.multi_margin_loss(x, y, p, 0.7, w, reduction=reduction),
            (torch.randn(4, 5), torch.rand(5), torch.tensor([1, 4, 3, 0])),
        )
    DIFFERENTIABLE[f"multilabel_margin_loss-{reduction}"] = (
        lambda x, y, reduction=reduction: F.multilabel_margin_loss(x, y, reduction=reduction),
        (torch.randn(4, 5) * 2, LABELS),
    )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_on_the_device(name: str) -> None:
    function, given = DIFFERENTIABLE[name]  # by the first argument

    def run(device: str) -> list[Tensor]:
        inputs = [t.to(device, copy=True) for t in given]
        result = function(inputs[0].requires_grad_(), *inputs[1:])
        gradients = torch.autograd.grad(result.sin().sum(), inputs[0])
        return [result.detach().cpu(), *(t.cpu() for t in gradients)]

    torch.testing.assert_close(run("tpu"), run("cpu"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jvp itself
def test_forward_mode_of_glu() -> None:
    x, tangent = torch.randn(3, 6), torch.randn(3, 6)
    want = torch.func.jvp(F.glu, (x,), (tangent,))
    got = torch.func.jvp(F.glu, (x.to("tpu"),), (tangent.to("tpu"),))
    torch.testing.assert_close([t.cpu() for t in got], list(want))


def test_dirichlet() -> None:
    torch.manual_seed(0)
    drawn = torch.distributions.Dirichlet(torch.tensor([1.0, 2.0, 3.0], device="tpu")).sample((4000,)).cpu()
    torch.testing.assert_close(drawn.sum(-1), torch.ones(4000))
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, 2.0, 3.0]) / 6, atol=0.02, rtol=0)


def test_dirichlet_with_small_parameters() -> None:
    torch.manual_seed(0)
    small = torch.full((2000, 3), 0.01)
    largest = [torch._sample_dirichlet(small.to(device)).cpu().amax(-1).mean() for device in ("tpu", "cpu")]
    torch.testing.assert_close(largest[0], largest[1], atol=0.01, rtol=0)
