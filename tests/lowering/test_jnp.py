"""Tier 2: functions of jax.numpy as rules, what crosses from jax, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

import tpu_compile
from tpu_compile.compiler import record
from tpu_compile.lowering import fx
from tpu_compile.lowering.jnp import as_rule, jax, jnp, lower_jax, lowers_jnp
from tpu_compile.lowering.registry import registry

from ..conftest import RunPython


@pytest.fixture
def op() -> Iterator[Any]:
    """Makes operators that live as long as the test: ``op("(Tensor x, int n) -> Tensor", fake)``."""
    library = torch.library.Library("tpu_compile_tests", "DEF")
    made: list[OpOverload] = []

    def make(schema: str, fake: Any) -> OpOverload:
        name = f"op{len(made)}"
        library.define(f"{name}{schema}")
        library._register_fake(name, fake)
        made.append(getattr(torch.ops.tpu_compile_tests, name).default)
        return made[-1]

    yield make
    for overload in made:
        registry._rules.pop(overload, None)
    library._destroy()


def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend="tpu", fullgraph=True)


def test_a_rule_of_the_users_own(op: Any) -> None:
    sinc = op("(Tensor x, float scale) -> Tensor", lambda x, scale: torch.empty_like(x))

    @tpu_compile.lowers_jnp(sinc)
    def rule(x: Any, scale: float) -> Any:
        return jnp.sinc(x) * scale

    x = torch.randn(5)
    torch.testing.assert_close(compiled(lambda x: sinc(x, 2.0) + 1)(x), x.sinc() * 2 + 1)
    assert tpu_compile.stats()["ops_jnp"] == 1


def test_results_have_the_promised_dtype_and_several_may_come(op: Any) -> None:
    def fake(x: torch.Tensor, many: list[torch.Tensor], other: torch.Tensor | None = None) -> Any:
        return x.new_empty(x.shape, dtype=torch.int32), x.new_empty(()), x.new_empty(x.shape, dtype=torch.float64)

    split = op("(Tensor x, Tensor[] many, Tensor? other=None) -> (Tensor, Tensor, Tensor)", fake)

    @lowers_jnp(split)
    def rule(x: Any, many: list[Any], other: Any = None) -> Any:
        assert other is None and x.dtype == jnp.bfloat16
        return jnp.floor(x), (x * 2).sum(), sum(many)

    x = torch.arange(4, dtype=torch.bfloat16) + 0.5
    many = [torch.ones(4, dtype=torch.float64) / 3, torch.ones(4, dtype=torch.float64)]
    whole, total, summed = compiled(lambda x, many: split(x, many))(x, many)
    assert whole.dtype == torch.int32 and whole.tolist() == [0, 1, 2, 3]
    assert total.dtype == torch.bfloat16 and total == 16
    assert torch.equal(summed, many[0] + many[1]), "float64 was computed in float32"


def test_one_function_a_program_and_one_trace_a_process(op: Any) -> None:
    twice = op("(Tensor x, Scalar n) -> Tensor", lambda x, n: torch.empty_like(x))
    traces = []

    @lowers_jnp(twice)
    def rule(x: Any, n: Any) -> Any:
        traces.append(n)
        return x * n

    with record() as recorded:
        compiled(lambda x: twice(twice(x, 3), 3) + twice(x, 3.0))(torch.ones(4))
        torch._dynamo.reset()
        compiled(lambda x: twice(x, 3) - 1)(torch.ones(4))
    assert traces == [3, 3.0], "1, 1.0 and True are different programs, the same one is traced once"
    text = fx.text(recorded.lowerings[0].compiled.program.bytecode)
    assert text.count("func.func private") == 2 and text.count("call @") == 3


def test_the_signature_is_the_schemas(op: Any) -> None:
    named = op("(Tensor x, int n) -> Tensor", lambda x, n: torch.empty_like(x))
    with pytest.raises(TypeError, match="n"):
        lowers_jnp(named)(lambda x, m: x)
    with pytest.raises(ValueError, match="a rule already"):
        lowers_jnp(torch.ops.aten.linalg_qr.default)(lambda A, mode="reduced": A)


def test_jax_is_imported_late_and_opens_no_client(run_python: RunPython) -> None:
    run_python(
        """
        import sys, torch
        torch.compile(lambda x: x + 1, backend="tpu", fullgraph=True)(torch.ones(3))
        assert "jax" not in sys.modules
        torch.compile(lambda x: torch.linalg.qr(x)[1], backend="tpu", fullgraph=True)(torch.randn(3, 3))
        from jax._src import xla_bridge
        assert not xla_bridge._backends, "on a TPU host this client would be a second owner of the chip"
        """
    )


def test_a_program_with_lapack_runs_where_jax_is_never_imported(run_python: RunPython, tmp_path: Any) -> None:
    with record() as recorded:
        compiled(lambda x: torch.linalg.qr(x)[1].abs())(torch.eye(3) * 2)
    program = recorded.lowerings[0].compiled.program
    assert program.ffi_handlers == ("lapack_sgeqrf_ffi", "lapack_sorgqr_ffi")
    (tmp_path / "program").write_bytes(program.bytecode)
    run_python(
        f"""
        import sys, torch
        from tpu_compile.runtime import CompileOptions, ffi, open_client
        ffi.register({program.ffi_handlers!r})
        client = open_client("cpu", {{}})
        payload = open({str(tmp_path / "program")!r}, "rb").read()
        executable = client.compile(payload, "qr", CompileOptions())
        (r,) = executable.execute([client.put(torch.eye(3) * 5)])
        assert torch.equal(client.fetch(r), torch.eye(3) * 5)
        assert "jax" not in sys.modules
        """
    )


def test_the_users_jax_settings_do_not_matter(run_python: RunPython) -> None:
    run_python(
        """
        import jax, torch
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_numpy_rank_promotion", "raise")
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        x = torch.randn(4, 4, dtype=torch.float64)
        f = torch.compile(lambda x: (torch.linalg.matrix_exp(x), torch.linalg.pinv(x)), backend="tpu", fullgraph=True)
        for got, want in zip(f(x), (torch.linalg.matrix_exp(x), torch.linalg.pinv(x))):
            torch.testing.assert_close(got, want)
        assert not jax.config.jax_enable_x64
        """
    )


def _graph(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*args)


def test_the_platform_family_chooses_the_algorithm() -> None:
    graph = _graph(torch.ops.aten.linalg_qr.default, torch.randn(4, 4))
    cpu, tpu = (fx.lower(graph, "qr", family=family) for family in ("cpu", "tpu"))
    assert "lapack_sgeqrf_ffi" in fx.text(cpu.bytecode) and cpu.ffi_handlers
    assert "@Qr" in fx.text(tpu.bytecode) and not tpu.ffi_handlers


def test_what_jax_has_not_for_a_family_is_a_gap() -> None:
    graph = _graph(torch.ops.aten.linalg_eig.default, torch.randn(4, 4))
    with pytest.raises(tpu_compile.UnsupportedOp, match="'eig' not found for platform tpu"):
        fx.lower(graph, "eig", family="tpu")


def test_nothing_of_jaxs_source_paths_crosses() -> None:
    graph = _graph(torch.ops.aten.linalg_qr.default, torch.randn(4, 4))
    assert b"site-packages" not in fx.lower(graph, "qr", family="cpu").bytecode
    assert as_rule(lambda x: x).__name__ == "<lambda>" and lower_jax.cache_info().currsize
    assert jax.__version__
