"""Recurrent layers and cells against eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _layers_are_traced() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def sequence(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}],
    ids=["plain", "deep-both-ways", "no-bias"],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers(agrees: Any, kind: type[nn.Module], options: dict[str, Any]) -> None:
    with torch.no_grad():
        agrees(kind(3, 4, **options), sequence(2, 5, 3))


@pytest.mark.parametrize("options", [{"bidirectional": True, "batch_first": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_train(agrees: Any, kind: type[nn.Module], options: dict[str, Any]) -> None:
    agrees(kind(3, 4, **options), sequence(2, 5, 3).requires_grad_(), grad=True)


class FromState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.layer(x, (h, c))


def test_an_lstm_trains_from_a_given_state(agrees: Any) -> None:
    states = [sequence(1, 2, 4).requires_grad_(), sequence(1, 2, 4).requires_grad_()]
    agrees(FromState(), sequence(5, 2, 3), *states, grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_lstm_dtypes(agrees: Any, dtype: torch.dtype) -> None:
    with torch.no_grad():
        agrees(nn.LSTM(3, 4).to(dtype), sequence(5, 2, 3, dtype=dtype))


def test_lstm_from_a_given_state(agrees: Any) -> None:
    layer = nn.LSTM(3, 4)
    with torch.no_grad():
        agrees(lambda x, h, c: layer(x, (h, c)), sequence(5, 2, 3), sequence(1, 2, 4), sequence(1, 2, 4))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(agrees: Any, kind: type[nn.Module]) -> None:
    agrees(kind(3, 4), sequence(2, 3).requires_grad_(), grad=True)
