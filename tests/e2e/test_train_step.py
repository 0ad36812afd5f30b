"""``train_step``: one program, one execution a step, everything in place, and what eager would have computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpu_compile
from tpu_compile import train_step

DEVICES = ("cpu", "tpu")


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 5)
    )


def batch(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16), torch.randint(0, 5, (rows,))


def pair(device: str, **adamw):
    """A model with its optimizer on the device, and the same on the CPU."""
    torch.manual_seed(0)
    host = net()
    ours = copy.deepcopy(host).to(device)
    return (
        *(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2, **adamw)),
        *(host, torch.optim.AdamW(host.parameters(), lr=1e-2, **adamw)),
    )


def same(ours: nn.Module, host: nn.Module, tolerance: float = 1e-5) -> None:
    for got, want in zip(ours.state_dict().values(), host.state_dict().values(), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


def eager_step(model, optimizer, x, y, clip=None):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("device", DEVICES)
def test_one_execution_a_step_and_nothing_compiled_twice(device):
    ours, optimizer, host, other = pair(device)
    step = train_step(ours, F.cross_entropy, optimizer, clip_norm=0.5)
    rates = [torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=20) for o in (optimizer, other)]
    batches = [batch() for _ in range(8)]
    moved = [tuple(t.to(device) for t in b) for b in batches]
    for number, (x, y) in enumerate(batches):
        if number == 1:
            tpu_compile.reset_stats()
        loss = step(*moved[number])
        assert not loss.requires_grad and loss.device.type == device
        assert loss.item() == pytest.approx(eager_step(host, other, x, y, 0.5), abs=1e-5)
        for rate in rates:  # learning rate and beta1 change at every step
            rate.step()
        if number == 4:
            optimizer.param_groups[0]["weight_decay"] = other.param_groups[0]["weight_decay"] = 0.3
    stats = tpu_compile.stats()
    assert stats["executions"] == 7 and stats["xla_compiles"] == stats["lowerings"] == stats["fallback_ops"] == 0
    assert stats["h2d_bytes"] <= 7 * 8 * 8 and not stats["copied_arguments"]  # the numbers of a step
    same(ours, host)
    got, want = optimizer.state_dict(), other.state_dict()
    assert got["param_groups"] == want["param_groups"]
    for key, state in want["state"].items():
        assert list(got["state"][key]) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(got["state"][key][name].cpu(), value, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in ours.parameters())


def test_everything_that_is_written_is_donated():
    ours, optimizer, *_ = pair("tpu")
    x, y = (t.to("tpu") for t in batch())
    step = train_step(ours, F.cross_entropy, optimizer)
    compiled = step.trace(x, y).lower().compile()
    assert not optimizer.state and set(compiled.overwritten.values()) == {"donated"}
    params = sum(p.nbytes for p in ours.parameters())
    memory = compiled.memory_analysis()
    written = 3 * params + sum(b.nbytes for b in ours.buffers())
    assert memory.alias_size_in_bytes == written and memory.output_size_in_bytes < written + 256
    assert "self.0.weight" in compiled.arguments and "exp_avg of self.0.weight" in compiled.arguments
    before = ours[0].weight.detach().cpu()
    loss = compiled(x, y)  # a stage can be called, and trains
    assert loss.item() > 0 and not torch.equal(before, ours[0].weight.detach().cpu())
    tpu_compile.reset_stats()
    step(x, y)
    assert tpu_compile.stats()["xla_compiles"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_accumulate_in_a_loop(device):
    ours, optimizer, host, other = pair(device)
    step = train_step(ours, F.cross_entropy, optimizer, accumulate=4)
    for _ in range(2):
        x, y = batch()
        loss, total = step(x.to(device), y.to(device)), 0.0
        other.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            mean = F.cross_entropy(host(part), target) / 4
            mean.backward()
            total += mean.item()
        other.step()
        assert loss.item() == pytest.approx(total, abs=1e-5)
    same(ours, host)
    text = step.trace(x.to(device), y.to(device)).lower().as_text()
    assert text.count("stablehlo.while") == 1
    with pytest.raises(tpu_compile.BadCall, match="10 rows"):
        step(*(t.to(device) for t in batch(10)))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_anew_at_each_step_and_part(device):
    model = nn.Dropout(0.5)
    weight = nn.Parameter(torch.ones(4000, device=device))
    model.register_parameter("weight", weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    x = torch.ones(2, 4000, device=device)
    step = train_step(model, lambda out: (out * weight).sum() / 2, optimizer, accumulate=2)
    torch.manual_seed(0)
    first = step(x)
    one = weight.detach().cpu().clone()
    assert set(one.tolist()) == {1.0, 0.5, 0.0}  # neither, one or both of the parts kept an element
    assert (one == 0.5).float().mean().item() == pytest.approx(0.5, abs=0.05)
    with torch.no_grad():
        weight.fill_(1.0)
    second = step(x)
    assert second.item() != first.item()
    with torch.no_grad():
        weight.fill_(1.0)
    torch.manual_seed(0)
    assert step(x).item() == first.item() and torch.equal(weight.detach().cpu(), one)


@pytest.mark.parametrize("device", DEVICES)
def test_grad_scaler(device):
    ours, optimizer, host, other = pair(device)
    scalers = [torch.amp.GradScaler(d, init_scale=2.0**10, growth_interval=2) for d in (device, "cpu")]
    step = train_step(ours, lambda out, y: F.cross_entropy(out, y), optimizer, scaler=scalers[0])
    for number in range(5):
        x, y = batch()
        x[0, 0] = float("inf") if number == 2 else x[0, 0]
        step(x.to(device), y.to(device))
        other.zero_grad()
        scalers[1].scale(F.cross_entropy(host(x), y)).backward()
        scalers[1].step(other)
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if number == 1:  # a batch norm keeps the NaN of the third batch
            same(ours, host)
    assert [s["step"].item() for s in optimizer.state.values()] == [4] * 5
    for got, want in zip(ours.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-5)


def test_autocast_keeps_float32_weights():
    ours, optimizer, host, other = pair("cpu")
    step = train_step(ours, F.cross_entropy, optimizer, autocast=torch.bfloat16)
    for _ in range(3):
        x, y = batch()
        other.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = F.cross_entropy(host(x), y)
        want.backward()
        other.step()
        assert step(x, y).item() == pytest.approx(want.item(), abs=5e-3)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    text = step.trace(x, y).as_text()
    assert "bf16[24, 32]" in text and "f32[32, 16]" in text


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_are_rounded_once_a_step(device):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)).bfloat16()
    ours = copy.deepcopy(host).to(device)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, host))
    step = train_step(ours, F.cross_entropy, optimizer)
    for _ in range(3):
        x, y = batch()
        loss = step(x.bfloat16().to(device), y.to(device))
        assert loss.item() == pytest.approx(eager_step(host, other, x.bfloat16(), y), abs=2e-2)
    assert {t.dtype for t in (*ours.parameters(), loss)} == {torch.bfloat16}
    same(ours, host, 2e-2)


class Masters:
    """bfloat16 weights of a float32 model, as stock torch keeps them: the optimizer steps the masters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.masters = model, [p.detach().float().requires_grad_() for p in model.parameters()]

    def write(self) -> None:
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)


def test_master_weights_of_a_bfloat16_model():
    """Gradients by one compiled program, a compiled step of the masters, and weights that are their roundings."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)).bfloat16()
    pairs = [Masters(m) for m in (copy.deepcopy(host), host)]
    optimizers = [torch.optim.AdamW(pair.masters, lr=1e-3) for pair in pairs]
    forward = torch.compile(pairs[0].model, backend="tpu", fullgraph=True)
    steps = torch.compile(optimizers[0].step, backend="tpu"), optimizers[1].step
    for _ in range(3):
        x, y = batch()
        for call, pair, step in zip((forward, host), pairs, steps, strict=True):
            pair.model.zero_grad()
            F.cross_entropy(call(x.bfloat16()).float(), y).backward()
            for p, master in zip(pair.model.parameters(), pair.masters, strict=True):
                master.grad = p.grad.float()
            step()
            pair.write()
    for got, want in zip(pairs[0].masters, pairs[1].masters, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


MASTERED = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
}


def half_pair(device: str, make):
    """A bfloat16 model with its optimizer on the device, and masters of the same on the CPU."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)).bfloat16()
    ours, masters = copy.deepcopy(host).to(device), Masters(host)
    return ours, make(ours.parameters()), masters, make(masters.masters)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASTERED)
def test_master_weights_inside_the_step(name, device):
    """Steps far smaller than a bfloat16's last digit add up; 30 losses are eager's with masters."""
    ours, optimizer, pair, other = half_pair(device, MASTERED[name])
    step = train_step(ours, lambda out, y: F.cross_entropy(out.float(), y), optimizer, master_weights=True)
    x, y = batch()
    for number in range(30):
        pair.model.zero_grad()
        want = F.cross_entropy(pair.model(x.bfloat16()).float(), y)
        want.backward()
        for p, master in zip(pair.model.parameters(), pair.masters, strict=True):
            master.grad = p.grad.float()
        other.step()
        pair.write()
        got = step(x.bfloat16().to(device), y.to(device))
        assert got.item() == pytest.approx(want.item(), abs=5e-3)
        if not number:
            tpu_compile.reset_stats()
    stats = tpu_compile.stats()
    assert stats["executions"] == 29 and stats["xla_compiles"] == stats["lowerings"] == 0
    for p, master in zip(ours.parameters(), pair.masters, strict=True):
        kept = optimizer.state[p]["master_weight"]
        assert torch.equal(kept.to(torch.bfloat16), p.detach()) and not torch.equal(kept, p.detach().float())
        assert {t.dtype for t in optimizer.state[p].values()} == {torch.float32}
        torch.testing.assert_close(kept.cpu(), master.detach(), rtol=1e-2, atol=2e-3)


def master_run(saved=None):
    """A model after the state that was ``saved``, or after three steps; its optimizer, and what makes a step."""
    ours, optimizer, *_ = half_pair("cpu", MASTERED["AdamW"])
    step = train_step(ours, lambda out, y: F.cross_entropy(out.float(), y), optimizer, master_weights=True)
    x, y = batch()
    if saved:
        ours.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    else:
        for _ in range(3):
            step(x.bfloat16(), y)
    return ours, optimizer, lambda: step(x.bfloat16(), y).item()


def test_master_weights_are_saved_loaded_and_give_way_to_weights_that_are_written():
    ours, optimizer, step = master_run()
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    *_, again = master_run(saved)
    assert [step() for _ in range(5)] == [again() for _ in range(5)]
    with torch.no_grad():
        ours[0].weight.zero_()
    step()
    master = optimizer.state[ours[0].weight]["master_weight"]
    assert 0 < master.abs().max() < 2e-3 and torch.equal(master.bfloat16(), ours[0].weight.detach())


def test_master_weights_under_a_grad_scaler():
    """float16: gradients are unscaled in float32, and a step with an infinity leaves masters and weights alone."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)).half()
    optimizer, scaler = torch.optim.AdamW(ours.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    step = train_step(
        ours, lambda out, y: F.cross_entropy(out.float(), y), optimizer, scaler=scaler, master_weights=True
    )
    x, y = batch()
    losses = [step(x.half(), y).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    before = copy.deepcopy((ours.state_dict(), optimizer.state[ours[0].weight]))
    step(torch.where(x > 1, torch.inf, x).half(), y)
    assert scaler.get_scale() == 2.0**7
    torch.testing.assert_close((ours.state_dict(), optimizer.state[ours[0].weight]), before, rtol=0, atol=0)


def test_state_is_loaded_and_saved_at_any_time():
    ours, optimizer, *_ = pair("tpu")
    x, y = (t.to("tpu") for t in batch())
    step = train_step(ours, F.cross_entropy, optimizer)
    step(x, y)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    want = [step(x, y).item() for _ in range(3)]
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    tpu_compile.reset_stats()
    assert [step(x, y).item() for _ in range(3)] == want and tpu_compile.stats()["lowerings"] == 0
    eager_step(ours, optimizer, x, y)  # and the optimizer steps in eager, with the state it has
    assert {s["step"].item() for s in optimizer.state.values()} == {5}
    step(x, y)
    assert {s["step"].item() for s in optimizer.state.values()} == {6}
    ours.eval()
    before = ours[1].running_mean.cpu()
    step(x, y)
    assert torch.equal(ours[1].running_mean.cpu(), before)


def test_frozen_and_unused_parameters_stay_as_they_are():
    ours, *_ = pair("cpu")
    ours[0].weight.requires_grad_(False)
    spare = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*ours.parameters(), spare], weight_decay=0.5)
    before = ours[0].weight.clone()
    train_step(ours, F.cross_entropy, optimizer)(*batch())
    assert torch.equal(ours[0].weight, before) and torch.equal(spare, torch.ones(3))
    assert len(optimizer.state) == 4


def test_a_step_of_a_meta_model_is_traced():
    with torch.device("meta"):
        model, (x, y) = net(), (torch.empty(24, 16), torch.empty(24, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters())
    traced = train_step(model, F.cross_entropy, optimizer, accumulate=2).trace(x, y)
    assert all(p.is_meta for p in model.parameters()) and not optimizer.state
    program = traced.for_target()
    assert len(program.donated) == 3 * 5 + 3  # parameters and moments, and what the batch norm keeps


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))
            for _ in range(6)
        )
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


def temporary(checkpointed: bool, remat: float | None) -> tuple[int, float]:
    """Bytes of temporaries, and the loss after two steps."""
    torch.manual_seed(0)
    model, x = Blocks(checkpointed), torch.randn(1024, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_step(model, lambda out: out.square().mean(), optimizer, remat=remat)
    memory = step.trace(x).lower().compile().memory_analysis().temp_size_in_bytes
    step(x)
    return memory, step(x).item()


def test_checkpointing_and_a_budget_save_memory():
    plain, loss = temporary(False, None)
    checkpointed, again = temporary(True, None)
    budgets = [temporary(False, budget) for budget in (0.6, 0.2)]
    assert again == pytest.approx(loss, rel=1e-6) and all(b[1] == pytest.approx(loss, rel=1e-5) for b in budgets)
    assert checkpointed < 0.4 * plain, (checkpointed, plain)
    assert budgets[1][0] < 0.75 * budgets[0][0] < 0.75 * plain, (budgets, plain)


def test_what_cannot_be_traced_says_so():
    model, (x, y) = net(), batch()

    def refused(optimizer, match, loss_fn=F.cross_entropy, model=model):
        with pytest.raises(tpu_compile.LoweringError, match=match):
            train_step(model, loss_fn, optimizer)(x, y)

    SGD = torch.optim.SGD
    refused(torch.optim.LBFGS(model.parameters()), "closure")
    refused(torch.optim.RAdam(model.parameters()), "RAdam.step cannot be traced")
    refused(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), "write lr=0.1")
    refused(SGD(model.parameters(), differentiable=True), "differentiable=True")
    refused(SGD(nn.Linear(2, 2).parameters()), "none of the optimizer's parameters")
    refused(SGD(model.parameters()), "one real number", loss_fn=lambda out, y: out)
    refused(SGD(model.parameters()), "depends on no parameter", loss_fn=lambda out, y: out.detach().sum())
    table = nn.Embedding(3, 4, sparse=True)
    refused(SGD(table.parameters()), "sparse=False", model=table)
    hooked = SGD(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    refused(hooked, "pre-hooks")
    with pytest.raises(tpu_compile.ConfigError, match="remat"):
        train_step(model, F.cross_entropy, SGD(model.parameters()), remat=0.0)
