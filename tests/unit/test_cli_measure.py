"""What `tpu-compile compare` calls the same, and by how much the rest differs."""

from __future__ import annotations

import dataclasses
from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from torch import nn

import tpu_compile
from tpu_compile.comparing.measure import Truth, measure
from tpu_compile.comparing.runs import Subject, leaves, pull_back, run


def off(want: Any, got: Any, **changes: Any) -> Any:
    return measure("t", torch.as_tensor(want), torch.as_tensor(got), **changes)


@pytest.mark.parametrize(
    ("want", "got", "agrees"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 1000.0], [1.0001, 1000.0], True),  # within the tolerance of the largest value
        ([1.0, 1.0], [1.0, 1.01], False),
        ([nan, inf, -inf], [nan, inf, -inf], True),
        ([nan, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [nan, 1.0], False),
        ([inf, 1.0], [-inf, 1.0], False),
        ([0.0], [-0.0], True),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([2**62], [2**62 + 1], False),  # the same as float64
        ([True], [False], False),
        ([1 + 1j], [1 + 1j], True),
        ([1 + 1j], [1 - 1j], False),
        ([], [], True),
    ],
)
def test_what_agrees(want: Any, got: Any, agrees: bool) -> None:
    difference = off(want, got)
    assert difference.agrees is agrees, difference


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(3)])
def test_another_dtype_or_shape_departs(other: torch.Tensor) -> None:
    assert "instead of float32[2]" in measure("t", torch.ones(2), other).problem


def test_the_figures() -> None:
    difference = off([1.0, 2.0, 4.0], [1.0, 2.5, 4.0])
    assert (difference.absolute, difference.relative) == (0.5, 0.25)
    assert difference.ulps == 2**21, "half of 2 is a quarter of the 2^23 floats between 2 and 4"
    assert difference.cosine == pytest.approx(22 / (21 * 23.25) ** 0.5)
    assert "1 of 3 elements, worst at [1]: 2.5 instead of 2.0" in difference.problem


def test_one_ulp_in_every_float_dtype_is_one_ulp() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        one = torch.tensor([1.0, -1.0], dtype=dtype)
        assert off(one, torch.nextafter(one, torch.zeros_like(one))).ulps == 1
    assert off([0.0], [-0.0]).ulps == 0


def test_zeros_have_no_angle() -> None:
    assert isnan(off([0.0], [0.0]).cosine) and off([1.0, 0.0], [2.0, 0.0]).cosine == 1


def test_values_that_are_no_tensors_must_be_equal() -> None:
    assert measure("n", 3, 3).agrees and measure("n", nan, nan).agrees
    assert measure("n", 3, 4).problem == "4 instead of 3"
    assert not measure("n", 1, True).agrees and not measure("n", 1, torch.tensor(1)).agrees


def test_a_result_no_further_from_the_truth_than_eager_agrees() -> None:
    noise = {"want": [1e-9, 1.0e-9], "got": [1e-9, -2e-9]}
    truth = torch.zeros(2, dtype=torch.float64)
    assert not off(**noise).agrees
    assert "the reference's own error" in off(**noise, truth=Truth(truth, 1.0)).note
    assert not off(**noise, truth=Truth(truth, 1e-9)).agrees, (
        "an error as large as all that the run computes is no rounding"
    )
    assert not off([1e-9, 1e-9], [1e-9, 1e-8], truth=Truth(truth, 1.0)).agrees, "ten times further than eager"


# ---- runs


@dataclasses.dataclass
class Unregistered:
    values: list[torch.Tensor]
    rest: Any


def test_leaves_have_paths_through_every_structure() -> None:
    tree = {"a": [torch.ones(1), None], "b": Unregistered([torch.ones(2)], (3, "text"))}
    found = {name: getattr(leaf, "shape", leaf) for name, leaf in leaves(tree, "result")}
    assert found == {
        "result['a'][0]": (1,),
        "result['b'].values[0]": (2,),
        "result['b'].rest[0]": 3,
        "result['b'].rest[1]": "text",
    }


class Counting(nn.Module):
    """Writes into a buffer, an argument and (under no_grad) a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x.detach().add_(1)
        with torch.no_grad():
            self.weight.mul_(2)
        return (x * self.weight).sum()


def test_a_run_sees_what_calls_leave_behind() -> None:
    subject = Subject(Counting(), (torch.zeros(2),), {})
    first, second = run(subject, subject.model, calls=2)
    assert {"result", "argument args[0]", "buffer calls", "parameter weight"} == set(first)
    assert (first["buffer calls"], second["buffer calls"]) == (1, 2), "a later call changed what an earlier one showed"
    assert second["argument args[0]"].tolist() == [2, 2] and second["parameter weight"].tolist() == [4, 4]


def test_gradients_are_each_calls_own_and_the_same_for_every_dtype() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    exact = Subject(nn.Linear(2, 2), (x,), {})
    rough = exact.to(torch.bfloat16)
    runs = [run(subject, subject.model, calls=2, grad=True) for subject in (exact, rough)]
    assert set(runs[0][0]) == {
        "result",
        "argument args[0]",
        "gradient of weight",
        "gradient of bias",
        "gradient of argument args[0]",
    }
    for call in range(2):
        torch.testing.assert_close(
            runs[1][call]["gradient of bias"].float(), runs[0][call]["gradient of bias"], rtol=0, atol=0
        )
    assert not torch.equal(runs[0][0]["gradient of bias"], runs[0][1]["gradient of bias"]), (
        "the second call's direction"
    )


def test_copies_share_inside_and_not_outside() -> None:
    model = nn.Linear(2, 2)
    copied = Subject(model, (model.weight,), {"same": model.weight}).copied()
    assert copied.args[0] is copied.model.weight is copied.kwargs["same"] and copied.args[0] is not model.weight


def test_what_cannot_be_copied_or_has_no_gradient_is_said() -> None:
    with pytest.raises(tpu_compile.ConfigError, match="cannot be copied"):
        Subject(nn.Linear(1, 1), ((i for i in ()),), {}).copied()
    with pytest.raises(tpu_compile.ConfigError, match="requires a gradient"):
        pull_back({"a": torch.ones(1)}, 0)
