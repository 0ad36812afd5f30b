"""Reading and writing at indices: None, negative ones, masks, repeats, empty and 0-dim tensors, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 4).to(dtype) if dtype != torch.uint8 else torch.randint(0, 9, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> list[torch.Tensor]:
        return [x[i], x[:, i], x[i, j], x[i, :, j], x[:, i, j], x[i[:, None], j], x[..., j], x[i[:0]], x[None, i]]

    agrees(fn, values((4, 3, 5), dtype), torch.tensor([0, -1, 2]), torch.tensor([1, 0, -3], dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_put(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.index_put((i,), v),
            torch.ops.aten.index_put(x, [None, i % 3], v[0]),
            x.index_put((i, i % 3), v[:1, 0]),
            x.index_put((i[:0],), v[:0]),
        ]

    agrees(fn, values((4, 3, 2), dtype), torch.tensor([0, -1, 2]), values((3, 3, 2), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_repeated_indices_accumulate(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [x.index_put((i,), v, accumulate=True), x.index_put((i,), v[0, 0], accumulate=True)]

    agrees(fn, values((4, 3), dtype), torch.tensor([1, -3, 1, 0]), values((4, 3), dtype))


def test_masked_assignment(agrees: Any) -> None:
    row = torch.tensor([True, False, True, True])
    block = torch.tensor([[True, False, True], [False, False, True], [True, True, False], [False, True, True]])

    def fn(x: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        results = [x.clone() for _ in range(6)]
        results[0][row] = 7
        results[1][block] = v[0]
        results[2][block] = v
        results[3][:, block[0]] = v[:2].T.reshape(1, 2, 2)
        results[4][row] = v[:3, None]
        results[5][block, :1] = v[:, :1]
        return results

    agrees(fn, torch.randn(4, 3, 2), torch.randn(int(block.sum()), 2))


@pytest.mark.parametrize("shape", [(2,), (), (1,), (7, 2), (1, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_masked_assignment_has_gradients(agrees: Any, shape: tuple[int, ...], dynamic: bool) -> None:
    block = torch.tensor([[True, False, True], [False, False, True], [True, True, False], [False, True, True]])

    def fn(x: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[mask] = v
        return y

    x, v = torch.randn(4, 3, 2, requires_grad=True), torch.randn(shape, requires_grad=True)
    agrees(fn, x, block, v, grad=True, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(4, 3), ()], ids=str)
def test_index_fill_has_the_gradient_of_its_value(agrees: Any, shape: tuple[int, ...]) -> None:
    index = torch.tensor([0, 0, 2] if shape else [0])
    x, v = torch.randn(shape, requires_grad=True), torch.randn((), requires_grad=True)
    agrees(lambda x, i, v: x.index_fill(0, i, v), x, index, v, grad=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_take_and_select(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, scalar: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.gather(1, i),
            x.gather(-1, i[:, :1]),
            x.gather(0, i[:0]),
            x.take(i - 3),
            x.index_select(0, i[0]),
            scalar.gather(0, i[0, 0] * 0),
            scalar.index_select(0, i[0, :1] * 0),
            torch.take_along_dim(x[:2], i, 1),
        ]

    index = torch.tensor([[0, 2, 1], [1, 1, 0]])
    agrees(fn, values((3, 4), dtype), index, values((), dtype))


def test_gradients_of_reads_add_up(agrees: Any) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [x[i % 2], x[:, i, i], x.gather(1, i.view(2, 2, 1)), x.index_select(1, i), x.take(i)]

    agrees(fn, torch.randn(2, 4, 4, requires_grad=True), torch.tensor([1, 1, 3, 0]), grad=True)


def test_put_and_masked_scatter(agrees: Any) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.put(i, v),
            x.put(i, v, accumulate=True),
            x.masked_scatter(x > 0, v.repeat(6)),
            x.masked_fill(x < 0, 3),
        ]

    agrees(fn, torch.randn(3, 4), torch.tensor([1, -1, 5]), torch.randn(3))


def test_nonzero_of_a_given_size(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nonzero_static(x, size=n, fill_value=-7) for n in (0, 2, 9)]

    agrees(fn, torch.tensor([[0, 1, 0], [2, 0, 3]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_bags(agrees: Any, mode: str, padding_idx: int | None) -> None:
    def fn(w: torch.Tensor, i: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(i, w, offsets, mode=mode, padding_idx=padding_idx)

    weight = torch.randn(5, 3, requires_grad=True)
    agrees(fn, weight, torch.tensor([0, 2, 2, 4, 1]), torch.tensor([0, 2, 2, 4]), grad=True)


def test_embedding_gradients_skip_padding_and_scale_by_frequency(agrees: Any) -> None:
    def fn(w: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        embedding = torch.nn.functional.embedding
        return [embedding(i, w), embedding(i, w, padding_idx=1), embedding(i, w, scale_grad_by_freq=True)]

    agrees(fn, torch.randn(4, 3, requires_grad=True), torch.tensor([[0, 1], [1, 3], [3, 3]]), grad=True)
