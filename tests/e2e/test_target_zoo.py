"""The architectures that people run compile for TPUs that are not here, and leave an executable each."""

from __future__ import annotations

import pytest
import torch

import tpu_compile
from tests import architectures

_QUICK = ("bert", "llama", "resnet")


@pytest.fixture(autouse=True)
def _needs_libtpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")


def check(name: str, target: str, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    model, inputs = architectures.make(name)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    compiled = tpu_compile.trace(model.to(dtype), **inputs).lower("tpu").compile(target=target)
    assert "is_scheduled=true" in compiled.as_text() and len(compiled.built.executable.serialize()) > 1000


@pytest.mark.parametrize("name", _QUICK)
def test_some_compile(name: str) -> None:
    check(name, "v6e:1x1", torch.bfloat16)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # mamba's own code
@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", architectures.ALL)
def test_all_compile(name: str, target: str) -> None:
    check(name, target)
