"""The reader of optimised HLO text: shapes, instructions, computations, the user's lines."""

from __future__ import annotations

import pytest

from tpu_compile.targets.hlo import Shape, parse, shapes
from tpu_compile.targets.products import Product, product

METADATA = 'metadata={op_name="aten.mm.default" stack_frame_id=1}'
CONFIG = 'backend_config={"window_config":{"estimated_cycles":"1234"},"aliasing_operands":{"lists":[]}}'
WIDE = "bf16[512,384]{1,0:T(8,128)(2,1)S(1)}"
HBM = "bf16[512,384]{1,0:T(8,128)(2,1)}"
TEXT = f"""HloModule net, is_scheduled=true, entry_computation_layout={{(bf16[256,512]{{1,0}})->f32[256,384]{{1,0}}}}

FileNames
1 "/home/me/model.py"

FunctionNames
1 "aten.mm.default"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12 end_line=12 column=0 end_column=0}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}


%fused_computation (param_0: bf16[256,512], param_1: bf16[512,384]) -> f32[256,384] {{
  %param_0 = bf16[256,512]{{1,0:T(8,128)(2,1)}} parameter(0)
  %param_1 = {WIDE} parameter(1)
  ROOT %convolution.1 = f32[256,384]{{1,0:T(8,128)}} convolution(%param_0, %param_1), dim_labels=bf_io->bf, {METADATA}
}}

ENTRY %main (a: bf16[256,512], b: bf16[512,384]) -> (f32[256,384]) {{
  %a = bf16[256,512]{{1,0:T(8,128)(2,1)}} parameter(0), metadata={{op_name="a"}}
  %b = bf16[512,384]{{1,0:T(8,128)(2,1)}} parameter(1)
  %copy-start = ({WIDE}, {HBM}, u32[]{{:S(2)}}) copy-start(%b)
  %copy-done = {WIDE} copy-done(%copy-start)
  %fusion = f32[256,384]{{1,0:T(8,128)}} fusion(%a, %copy-done), calls=%fused_computation, {METADATA}, {CONFIG}
  ROOT %tuple = (f32[256,384]{{1,0:T(8,128)}}, /*index=1*/f32[256,384]{{1,0:T(8,128)}}) tuple(%fusion, %fusion)
}}
"""


def test_a_module_is_read_whole() -> None:
    module = parse(TEXT)
    assert module.name == "net" and set(module.computations) == {"fused_computation", "main"}
    opcodes = [each.opcode for each in module.entry.instructions]
    assert opcodes == ["parameter", "parameter", "copy-start", "copy-done", "fusion", "tuple"]
    fusion = module.entry.by_name["fusion"]
    assert (fusion.cycles, fusion.op, fusion.where) == (1234, "aten.mm.default", "/home/me/model.py:12")
    assert (fusion.operands, fusion.called) == (("a", "copy-done"), ("fused_computation",))
    assert module.entry.root.opcode == "tuple" and len(module.entry.root.results) == 2
    assert [each.opcode for _, each in module.inside(fusion)] == ["parameter", "parameter", "convolution"]


def test_lines_may_stand_at_the_instruction_itself() -> None:
    text = TEXT.replace("stack_frame_id=1", 'source_file="/home/me/other.py" source_line=7')
    assert parse(text).entry.by_name["fusion"].where == "/home/me/other.py:7"


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "space", "nbytes", "padded"),
    [
        ("f32[50257,768]{1,0:T(8,128)}", "f32", (50257, 768), 0, 50257 * 768 * 4, 50264 * 768 * 4),
        ("bf16[8,100]{1,0:T(8,128)(2,1)S(1)}", "bf16", (8, 100), 1, 1600, 8 * 128 * 2),
        ("f32[2,128,50257]{1,2,0:T(8,128)}", "f32", (2, 128, 50257), 0, 2 * 128 * 50257 * 4, 2 * 50264 * 128 * 4),
        ("u32[]{:T(128)}", "u32", (), 0, 4, 4),
        ("f8e4m3fn[16]{0}", "f8e4m3fn", (16,), 0, 16, 16),
        ("pred[3]", "pred", (3,), 0, 3, 3),
    ],
)
def test_shapes(text: str, dtype: str, dims: tuple[int, ...], space: int, nbytes: int, padded: int) -> None:
    (shape,) = shapes(text)
    assert (shape.dtype, shape.dims, shape.space) == (dtype, dims, space)
    assert (shape.nbytes, shape.padded_bytes) == (nbytes, padded)


def convolution(left: str, right: str, result: str, attributes: str) -> Product:
    text = f"""HloModule m

ENTRY %main (a: {left}, b: {right}) -> {result} {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %c = {result} convolution(%a, %b), {attributes}
}}
"""
    entry = parse(text).entry
    found = product(entry, entry.root)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        ("f32[256,768]", "f32[768,3072]", "f32[256,3072]", "dim_labels=bf_io->bf", 2 * 256 * 768 * 3072),
        # A batch of 24 products, as libtpu writes it: each position of a dilated axis meets one slice.
        (
            "f32[24,128,64]",
            "f32[24,64,128]",
            "f32[24,128,128]",
            "window={size=24 stride=23 lhs_dilate=24}, dim_labels=0bf_0io->0bf",
            2 * 24 * 128 * 64 * 128,
        ),
        # A 3x3 convolution: what would multiply padding does not count.
        (
            "f32[1,8,8,16]",
            "f32[3,3,16,32]",
            "f32[1,8,8,32]",
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 16 * 32 * 22 * 22,
        ),
        (
            "f32[1,9,9,16]",
            "f32[3,3,16,32]",
            "f32[1,4,4,32]",
            "window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
            2 * 16 * 32 * 9 * 16,
        ),
    ],
    ids=["product", "batch", "padded", "strided"],
)
def test_flops(left: str, right: str, result: str, attributes: str, flops: int) -> None:
    assert convolution(left, right, result, attributes).flops == flops


def test_a_batch_of_products_is_told_from_a_window() -> None:
    found = convolution(
        "f32[24,128,64]",
        "f32[24,64,128]",
        "f32[24,128,128]",
        "window={size=24 stride=23 lhs_dilate=24}, dim_labels=0bf_0io->0bf",
    )
    assert (found.batch, found.m, found.k, found.n) == (24, 128, 64, 128)


@pytest.mark.parametrize(
    ("dtype", "precision", "passes"),
    [("f32", "", 1), ("f32", "high,high", 3), ("f32", "highest,highest", 6), ("bf16", "highest,highest", 1)],
)
def test_passes_of_the_matrix_unit(dtype: str, precision: str, passes: int) -> None:
    attributes = "dim_labels=bf_io->bf" + (f", operand_precision={{{precision}}}" if precision else "")
    found = convolution(f"{dtype}[8,128]", f"{dtype}[128,128]", f"{dtype}[8,128]", attributes)
    assert (found.passes, found.dtype) == (passes, dtype)


def test_what_padding_wastes() -> None:
    found = convolution("bf16[8,64]", "bf16[64,100]", "bf16[8,100]", "dim_labels=bf_io->bf")
    assert found.waste(128) == pytest.approx(1 - 64 * 100 / (128 * 128))
    assert convolution("bf16[8,128]", "bf16[128,256]", "bf16[8,256]", "dim_labels=bf_io->bf").waste(128) == 0


def test_a_shape_is_written_as_hlo_does() -> None:
    assert str(Shape("bf16", (2, 3))) == "bf16[2,3]"
