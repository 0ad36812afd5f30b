"""Restarts: a second process traces, lowers and compiles nothing, and computes the same. What cannot be kept is not."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import tpu_compile
from tpu_compile.cache import CacheStore, open_store
from tpu_compile.cache.store import tracing_store
from tpu_compile.errors import TpuCompileWarning
from tpu_compile.warm import autograd

HEAD = """
import json, torch, tpu_compile
torch.manual_seed(0)
def say(*results):
    flat = [t.detach().double().sum().item() if isinstance(t, torch.Tensor) else t for t in results]
    print(json.dumps([tpu_compile.stats(), flat]))
"""

PROGRAMS = {
    "inference": """
        m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        x = torch.randn(3, 8)
        with torch.no_grad():
            y = torch.compile(m, backend="tpu", fullgraph=True)(x)
        torch.testing.assert_close(y, m(x))
        say(y)
        """,
    "training": """
        m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        x = torch.randn(3, 8)
        loss = torch.compile(m, backend="tpu", fullgraph=True)(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        got = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        (2 * m(x).pow(2).sum()).backward()
        for g, p in zip(got, m.parameters()):
            torch.testing.assert_close(g, p.grad)
        say(loss, *got)
        """,
    "dropout": """
        m = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5)).train()
        x = torch.randn(3, 8)
        c = torch.compile(m, backend="tpu", fullgraph=True)
        first, second = c(x), c(x)
        assert not first.equal(second) and 0.2 < (first == 0).float().mean() < 0.8
        first.sum().backward()
        torch.testing.assert_close(m[0].bias.grad, 2.0 * (first != 0).sum(0))
        say(first, second, m[0].bias.grad)
        """,
    "batch norm": """
        m = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).train()
        x = torch.randn(4, 2, 8, 8)
        y = torch.compile(m, backend="tpu", fullgraph=True)(x)
        y.pow(2).sum().backward()
        assert m[1].num_batches_tracked == 1 and m[1].running_mean.abs().sum() > 0
        say(y, m[1].running_mean, m[1].running_var, m[0].bias)
        """,
    "dynamic shapes": """
        c = torch.compile(lambda x, w: torch.relu(x @ w).sum(0), backend="tpu", fullgraph=True, dynamic=True)
        w = torch.randn(8, 4)
        results = []
        for n in (3, 5, 3, 6):
            x = torch.randn(n, 8)
            results.append(c(x, w))
            torch.testing.assert_close(results[-1], torch.relu(x @ w).sum(0))
        say(*results)
        """,
    "dynamic training": """
        m = torch.nn.Linear(8, 4)
        c = torch.compile(m, backend="tpu", fullgraph=True, dynamic=True)
        results = []
        for n in (3, 5, 3):
            m.zero_grad()
            x = torch.randn(n, 8)
            c(x).pow(2).sum().backward()
            got = m.weight.grad.clone()
            m.zero_grad()
            m(x).pow(2).sum().backward()
            torch.testing.assert_close(got, m.weight.grad)
            results.append(got)
        say(*results)
        """,
    "graph break": """
        def f(x):
            y = torch.sin(x) * 2
            torch._dynamo.graph_break()
            return torch.cos(y) + 1
        x = torch.randn(5)
        y = torch.compile(f, backend="tpu")(x)
        torch.testing.assert_close(y, f(x))
        say(y)
        """,
    "mutation": """
        def f(x, y):
            x.mul_(2).add_(y)
            return x.t(), x.sum(0), None, 3
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        want = x.clone()
        expected = f(want, y)
        got = torch.compile(f, backend="tpu", fullgraph=True)(x, y)
        torch.testing.assert_close(x, want)
        for g, w in zip(got, expected):
            assert g == w if not isinstance(g, torch.Tensor) else torch.allclose(g, w)
        assert got[0]._base is x or got[0].data_ptr() == x.data_ptr()
        say(x, got[1])
        """,
    "views of symbolic sizes": """
        def f(x):
            y = x * 2
            return y, y.t()[1:], y.view(-1), x.t()
        c = torch.compile(f, backend="tpu", fullgraph=True, dynamic=True)
        results = []
        for n in (3, 5, 3):
            x = torch.randn(n, 4)
            got = c(x)
            for g, w in zip(got, f(x)):
                torch.testing.assert_close(g, w)
                assert g.stride() == w.stride()
            assert got[3].data_ptr() == x.data_ptr() and got[1]._base is not None
            results.append(got[1])
        say(*results)
        """,
    "a custom autograd function": """
        class Clamped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sin()
            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * x.cos() * 7
        x = torch.randn(5, requires_grad=True)
        torch.compile(lambda x: Clamped.apply(x * 2), backend="tpu", fullgraph=True)(x).sum().backward()
        torch.testing.assert_close(x.grad, 14 * (2 * x.detach()).cos())
        say(x.grad)
        """,
    "random numbers in a branch of sizes": """
        c = torch.compile(lambda x: torch.rand_like(x) + torch.randint(0, 9, (x.shape[0],))[:, None],
                          backend="tpu", fullgraph=True, dynamic=True)
        results = [c(torch.zeros(n, 3)) for n in (4, 2, 4)]
        assert not results[0].equal(results[2])
        say(*results)
        """,
    "constants": """
        small, large = torch.arange(6.0), torch.arange(6000.0).reshape(1000, 6)
        class M(torch.nn.Module):
            def forward(self, x):
                return x * torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.arange(6.0), torch.full((1000, 6), 2.5).sum(0)
        x = torch.randn(2, 6)
        got = torch.compile(M(), backend="tpu", fullgraph=True)(x)
        for g, w in zip(got, M()(x)):
            torch.testing.assert_close(g, w)
        say(*got)
        """,
}


ALL = "\n".join(
    f"def program_{number}():\n{textwrap.indent(textwrap.dedent(text), '    ')}"
    for number, text in enumerate(PROGRAMS.values())
)
RUN = """
for number in range(%d):
    torch.manual_seed(0)
    torch._dynamo.reset()
    tpu_compile.reset_stats()
    globals()[f"program_{number}"]()
"""


def test_a_second_process_traces_lowers_and_compiles_nothing(run_python: Any) -> None:
    source = HEAD + ALL + RUN % len(PROGRAMS)
    first, second = (dict(zip(PROGRAMS, _said(run_python(source).stdout), strict=True)) for _ in range(2))
    for name in PROGRAMS:
        (before, results), (after, again) = first[name], second[name]
        assert before["tracing_puts"] >= 1 and before["lowerings"] >= 1 and before["xla_compiles"] >= 1, name
        assert (after["lowerings"], after["xla_compiles"], after["tracing_misses"]) == (0, 0, 0), (name, after)
        assert after["tracing_hits"] == before["tracing_misses"] and after["tracing_bypasses"] == 0, name
        assert again == results, f"{name}: the same seed gives the same numbers"


def _said(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def compute(f: Any, *arguments: Any, **options: Any) -> dict[str, float]:
    """One compiled call as in a fresh process, checked; what it took."""
    from tpu_compile.compiler import runtime

    torch._dynamo.reset()
    runtime.forget()
    tpu_compile.reset_stats()
    torch.testing.assert_close(torch.compile(f, backend="tpu", **options)(*arguments), f(*arguments))
    return tpu_compile.stats()


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3 + 1


def store() -> CacheStore:
    found = open_store()
    assert found is not None
    return tracing_store(found)


def test_off_means_off(cache_dir: Path) -> None:
    with tpu_compile.override(cache=False):
        done = compute(f, torch.randn(4))
    assert not cache_dir.exists()
    assert not any(done[f"tracing_{what}"] for what in ("hits", "misses", "puts", "bypasses"))
    assert torch._functorch.config.bundled_autograd_cache is False


def test_torchs_own_cache_sees_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert compute(f, torch.randn(4))["tracing_puts"] == 1
    assert not [path for path in (tmp_path / "inductor").rglob("*") if path.is_file()]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_another_option_knob_precision_or_source_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    assert compute(f, x)["tracing_puts"] == 1
    assert compute(f, x)["tracing_hits"] == 1
    assert compute(f, x, options={"optimization_level": 0})["tracing_misses"] == 1
    assert compute(f, x, options={"excess_precision": True})["tracing_misses"] == 1
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert compute(f, x)["tracing_misses"] == 1
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(autograd.sources, "digest", lambda: "another release")
    assert compute(f, x)["tracing_misses"] == 1


def test_a_source_file_that_changed_meanwhile_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd.sources, "unchanged", lambda: False)
    done = compute(f, torch.randn(4))
    assert (done["tracing_puts"], done["lowering_puts"], done["disk_puts"]) == (0, 0, 1)


def test_damage_costs_a_trace_and_nothing_else() -> None:
    from tpu_compile.cache.faults import forget_warnings
    from tpu_compile.errors import CacheWarning

    x = torch.randn(4)
    assert compute(f, x)["tracing_puts"] == 1
    (info,) = store().entries(of="trace")
    data = bytearray(info.path.read_bytes())
    data[-9] ^= 1
    info.path.write_bytes(data)
    forget_warnings()
    with pytest.warns(CacheWarning):
        again = compute(f, x)
    assert (again["tracing_misses"], again["lowerings"], again["lowering_hits"], again["tracing_puts"]) == (1, 0, 1, 1)
    assert compute(f, x)["tracing_hits"] == 1, "it is repaired"


def test_what_was_pickled_is_neither_exported_nor_shared(tmp_path: Path) -> None:
    import tarfile

    from tpu_compile.cache.archive import export_archive

    compute(f, torch.randn(4))
    main = open_store()
    assert main is not None and [info.kind for info in main.entries(of="")].count("program") == 1
    assert len(list(store().entries(of="trace"))) == 1 and store().folder.root == main.folder.root / "tracing"
    assert store().folder.entries.stat().st_mode & 0o777 == 0o700
    export_archive(main, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as archive:
        names = archive.getnames()
    digests = {info.header.digest for info in store().entries(of="trace")}
    assert len(names) == 2 and not any(digest in name for digest in digests for name in names)
    with tpu_compile.override(cache_remote="memory://warm", cache_remote_write=True):
        other = open_store()
        assert other is not None and other.remote is not None and tracing_store(other).remote is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own doing
def test_another_backward_of_the_users_is_another_key() -> None:
    x = torch.randn(4, requires_grad=True)
    for factor, expected in ((7.0, "misses"), (8.0, "misses"), (7.0, "hits")):

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * factor  # noqa: B023

        torch._dynamo.reset()
        tpu_compile.reset_stats()
        x.grad = None
        torch.compile(lambda x: Scaled.apply(x), backend="tpu", fullgraph=True)(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [factor] * 4
        assert tpu_compile.stats()[f"tracing_{expected}"] == 1


def test_with_a_key_nothing_is_unpickled_that_is_not_signed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_compile.cache.faults import forget_warnings
    from tpu_compile.errors import CacheWarning

    x = torch.randn(4)
    compute(f, x)
    monkeypatch.setattr(autograd.pickle, "loads", lambda data: pytest.fail("it was unpickled"))
    forget_warnings()
    with tpu_compile.override(cache_key="a secret"), pytest.warns(CacheWarning, match="not signed"):
        assert compute(f, x)["tracing_misses"] == 1


def test_an_entry_that_others_may_write_to_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_compile.cache.faults import forget_warnings
    from tpu_compile.errors import CacheWarning

    x = torch.randn(4)
    compute(f, x)
    (info,) = store().entries(of="trace")
    info.path.chmod(0o666)
    store().folder.entries.chmod(0o755)
    monkeypatch.setattr(autograd.pickle, "loads", lambda data: pytest.fail("it was unpickled"))
    forget_warnings()
    with pytest.warns(CacheWarning):
        assert compute(f, x)["tracing_misses"] == 1


# ---- what is not kept


def test_ops_that_run_on_the_cpu_are_traced_anew() -> None:
    def unsupported(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(torch.sin(x) > 0) * 2

    for _ in range(2):
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TpuCompileWarning)
                done = compute(unsupported, torch.tensor([1.0, -1.0, 2.0]))
        assert done["tracing_hits"] == done["tracing_puts"] == 0


def test_an_operator_of_another_package_is_traced_anew() -> None:
    library = torch.library.Library("warm_tracing", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    try:
        for _ in range(2):
            done = compute(lambda x: torch.ops.warm_tracing.twice(x), torch.randn(4))
            assert (done["tracing_bypasses"], done["tracing_hits"], done["tracing_puts"]) == (1, 0, 0)
    finally:
        library._destroy()


def test_a_users_rule_bypasses_and_its_presence_is_part_of_the_key() -> None:
    from jaxlib.mlir.dialects import stablehlo

    from tpu_compile.lowering.registry import registry

    op, x = torch.ops.aten.sinh.default, torch.randn(4)
    ours = registry.get(op)
    assert ours is not None
    assert compute(torch.sinh, x)["tracing_puts"] == 1

    def theirs(ctx: Any, x: Any) -> Any:
        return stablehlo.add(x, x)

    registry.register(op, theirs, replace=True)
    try:
        torch._dynamo.reset()
        tpu_compile.reset_stats()
        got = torch.compile(torch.sinh, backend="tpu")(x)
        torch.testing.assert_close(got, 2 * x, msg="the user's rule was not asked")
        done = tpu_compile.stats()
        assert done["lowerings"] == 1
        assert not any(done[c] for c in ("tracing_hits", "tracing_puts", "lowering_hits", "lowering_puts"))
        assert compute(f, x)["tracing_puts"] == 1, "graphs that do not touch it are kept"
    finally:
        registry.register(op, ours.function, ours.tier, replace=True)


def test_arguments_that_share_memory_are_traced_anew() -> None:
    base = torch.randn(8)
    done = compute(lambda a, b: a + 2 * b, base[:4], base[4:])
    assert done["tracing_bypasses"] == 1 and done["tracing_puts"] == 0


def test_somebody_who_looks_sees_todays_graph(tmp_path: Path) -> None:
    from tpu_compile.compiler import record

    x = torch.randn(4)
    compute(f, x)
    with record() as seen:
        done = compute(f, x)
    assert len(seen.lowerings) == 1 and done["lowerings"] == 1 and done["tracing_hits"] == 0
    with tpu_compile.override(dump_to=str(tmp_path)):
        assert compute(f, x)["lowerings"] == 1
    assert list(tmp_path.glob("*.fx.py"))


# ---- backwards that are made ahead


def test_a_backward_that_is_never_called_is_lowered_and_not_compiled() -> None:
    x = torch.randn(4, requires_grad=True)
    done = compute(lambda x: torch.sin(x) * 3, x)
    assert (done["lowerings"], done["xla_compiles"]) == (2, 1)


def test_a_backward_that_cannot_be_lowered_fails_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_compile.lowering import fx

    true_missing = fx.missing

    def missing(graph_module: Any) -> Any:
        names = [str(n.target) for n in graph_module.graph.nodes]
        if "aten.cos.default" in names:  # the gradient of sin
            node = next(n for n in graph_module.graph.nodes if str(n.target) == "aten.cos.default")
            return [(node, tpu_compile.errors.Gap("aten.cos.default", "no rule lowers it", ""))]
        return true_missing(graph_module)

    monkeypatch.setattr(fx, "missing", missing)
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(torch.sin, backend="tpu", fullgraph=True)(x)
    torch.testing.assert_close(y, torch.sin(x))
    with pytest.raises(tpu_compile.UnsupportedOp, match=r"aten\.cos"):
        y.sum().backward()
    assert tpu_compile.stats()["tracing_puts"] == 0


def test_executables_that_were_evicted_are_compiled_from_what_was_kept() -> None:
    x = torch.randn(4)
    compute(f, x)
    main = open_store()
    assert main is not None
    main.clear()
    done = compute(f, x)
    assert (done["tracing_hits"], done["lowerings"], done["xla_compiles"]) == (1, 0, 1)


# ---- what torch does not promise


def test_torch_asks_the_functions_that_are_ours_for_a_while() -> None:
    """The private names that ``warm.autograd`` exchanges: torch must look them up where they are exchanged."""
    import inspect

    from torch._functorch._aot_autograd import autograd_cache

    load = inspect.getsource(autograd_cache.AOTAutogradCache.try_load)
    assert "autograd_cache_key(\n" in load and "AOTAutogradCache._lookup(" in load
    assert "find_guarded_entry" in inspect.getsource(autograd_cache.AOTAutogradCache._lookup)
    assert "cls.iterate_over_candidates(" in inspect.getsource(autograd_cache.AOTAutogradCache.find_guarded_entry)
    assert "AOTAutogradCache._write_to_local_cache(key, content)" in inspect.getsource(
        autograd_cache.AOTAutogradCache.save
    )
    details = inspect.getsource(autograd_cache.AOTAutogradCacheDetails.__init__)
    assert "self._init_fx_graph_hash_details(gm, example_inputs, fx_config)" in details
    compute(f, torch.randn(4))
    assert autograd_cache.autograd_cache_key is autograd._true_key
    assert "iterate_over_candidates" not in vars(autograd_cache.AOTAutogradCache)
