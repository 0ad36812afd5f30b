"""Saving, loading and copying `tpu` tensors."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("tpu")


@pytest.mark.parametrize(
    ("location", "device"),
    [
        (None, "tpu"),
        ("cpu", "cpu"),
        ("tpu", "tpu"),
        ("tpu:0", "tpu"),
        (torch.device("tpu"), "tpu"),
        ({"tpu:0": "cpu"}, "cpu"),
        (lambda storage, _: storage, "cpu"),
    ],
    ids=["none", "cpu", "tpu", "tpu_0", "device", "mapping", "function"],  # a function's own name has an address in it
)
def test_a_state_dict_comes_back(model, location, device):
    state = torch.load(saved(model.state_dict()), map_location=location)
    for name, value in model.state_dict().items():
        assert state[name].device.type == device
        torch.testing.assert_close(state[name].cpu(), value.cpu(), rtol=0, atol=0)


def test_a_checkpoint_of_the_cpu_goes_to_the_device(model):
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.load_state_dict(torch.load(saved(other.state_dict()), map_location="tpu"))
    assert model[0].weight.is_tpu and torch.equal(model[0].weight.cpu(), other[0].weight)
    assert model(torch.randn(5, 3, device="tpu")).shape == (5, 4)
    with pytest.raises(RuntimeError, match="one tpu device"):
        torch.load(saved(other.state_dict()), map_location="tpu:1")


def test_loading_compiles_nothing_for_the_bytes():
    import tpu_compile

    file, before = saved(torch.arange(12.0, device="tpu").view(3, 4)), tpu_compile.stats()
    loaded = torch.load(file, map_location="tpu")
    assert torch.equal(loaded.cpu(), torch.arange(12.0).view(3, 4))
    assert tpu_compile.stats()["lowerings"] == before["lowerings"]


def test_aliases_survive():
    base = torch.arange(10.0, device="tpu")
    loaded = torch.load(saved({"base": base, "view": base[2:5]}))
    loaded["base"][2] = 100
    assert loaded["view"].tolist() == [100, 3, 4]
    tied = torch.nn.Linear(3, 3).to("tpu")
    again = torch.load(saved([tied.weight, tied.weight]), weights_only=False)
    assert again[0] is again[1]


def test_optimizers_resume(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, device="tpu")).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(torch.load(saved(optimizer.state_dict())))
    weight = model[0].weight
    assert fresh.state[weight]["exp_avg"].is_tpu
    assert torch.equal(fresh.state[weight]["exp_avg"].cpu(), optimizer.state[weight]["exp_avg"].cpu())


def test_pickles_and_deep_copies(model):
    tensor = torch.arange(6.0, device="tpu").view(2, 3)
    for again in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.deepcopy(copy.deepcopy(tensor))):
        assert again.is_tpu and again.tolist() == tensor.tolist() and again.data_ptr() != tensor.data_ptr()
    parameter = pickle.loads(pickle.dumps(torch.nn.Parameter(tensor)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.add_(1)
    assert not torch.equal(twin[0].weight.cpu(), model[0].weight.cpu())


def test_safetensors(model, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.state_dict(), tmp_path / "file")
    loaded = safetensors.load_file(tmp_path / "file")
    model.load_state_dict(loaded)
    tied = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    tied[1].weight = tied[0].weight
    tied.to("tpu")
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(tied.state_dict(), tmp_path / "tied")
    safetensors.save_model(tied, str(tmp_path / "tied"))
    safetensors.load_model(tied, str(tmp_path / "tied"))
