"""Compiling for a TPU that is not there. Needs libtpu, and no TPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunPython
from tpu_compile.config import override
from tpu_compile.errors import CompilationFailed, ConfigError, DeviceError, MissingDependency, OutOfMemory
from tpu_compile.runtime import CompileOptions, plugin
from tpu_compile.runtime import topology as topology_module
from tpu_compile.runtime.topology import GENERATIONS, Topology, topology
from tpu_compile.stats import reset_stats, stats

DEFAULT = CompileOptions()


@pytest.fixture(scope="module", autouse=True)
def _needs_libtpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")


@pytest.fixture
def worker() -> Iterator[int]:
    """The process id of the worker that answers now."""
    topology("v5e:2x2")
    (one,) = topology_module._workers._idle
    yield one._process.pid


def ended(worker: int) -> None:
    """Kill the worker, and see it dead."""
    os.kill(worker, signal.SIGKILL)
    (one,) = topology_module._workers._idle
    assert one._process.wait(timeout=60) == -signal.SIGKILL


def matmul(n: int = 256, dtype: str = "bf16") -> bytes:
    t = f"tensor<{n}x{n}x{dtype}>"
    return f"""module @m {{ func.func public @main(%a: {t}, %b: {t}) -> {t} {{
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : ({t}, {t}) -> {t}
        %1 = stablehlo.tanh %0 : {t}
        return %1 : {t}
    }} }}""".encode()


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [("v5e:2x2", "TPU v5 lite", 4), ("v6e:2x2", "TPU v6 lite", 4), ("tpu7x:2x2x1", "TPU7x", 8)],
)
def test_a_program_compiles_for_an_absent_tpu(name: str, kind: str, devices: int) -> None:
    target = topology(name)
    assert (target.device_kind, target.device_count, target.family) == (kind, devices, "tpu")
    compiled = target.compile(matmul(), "graph 0", DEFAULT)
    assert "is_scheduled=true" in compiled.as_text() and "estimated_cycles" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] >= 2 * 256**3
    memory = compiled.memory_analysis()
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (2 * 256 * 256 * 2, 256 * 256 * 2)
    assert len(compiled.serialize()) > 1000


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_is_known(generation: str) -> None:
    assert topology(f"{generation}:2x2x1").device_kind.startswith("TPU")


@pytest.mark.parametrize(
    ("name", "devices"), [("v5e:1x1", 1), ("v6e:1x1", 1), ("v5e:1x2", 2), ("v5e:16x16", 256), ("tpu7x:16x16x32", 16384)]
)
def test_one_chip_and_a_whole_pod(name: str, devices: int) -> None:
    assert topology(name).device_count == devices


@pytest.mark.parametrize("name", ["v9z:2x2", "v5e", "v5e:3x3", "", "v5e:2by2"])
def test_an_unknown_slice_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology(name)
    assert repr(name) in str(caught.value)
    assert [known for known in (*GENERATIONS, "v5e:2x2") if known not in str(caught.value)] == []


def test_the_key_names_the_slice_and_the_compiler() -> None:
    parts = topology("v5e:2x2").key_parts(DEFAULT)
    library = plugin.libtpu()
    assert library is not None and library.version in parts["plugin"]
    assert parts["topology"] == "v5e:2x2" and "TFRT TPU v5 lite" in parts["platform_version"]
    assert "host_cpu" not in parts, "the code is for the TPU, whoever compiles it"
    assert parts != topology("v5e:2x4").key_parts(DEFAULT)
    assert parts != topology("v5e:2x2").key_parts(CompileOptions(num_partitions=2))


def test_a_program_that_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    with override(dump_to=str(tmp_path)), pytest.raises(OutOfMemory) as caught:
        topology("v5e:2x2").compile(matmul(65536, "f32"), "large", DEFAULT)
    error = caught.value
    assert (error.code, error.needed, error.available) == ("RESOURCE_EXHAUSTED", 48 << 30, 63 << 28)
    assert (Path(error.dump) / "program.mlir").read_bytes() == matmul(65536, "f32")


def test_memory_is_known_before_there_is_code(worker: int) -> None:
    target, program = topology("v5e:1x1"), matmul(2048)
    held = target.compile(program, "whole", DEFAULT).memory_analysis().held
    assert target.hbm(program, "in part", DEFAULT) == pytest.approx(held, abs=2**16) and held >= 3 * 2048 * 2048 * 2
    with pytest.raises(OutOfMemory) as caught:
        target.hbm(matmul(65536, "f32"), "large", DEFAULT)
    assert (caught.value.needed, caught.value.available) == (48 << 30, 63 << 28)
    (left,) = topology_module._workers._idle
    assert left._process.pid == worker, "a process that answers once is started for it"


def test_code_is_left_out_where_nobody_wants_it() -> None:
    whole, part = (topology("v5e:1x1").compile(matmul(), "p", DEFAULT, code=code) for code in (True, False))
    assert (part.text, part.memory, part.cost, part.blob) == (whole.text, whole.memory, whole.cost, b"")


def test_a_program_for_four_devices_is_partitioned() -> None:
    t = "tensor<1024x1024xf32>"
    code = f"""module @m attributes {{mhlo.num_partitions = 4 : i32}} {{
        sdy.mesh @mesh = <["x"=4]>
        func.func public @main(%a: {t} {{sdy.sharding = #sdy.sharding<@mesh, [{{"x"}}, {{}}]>}}) -> tensor<f32> {{
            %c = stablehlo.constant dense<0.0> : tensor<f32>
            %0 = stablehlo.reduce(%a init: %c) applies stablehlo.add across dimensions = [0, 1]
                : ({t}, tensor<f32>) -> tensor<f32>
            return %0 : tensor<f32>
        }} }}""".encode()
    compiled = topology("v5e:2x2").compile(code, "sharded", CompileOptions(num_partitions=4))
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 1024 * 1024 * 4 // 4
    assert all(value >= 0 for value in compiled.cost_analysis().values())
    with pytest.raises(ConfigError, match="4 devices"):
        topology("v5e:2x2").compile(code, "sharded", CompileOptions(num_partitions=8))


def test_bf16_is_rounded_at_every_step_until_excess_precision_is_asked_for() -> None:
    t = "tensor<1024xbf16>"
    code = f"""module @m {{ func.func public @main(%a: {t}, %b: {t}) -> {t} {{
        %0 = stablehlo.add %a, %b : {t}
        %1 = stablehlo.subtract %0, %a : {t}
        return %1 : {t}
    }} }}""".encode()
    target = topology("v5e:2x2")  # computes bf16 in f32
    assert " reduce-precision(" in target.compile(code, "test", DEFAULT).as_text()
    assert " reduce-precision(" not in target.compile(code, "test", CompileOptions(excess_precision=True)).as_text()


@pytest.mark.parametrize(
    ("name", "value"), [("xla_nope", "1"), ("xla_tpu_scoped_vmem_limit_kib", "many"), ("xla_cpu_enable_fast_math", "x")]
)
def test_an_option_that_libtpu_does_not_take_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        topology("v5e:2x2").compile(matmul(), "test", CompileOptions(xla_options=((name, value),)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("xla_tpu_scoped_vmem_limit_kib", "65536"), ("xla_tpu_enable_latency_hiding_scheduler", "true")],
)
def test_options_are_taken_as_text(name: str, value: str) -> None:
    assert topology("v5e:2x2").compile(matmul(), "test", CompileOptions(xla_options=((name, value),))).as_text()


def test_a_rejected_program_comes_with_its_line(tmp_path: Path) -> None:
    t = "tensor<4x4xf32>"
    code = f"""module @m {{ func.func public @main(%a: {t}) -> {t} {{
        %0 = stablehlo.custom_call @nope(%a) {{api_version = 4 : i32}} : ({t}) -> {t} loc(#l)
        return %0 : {t} }} }}
    #l = loc("/home/me/model.py":12:3)""".encode()
    with override(dump_to=str(tmp_path)), pytest.raises(CompilationFailed, match="nope") as caught:
        topology("v5e:2x2").compile(code, "my graph", DEFAULT)
    assert "my graph (/home/me/model.py:12)" in str(caught.value)
    with override(dump_to=str(tmp_path)), pytest.raises(CompilationFailed, match="Unable to parse"):
        topology("v5e:2x2").compile(b"garbage", "my graph", DEFAULT)


def compile_slowly(target: Topology) -> None:
    target.compile(matmul(1024, "f64"), "slow graph", DEFAULT)  # f64 is emulated: half a minute


def test_one_worker_answers_all_requests(worker: int) -> None:
    for name in ("v5e:2x2", "v6e:2x2"):
        topology(name).compile(matmul(), "test", DEFAULT)
    assert [each._process.pid for each in topology_module._workers._idle] == [worker]


def test_a_crash_is_an_error_and_the_next_compile_works(worker: int, tmp_path: Path) -> None:
    target = topology("v5e:2x2")
    threading.Timer(0.5, os.kill, (worker, signal.SIGABRT)).start()
    with override(dump_to=str(tmp_path)), pytest.raises(CompilationFailed, match="slow graph") as caught:
        compile_slowly(target)
    assert caught.value.code == "ABORTED" and "signal 6" in str(caught.value)
    assert "SIGABRT received" in str(caught.value), "the message ends with what libtpu wrote"
    assert (Path(caught.value.dump) / "program.mlir").exists()
    assert target.compile(matmul(), "test", DEFAULT).as_text()


def test_a_worker_that_died_between_requests_is_replaced(worker: int) -> None:
    ended(worker)
    assert topology("v5e:2x2").compile(matmul(), "test", DEFAULT).as_text()


def test_a_worker_that_cannot_start_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch, worker: int) -> None:
    ended(worker)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    monkeypatch.setattr(topology_module, "WORKER", "tpu_compile.no_such_module")
    with pytest.raises(DeviceError, match="no_such_module") as caught:
        topology("v5e:2x2")
    assert caught.value.code == "ABORTED"


def test_threads_share_the_worker() -> None:
    sizes: dict[int, int] = {}

    def work(n: int) -> None:
        memory = topology("v5e:2x2").compile(matmul(n), "test", DEFAULT).memory_analysis()
        sizes[n] = memory.output_size_in_bytes

    threads = [threading.Thread(target=work, args=(n,)) for n in (128, 256, 384)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == {n: n * n * 2 for n in (128, 256, 384)}


@pytest.mark.parametrize(("memory", "count"), [(1 << 40, 2), (1, 1)], ids=["enough", "too little"])
def test_two_workers_compile_at_once_if_asked_to_and_memory_allows(worker: int, memory: int, count: int) -> None:
    target, used, together = topology("v5e:2x2"), [], threading.Barrier(count, timeout=60)

    def work() -> None:
        with topology_module._workers._lent() as lent:
            used.append(lent._process.pid)
            together.wait()

    with topology_module.workers(2, memory):
        target.compile(matmul(), "how much memory a compile takes", DEFAULT)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert worker in used and len(set(used)) == count
    (left,) = topology_module._workers._idle
    assert all(Path(f"/proc/{pid}").exists() == (pid == left._process.pid) for pid in used)


def test_what_a_worker_has_grown_to_leaves_out_its_parent(run_python: RunPython) -> None:
    child = "from tpu_compile.runtime import tpu_worker; print(tpu_worker._resident())"
    code = f"import subprocess, sys; held = b'x' * (1 << 30); subprocess.run([sys.executable, '-c', {child!r}])"
    assert 1 << 20 < int(run_python(code).stdout) < 1 << 30


def test_a_worker_that_has_grown_is_not_kept(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_module, "_GROWN", 1)
    assert topology("v5e:2x2").compile(matmul(), "test", DEFAULT).as_text()
    assert not topology_module._workers._idle and not Path(f"/proc/{worker}").exists()


COMPILE = f"""
    from tpu_compile.runtime import CompileOptions
    from tpu_compile.runtime.topology import topology
    compiled = topology("v5e:2x2").compile({matmul()!r}, "test", CompileOptions())
    assert "fusion" in compiled.as_text()
"""


def test_a_process_loads_neither_torch_nor_libtpu_and_leaves_nothing_behind(run_python: RunPython) -> None:
    done = run_python(
        COMPILE
        + """
    import sys
    from tpu_compile.runtime import topology as module
    assert not {"torch", "libtpu", "jax"} & set(sys.modules)
    print(module._workers._idle[0]._process.pid)
    """,
        {"PYTHONWARNINGS": "error"},
    )
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_worker_ends_with_a_process_that_is_killed_in_the_middle_of_a_compile(run_python: RunPython) -> None:
    done = run_python(
        f"""
    import os, signal, threading
    from tpu_compile.runtime import CompileOptions
    from tpu_compile.runtime import topology as module
    target = module.topology("v5e:2x2")
    print(module._workers._idle[0]._process.pid, flush=True)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    target.compile({matmul(1024, "f64")!r}, "half a minute", CompileOptions())
    """,
        check=False,
    )
    worker, end = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 15
    while worker.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert done.returncode == -signal.SIGKILL and not worker.exists()


def test_two_processes_compile_at_once(run_python: RunPython) -> None:
    run_python(
        f"""
    import subprocess, sys, textwrap
    code = textwrap.dedent({COMPILE!r})
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    """
    )


JAX = """
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    there = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    on = jax.sharding.SingleDeviceSharding(there)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    compiled = jax.jit(lambda x: jnp.tanh(x) @ x, in_shardings=on, out_shardings=on).lower(x).compile()
    assert "fusion" in compiled.as_text()
"""
ALONE = {
    **{"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"},
    **{"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "0"},
}
"""What jax needs to compile for a TPU that is not there; the machine's lock file stays in force for it."""


@pytest.mark.parametrize("code", [JAX + COMPILE, COMPILE + JAX + COMPILE], ids=["jax first", "jax second"])
def test_beside_a_jax_that_has_loaded_libtpu(run_python: RunPython, code: str) -> None:
    run_python(code, ALONE)


def test_a_forked_child_has_a_worker_of_its_own(run_python: RunPython) -> None:
    run_python(
        COMPILE
        + """
    import os
    child = os.fork()
    assert topology("v5e:2x2").compile(b"module @m { func.func public @main() { return } }", "t", CompileOptions())
    if child:
        assert os.waitpid(child, 0)[1] == 0
    """,
        {"PYTHONWARNINGS": "error"},
    )


def test_a_compiled_function_is_compiled_for_a_target_too() -> None:
    import torch

    compiled = torch.compile(lambda x: x * 2, backend="tpu", options={"target": "v5e:1x1"})
    reset_stats()
    assert torch.equal(compiled(torch.ones(8)), torch.full((8,), 2.0)), "what runs is this machine's"
    assert stats()["xla_compiles"] == 2
    with pytest.raises(ConfigError, match="v5e:2x2"):
        torch.compile(lambda x: x * 3, backend="tpu", options={"target": "v5"})(torch.ones(8))


def test_without_libtpu_the_pip_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "libtpu", lambda: None)
    with pytest.raises(MissingDependency, match=r"pip install 'tpu-compile\[tpu\]'"):
        topology("v5e:2x2")
