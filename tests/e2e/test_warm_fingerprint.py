"""A graph's fingerprint: equal ones lower to the same program, and what does not decide the program does not count."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_compile.lowering import fx
from tpu_compile.lowering.program import HostCheck, Program, Result, TensorSpec
from tpu_compile.lowering.registry import registry
from tpu_compile.warm import record, sources
from tpu_compile.warm.fingerprint import NoFingerprint, fingerprint

aten = torch.ops.aten
X, Y = torch.ones(4, 6), torch.ones(4, 6)


def graph(f: Callable[..., Any], *arguments: Any) -> GraphModule:
    traced = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    assert isinstance(traced, GraphModule)
    return traced


def digest(f: Callable[..., Any], *arguments: Any) -> str:
    return fingerprint(graph(f, *arguments), {}).digest


def program(module: GraphModule) -> tuple[Any, ...]:
    """Everything of a lowered program but its source lines."""
    lowered = fx.lower(module, "graph", family="cpu")
    return lowered.digest, str(record.dump(lowered, lowered.constants)), [t.tolist() for t in lowered.constants]


# ---- what changes a fingerprint

BASE = (lambda x, y: torch.relu(x + 2.0 * y).sum(0), X, Y)


@pytest.mark.parametrize(
    "changed",
    [
        (lambda x, y: torch.relu(x + 2.5 * y).sum(0), X, Y),
        (lambda x, y: torch.relu(x + 2 * y).sum(0), X, Y),
        (lambda x, y: torch.relu(x - 2.0 * y).sum(0), X, Y),
        (lambda x, y: torch.relu(y + 2.0 * x).sum(0), X, Y),
        (lambda x, y: torch.relu(x + 2.0 * y).sum(1), X, Y),
        (lambda x, y: torch.relu(x + 2.0 * y).sum(0, keepdim=True), X, Y),
        (lambda x, y: (torch.relu(x + 2.0 * y).sum(0),) * 2, X, Y),
        (BASE[0], X.double(), Y),
        (BASE[0], X[:3], Y[:3]),
        (BASE[0], torch.ones(6, 4).t(), Y),
        (BASE[0], torch.ones(4, 8)[:, :6], Y),
        (BASE[0], torch.ones(30)[6:].view(4, 6), Y),
        (lambda x, y: torch.relu(x + 2.0 * y + torch.tensor([1.0])).sum(0), X, Y),
    ],
    ids=(
        "number float-or-int operator arguments axis keyword results dtype shape strides gaps offset constant".split()
    ),
)
def test_what_decides_the_program_changes_it(changed: tuple[Any, ...]) -> None:
    assert digest(*changed) != digest(*BASE)


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (1, True), (float("inf"), float("nan")), (1.0, 1.0000000000000002)]
)
def test_numbers_that_look_alike_are_told_apart(one: Any, other: Any) -> None:
    assert digest(lambda x: x * one, X) != digest(lambda x: x * other, X)


@pytest.mark.parametrize("table", [torch.arange(6.0), torch.arange(2000.0)], ids=["embedded", "passed in"])
def test_a_constant_counts_by_its_contents(table: torch.Tensor) -> None:
    copy, other = table.clone(), table.clone()
    other[-1] += 1
    first, same, changed = (graph(partial(torch.add, t), X[0, 0]) for t in (table, copy, other))
    assert [n.op for n in first.graph.nodes].count("get_attr") == 1
    assert fingerprint(same, {}).digest == fingerprint(first, {}).digest != fingerprint(changed, {}).digest
    assert fingerprint(first, {}).tensors[0].equal(table)


def test_one_constant_in_two_places_is_not_two_equal_ones() -> None:
    """Passed in once, or twice: two programs."""
    table, equal = torch.arange(2000.0), torch.arange(2000.0)
    once = graph(lambda x: (x.sum() + table, x.sum() - table), X)
    twice = graph(lambda x: (x.sum() + table, x.sum() - equal), X)
    assert program(once) != program(twice)
    assert fingerprint(once, {}).digest != fingerprint(twice, {}).digest


# ---- what does not


def test_names_lines_and_the_order_of_keywords_do_not_count() -> None:
    def renamed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        # another place, other names

        doubled = 2.0 * second
        return torch.relu(first + doubled).sum(0)

    assert digest(renamed, X, Y) == digest(*BASE)
    module = graph(lambda x: aten.sum.dim_IntList(x, [0], keepdim=True, dtype=torch.float64), X)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    before = fingerprint(module, {}).digest
    node.kwargs = dict(reversed(node.kwargs.items()))
    node.meta["stack_trace"] = 'File "elsewhere.py", line 7, in f'
    assert fingerprint(module, {}).digest == before


def test_it_is_the_same_in_every_process(run_python: Any) -> None:
    code = """
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        from tpu_compile.warm.fingerprint import fingerprint
        traced = make_fx(lambda x: torch.relu(x * 2).sum(0), tracing_mode="fake")(torch.ones(4, 6))
        print(fingerprint(traced, {}).digest)
        """
    said = {run_python(code, env={"PYTHONHASHSEED": str(seed)}).stdout for seed in (1, 2)}
    assert said == {digest(lambda x: torch.relu(x * 2).sum(0), X) + "\n"}


# ---- both directions, at random

UNARY = (torch.relu, torch.sin, torch.neg, lambda x: x.t().contiguous().t(), lambda x: x * 2, lambda x: x * 2.0)
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: torch.add(a, b, alpha=2))


def random_function(seed: int) -> Callable[..., Any]:
    """A small computation; seeds share most of their choices, so that many of the graphs are nearly equal."""
    dice = random.Random(seed % 40)
    steps = [(dice.randrange(2), dice.randrange(64), dice.randrange(64), dice.randrange(64)) for _ in range(4)]
    last = random.Random(seed).randrange(3)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = [x, y]
        for kind, op, a, b in steps:
            one, other = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[op % len(UNARY)](one) if kind else BINARY[op % len(BINARY)](one, other))
        return values[-1].sum(last - 1)

    return f


def test_equal_fingerprints_mean_equal_programs_and_the_other_way_round() -> None:
    """Graphs without dead code, which lowers to nothing but is there."""
    by_fingerprint: dict[str, set[str]] = {}
    by_program: dict[str, set[str]] = {}
    for seed in range(160):
        module = graph(random_function(seed), X, Y)
        module.graph.eliminate_dead_code()
        mark, made = fingerprint(module, {}).digest, str(program(module))
        by_fingerprint.setdefault(mark, set()).add(made)
        by_program.setdefault(made, set()).add(mark)
    print(f"{len(by_fingerprint)} fingerprints, {len(by_program)} programs of 160 graphs")
    assert all(len(made) == 1 for made in by_fingerprint.values())
    assert len(by_fingerprint) < 160, "no two graphs were alike: the test shows nothing"
    assert len(by_program) > 20


def mutations(module: GraphModule) -> list[Callable[[], None]]:
    """Small changes of one node each; each undoes itself when it is called a second time."""
    made: list[Callable[[], None]] = []
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        for place, argument in enumerate(node.args):
            if type(argument) in (int, float):
                made.append(lambda node=node, place=place, step=[1]: _bump(node, place, step))  # type: ignore[misc]
        if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
            made.append(lambda node=node: _swap_operator(node))  # type: ignore[misc]
            made.append(lambda node=node: _swap_arguments(node))  # type: ignore[misc]
    return made


def _bump(node: Any, place: int, step: list[int]) -> None:
    node.args = (*node.args[:place], node.args[place] + step[0], *node.args[place + 1 :])
    step[0] = -step[0]


def _swap_operator(node: Any) -> None:
    node.target = {aten.add.Tensor: aten.mul.Tensor, aten.mul.Tensor: aten.add.Tensor}.get(node.target, aten.sub.Tensor)


def _swap_arguments(node: Any) -> None:
    node.args = (*reversed(node.args[:2]), *node.args[2:])


def test_a_change_that_reaches_the_program_reaches_the_fingerprint() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.add(x * 3, y) * torch.sub(y, 5.0)
        return torch.cat([z, z.sin() + 1.5]).sum(0).add(x[0] * y[1])

    module = graph(f, X, Y)
    before, base = fingerprint(module, {}).digest, program(module)
    reached = 0
    for change in mutations(module):
        change()
        try:
            changed = program(module) != base
        except Exception:  # a change that no longer fits its shapes has no program to compare
            changed = False
        if changed:
            reached += 1
            assert fingerprint(module, {}).digest != before
        change()
    assert reached >= 5 and fingerprint(module, {}).digest == before


# ---- what has none


def test_a_function_of_the_users_in_the_graph_has_no_fingerprint() -> None:
    module = graph(lambda x: x + 1, X)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    node.target = lambda x, y: x
    with pytest.raises(NoFingerprint, match="a call of"):
        fingerprint(module, {})
    node.target, node.args = aten.add.Tensor, (node.args[0], object())
    with pytest.raises(NoFingerprint, match="type object"):
        fingerprint(module, {})


# ---- the record of a program


def test_a_record_holds_the_whole_program() -> None:
    constant = torch.arange(3.0)
    check = HostCheck(1, torch.nn.functional.relu)
    whole = Program(
        name="graph",
        bytecode=b"ML\xefR",
        digest="0" * 64,
        inputs=(TensorSpec((2, 3), torch.bfloat16, (3, 1)),),
        arguments=(4,),
        outputs=(TensorSpec((), torch.int64, ()),),
        results=(
            Result(index=0),
            Result(index=0, number=True),
            Result(argument=2),
            Result(value=None),
            Result(value=-0.0),
            Result(value=True),
        ),
        mutated=((0, 1),),
        donated=(0,),
        constants=(constant,),
        random=True,
        ffi_handlers=("lapack_sgeqrf_ffi",),
        ops_per_tier=(("native", 3),),
        ops=(("aten.add.Tensor", 2),),
    )
    written = json.loads(json.dumps(record.dump(whole, [constant])))
    back = record.load(written, "graph", whole.bytecode, [constant])
    assert back == whole and str(back.results) == str(whole.results)
    assert set(written) == {field.name for field in fields(Program)} - {"name", "bytecode"}
    with pytest.raises(record.NotRecordable, match="a check by"):
        record.dump(replace(whole, checks=(check,)), [constant])
    with pytest.raises(record.NotRecordable, match="not the graph's"):
        record.dump(whole, [])


# ---- whose rules


def test_our_own_rules_are_ours_and_a_users_is_not() -> None:
    registry.load()
    before = sources.foreign_rules()  # of tests that gave an operator a rule
    assert not any(name.startswith(("aten.", "prims.", "tpu_compile.")) for name in before)
    library = torch.library.Library("warm_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    registry.register(torch.ops.warm_test.double.default, lambda ctx, x: x)
    try:
        assert sources.foreign_rules() == {*before, "warm_test.double.default"}
    finally:
        del registry._rules[torch.ops.warm_test.double.default]
        library._destroy()


def test_sources_are_read_once_and_compared_when_a_program_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.unchanged()
    monkeypatch.setattr(sources, "_read", lambda: "edited meanwhile")
    assert not sources.unchanged()
    assert sources.digest() != "edited meanwhile"
