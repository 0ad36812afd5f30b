"""8-bit products are real 8-bit dots, and autocast gives each op the dtype that eager gives it."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from tpu_compile import compiler
from tpu_compile.lowering import fx
from tpu_compile.tolerances import TOLERANCE


def check(fn, *args, pattern: str = "", rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compiled equals eager, and the StableHLO holds ``pattern``."""
    with compiler.record() as seen:
        got = torch.compile(fn, backend="tpu", fullgraph=True)(*args)
    want = fn(*args)
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)
    assert got.dtype == want.dtype
    assert pattern in fx.text(seen.lowerings[0].compiled.program.bytecode)


def int8(*sizes: int) -> torch.Tensor:
    return torch.randint(-128, 128, sizes, dtype=torch.int8)


def test_int_mm_has_int32_sums():
    x, w = int8(32, 64), int8(16, 64)
    check(lambda x, w: torch._int_mm(x, w.t()), x, w, pattern="xi8>) -> tensor<32x16xi32>")
    check(lambda x, w: x.to(torch.int32) @ w.to(torch.int32).t(), x, w, pattern="xi8>) -> tensor<32x16xi32>")
    check(lambda x, w: x.to(torch.int32) @ w, x, w.t().to(torch.int32), pattern="xi32>) -> tensor<32x16xi32>")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_weights_of_floating_activations(kind):
    torch.manual_seed(0)
    x, w, scales = torch.randn(4, 64, dtype=kind), int8(16, 64), (torch.rand(16) / 128).to(kind)
    tolerance = TOLERANCE[kind]
    check(torch._weight_int8pack_mm, x, w, scales, rtol=tolerance[0], atol=tolerance[1])


class Dynamic(nn.Module):
    """A linear layer quantised as torchao does: weights by row beforehand, activations by token at each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        quantised = (x / scale).round().clamp(-128, 127).to(torch.int8)
        sums = torch._int_mm(quantised.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], -1)
        return sums * scale * self.scale.t() + self.bias


def test_a_dynamically_quantised_linear_is_an_int8_dot():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32), torch.randn(4, 8, 64)
    check(Dynamic(linear), x, pattern="xi8>) -> tensor<32x32xi32>", rtol=1e-5, atol=1e-5)
    assert (Dynamic(linear)(x) - linear(x)).abs().max() < 0.05


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_dequantised_stay_int8_up_to_the_product(kind):
    """As torchao does: the scale of each row of the weights after the product, or before it."""
    torch.manual_seed(0)
    x, w, scale = torch.randn(4, 8, 64, dtype=kind), int8(32, 64), (torch.rand(32, 1) / 128).to(kind)
    tolerance = TOLERANCE[kind]

    def after(x, w, scale):
        return (x.flatten(0, 1) @ w.to(x.dtype).t()) * scale.t()

    def before(x, w, scale):
        return nn.functional.linear(x, w.to(scale.dtype) * scale)

    for way in (after, before):
        check(way, x, w, scale, pattern="(tensor<32x64xi8>) -> tensor<32x64x", rtol=tolerance[0], atol=tolerance[1])


def test_activations_by_token_without_a_sign():
    """torchao's way where activations are all above zero: bytes without a sign, and int8 weights."""
    x, w = torch.randint(0, 256, (32, 64), dtype=torch.uint8), int8(64, 16)
    check(torch._int_mm, x, w, pattern="(tensor<32x64xui8>, tensor<64x16xi8>) -> tensor<32x16xi32>")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_carried(kind):
    torch.manual_seed(0)
    x, w, scale = torch.randn(8, 64), torch.randn(32, 64).to(kind), torch.rand(32, 1)
    check(lambda x, w, s: nn.functional.linear(x, w.to(x.dtype) * s), x, w, scale, rtol=1e-5, atol=1e-4)
    check(lambda x, w, s: (x.to(kind).view(8, 2, 32).transpose(0, 1), w[:, :3])[0], x, w, scale)


@pytest.mark.parametrize(
    ("by_row", "kind"),  # torch's own kernel gives bfloat16 only, with a scale a row
    [(False, torch.bfloat16), (False, torch.float32), (False, torch.float8_e4m3fn), (True, torch.bfloat16)],
    ids=str,
)
def test_scaled_float8_products(by_row, kind):
    torch.manual_seed(0)
    x, w = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    scales = (torch.rand(16, 1), torch.rand(1, 16)) if by_row else (torch.tensor(0.5), torch.tensor(0.25))
    step = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float8_e4m3fn: 2**-3}[kind]
    pattern = "f8E4M3FN>) -> tensor<16x16xf32>"
    check(
        lambda x, w, a, b: torch._scaled_mm(x, w.t(), a, b, out_dtype=kind), x, w, *scales, pattern=pattern, rtol=step
    )


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_each_op_eagers_dtype(device, kind):
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 8, device=device), torch.randn(8, 8, device=device)
    image, kernel = torch.randn(1, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
    ops = {
        "linear": lambda: nn.functional.linear(x, w),
        "matmul": lambda: x @ w,
        "einsum": lambda: torch.einsum("bij,jk->bik", x, w),
        "baddbmm": lambda: torch.baddbmm(x, x, w.expand(2, 8, 8)),
        "conv2d": lambda: nn.functional.conv2d(image, kernel),
        "attention": lambda: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        "softmax": lambda: (x @ w).softmax(-1),
        "layer_norm": lambda: nn.functional.layer_norm(x @ w, (8,)),
        "gelu": lambda: nn.functional.gelu(x @ w),
        "sum": lambda: (x @ w).sum(),
        "exp": lambda: (x @ w).exp(),
        "pow": lambda: (x @ w).pow(2),
        "mse_loss": lambda: nn.functional.mse_loss(x @ w, x),
        "cross_entropy": lambda: nn.functional.cross_entropy((x @ w).flatten(0, 1), x.flatten()[:8].long() * 0),
        "cat": lambda: torch.cat([x @ w, x]),
        "add": lambda: (x @ w) + x,
        "norm": lambda: (x @ w).norm(),
        "cumsum": lambda: (x @ w).cumsum(0),
        "stack": lambda: torch.stack([x @ w, x]),
    }

    def run():
        with torch.autocast(device, kind):
            return [op() for op in ops.values()]

    compiled = torch.compile(run, backend="tpu", fullgraph=True)()
    dtypes = [dict(zip(ops, (t.dtype for t in results), strict=True)) for results in (compiled, run())]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("zero_point", [torch.tensor(3, dtype=torch.int32), torch.tensor(2.5)], ids=["int", "float"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_training_for_8_bits_rounds_to_a_grid(zero_point, kind):
    """Values and the straight-through gradient, which is 0 where a value was cut off."""
    scales, origins = torch.rand(8) / 10 + 0.05, zero_point.expand(8).contiguous()

    def fn(x):
        by_tensor = torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 7)
        by_channel = torch.fake_quantize_per_channel_affine(x, scales, origins, 1, 0, 15)
        by_numbers = torch.fake_quantize_per_tensor_affine(x, scales[0], origins[0].int(), 0, 15)
        return torch.stack([by_tensor, by_channel, by_numbers])

    x = torch.randn(8, 6).to(kind).t()
    eager, compiled = (x.clone().requires_grad_() for _ in range(2))
    want, got = fn(eager), torch.compile(fn, backend="tpu", fullgraph=True)(compiled)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for y in (want, got):
        (y * torch.arange(8)).sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=0, atol=0)


def exported(case: str, x: torch.Tensor) -> torch.Tensor:
    """Rounding to 8 bits and back, as torch writes it into an exported graph."""
    library = torch.ops.quantized_decomposed
    scales, origins = torch.linspace(0.02, 0.1, 8), torch.arange(-4, 4)
    if case == "tensor":
        given, options = (0.05, 3, -128, 127, torch.int8), {"out_dtype": torch.float32}
        return library.dequantize_per_tensor(library.quantize_per_tensor(x, *given), *given, **options)
    if case == "numbers in tensors":
        given = torch.tensor(0.05, dtype=torch.float64), torch.tensor(3), -128, 127, torch.int8
        return library.dequantize_per_tensor.tensor(library.quantize_per_tensor.tensor(x, *given), *given)
    if case == "group":
        given = scales[:6, None].expand(6, 2), None, -8, 7, torch.int8, 4, torch.float32
        return library.dequantize_per_channel_group((x * 10).to(torch.int8), *given)
    if case == "channel":
        given = scales, origins, 1, -128, 127, torch.int8
        return library.dequantize_per_channel(library.quantize_per_channel(x, *given), *given)
    given = scales[:6, None].double(), origins[:6, None], -128, 127, torch.int8
    return library.dequantize_per_token(library.quantize_per_token(x, *given), *given, torch.float32)


@pytest.mark.parametrize("case", ["tensor", "numbers in tensors", "channel", "group", "token"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graphs_that_torch_quantised_by_export(case):
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # defines the operators
    check(lambda x: exported(case, x), torch.randn(6, 8), pattern="xi8>")
