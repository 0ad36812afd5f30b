"""torch's ecosystem on the `tpu` device: modules, autograd, optimizers, autocast, function transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=tolerance, atol=tolerance)


def agree(module: torch.nn.Module, *inputs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Results, gradients and buffers of a module on the CPU and moved to the device."""
    moved = copy.deepcopy(module).to("tpu")
    want, got = module(*inputs), moved(*(t.to("tpu") for t in inputs))
    pairs = [(want, got)] if isinstance(want, torch.Tensor) else [(want[0], got[0])]
    for w, g in pairs:
        close(g, w, tolerance)
        w.square().mean().backward()
        g.square().mean().backward()
    for w, g in zip(module.parameters(), moved.parameters(), strict=True):
        assert g.grad is not None and g.grad.device.type == "tpu"
        close(g.grad, w.grad, tolerance)
    for w, g in zip(module.buffers(), moved.buffers(), strict=True):
        close(g, w, tolerance)


def test_parameters_stay_the_same_objects():
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model, weight = torch.nn.ModuleList([embedding, head]), embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("tpu")
    assert embedding.weight is head.weight is weight is optimizer.param_groups[0]["params"][0] and weight.is_tpu
    head(embedding(torch.tensor([1, 2], device="tpu"))).sum().backward()
    optimizer.step()
    grad = weight.grad
    model.cpu()
    assert weight.grad is grad and grad.device.type == weight.device.type == "cpu" and head.weight is weight


def test_modules_move_under_every_name():
    model = torch.nn.Linear(2, 2).tpu()
    assert model.weight.is_tpu and torch.ones(2).tpu().is_tpu
    fresh = torch.nn.Linear(3, 4, device="meta").to_empty(device="tpu")
    fresh.reset_parameters()
    assert fresh.weight.device == torch.device("tpu", 0) and torch.ones(3, device="tpu").to("meta").is_meta
    with torch.device("tpu"):
        assert torch.nn.Linear(2, 2).weight.is_tpu and torch.zeros(1).is_tpu and torch.tensor([1, 2]).is_tpu
    assert torch.ones(3, device="tpu").to("cpu", torch.float64, non_blocking=True).dtype == torch.float64


MODULES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "convolution and batch norm": lambda: (
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(36, 3),
        ),
        torch.randn(2, 3, 8, 8),
    ),
    "channels last": lambda: (
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "transformer": lambda: (
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(2, 5, 8),
    ),
    "LSTM": lambda: (torch.nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True), torch.randn(2, 3, 4)),
    "GRU": lambda: (torch.nn.GRU(4, 5, batch_first=True), torch.randn(2, 3, 4)),
    "weight norm": lambda: (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4)), torch.randn(2, 3)),
    "group norm": lambda: (torch.nn.GroupNorm(2, 4), torch.randn(2, 4, 6)),
    "transposed convolution": lambda: (torch.nn.ConvTranspose1d(3, 4, 3, stride=2), torch.randn(2, 3, 8)),
    "embedding bag": lambda: (torch.nn.EmbeddingBag(7, 4, mode="mean"), torch.tensor([[1, 2], [3, 3]])),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_train_as_on_the_cpu(name):
    torch.manual_seed(0)
    agree(*MODULES[name]())


# ---- autograd


def test_double_backward_and_checks_of_gradients():
    x = torch.randn(3, device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close(second, 6 * x)
    wide = torch.randn(3, 3, device="tpu", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: (a @ a).sin(), (wide,))


def test_custom_functions_and_saved_outputs():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    x = torch.randn(3, device="tpu", requires_grad=True)
    Double.apply(x).sum().backward()
    close(x.grad, x.detach().exp())


def test_a_write_to_a_saved_tensor_is_noticed():
    x = torch.randn(3, device="tpu", requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks():
    model, seen = torch.nn.Linear(3, 4).to("tpu"), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.weight.register_hook(lambda grad: seen.append(grad.device.type))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    model(torch.randn(2, 3, device="tpu", requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "forward", "tpu"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_dropout(reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(8, 8).to("tpu")

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.relu(layer(x)), 0.5)

    grads = []
    for run in (lambda x: checkpoint(block, x, use_reentrant=reentrant), block):
        x = torch.ones(4, 8, device="tpu", requires_grad=True)
        torch.manual_seed(3)
        run(x).sum().backward()
        grads.append(x.grad)
    close(grads[0], grads[1], 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
def test_function_transforms():
    from torch.func import functional_call, grad, hessian, jacrev, vmap

    x = torch.randn(4, 3, device="tpu")
    close(vmap(grad(lambda a: (a**2).sum()))(x), 2 * x)
    close(jacrev(torch.sin)(x[0]), torch.diag(torch.cos(x[0])))
    close(hessian(lambda a: (a**3).sum())(x[0]), torch.diag(6 * x[0]))
    close(vmap(lambda a, b: a @ b)(x, x), (x.cpu() * x.cpu()).sum(1))
    model = torch.nn.Linear(3, 2).to("tpu")
    parameters = dict(model.named_parameters())
    grads = grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)
    close(grads["bias"], torch.full((2,), 4.0))


# ---- autocast


def test_autocast_chooses_dtypes_as_on_other_devices():
    model, x = torch.nn.Linear(3, 4).to("tpu"), torch.randn(2, 3, device="tpu")
    with torch.autocast("tpu"):
        y = model(x)
        assert y.dtype == torch.bfloat16 and torch.softmax(y, -1).dtype == torch.float32
        assert (y + x[:, :1]).dtype == torch.float32 and torch.relu(y).dtype == torch.bfloat16
        assert torch.einsum("ij,kj->ik", x, x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(torch.sigmoid(y), torch.ones_like(y))
        with torch.autocast("tpu", enabled=False):
            assert model(x).dtype == torch.float32
    with torch.autocast("tpu", dtype=torch.float16):
        assert model(x).dtype == torch.float16
    y.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32


# ---- the rest


def test_profiles_name_the_ops():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3, device="tpu") + 1
    assert any(event.key == "aten::add" for event in profile.key_averages())


def test_data_loaders():
    from torch.utils.data import DataLoader, TensorDataset

    host = TensorDataset(torch.arange(10.0), torch.arange(10))
    assert [a.to("tpu").sum().item() for a, _ in DataLoader(host, batch_size=4)] == [6, 22, 17]
    assert [a.sum().item() for a, _ in DataLoader(host, batch_size=4, pin_memory=True)] == [6, 22, 17]
    workers = DataLoader(host, batch_size=4, num_workers=1, pin_memory=True)  # forked, and the device is open
    assert [a.to("tpu").sum().item() for a, _ in workers] == [6, 22, 17]
    resident = TensorDataset(torch.arange(10.0, device="tpu"))
    assert [a.sum().item() for (a,) in DataLoader(resident, batch_size=4)] == [6, 22, 17]


def test_device_functions():
    assert torch.tpu.is_available() and torch.tpu.device_count() == 1 and torch.tpu.current_device() == 0
    properties = torch.tpu.get_device_properties()
    assert properties.platform == "cpu" and torch.tpu.get_device_name() == properties.name
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    start.record()
    _ = torch.ones(3, device="tpu") + 1
    end.record()
    assert start.elapsed_time(end) > 0 and torch.tpu.Stream() == torch.tpu.current_stream()
    with torch.tpu.stream(torch.tpu.Stream()), torch.tpu.device(0):
        torch.tpu.synchronize()
    torch.tpu.empty_cache()
    torch.tpu.reset_peak_memory_stats()
    held = torch.ones(1000, device="tpu")
    assert torch.tpu.max_memory_allocated() >= torch.tpu.memory_allocated() >= held.nbytes
    assert torch.get_device_module("tpu") is torch.tpu


def test_torch_accelerator_knows_the_device():
    assert torch.accelerator.current_accelerator() == torch.device("tpu") and torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.current_stream().device.type == torch.Stream(device="tpu").device.type == "tpu"


def test_what_python_cannot_reach_is_an_error():
    """As README lists it: one day torch lets Python answer, and this test says so."""
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="tpu")
    with pytest.raises(NotImplementedError, match="getPinnedMemoryAllocator"):
        torch.empty(3, pin_memory=True)
    for make in (torch.empty, torch.zeros, torch.rand, torch.arange):
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            make(3, pin_memory=True, device="tpu")
    with pytest.raises(RuntimeError, match="synchronizing all streams"):
        torch.accelerator.synchronize()
    for unreachable in (torch.accelerator.memory_allocated, torch.accelerator.empty_cache):
        with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
            unreachable()
    with pytest.raises(RuntimeError, match="cannot be shared"):
        torch.ones(3, device="tpu").share_memory_()
