"""Reported faults: slices, gathers, scatters, writes through views. Each test names the public report it was drawn
from."""

from __future__ import annotations

import torch
from torch import nn


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_slices_clamp(agrees):  # tenstorrent/tt-xla#4465
    def fn(x):
        strict = torch.ops.aten.slice.Tensor(x, 0, -100, 100)
        return x[-100:], x[:100], x[3:1], x[-3:100:2], x[7:], strict, x[..., -9:2]

    agrees(fn, torch.randn(5, 3))


def test_what_a_scatter_overwrites_gets_no_gradient(agrees):  # pytorch/pytorch#180164
    def fn(base, piece, row):
        y = torch.slice_scatter(base, piece, dim=1, start=1, end=6, step=2)
        return y * 1.0, torch.select_scatter(base * 2, row, 0, -1), torch.diagonal_scatter(base * 3, row[:4], offset=1)

    agrees(fn, leaf(4, 6), leaf(4, 3), leaf(6), grad=True)


def test_interleaved_strided_writes(agrees):  # pytorch/pytorch#193183
    def fn(frequencies):
        out = frequencies[0].clone()
        for axis, width in ((1, 4), (2, 3)):
            out[..., axis : 3 * width : 3] = frequencies[axis, ..., axis : 3 * width : 3]
        return out.cos(), out

    agrees(fn, torch.randn(3, 2, 5, 16))


def test_empty_indices(agrees):  # pytorch/xla#6353
    def fn(x, i, j):
        taken = x[i], x[:, i], x[i, i], x.index_select(1, i), torch.gather(x, 1, j)
        return taken, x[i] + x[:0], x.index_add(0, i, x[i]), x.index_put((i,), x[i])

    agrees(fn, torch.randn(3, 4), torch.empty(0, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int64))


def test_indices_apart_move_their_axes_to_the_front(agrees):  # pytorch/xla#9644
    def fn(x, i, j):
        return x[torch.arange(3), i], x[i, :, j], x[:, i, j], x[:, None, i], x[i[:, None], j[None], ::2]

    agrees(fn, leaf(3, 4, 5), torch.tensor([2, 0, 2]), torch.tensor([1, 3, 1]), grad=True)


def test_index_put_adds_up_repeats(agrees):  # pytorch/pytorch#61034
    def fn(a, values, x, row):
        i = torch.tensor([0, 4, 2, 2, 4])
        summed = a.index_put((i,), values, accumulate=True)
        spread = x.index_put((torch.tensor([[0, 2], [1, 2]]),), row, accumulate=True)
        return summed, spread, a.index_add(0, i, values, alpha=-2)

    agrees(fn, leaf(5, 3), leaf(5, 3), leaf(5, 4, 3), leaf(3), grad=True)


def test_boolean_mask_assignment(agrees):  # pytorch/pytorch#93421
    def fn(x, mask, source):
        x = x.clone()
        x[mask] = source
        x[~mask] *= 3
        return x, x[mask], torch.where(x > 0)[0], x.masked_scatter(mask, source)

    mask = torch.tensor([False, True, True, False, False, True])
    agrees(fn, torch.randn(6), mask, torch.randn(3), fullgraph=False)


def test_gather_with_repeats(agrees):  # tenstorrent/tt-xla#5325
    def fn(x, i):
        order = x.argsort(dim=1, stable=True)
        return torch.gather(x, 1, i), torch.take_along_dim(x, order, 1), torch.gather(x, 0, i[:2] % 3), x.take(i)

    agrees(fn, leaf(3, 6), torch.tensor([[5, 5, 0, 1], [2, 2, 2, 2], [0, 5, 4, 5]]), grad=True)


def test_as_strided_and_chunk(agrees):  # llvm/torch-mlir#3972
    def fn(x):
        windows = x.as_strided((5, 3), (2, 1), 1)
        parts = x.chunk(5), x.view(4, 3).tensor_split((1, 3)), x.view(4, 3).split([1, 2], dim=1)
        return windows * 2, parts, x.unfold(0, 4, 3)

    agrees(fn, torch.randn(12))


def test_embedding_gradient(agrees):  # tenstorrent/tt-xla#4825: repeats add up, padding_idx gets none
    agrees(nn.Embedding(6, 4, padding_idx=1), torch.tensor([[0, 1, 5, 5], [5, 1, 2, 0]]), grad=True)


def test_writes_through_views_reach_their_base(agrees):  # pytorch/xla#5179
    def fn(x, a, row):
        flat = x.view(-1)
        flat.add_(1)
        flat[1:3].zero_()
        a.t().mul_(row)
        a.diagonal().fill_(0.5)
        return x * 2

    agrees(fn, torch.randn(3, 4), torch.randn(3, 3), torch.tensor([1.0, -2.0, 3.0]), calls=2)


def test_two_windows_of_one_buffer(agrees):  # pytorch/xla#8832: which must not be given away
    def fn(keys, values, k, v, at):
        keys.index_copy_(1, at, k)
        values.index_copy_(1, at, v)
        at.add_(1)
        return (keys * values).sum(-1)

    buffer = torch.zeros(2, 2, 6, 4)
    agrees(fn, buffer[0], buffer[1], torch.randn(2, 2, 4), torch.randn(2, 2, 4), torch.tensor([0, 1]), calls=3)


def test_a_gradient_survives_the_update(agrees):  # pytorch/xla#7585
    def fn(weight, grad, momentum):
        momentum.mul_(0.9).add_(grad)
        weight.sub_(momentum, alpha=0.1)
        return weight.norm(), weight

    agrees(fn, torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4), calls=3)


def test_an_expanded_view_follows_its_base(agrees):  # pytorch/xla#3394
    def fn(x):
        wide, turned = x.expand(3, 4), x.t()
        x[0] = 0
        return wide, turned, wide + turned[:, :1]

    agrees(fn, torch.tensor([[1.0], [2.0], [3.0]]))


def test_a_loop_reads_what_its_last_turn_wrote(agrees):  # pytorch/xla#1808
    def fn(x, out):
        for i in range(1, 5):
            out[i] = out[i - 1] * 0.5 + x[i]
        return out.clone()

    agrees(fn, torch.randn(5, 2), torch.ones(5, 2), calls=3)
