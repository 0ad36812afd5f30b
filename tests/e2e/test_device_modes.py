"""The modes of the eager `tpu` device: the same program, run at once, checked, or fused."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tpu_compile
from tpu_compile.errors import ConfigError, DeviceError, OutOfMemory


@pytest.fixture(autouse=True)
def _strict_afterwards() -> Iterator[None]:
    yield
    torch.tpu.set_mode("strict")


def train(mode: str, *, read: bool = True, steps: int = 6) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a small model with dropout."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    inputs = [torch.randn(5, 8) for _ in range(steps)]
    with torch.tpu.mode(mode):
        model = copy.deepcopy(model).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.manual_seed(1)
        losses = []
        for x in inputs:
            optimizer.zero_grad()
            loss = model(x.to("tpu")).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item() if read else loss.detach())
        return [float(loss) for loss in losses], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("mode", ["debug", "defer"])
def test_the_loss_curve_is_the_same(mode, read):
    want, got = train("strict"), train(mode, read=read)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_deferred_step_is_three_executions():
    """Forward, backward and optimizer: each may run while the next is noted down."""
    train("defer")
    tpu_compile.reset_stats()
    train("defer")
    stats = tpu_compile.stats()
    assert stats["executions"] <= 3 * 6 + 2 and stats["lowerings"] == 0


@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_that_reads_nothing_is_cut_at_its_period(monkeypatch, grad):
    from tpu_compile.device import defer

    def run(steps: int) -> torch.Tensor:
        x = torch.linspace(0, 1, 8, device="tpu")
        for _ in range(steps):
            for scale in (0.5, 0.25, 2.0, 4.0):
                x = torch.sin(x * scale) + torch.cos(x - scale) * 0.5
        return x

    monkeypatch.setattr(defer, "MOST_OPS", 100)
    want = run(40)
    with torch.tpu.mode("defer"), torch.set_grad_enabled(grad):
        run(40).cpu()
        tpu_compile.reset_stats()
        got = run(40).cpu()
    torch.testing.assert_close(got, want.cpu(), rtol=1e-5, atol=1e-6)
    stats = tpu_compile.stats()
    assert 5 <= stats["executions"] <= 60 and stats["lowerings"] <= 2


def test_a_loop_in_place_is_cut_where_its_period_begins(monkeypatch):
    """What the period reads of the steps before it, and overwrites, comes from outside then."""
    from tpu_compile.device import defer

    def run(steps: int) -> list[torch.Tensor]:
        x, total = torch.linspace(0, 1, 8, device="tpu"), torch.zeros(8, device="tpu")
        old = x + 1
        for _ in range(steps):
            for scale in (0.5, 0.25, 2.0, 4.0):
                old = (x * scale + old).sin()
                total.add_(old).mul_(0.5)
                x.mul_(0.9)
        return [x.cpu(), total.cpu(), old.cpu()]

    monkeypatch.setattr(defer, "MOST_OPS", 97)
    want = run(40)
    with torch.tpu.mode("defer"):
        before = tpu_compile.stats()["lowerings"]
        got = run(40)
        assert tpu_compile.stats()["lowerings"] <= before + 13
        before = tpu_compile.stats()["lowerings"]
        again = run(40)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-6)
    assert tpu_compile.stats()["lowerings"] <= before + 2


def test_a_sequence_that_leaves_its_usual_way_half_way():
    def run(other: bool) -> list[float]:
        x = torch.arange(3.0, device="tpu")
        y = x * 2
        z = y + 1 if not other else y - x
        y.add_(z)
        return (y * z).tolist()

    with torch.tpu.mode("defer"):
        usual, other = run(False), run(True)
        before = tpu_compile.stats()["lowerings"]
        assert [run(False), run(True), run(False)] == [usual, other, usual] == [[1, 15, 45], [0, 3, 12], [1, 15, 45]]
        assert tpu_compile.stats()["lowerings"] == before


def test_what_the_host_reads_meanwhile_is_still_one_input(monkeypatch):
    """A buffer that is passed twice could not be overwritten."""
    from tpu_compile.device import defer

    run = defer._job

    def job(compiled: Any, externals: list[Any], *rest: Any) -> None:
        given = [id(defer._computed(source)) for source in externals]
        assert len(set(given)) == len(given)
        run(compiled, externals, *rest)

    monkeypatch.setattr(defer, "_job", job)
    with torch.tpu.mode("defer"):
        for _ in range(2):
            lowerings = tpu_compile.stats()["lowerings"]
            x = torch.arange(3.0, device="tpu") + 1
            assert x.sum().item() == 6  # x is computed as well
            y = x * 2
            assert x.tolist() == [1, 2, 3]
            z = x + y
            x.add_(z)
            assert (x.tolist(), y.tolist(), z.tolist()) == ([4, 8, 12], [2, 4, 6], [3, 6, 9])
        assert tpu_compile.stats()["lowerings"] == lowerings


def test_a_sequence_that_does_not_compile_leaves_nothing_behind(monkeypatch):
    from tpu_compile.device import defer

    def fail(_: Any) -> Any:
        raise OutOfMemory("too large")

    with torch.tpu.mode("defer"):
        x = torch.ones(5, 7, device="tpu")
        y = x * 3 - x
        with monkeypatch.context() as patch:
            patch.setattr(defer, "_compile", fail)
            with pytest.raises(OutOfMemory):
                y.tolist()
        with pytest.raises(DeviceError, match="has failed"):
            y.tolist()
        assert (torch.ones(2, device="tpu") * 2).tolist() == [2, 2]


def test_deferred_writes_alias():
    with torch.tpu.mode("defer"):
        base = torch.zeros(3, 4, device="tpu")
        row, column = base[1], base[:, 2]
        row.add_(1)
        column.fill_(5)
        row.mul_(2)
        twice = base + base
        before = tpu_compile.stats()["executions"]
        assert base.tolist() == [[0, 0, 5, 0], [2, 2, 10, 2], [0, 0, 5, 0]]
        assert twice.tolist() == [[0, 0, 10, 0], [4, 4, 20, 4], [0, 0, 10, 0]]
        assert tpu_compile.stats()["executions"] == before + 1


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.t() * 2
    y[1] += 10
    y[:, 0].mul_(3)
    return y @ x.t()


LAYOUTS = {
    "transposed": lambda x: (x.t() * 2) + torch.arange(3.0, device=x.device),
    "permuted": lambda x: (x[None].permute(2, 0, 1) + 1)[1] * x[0],
    "viewed": lambda x: (x.t() * 2).t().view(-1)[2:5] + 1,
    "written": _written,
    "channels last": lambda x: (x.expand(2, 3, 3, 3).to(memory_format=torch.channels_last) * 2)[:, 1].sum(0) + x,
    "expanded": lambda x: x.cumsum(0)[:, :1].expand(3, 3) + x,
    "returned as well": lambda x: [y := x.t() * 2, y[0] + 1, y.sum(1)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_that_do_not_lie_row_by_row(name):
    """Inside a sequence as well a tensor lies in memory as its strides say."""
    x, run = torch.arange(9.0).view(3, 3), LAYOUTS[name]
    with torch.tpu.mode("defer"):
        got, want = run(x.to("tpu")), run(x)
        pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
        for g, w in pairs:
            assert g.stride() == w.stride() and g.tolist() == w.tolist()


def test_what_is_read_is_not_overwritten_before():
    """XLA would fuse the column's read into the row's write, which goes on in place."""
    with torch.tpu.mode("defer"):
        x = torch.arange(1.0, 10).view(3, 3).to("tpu")
        x[1].add_(x[:, 0].clone())
        x[0].mul_(2)
        assert x.tolist() == [[2, 4, 6], [5, 9, 13], [7, 8, 9]]


@pytest.mark.parametrize("mode", ["strict", "defer"])
def test_copies_of_one_value_are_buffers_of_their_own(mode):
    with torch.tpu.mode(mode):
        x = torch.arange(3.0, device="tpu") * 2
        clone, (a, b) = x.clone(), (torch.zeros(3, device="tpu") for _ in range(2))
        torch._foreach_copy_([a, b], [x, x])
        assert x.tolist() == clone.tolist() == a.tolist() == b.tolist() == [0, 2, 4]
        a.add_(1)
        clone.add_(2)
        assert [t.tolist() for t in (x, clone, a, b)] == [[0, 2, 4], [2, 4, 6], [1, 3, 5], [0, 2, 4]]


def test_numbers_that_are_equal_by_chance_are_not_the_same():
    with torch.tpu.mode("defer"):
        x = torch.ones(3, device="tpu")
        for first, second in ((2.0, 3.0), (5.0, 7.0), (4.0, 4.0)):
            lowerings = tpu_compile.stats()["lowerings"]
            assert ((x * first) * second).tolist() == [first * second] * 3
        assert tpu_compile.stats()["lowerings"] == lowerings


def test_a_read_waits_for_no_more_than_it_needs(monkeypatch):
    """The loss is known while the backward pass runs."""
    from tpu_compile.device import defer

    gate, run, ran, passed = threading.Event(), defer._job, [], []

    def job(*args: Any) -> None:
        if ran:
            passed.append(gate.wait(20))
        ran.append(None)
        run(*args)

    monkeypatch.setattr(defer, "_job", job)
    with torch.tpu.mode("defer"):
        w = torch.full((4,), 2.0).to("tpu").requires_grad_()
        loss = (w * w).sum()
        loss.backward()  # in a thread of its own: the forward pass is submitted when that begins
        total = w.grad + 1  # and the backward pass when this thread goes on
        assert loss.item() == 16 and not passed
        gate.set()
        assert total.tolist() == [5] * 4 and passed == [True] * len(passed)


def test_what_nobody_wants_is_not_returned():
    with torch.tpu.mode("defer"):
        x = torch.ones(1000, device="tpu")
        y = ((x + 1) * 2).sum()
        before = torch.tpu.memory_allocated()
        assert y.item() == 4000 and torch.tpu.memory_allocated() == before


def test_deferred_random_numbers_follow_the_seed():
    drawn = []
    for mode in ("strict", "defer"):
        with torch.tpu.mode(mode):
            torch.manual_seed(4)
            first = torch.rand(3, device="tpu"), torch.randn(2, device="tpu")
            torch.manual_seed(4)
            again = torch.rand(3, device="tpu")
            state = torch.tpu.get_rng_state()
            later = torch.rand(2, device="tpu")
            torch.tpu.set_rng_state(state)
            drawn.append([t.tolist() for t in (*first, again, later, torch.rand(2, device="tpu"))])
    assert drawn[0] == drawn[1] and drawn[1][0] == drawn[1][2] and drawn[1][3] == drawn[1][4]


def test_compiled_calls_and_fallbacks_end_a_sequence():
    double = torch.compile(lambda x: x * 2, backend="tpu", fullgraph=True)
    with torch.tpu.mode("defer"):
        x = torch.arange(6.0, device="tpu") + 1
        y = double(x)
        x.add_(10)
        assert y.tolist() == [2, 4, 6, 8, 10, 12] and x[x > 13].tolist() == [14, 15, 16]


def test_changing_the_mode_runs_what_was_put_off():
    torch.tpu.set_mode("defer")
    x = torch.ones(3, device="tpu") + 1
    torch.tpu.set_mode("strict")
    assert (x + 1).tolist() == [3] * 3 and torch.tpu.get_mode() == "strict"
    with pytest.raises(ConfigError, match="strict, debug, defer"):
        torch.tpu.set_mode("lazy")


def test_errors_of_shape_come_at_once():
    with torch.tpu.mode("defer"), pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2, device="tpu") + torch.ones(3, device="tpu")


# ---- debug

INDICES = {
    "index": (lambda x, i: x[i], IndexError, "out of bounds"),
    "embedding": (lambda x, i: torch.nn.functional.embedding(i, x), IndexError, "out of range"),
    "gather": (lambda x, i: x.gather(0, i[:, None]), RuntimeError, "out of bounds"),
    "index_select": (lambda x, i: x.index_select(0, i), IndexError, "out of range"),
    "cross_entropy": (lambda x, i: torch.nn.functional.cross_entropy(x, i.expand(3)), IndexError, "out of bounds"),
    "index_put": (lambda x, i: x.index_put_((i,), torch.tensor(0.0, device="tpu")), IndexError, "out of bounds"),
}


@pytest.mark.parametrize("name", INDICES)
def test_debug_finds_bad_indices_at_their_line(name):
    call, kind, message = INDICES[name]
    x, good, bad = torch.arange(12.0, device="tpu").view(3, 4), torch.tensor([2]), torch.tensor([7])
    with torch.tpu.mode("debug"):
        call(x, good.to("tpu"))
        with pytest.raises(kind, match=message) as caught:
            call(x, bad.to("tpu"))
    assert any("test_device_modes.py" in note for note in caught.value.__notes__)


def test_what_fails_in_debug_names_its_line():
    with torch.tpu.mode("debug"), pytest.raises(OutOfMemory) as caught:
        torch.ones(1, device="tpu").expand(1 << 21, 1 << 21) + 0
    assert any("aten.add.Tensor" in note and "test_device_modes.py" in note for note in caught.value.__notes__)


def test_debug_finds_new_nans_on_request():
    x = -torch.ones(3, device="tpu")
    with torch.tpu.mode("debug"):
        nan = x.log()
    with torch.tpu.mode("debug", nans=True):
        nan + 1  # not this op's fault
        with pytest.raises(FloatingPointError, match=r"log.default.*test_device_modes.py"):
            x.log()


def test_the_environment_chooses_the_mode(run_python):
    done = run_python(
        """
        import torch, tpu_compile
        x = torch.ones(3, device="tpu") + 1
        print(torch.tpu.get_mode(), tpu_compile.stats()["executions"], x.tolist())
        """,
        {"TPU_COMPILE_EAGER_MODE": "defer"},
    )
    assert done.stdout.strip() == "defer 0 [2.0, 2.0, 2.0]"


def test_a_process_ends_well_while_a_sequence_runs(run_python):
    done = run_python(
        """
        import torch
        w = torch.randn(600, 600, device="tpu", requires_grad=True)
        torch.tpu.set_mode("defer")
        x = w
        for _ in range(20):
            x = x @ w
        x.sum().backward()  # another thread: the forward pass begins to run
        """
    )
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("way", ["strict", "defer", "compiled"])
def test_out_of_memory_says_what_was_alive(way):
    gc.collect()  # the traceback of another test's error can hold that test's tensors
    held = torch.ones(1 << 20, device="tpu")

    def grow(x: torch.Tensor) -> torch.Tensor:
        return x.expand(1 << 20, 1 << 20) + 0

    call = torch.compile(grow, backend="tpu") if way == "compiled" else grow
    with torch.tpu.mode("defer" if way == "defer" else "strict"):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            call(held)[0, 0].item()
        assert isinstance(caught.value, OutOfMemory)
        said = "".join(caught.value.__notes__)
        assert "4,194,304 bytes in 1 x torch.float32[1048576]" in said and "1048576, 1048576" not in said
        assert (held[:2] * 2).tolist() == [2, 2]
