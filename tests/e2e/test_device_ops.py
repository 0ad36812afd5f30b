"""Eager ops on the `tpu` device: one aten call is one program, remembered; what nothing lowers runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import tpu_compile
from tpu_compile.errors import ConfigError, TpuCompileWarning, UnsupportedOp


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0) -> None:
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


def compiled_since(before: dict[str, float]) -> float:
    return tpu_compile.stats()["lowerings"] - before["lowerings"]


PROMOTIONS = {
    "int and float number": lambda t: t(torch.arange(3)) * 2.5,
    "int8 and int number": lambda t: t(torch.arange(3, dtype=torch.int8)) + 7,
    "bfloat16 and number": lambda t: t(torch.linspace(0, 1, 5, dtype=torch.bfloat16)) * 0.1 + 0.3,
    "bool and number": lambda t: t(torch.tensor([True, False])) + 1,
    "float and 0-dim double on the CPU": lambda t: t(torch.ones(3)) * torch.tensor(0.1, dtype=torch.float64),
    "0-dim float and double number": lambda t: t(torch.tensor(0.5)) * 0.1,
    "comparison with a number": lambda t: t(torch.linspace(0, 1, 5, dtype=torch.float16)) <= 0.25,
    "0-dim comparison": lambda t: t(torch.tensor(0.1, dtype=torch.float16)) == 0.1,
    "uint8 and negative number": lambda t: t(torch.tensor([255, 1], dtype=torch.uint8)) == -1,
    "complex number": lambda t: t(torch.ones(3)) * (1 + 2j),
    "true division": lambda t: t(torch.arange(5)) / 2,
    "floor division": lambda t: t(torch.arange(-4, 4)) // 3,
    "power": lambda t: t(torch.linspace(0, 2, 5)) ** 2.5,
    "int power": lambda t: 2 ** t(torch.arange(5)),
    "negative zero": lambda t: t(torch.ones(2)) * -0.0,
    "zero": lambda t: t(torch.ones(2)) * 0.0,
}


@pytest.mark.parametrize("name", PROMOTIONS)
def test_promotion_is_torchs(name):
    fn = PROMOTIONS[name]
    got, want = fn(lambda t: t.to("tpu")), fn(lambda t: t)
    same(got, want, 1e-3 if want.dtype in (torch.float16, torch.bfloat16) else 1e-6)
    assert want.is_complex() or torch.equal(torch.signbit(got.cpu()), torch.signbit(want))


def test_numbers_that_change_compile_nothing():
    t = torch.arange(4.0, device="tpu")
    ops = (
        lambda x, s: x * s,
        lambda x, s: x.add(x, alpha=s),
        lambda x, s: x.clone().add_(s),
        lambda x, s: torch.addcmul(x, x, x, value=s),
        lambda x, s: torch.addcdiv(x, x, x + 1, value=s),
        lambda x, s: torch.lerp(x, x + 1, s),
        lambda x, s: x.clamp(-s, s),
        lambda x, s: x.clone().fill_(s),
        lambda x, s: torch.full((3,), s, device=x.device),
        lambda x, s: x > s,
        lambda x, s: torch._foreach_mul([x, x + 1], s)[1],
        lambda x, s: torch._foreach_add([x, x], [s, 2 * s])[1],
        lambda x, s: x + int(10 * s),
    )
    for op in ops:
        op(t, 0.5)
    before = tpu_compile.stats()
    for s in (0.75, -3.0, 1.0, 0.0, float("inf")):
        for op in ops if abs(s) < 100 else ops[:-1]:
            same(op(t, s), op(t.cpu(), s), 1e-6)
    assert compiled_since(before) == 0


def test_a_repeat_executes_and_does_nothing_else():
    a, b = torch.ones(3, device="tpu"), torch.ones(3, device="tpu")
    a + b
    before = tpu_compile.stats()
    a + b
    changed = {k: v - before[k] for k, v in tpu_compile.stats().items() if v != before[k]}
    assert changed == {"executions": 1}


def test_a_program_compiled_for_a_model_is_found_again_on_disk(run_python):
    program = """
        import torch, tpu_compile
        x = torch.ones(3, device="tpu")
        print((x.sin() + 1).sum().item())
        print("compiles", tpu_compile.stats()["xla_compiles"])
    """
    first, second = run_python(program), run_python(program)
    assert "compiles 0" not in first.stdout and "compiles 0" in second.stdout


def test_in_place_and_out_variants():
    want = torch.arange(6.0).view(2, 3)
    t = want.to("tpu")
    for x in (want, t):
        x.mul_(2).add_(1).clamp_(max=9)
        torch.sub(x, 1, out=x)
        x[0].copy_(x[1])
        x.t().mul_(2)
        torch.sort(x, out=(x, torch.empty(2, 3, dtype=torch.int64, device=x.device)))
    same(t, want)


def test_indexing():
    want, i = torch.arange(12.0).reshape(3, 4), torch.tensor([2, 0])
    t = want.to("tpu")
    same(t[i.to("tpu")], want[i])
    same(t[i], want[i])  # torch takes indices on the CPU
    same(t[:, i], want[:, i])
    same(t[t > 5], want[want > 5])
    for x in (want, t):
        x[x > 9] = 0
        x[i.to(x.device)] += 1
        x.index_add_(0, i.to(x.device), torch.ones(2, 4, device=x.device))
        x.scatter_(1, torch.tensor([[0], [1], [2]], device=x.device), 5.0)
        x[1:, ::2] = 7
    same(t, want)
    same(t.nonzero(), want.nonzero())


MASK = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, False]])
COUNTS = torch.tensor([2, 0, 1, 2])
SIZED = {
    "nonzero": lambda t: t(MASK).nonzero(),
    "nonzero of many": lambda t: (t(torch.arange(100)) % 3).nonzero(),
    "masked_select": lambda t: t(torch.arange(4.0)).masked_select(t(MASK)),
    "a mask": lambda t: t(torch.arange(12.0).view(3, 4))[t(MASK)],
    "a mask of rows": lambda t: t(torch.arange(200.0).view(100, 2))[t(torch.arange(100) % 3 == 1)],
    "a mask of columns": lambda t: t(torch.arange(12.0).view(3, 4))[:, t(MASK[0])],
    "a mask beside an index": lambda t: t(torch.arange(12.0).view(3, 4))[t(COUNTS[:3]), t(MASK[2])],
    "unique": lambda t: torch.unique(t(COUNTS), return_inverse=True, return_counts=True),
    "unique rows": lambda t: torch.unique(t(MASK.T), dim=0, return_inverse=True, return_counts=True),
    "unique columns": lambda t: torch.unique(t(COUNTS[None].repeat(2, 1)), dim=1),
    "unique_consecutive": lambda t: torch.unique_consecutive(t(COUNTS // 2), return_inverse=True, return_counts=True),
    "unique NaNs": lambda t: torch.unique(t(torch.tensor([torch.nan, 1, torch.nan, 1]))),
    "bincount": lambda t: torch.bincount(t(COUNTS), minlength=5),
    "bincount with weights": lambda t: torch.bincount(t(COUNTS), t(torch.linspace(0, 1, 4))),
    "repeat_interleave": lambda t: torch.repeat_interleave(t(torch.arange(4.0)), t(COUNTS)),
    "tensor_split": lambda t: torch.tensor_split(t(torch.arange(8.0)), t(COUNTS[2:])),
    "nothing": lambda t: t(torch.ones(3))[t(torch.zeros(3, dtype=torch.bool))],
}


@pytest.mark.parametrize("name", SIZED)
def test_results_whose_size_depends_on_values(name):
    """The host reads the size, and nothing else leaves the device."""
    got, want = SIZED[name](lambda t: t.to("tpu")), SIZED[name](lambda t: t)
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    for g, w in pairs:
        same(g, w)
    assert tpu_compile.stats()["fallback_ops"] == 0


def test_masks_of_similar_counts_share_a_program():
    x, positions = torch.arange(1000.0, device="tpu"), torch.arange(1000, device="tpu")
    x[positions < 900]
    before = tpu_compile.stats()
    for count in (910, 950, 990):
        same(x[positions < count], torch.arange(float(count)))
    assert compiled_since(before) == 0


def test_a_mask_of_truths_where_keys_are_shared():
    torch.manual_seed(0)
    q, k, allowed = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, allowed)
    got = torch.nn.functional.scaled_dot_product_attention(*(t.to("tpu") for t in (q, k, k, allowed)))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_errors_are_torchs_own():
    calls = {
        "shapes": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        "broadcast": lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
        "view": lambda d: torch.ones(2, device=d).view(3),
        "cat": lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
        "cast": lambda d: torch.ones(2, device=d, dtype=torch.long).add_(1.5),
        "leaf": lambda d: torch.ones(3, device=d, requires_grad=True).add_(1),
        "target": lambda d: torch.nn.functional.cross_entropy(torch.ones(2, 3, device=d), torch.ones(3, device=d)),
    }
    for name, call in calls.items():
        said = []
        for device in ("cpu", "tpu"):
            with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
                call(device)
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1], name


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device, .*tpu:0 and cpu"):
        torch.ones(2, device="tpu") + torch.ones(2)
    with pytest.raises(RuntimeError, match="argument for argument mat2"):
        torch.ones(2, 2, device="tpu").mm(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"argument for argument tensors in method aten\.cat"):
        torch.cat([torch.ones(2, device="tpu"), torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device"):
        torch.ones(2)[torch.tensor([0], device="tpu")]


def test_other_layouts_are_an_error_that_says_what_to_do():
    embedding = torch.nn.Embedding(4, 2, sparse=True).to("tpu")
    for make in (
        lambda: torch.eye(2).to_sparse().to("tpu"),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), device="tpu"),
        lambda: embedding(torch.tensor([1], device="tpu")).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match="dense tensors only"):
            make()


def test_one_device_a_process():
    for make in (
        lambda: torch.ones(2, device="tpu:1"),
        lambda: torch.empty(2, device="tpu:1"),
        lambda: torch.ones(2).to("tpu:1"),
        lambda: torch.tpu.set_device(1),
    ):
        with pytest.raises(RuntimeError, match="one tpu device"):
            make()


# ---- what nothing lowers


@pytest.fixture(scope="module")  # torch keeps handles of operators: a second definition would meet the first one's
def library() -> Iterator[torch.library.Library]:
    """A library with operators that have a CPU kernel only."""
    with torch.library._scoped_library("test_device", "DEF") as made:
        made.define("thrice(Tensor x) -> Tensor")
        made.impl("thrice", lambda x: x * 3, "CPU")
        made.define("bump(Tensor(a!) x, Tensor(b!)[] more) -> Tensor(a!)")
        made.impl("bump", lambda x, more: [t.add_(1) for t in (*more, x)][-1], "CPU")
        yield made


def test_a_fallback_is_right_counted_and_told_once(library):
    x, before = torch.ones(3, device="tpu"), tpu_compile.stats()["fallback_ops"]
    with pytest.warns(TpuCompileWarning, match=r"thrice(.*\n)*.*test_device_ops.py"):
        same(torch.ops.test_device.thrice(x), torch.full((3,), 3.0))
    same(torch.ops.test_device.thrice(x), torch.full((3,), 3.0))
    assert tpu_compile.stats()["fallback_ops"] == before + 2


def test_a_fallback_writes_where_the_op_writes(library):
    base, other = torch.zeros(2, 3, device="tpu"), torch.ones(2, device="tpu")
    view = base[1]
    with pytest.warns(TpuCompileWarning, match="bump"):
        assert torch.ops.test_device.bump(view, [other]) is view
    same(base, torch.tensor([[0.0, 0, 0], [1, 1, 1]]))
    same(other, torch.full((2,), 2.0))


def test_a_fallback_can_be_forbidden(library):
    with tpu_compile.override(fallback="error"), pytest.raises(UnsupportedOp, match="thrice"):
        torch.ops.test_device.thrice(torch.ones(3, device="tpu"))
    with pytest.raises(ConfigError, match="warn, error"), tpu_compile.override(fallback="sometimes"):
        pass


def test_operators_of_other_libraries_run_as_what_they_are_made_of(library):
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    same(torch.ops.test_device.twice(torch.ones(3, device="tpu")), torch.full((3,), 2.0))


# ---- random numbers


def test_seeds_and_states():
    torch.manual_seed(1)
    first = torch.rand(3, device="tpu")
    torch.manual_seed(1)
    same(torch.rand(3, device="tpu"), first.cpu())
    state = torch.tpu.get_rng_state()
    drawn = torch.randn(3, device="tpu").cpu()
    assert not torch.equal(drawn, torch.randn(3, device="tpu").cpu())
    torch.tpu.set_rng_state(state)
    same(torch.randn(3, device="tpu"), drawn)
    with torch.random.fork_rng(device_type="tpu"):
        inside = torch.rand(3, device="tpu").cpu()
    same(torch.rand(3, device="tpu"), inside)
    with pytest.raises(ValueError, match="no state of the tpu generator"):
        torch.tpu.set_rng_state(torch.get_rng_state())


def test_drawing_on_the_device_leaves_the_cpus_generator_alone():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(5, device="tpu")
    assert torch.equal(torch.rand(2), want)


def test_generators():
    cpu = torch.Generator().manual_seed(5)
    first = torch.rand(3, device="tpu", generator=cpu).cpu()
    cpu.manual_seed(5)
    same(torch.rand(3, device="tpu", generator=cpu), first)
    torch.tpu.manual_seed(5)
    plain = torch.rand(3, device="tpu").cpu()
    torch.tpu.manual_seed_all(5)
    same(torch.rand(3, device="tpu", generator=torch.tpu.default_generator), plain)
    torch.tpu.manual_seed(6)
    assert not torch.equal(torch.empty(3, device="tpu").uniform_().cpu(), plain)


def test_eager_and_compiled_draw_the_same():
    def draw() -> tuple[torch.Tensor, ...]:
        x = torch.ones(4, device="tpu")
        return torch.rand(4, device="tpu"), torch.nn.functional.dropout(x), torch.randint(0, 9, (5,), device="tpu")

    torch.manual_seed(0)
    eager = draw()
    torch.manual_seed(0)
    for got, want in zip(torch.compile(draw, backend="tpu", fullgraph=True)(), eager, strict=True):
        same(got, want.cpu())


# ---- looking at tensors


def test_printing_and_reading():
    t = torch.arange(6.0, device="tpu").reshape(2, 3)
    assert repr(t) == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='tpu:0')"
    assert f"{torch.tensor(1.5, device='tpu'):.2f}" == "1.50" and "device='tpu:0'" in repr(torch.empty(0, device="tpu"))
    assert t.tolist() == [[0, 1, 2], [3, 4, 5]] and float(t[1, 2]) == 5 and bool(t[0, 1]) and len(list(t)) == 2
    with pytest.raises(TypeError, match="can't convert tpu:0 device type tensor to numpy"):
        t.numpy()
    assert torch.equal(t, t.clone()) and torch.allclose(t, t + 1e-9) and not torch.equal(t, t + 1)
    torch.testing.assert_close(t, t.clone())


def _ctc(device: str, targets: torch.Tensor, inputs: list[int], labels: list[int], zero: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    scores = torch.randn(12, 4, 7).to(device).requires_grad_()
    loss = F.ctc_loss(scores.log_softmax(-1), targets.to(device), inputs, labels, reduction="none", zero_infinity=zero)
    loss.sum().backward()
    assert scores.grad is not None
    return [loss.detach().cpu(), scores.grad.cpu()]


TARGETS = torch.tensor([[1, 2, 2, 3, 4], [5, 6, 1, 0, 0], [3, 3, 3, 3, 3], [2, 1, 0, 0, 0]])
CTC = {
    "padded": (TARGETS, [12, 10, 12, 3], [5, 3, 5, 2], False),
    "no target": (TARGETS, [12, 1, 9, 3], [5, 0, 5, 2], False),
    "no input": (TARGETS, [12, 0, 9, 0], [5, 0, 5, 2], True),
    "impossible": (TARGETS, [12, 10, 8, 1], [5, 3, 5, 2], False),
    "impossible, no infinity": (TARGETS, [12, 10, 8, 1], [5, 3, 5, 2], True),
    "one after the other": (
        torch.cat([TARGETS[0], TARGETS[1, :3], TARGETS[3, :2]]),
        [12, 10, 7, 3],
        [5, 3, 0, 2],
        False,
    ),
}


@pytest.mark.parametrize("name", CTC)
def test_ctc_is_the_cpus(name):
    """Losses and gradients, also where torch gives infinity and NaN."""
    tpu_compile.reset_stats()
    for got, want in zip(_ctc("tpu", *CTC[name]), _ctc("cpu", *CTC[name]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert tpu_compile.stats()["fallback_ops"] == 0


def test_ctc_of_other_lengths_compiles_nothing():
    _ctc("tpu", TARGETS, [12, 10, 12, 3], [5, 3, 5, 2], False)
    before = tpu_compile.stats()
    _ctc("tpu", TARGETS, [11, 4, 12, 6], [2, 3, 4, 1], False)
    assert compiled_since(before) == 0
    with pytest.raises(RuntimeError, match="Expected input_lengths to have value at most 12"):
        _ctc("tpu", TARGETS, [13, 4, 12, 6], [2, 3, 4, 1], False)


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
def test_least_squares_are_the_cpus(driver):
    """All four results, for full rank and, where the driver looks at it, for less; and gradients."""
    torch.manual_seed(0)
    full, b = torch.randn(6, 3), torch.randn(6, 2)
    low = torch.cat([full[:, :2], full[:, :1]], 1)
    tpu_compile.reset_stats()
    for a in (full, full[:2]) if driver == "gels" else (full, full[:2], low):
        want = torch.linalg.lstsq(a, b[: len(a)], driver=driver)
        got = torch.linalg.lstsq(a.to("tpu"), b[: len(a)].to("tpu"), driver=driver)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4)
    grads = []
    for device in ("cpu", "tpu"):
        a = full.to(device).detach().requires_grad_()
        torch.linalg.lstsq(a, b.to(device), driver=driver).solution.square().sum().backward()
        grads.append(a.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)
    assert tpu_compile.stats()["fallback_ops"] == 0
    with pytest.raises(RuntimeError, match=r"input.size\(-2\) should match other.size\(-2\)"):
        torch.linalg.lstsq(full.to("tpu"), b[:3].to("tpu"), driver=driver)
