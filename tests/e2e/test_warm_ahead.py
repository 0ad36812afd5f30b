"""``tpu_compile.aot``: a new process goes from import to its first result without Dynamo; a broken guard is named."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tpu_compile
from tpu_compile.cache import open_store
from tpu_compile.cache.store import tracing_store
from tpu_compile.errors import TpuCompileWarning
from tpu_compile.warm.ahead import aot

PROGRAM = """
import json, sys, torch, tpu_compile
from torch._dynamo.utils import counters
from tpu_compile.warm.ahead import aot
torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return {"y": self.inner(x) * scale, "n": [x.shape[0]]}

m, x = Model().eval(), torch.randn(3, 8)
with torch.no_grad():
    f = aot(m, (x,), {"scale": 2.0})
    got, want = f(x, scale=2.0), Model.forward(m, x, scale=2.0)
torch.testing.assert_close(got, want)
assert m.calls == 2 and not f.why_not

t = Model().train()
g = aot(t, (x,))
got = g(x)["y"]
got.sum().backward()
assert (t.inner[0].weight.grad.abs().sum() > 0) and not got.equal(g(x)["y"]), "dropout draws anew"

small, large = torch.randn(3, 4), torch.randn(7, 4)
def rows(x):
    return torch.softmax(x, 0).sum(1), x.shape[0]
h = aot(rows, (small,), dynamic=True)
for given in (small, large):
    torch.testing.assert_close(h(given), rows(given))
print(json.dumps([tpu_compile.stats(), [f.found, g.found, h.found], counters["stats"]["calls_captured"]]))
"""


def said(done: Any) -> Any:
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_starts_without_dynamo(run_python: Any) -> None:
    first, found, captured = said(run_python(PROGRAM))
    assert found == [False] * 3 and captured and first["tracing_puts"] == 3 and first["lowerings"] >= 4
    second, found, captured = said(run_python(PROGRAM))
    assert found == [True] * 3 and not captured
    assert (second["lowerings"], second["xla_compiles"], second["tracing_hits"]) == (0, 0, 3), second


def test_a_move_a_comment_and_a_docstring_do_not_matter_and_code_does(run_python: Any, tmp_path: Path) -> None:
    library = tmp_path / "library.py"
    program = """
        import json, sys, torch
        from tpu_compile.warm.ahead import aot
        import library
        f = aot(library.twice, (torch.ones(3),))
        print(json.dumps([f.found, f(torch.ones(3)).tolist()]))
        """

    def run(text: str) -> Any:
        library.write_text(text)
        return said(run_python(program))

    assert run("def helper(x):\n    return x * 2\ndef twice(x):\n    return helper(x)\n") == [False, [2.0] * 3]
    commented = "# new\n\n\ndef helper(x):\n    'Says.'\n    return x * 2  # so\ndef twice(x):\n    return helper(x)\n"
    assert run(commented) == [True, [2.0] * 3]
    assert run(commented.replace("x * 2", "x * 3")) == [False, [3.0] * 3]


# ---- guards


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = torch.nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.factor * FACTOR


FACTOR = 1.0


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def agree(f: Callable[..., Any], model: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(f(*args), model(*args))


def anew() -> None:
    """As if the process were new."""
    from tpu_compile.compiler import runtime

    torch._dynamo.reset()
    runtime.forget()
    tpu_compile.reset_stats()


def test_a_call_that_breaks_a_guard_is_compiled_and_says_which_once(net: Net) -> None:
    f = aot(net, (torch.randn(2, 4),))
    agree(f, net, torch.randn(2, 4))
    with pytest.warns(TpuCompileWarning, match=r"Net .* is compiled anew: .*size mismatch at index 0") as told:
        agree(f, net, torch.randn(3, 4))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(f, net, torch.randn(5, 4))
        before = tpu_compile.stats()["lowerings"]
        agree(f, net, torch.randn(2, 4))
    assert tpu_compile.stats()["lowerings"] == before, "what was compiled ahead still serves its own calls"


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        (lambda net: setattr(net, "factor", 3.0), "factor"),
        (lambda net: net.linear.requires_grad_(False), "requires_grad"),
        (lambda net: setattr(net, "linear", torch.nn.Sequential(net.linear, torch.nn.Tanh())), "linear"),
        (lambda net: net.register_forward_hook(lambda module, args, out: out + 1), "hooks"),
        (lambda net: globals().__setitem__("FACTOR", 5.0), "FACTOR"),
    ],
    ids=["attribute", "requires_grad", "submodule", "hook", "global"],
)
def test_what_changes_later_is_noticed(net: Net, change: Callable[[Net], Any], guard: str) -> None:
    x = torch.randn(2, 4)
    f = aot(net, (x,))
    agree(f, net, x)
    try:
        change(net)
        with pytest.warns(TpuCompileWarning, match=guard):
            agree(f, net, x)
    finally:
        globals()["FACTOR"] = 1.0


def test_modes_are_guarded(net: Net) -> None:
    x = torch.randn(2, 4)
    with torch.no_grad():
        f = aot(net, (x,))
        assert not f(x).requires_grad
    with pytest.warns(TpuCompileWarning, match="grad_mode"):
        assert f(x).requires_grad


def test_a_stored_guard_that_breaks_is_named_and_replaced(net: Net) -> None:
    x = torch.randn(2, 4)
    aot(net, (x,))
    net.factor = 7.0
    anew()
    with pytest.warns(TpuCompileWarning, match=r"Net is compiled anew, since a guard .*factor"):
        f = aot(net, (x,))
    agree(f, net, x)
    anew()
    again = aot(net, (x,))
    assert again.found and tpu_compile.stats()["lowerings"] == 0
    agree(again, net, x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def calls_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * 2


def test_a_function_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    agree(aot(calls_helper, (x,)), calls_helper, x)
    anew()
    assert aot(calls_helper, (x,)).found
    monkeypatch.setitem(globals(), "helper", lambda x: x - 1)
    anew()
    with pytest.warns(TpuCompileWarning, match=r"G\['helper'\] is .*<lambda>"):
        f = aot(calls_helper, (x,))
    agree(f, calls_helper, x)
    assert not f.found


def scaled(factor: float) -> Callable[..., Any]:
    return lambda x, plus=1.0: x * factor + plus


def test_the_closure_and_the_defaults_are_todays() -> None:
    x = torch.randn(4)
    agree(aot(scaled(2.0), (x,)), scaled(2.0), x)
    anew()
    assert aot(scaled(2.0), (x,)).found
    with pytest.warns(TpuCompileWarning, match=r"factor.* is float 3.0, was float 2.0"):
        f = aot(scaled(3.0), (x,))
    agree(f, scaled(3.0), x)
    other = scaled(3.0)
    other.__defaults__ = (5.0,)  # type: ignore[attr-defined]
    with pytest.warns(TpuCompileWarning, match=r"plus.* is float 5.0, was float 1.0"):
        f = aot(other, (x,))
    agree(f, other, x)


TABLE = torch.arange(4.0)


def test_tensors_and_modules_of_the_closure_and_of_the_globals_are_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks_up(table: torch.Tensor, module: torch.nn.Module) -> Callable[..., Any]:
        return lambda x: module(x + table) * TABLE

    x = torch.randn(4)
    torch.manual_seed(0)
    for turn in range(3):
        function = looks_up(torch.randn(4), torch.nn.Linear(4, 4))
        monkeypatch.setitem(globals(), "TABLE", torch.randn(4))
        f = aot(function, (x,))
        assert (f.found, f.why_not) == (turn > 0, "")
        agree(f, function, x)
        monkeypatch.setitem(globals(), "TABLE", torch.randn(4))
        agree(f, function, x)
        anew()


SETTINGS = {"sizes": [1.0, 2.0], "on": True}


class Configured(torch.nn.Module):
    kind = "plain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * SETTINGS["sizes"][1] if SETTINGS["on"] else x  # type: ignore[index]
        return y * math.tau if self.kind == "plain" else y * 3


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        (lambda patch: patch.setitem(SETTINGS, "on", False), "SETTINGS.*on"),
        (lambda patch: patch.setitem(SETTINGS, "sizes", [1.0, 7.0]), "SETTINGS.*sizes"),
        (lambda patch: patch.setattr(Configured, "kind", "other"), "kind"),
        (lambda patch: patch.setattr(math, "tau", 1.0), "tau"),
    ],
    ids=["item", "nested", "class attribute", "module attribute"],
)
def test_settings_that_differ_in_another_process_are_noticed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], guard: str
) -> None:
    x = torch.randn(4)
    agree(aot(Configured(), (x,)), Configured(), x)
    change(monkeypatch)
    anew()
    with pytest.warns(TpuCompileWarning, match=guard):
        f = aot(Configured(), (x,))
    agree(f, Configured(), x)


# ---- what is another key


def test_another_option_shape_structure_or_mode_is_another_key(net: Net) -> None:
    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not aot(net, (x,)).found
        assert not aot(net, (torch.randn(3, 4),)).found
        assert not aot(net, (x,), options={"excess_precision": True}).found
        assert not aot(net, (x,), dynamic=True).found
        with torch.no_grad():
            assert not aot(net, (x,)).found
        assert not aot(net.eval(), (x,)).found
        assert not aot(net.double(), (x.double(),)).found
        assert aot(Net().train(), (x,)).found, "weights are no part of it"
    with pytest.raises(tpu_compile.ConfigError, match="excess_precision"):
        aot(net, (x,), options={"exces_precision": True})


def test_without_a_cache_it_is_compiled_and_not_stored(net: Net, cache_dir: Path) -> None:
    x = torch.randn(2, 4)
    with tpu_compile.override(cache=False):
        f = aot(net, (x,))
        agree(f, net, x)
    assert not f.found and not f.why_not and not cache_dir.exists()


def test_damage_costs_a_compile_and_nothing_else(net: Net) -> None:
    from tpu_compile.cache import CacheKey
    from tpu_compile.errors import CacheWarning

    x = torch.randn(2, 4)
    aot(net, (x,))
    main = open_store()
    assert main is not None
    store = tracing_store(main)
    (info,) = store.entries(of="function")
    header = info.header
    key = CacheKey.of(header.name, dict(header.parts))
    store.put(key, b"no pickle", compile_seconds=1.0, metadata=header.metadata)
    with pytest.warns(CacheWarning, match="cannot be used"):
        f = aot(net, (x,))
    agree(f, net, x)
    anew()
    assert aot(net, (x,)).found, "it is repaired"


# ---- what cannot be stored


def test_what_cannot_be_stored_is_compiled_at_its_first_call_and_says_why() -> None:
    x = torch.randn(4)
    hooked = torch.nn.Sequential(torch.nn.Tanh())
    hooked[0].register_forward_hook(lambda module, args, out: out + 1)
    odd: list[tuple[Callable[..., Any], str]] = [
        (breaks, "graph_break"),
        (looks, "nonzero|data-dependent|dynamic"),
        (torch.sin, "no Python function"),
        (hooked, "0 has hooks"),
    ]
    for function, reason in odd:
        with pytest.warns(TpuCompileWarning, match=f"cannot be compiled ahead of time.*(?s:.*)({reason})"):
            f = aot(function, (x,))
        assert f.why_not and not f.found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TpuCompileWarning)
            agree(f, function, x)


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def looks(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0)
