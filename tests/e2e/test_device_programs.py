"""Random programs of views, writes and arithmetic: the `tpu` device agrees with the CPU, aliases included."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

Tensor = torch.Tensor
MAKE: list[Callable[[Tensor, Tensor, float], Tensor]] = [
    lambda a, b, n: a.t(),
    lambda a, b, n: a[1:].expand(2, 3)[:1] + b,
    lambda a, b, n: a.t() * n,
    lambda a, b, n: torch.tanh(a @ b),
    lambda a, b, n: torch.cat([a[:1], b[1:]]),
    lambda a, b, n: torch.stack([a, b], 1)[:, 1],
    lambda a, b, n: a[None].permute(2, 0, 1).relu()[:, 0],
    lambda a, b, n: a.sum(0, keepdim=True).expand(3, 3),
    lambda a, b, n: torch.where(a > b, a.t(), b * n),
    lambda a, b, n: a.clone(memory_format=torch.contiguous_format),
    lambda a, b, n: a.reshape(9)[::2][:3].expand(3, 3) - b,
    lambda a, b, n: a.detach().as_strided((3, 3), (1, 3)) if a.is_contiguous() else a.flip(0),
    lambda a, b, n: torch.sort(a, 1).values.cumsum(0).tanh(),
    lambda a, b, n: torch.empty_like(a).copy_(b).t().tanh(),
]
WRITE: list[Callable[[Tensor, Tensor, float], object]] = [
    lambda a, b, n: a[1].add_(b[0].clone()),
    lambda a, b, n: a.t()[0].mul_(n),
    lambda a, b, n: a.diagonal().fill_(n),
    lambda a, b, n: a.copy_(b.clone()),
    lambda a, b, n: a[:, 1:].sub_(b[:, :2].clone()).tanh_(),
    lambda a, b, n: torch._foreach_mul_([a[0], a[2]], n),
    lambda a, b, n: torch.mul(b.clone(), n, out=a),
    lambda a, b, n: a.view(torch.int32).bitwise_and_(-256) if a.is_contiguous() else None,
]
SEEDS = range(6)


def run(seed: int, device: str) -> list[tuple[tuple[int, ...], Tensor]]:
    """A program of 24 steps; strides and values of what it read on its way, and of all that it made."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    known = [torch.rand(3, 3).to(device), torch.rand(3, 3).to(device)]
    read = []
    for _ in range(24):
        a, b = rng.choice(known), rng.choice(known)
        number = rng.choice([0.5, -1.0, 0.25, rng.random()])
        if rng.random() < 0.4 and 0 not in a.stride():
            rng.choice(WRITE)(a, b, number)
        else:
            known.append(rng.choice(MAKE)(a, b, number))
        if rng.random() < 0.1:
            a = rng.choice(known)
            read.append((a.stride(), a.cpu().clone()))
    return read + [(t.stride(), t.cpu()) for t in known]


@pytest.mark.parametrize("mode", ["strict", "defer"])
def test_random_programs(mode):
    for seed in SEEDS:
        with torch.tpu.mode(mode):
            got = run(seed, "tpu")
        for place, (g, w) in enumerate(zip(got, run(seed, "cpu"), strict=True)):
            assert g[0] == w[0], (seed, place)
            torch.testing.assert_close(
                g[1], w[1], rtol=1e-4, atol=1e-5, msg=lambda m, s=seed, p=place: f"{s}, {p}: {m}"
            )
