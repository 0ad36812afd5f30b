"""Fourier transforms against eager: every public transform, norm and shape, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NORMS = ("backward", "ortho", "forward")
TO_COMPLEX = ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn")
FROM_REAL = ("rfft", "rfft2", "rfftn", "ihfft", "ihfft2", "ihfftn")
TO_REAL = ("irfft", "irfft2", "irfftn", "hfft", "hfft2", "hfftn")


def check(fn: Any, *args: torch.Tensor) -> None:
    got, want = torch.compile(fn, backend="tpu", fullgraph=True)(*args), fn(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_every_transform(norm: str) -> None:
    def fn(real: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
        return [
            *(getattr(torch.fft, name)(x, norm=norm) for name in TO_COMPLEX for x in (real, wide)),
            *(getattr(torch.fft, name)(real, norm=norm) for name in FROM_REAL),
            *(getattr(torch.fft, name)(wide, norm=norm) for name in TO_REAL),
        ]

    check(fn, torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lengths_axes_and_odd_sizes(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        half = torch.fft.rfft(x, dim=1)
        return [
            torch.fft.fft(x, 9, dim=1),
            torch.fft.fft(x, 2, dim=0),
            torch.fft.fftn(x, (2, 8), dim=(2, 0)),
            torch.fft.rfftn(x, dim=(0, -1, 1)),
            torch.fft.irfft(half, 7, dim=1),
            torch.fft.irfft(half, 6, dim=1),
            torch.fft.fftshift(x),
        ]

    check(fn, torch.randn(3, 7, 4, dtype=dtype))


def test_more_than_three_axes_and_empty_batches() -> None:
    check(lambda x: torch.fft.fftn(x), torch.randn(2, 3, 2, 3, 2))
    check(lambda x: torch.fft.irfftn(torch.fft.rfftn(x)), torch.randn(2, 2, 2, 2, 4))
    empty = torch.compile(torch.fft.rfft, backend="tpu", fullgraph=True)(torch.randn(0, 4))  # eager's MKL refuses it
    assert empty.shape == (0, 3) and empty.dtype == torch.complex64


def test_the_imaginary_part_of_the_ends_is_not_read() -> None:
    check(lambda x: (torch.fft.irfft(x), torch.fft.irfft2(x)), torch.randn(3, 5, dtype=torch.complex64))


def test_frequencies_and_windows() -> None:
    def fn() -> list[torch.Tensor]:
        pairs = [(n, d) for n in (1, 6, 7) for d in (1.0, 0.1)]
        return [f(n, d) for n, d in pairs for f in (torch.fft.fftfreq, torch.fft.rfftfreq)]

    check(fn)


def test_stft_and_back() -> None:
    window = torch.hann_window(16)

    def fn(x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        return spectrum, spectrum.abs().square().sum(-1)

    check(fn, torch.randn(2, 64), window)


def test_gradients() -> None:
    def loss(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfftn(x, norm="ortho") * torch.fft.fftn(z)[..., :3]
        return torch.fft.irfftn(spectrum, s=(4, 5)).square().sum() + torch.fft.ifft(z).abs().sum()

    grads = []
    for fn in (loss, torch.compile(loss, backend="tpu", fullgraph=True)):
        torch.manual_seed(0)
        x, z = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, dtype=torch.complex64, requires_grad=True)
        grads.append(torch.autograd.grad(fn(x, z), (x, z)))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
