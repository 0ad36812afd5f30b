"""The parts of an exported file, each by itself: nesting, sizes, tensors, graphs."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, namedtuple

import pytest
import safetensors.torch
import sympy
import torch
from torch.utils._sympy.functions import CeilToInt, FloorDiv, Max, ModularIndexing

from tpu_compile.errors import BadCall, ExportError
from tpu_compile.exporting import expressions, graphs, structure, weights
from tpu_compile.exporting.programs import dump_plain, load_plain

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        1,
        (1, [2, {"a": 3, 4: (5,)}], ()),
        OrderedDict(b=1, a=2),
        Pair(1, Pair(2, [3])),
        {"nested": {"empty": {}, "none": None}},
    ],
    ids=["leaf", "containers", "ordered", "named", "empty"],
)
def test_nesting_survives_json(value):
    tree = json.loads(json.dumps(structure.tree_of(value)))
    leaves = torch.utils._pytree.tree_leaves(value)
    assert structure.check(tree) == len(leaves)
    assert structure.build(tree, iter(leaves)) == value
    assert [leaf for _, leaf in structure.flatten(tree, value, "x")] == leaves


@pytest.mark.parametrize(
    "tree",
    [
        ["set", None, [None], ""],
        ["dict", None, [None], ""],
        ["dict", ["a"], [None, None], ""],
        ["namedtuple", ["a; import os"], [None], "P"],
        ["namedtuple", ["a"], [None], "P, x"],
        ["namedtuple", ["__class__"], [None], "P"],
        ["tuple", None, [["list", None, [5], ""]], ""],
        "text",
    ],
)
def test_what_is_no_nesting_is_refused(tree):
    with pytest.raises((ValueError, TypeError)):
        structure.check(tree)


def test_a_departing_argument_is_named():
    tree = structure.tree_of(({"a": [1, 2]},))
    with pytest.raises(BadCall, match=r"args\[0\]\['a'\] is a list of 3; the program takes a list of 2"):
        list(structure.flatten(tree, ({"a": [1, 2, 3]},), "args"))


def test_sizes_survive_json():
    s, t = sympy.symbols("s0 s1", integer=True, positive=True)
    bindings = {"batch": 7, "s1": 3}
    for e in (
        s * t + 2,
        FloorDiv(s - 1, 2) + 1,
        Max(s, 4 * t),
        ModularIndexing(s, 2, 3),
        CeilToInt(s / 2),
        s**2 - t,
        sympy.Rational(1, 2) * s * 2,
        sympy.And(s > 3, t < 2),
    ):
        written = json.loads(json.dumps(expressions.dump(_Symbolic(e), {"s0": "batch"})))
        assert expressions.value(written, bindings) == e.subs({s: 7, t: 3}), e
    with pytest.raises(ExportError, match="depends on data"):
        expressions.dump(_Symbolic(sympy.Symbol("u0", integer=True) + 1), {})
    with pytest.raises(KeyError):
        expressions.value(["__import__", "os"], {})


class _Node:
    def __init__(self, expr):
        self.expr = expr


class _Symbolic(torch.SymInt):
    def __init__(self, expr):
        self.node = _Node(expr)


def test_tensors_are_written_as_safetensors_has_them():
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(True),
        "d": torch.zeros(0, 2),
        "e": torch.complex(torch.ones(2), torch.zeros(2)).conj(),
    }
    file = b"".join(bytes(piece) for piece in weights.write(tensors))
    assert all(torch.equal(t, tensors[name]) for name, t in safetensors.torch.load(file).items())
    theirs = safetensors.torch.save({name: t.contiguous().resolve_conj() for name, t in tensors.items()})
    assert all(torch.equal(t, tensors[name]) for name, t in weights.read(memoryview(bytearray(theirs))).items())


@pytest.mark.parametrize("entry", [(0, 400), (-4, 0), (0, 3)], ids=["beyond", "before", "short"])
def test_a_tensor_outside_its_file_is_refused(entry):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": entry}}).encode()
    with pytest.raises(ValueError):
        weights.read(memoryview(bytearray(struct.pack("<Q", len(header)) + header + bytes(4))))
    with pytest.raises(ValueError, match="longer than the file"):
        weights.read(memoryview(bytearray(struct.pack("<Q", 1 << 40) + header)))


@pytest.mark.parametrize("value", [None, True, 3, "text", 0.1, float("inf"), 1 + 2j, torch.float16])
def test_plain_values_survive_json(value):
    assert load_plain(json.loads(json.dumps(dump_plain(value, "x is")))) == value


@pytest.mark.parametrize("target", ["os.system", "aten.from_file.default", "builtins.eval", "getattr"])
def test_a_graph_calls_nothing_but_what_has_a_rule(target):
    call = {"op": "call", "name": "x", "line": "", "target": target, "args": [], "kwargs": {}, "val": None}
    with pytest.raises(KeyError):
        graphs.load([call], [], {})
