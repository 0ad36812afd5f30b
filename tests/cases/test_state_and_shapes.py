"""Reported faults: state across calls, training steps, dynamic shapes, exported programs. Each test names its public
report."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpu_compile

EXPORT = pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # torch's own, in torch.export


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that a state_dict leaves out as well."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def follow(model: nn.Module, calls: list[tuple[torch.Tensor, ...]], tolerance: float = 1e-4, **options: object) -> None:
    """Call eager and compiled twins in turn; results and states must stay together."""
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tpu", **options)  # type: ignore[call-overload]
    for args in calls:
        torch.testing.assert_close(compiled(*args), twin(*args), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state(model), state(twin), rtol=tolerance, atol=tolerance)


def test_a_cache_in_buffers(agrees):  # iree-org/iree-turbine#85
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(2, 6, 4))
            self.register_buffer("length", torch.tensor(0), persistent=False)

        def forward(self, k):
            self.keys.index_copy_(1, self.length[None], k)
            self.length += 1
            seen = torch.arange(6) < self.length
            return (self.keys.sum(-1) * seen).cumsum(1)

    agrees(Cache(), torch.randn(2, 1, 4), calls=4)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at the loss
def test_forward_backward_and_update_in_one_step():  # pytorch/xla#2327
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)

        def forward(self, x, y):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y, label_smoothing=0.1)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    follow(Step(), [(torch.randn(5, 4), torch.tensor([0, 2, 1, -100, 2]))] * 4)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # Dynamo wraps it
def test_the_rate_that_a_schedule_sets_is_used():  # pytorch/pytorch#107076
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.sgd = torch.optim.SGD([self.weight], lr=0.2, momentum=0.9, weight_decay=0.1)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 2, 0.1)

        def forward(self, target):
            self.weight.grad = self.weight.detach() - target
            self.sgd.step()
            self.schedule.step()
            return self.weight.detach().clone()

    with pytest.warns(tpu_compile.TpuCompileWarning, match="learning rate"):
        follow(Step(), [(torch.randn(6),)] * 5)


def test_python_numbers_that_a_module_counts():  # pytorch/pytorch#120248
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.mean = 0, torch.zeros(2)

        def forward(self, x):
            self.seen += 1
            self.mean = self.mean + (x - self.mean) / self.seen
            return self.mean * self.seen if self.seen % 2 else self.mean - self.seen

    follow(Counter(), [(torch.randn(2),), (torch.ones(2),), (torch.zeros(2),), (torch.ones(2) * 4,)])


def test_the_prompt_s_program_does_not_serve_the_next_token():  # tenstorrent/tt-xla#5771
    class Attend(nn.Module):
        def forward(self, x, w):
            scores = x @ x.mT / x.shape[-1] ** 0.5
            mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
            return scores.masked_fill(~mask, -math.inf).softmax(-1) @ x @ w, x[-1:] * 1

    follow(Attend(), [(torch.randn(n, 4), torch.ones(4, 4)) for n in (6, 1, 2, 7, 1)])


def test_a_pool_with_a_dynamic_batch():  # pytorch/xla#8200
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 3, 3), nn.Linear(12, 2)

        def forward(self, x):
            return self.out(F.max_pool2d(self.conv(x).relu(), 2, ceil_mode=True).flatten(1)).log_softmax(-1)

    follow(Net(), [(torch.randn(n, 1, 6, 6),) for n in (4, 3, 7)], dynamic=True)


def test_rolls_joins_and_windows_of_dynamic_size():  # pytorch/pytorch#116493
    class Moves(nn.Module):
        def forward(self, x):
            moved = x.roll(2, 0), x.flip(0, 1), torch.cat([x, x[-2:]]), x.unfold(0, 2, 1)
            return torch.diff(x, dim=-1).sum(-1), *moved, x[1:] - x[:-1]

    follow(Moves(), [(torch.randn(n, m),) for n, m in ((4, 5), (3, 8), (9, 2))], dynamic=True)


def test_sizes_are_numbers_of_the_program():  # pytorch/pytorch#145587
    class Sizes(nn.Module):
        def forward(self, a, b):
            n, m = a.shape
            grid = torch.arange(n, dtype=a.dtype)[:, None] * m + torch.arange(m)
            return (
                n * a * b,
                a.sum() / (n * m),
                grid,
                a.reshape(m, n),
                torch.full((n // 2, m + 1), n / m),
                a[: n // 2] * 1,
            )

    follow(Sizes(), [(torch.randn(n, 3), torch.randn(n, 3)) for n in (4, 8, 5)], dynamic=True)


def test_sizes_divided_inside_an_operator():
    """Resampling divides the input's size by the output's; torch writes that as ``aten.true_divide`` of tensors."""

    class Scales(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=1.5, mode="bilinear")

    calls = [(torch.randn(b, 2, n, m),) for b, n, m in ((1, 6, 8), (2, 7, 5), (3, 4, 4))]
    follow(Scales(), calls, dynamic=True, fullgraph=True)


def test_views_that_differ_in_where_they_start():  # pytorch/pytorch#104563
    def fn(x):
        x.mul_(2)
        return x.view(-1)[1:] + 1

    eager_base, base = torch.arange(24.0), torch.arange(24.0)
    compiled = torch.compile(fn, backend="tpu")
    for start in (0, 6, 12, 13):
        assert torch.equal(compiled(base[start : start + 6]), fn(eager_base[start : start + 6]))
        assert torch.equal(base, eager_base)


@EXPORT
def test_an_exported_program_writes_its_buffers_back():  # google/torchax
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("history", torch.zeros(4))

        def forward(self, x):
            self.count.add_(1)
            self.history.copy_(torch.cat([self.history[1:], x.sum()[None] * self.count]))
            return x * self.count

    x = torch.randn(2)
    follow(torch.export.export(Counter(), (x,)).module(), [(x,)] * 3)


@EXPORT
def test_an_exported_program_lifts_its_constants():  # pytorch/xla#7845
    class Rotary(nn.Module):
        table = torch.arange(12.0).view(3, 4)

        def forward(self, x):
            return x * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0]), x.new_tensor([2]) + self.table[0]

    x = torch.randn(3, 4)
    program = torch.export.export(Rotary(), (x,)).module()
    torch.testing.assert_close(torch.compile(program, backend="tpu")(x), program(x))


@EXPORT
def test_an_exported_program_with_bfloat16_weights():  # pytorch/xla
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16().requires_grad_(False)
    x = torch.randn(3, 8).bfloat16()
    follow(torch.export.export(model, (x,)).module(), [(x,)], tolerance=3e-2)


@EXPORT
def test_one_exported_program_for_every_batch():  # iree-org/iree-turbine#1226
    class Join(nn.Module):
        def forward(self, *parts, scale):
            return torch.cat(parts, 1) * scale, parts[0].mean(0)

    parts = torch.randn(4, 2), torch.randn(4, 3)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"parts": ({0: batch}, {0: batch}), "scale": None}
    program = torch.export.export(Join(), parts, {"scale": torch.tensor(2.0)}, dynamic_shapes=shapes).module()
    compiled = torch.compile(program, backend="tpu")
    for n in (4, 9, 2):
        given = torch.randn(n, 2), torch.randn(n, 3)
        scale = torch.tensor(3.0)
        torch.testing.assert_close(compiled(*given, scale=scale), program(*given, scale=scale))
