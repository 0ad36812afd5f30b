"""Faults that are read out of a program: constants, changes of layout, products in passes or mostly padding."""

from __future__ import annotations

import pytest

from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.targets.analysis import Analysis, analyse, grouped

MEMORY = MemoryAnalysis(4096, 4096, 2**20, 0, 1000, 2**21, 0, 0, 0, 0, 0)
PASSES = "operand_precision={highest,highest}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
TEXT = f"""HloModule m

ENTRY %main (a: f32[8,64]) -> f32[64,100] {{
  %a = f32[8,64]{{1,0:T(8,128)}} parameter(0)
  %small = f32[8]{{0:T(128)}} constant({{...}}), metadata={{op_name="aten.arange" source_file="m.py" source_line=1}}
  %large = f32[64,100]{{1,0:T(8,128)}} constant({{...}}), metadata={{op_name="c" source_file="m.py" source_line=2}}
  %p = f32[8,100]{{1,0:T(8,128)}} convolution(%a, %large), dim_labels=bf_io->bf, {PASSES}, {CYCLES % 900}
  %c = f32[8,100]{{0,1:T(8,128)}} copy(%p), metadata={{op_name="aten.t" source_file="m.py" source_line=3}}, {
    CYCLES % 60
}
  ROOT %d = f32[8,100]{{0,1:T(8,128)}} copy(%c), metadata={{op_name="aten.t" source_file="m.py" source_line=3}}, {
    CYCLES % 40
}
}}
"""


def read() -> Analysis:
    return analyse(TEXT, MEMORY, "v5e:1x1")


def test_large_constants_are_listed_with_their_line() -> None:
    (constant,) = read().constants
    assert (constant.what, constant.nbytes, constant.where) == ("f32[64,100]", 64 * 100 * 4, "m.py:2")


def test_products_in_passes_and_mostly_padding() -> None:
    found = read()
    ((step, product),) = found.wide_products
    assert (step.name, product.passes, product.dtype) == ("p", 6, "f32")
    ((_, wasteful),) = found.wasteful_products()
    assert wasteful.waste(128) == 1 - 64 * 100 / 128**2
    assert found.wasteful_products(0.9) == []


def test_changes_of_layout_at_one_line_are_put_together() -> None:
    found = read()
    assert [step.name for step in found.layout_changes] == ["c", "d"]
    ((step, count, seconds),) = grouped(found.layout_changes)
    assert (step.where, count) == ("m.py:3", 2) and found.share(seconds) == pytest.approx(0.1)
    assert found.by_line[-1][0] == "m.py:3" and found.top(1)[0].name == "p"


def test_what_fits_and_by_how_much() -> None:
    fit = read().fit
    assert fit.fits and fit.needed == 2 * 4096 + 2**20 and fit.spare == fit.available - fit.needed
