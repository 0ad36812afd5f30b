"""The runtime alone: StableHLO text in, tensors through it. Each test runs on jaxlib's CPU client and on a plugin's."""

from __future__ import annotations

import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import RunPython
from tpu_compile.config import override
from tpu_compile.errors import BadCall, CompilationFailed, ConfigError, DeviceError, OutOfMemory
from tpu_compile.runtime import CompileOptions, ffi, open_client
from tpu_compile.runtime.client import Client
from tpu_compile.stats import counters

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
DEFAULT = CompileOptions()


@pytest.fixture(scope="module", params=["cpu", "xla_cpu_pjrt"])
def client(request: pytest.FixtureRequest) -> Client:
    return open_client(request.param)


def program(arguments: str, results: str, body: str, name: str = "m") -> bytes:
    """A module whose ``main`` has these argument and result types; ``body`` ends with its return."""
    return f"module @{name} {{ func.func public @main({arguments}) -> ({results}) {{\n{body}\n}} }}".encode()


def binary(op: str, kind: str = "8xf32") -> bytes:
    t = f"tensor<{kind}>"
    return program(f"%a: {t}, %b: {t}", t, f"%0 = stablehlo.{op} %a, %b : {t}\nreturn %0 : {t}")


def run(client: Client, code: bytes, *arguments: torch.Tensor, options: CompileOptions = DEFAULT) -> list[torch.Tensor]:
    executable = client.compile(code, "test", options)
    return [client.fetch(b) for b in executable.execute([client.share(t) for t in arguments])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*as_bytes)


# Tensors


@pytest.mark.parametrize("how", ["put", "share"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_the_trip(client: Client, dtype: torch.dtype, how: str) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    for shape in [(2, 3), (6,)]:
        t = bits.clone().view(dtype).reshape(shape)
        assert same_bits(client.fetch(getattr(client, how)(t)), t)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0),
    "empty in the middle": lambda: torch.zeros(3, 0, 2),
    "scalar bf16": lambda: torch.tensor(2.5, dtype=torch.bfloat16),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "strided": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[::2],
    "strided bf16": lambda: torch.arange(12.0).reshape(3, 4).bfloat16().T,
    "misaligned": lambda: torch.arange(100.0)[1:],
    "conjugate": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    "negated": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj().imag,
    "requires grad": lambda: torch.ones(4, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4).bfloat16()),
}


@pytest.mark.parametrize("how", ["put", "share"])
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_every_kind_of_tensor_arrives_as_its_values(client: Client, make: Callable[[], torch.Tensor], how: str) -> None:
    t = make()
    back = client.fetch(getattr(client, how)(t))
    assert same_bits(back, t.detach().resolve_conj().resolve_neg())
    assert back.is_contiguous() and not back.requires_grad


def test_sharing_copies_nothing_and_a_fetch_is_the_same_memory(client: Client) -> None:
    t = torch.arange(1000.0)
    buffer = client.share(t)
    assert client.fetch(buffer).data_ptr() == t.data_ptr()
    assert counters["h2d_bytes"] == counters["d2h_bytes"] == 0


def test_put_is_a_copy_and_is_counted(client: Client) -> None:
    t = torch.arange(1000.0)
    assert client.fetch(client.put(t)).data_ptr() != t.data_ptr()
    assert counters["h2d_bytes"] == 4000


@pytest.mark.parametrize("offset", [0, 1], ids=["put", "share of misaligned memory"])
def test_a_copied_tensor_may_be_overwritten_at_once(client: Client, offset: int) -> None:
    for value in range(20):
        t = torch.full((1 << 20,), float(value))[offset:]
        buffer = client.share(t) if offset else client.put(t)
        t.fill_(-1)
        assert bool((client.fetch(buffer) == value).all())


def test_a_buffer_keeps_the_memory_alive_and_gives_it_back(client: Client) -> None:
    block = np.ones(1 << 16, dtype=np.float32)
    released = weakref.ref(block)
    skipped = -block.ctypes.data % 64 // 4
    buffer = client.share(torch.from_numpy(block[skipped:]))
    del block
    client.put(torch.ones(1))  # jaxlib lets go of what it no longer needs at its next call
    assert released() is not None
    view = client.fetch(buffer)
    del buffer
    client.put(torch.ones(1))
    assert released() is not None and bool((view == 1).all())
    del view
    for _ in range(100):  # a plugin's client lets go on a thread of its own
        client.put(torch.ones(1))
        if released() is None:
            break
        time.sleep(0.01)
    assert released() is None


@pytest.mark.parametrize("how", ["put", "share"])
def test_what_cannot_be_a_buffer_is_refused(client: Client, how: str) -> None:
    with pytest.raises(BadCall, match="meta"):
        getattr(client, how)(torch.zeros(3, device="meta"))
    with pytest.raises(BadCall, match=r"Sparse|storage"):
        getattr(client, how)(torch.eye(3).to_sparse())


def test_a_device_without_host_memory_copies_both_ways() -> None:
    remote = Client(open_client("cpu")._raw, {"plugin": "test"})
    remote.host_memory = False
    for dtype in DTYPES:
        t = torch.ones(3, 2).to(dtype)
        assert same_bits(remote.fetch(remote.share(t)), t)
        assert remote.fetch(remote.share(t)).data_ptr() != t.data_ptr()
    assert counters["h2d_bytes"] == counters["d2h_bytes"] == 2 * 6 * sum(dtype.itemsize for dtype in DTYPES)


def test_a_fetched_copy_belongs_to_the_caller() -> None:
    remote = Client(open_client("cpu")._raw, {"plugin": "test"})
    remote.host_memory = False
    buffer = remote.put(torch.zeros(3))
    remote.fetch(buffer).fill_(7)
    assert remote.fetch(buffer).tolist() == [0, 0, 0]


# Calls


def test_a_program_runs_and_runs_again(client: Client) -> None:
    executable = client.compile(binary("add"), "test", DEFAULT)
    for value in (1.0, 2.0):
        (result,) = executable.execute([client.share(torch.full((8,), value)), client.put(torch.ones(8))])
        assert client.fetch(result).tolist() == [value + 1] * 8


def test_many_arguments_and_many_results(client: Client) -> None:
    t = "tensor<8xf32>"
    arguments = ", ".join(f"%a{i}: {t}" for i in range(100))
    body = "\n".join(f"%s{i} = stablehlo.negate %a{i} : {t}" for i in range(100))
    names = ", ".join(f"%s{i}" for i in range(100))
    code = program(arguments, ", ".join([t] * 100), f"{body}\nreturn {names} : {', '.join([t] * 100)}")
    results = run(client, code, *(torch.full((8,), float(i)) for i in range(100)))
    assert [r[0].item() for r in results] == [-i for i in range(100)]


def test_results_of_different_types(client: Client) -> None:
    code = program(
        "%a: tensor<4x2xf32>",
        "tensor<4x2xi1>, tensor<i64>, tensor<0xbf16>, tensor<4x2xf32>",
        """%z = stablehlo.constant dense<0.0> : tensor<4x2xf32>
        %0 = stablehlo.compare GT, %a, %z : (tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<4x2xi1>
        %1 = stablehlo.constant dense<7> : tensor<i64>
        %2 = stablehlo.constant dense<> : tensor<0xbf16>
        return %0, %1, %2, %a : tensor<4x2xi1>, tensor<i64>, tensor<0xbf16>, tensor<4x2xf32>""",
    )
    t = torch.randn(4, 2)
    positive, seven, nothing, itself = run(client, code, t)
    assert torch.equal(positive, t > 0) and torch.equal(itself, t)
    assert (seven.dtype, seven.item(), nothing.dtype, nothing.numel()) == (torch.int64, 7, torch.bfloat16, 0)


def test_no_arguments_and_no_results(client: Client) -> None:
    assert run(client, program("", "", "return")) == []
    assert [
        t.item()
        for t in run(
            client,
            program("", "tensor<f32>", "%0 = stablehlo.constant dense<3.0> : tensor<f32>\nreturn %0 : tensor<f32>"),
        )
    ] == [3]


def long_running(n: int = 1500) -> bytes:
    t = f"tensor<{n}x{n}xf32>"
    dot = f"contracting_dims = [1] x [0] : ({t}, {t}) -> {t}"
    body = f"%0 = stablehlo.dot_general %a, %a, {dot}\n%1 = stablehlo.dot_general %0, %0, {dot}\nreturn %1 : {t}"
    return program(f"%a: {t}", t, body)


def test_a_fetch_waits_for_the_result(client: Client) -> None:
    executable = client.compile(long_running(), "test", DEFAULT)
    eye = client.put(torch.eye(1500))
    assert torch.equal(client.fetch(executable.execute([eye])[0]), torch.eye(1500))


def test_threads_share_a_client_and_an_executable(client: Client) -> None:
    executable = client.compile(binary("multiply"), "test", DEFAULT)
    wrong: list[int] = []

    def work(i: int) -> None:
        own = client.compile(binary("subtract", f"{8 + i}xf32"), f"test {i}", DEFAULT)
        for _ in range(50):
            (a,) = executable.execute([client.share(torch.full((8,), float(i))), client.put(torch.full((8,), 2.0))])
            (b,) = own.execute([client.put(torch.full((8 + i,), float(i))), client.share(torch.ones(8 + i))])
            if client.fetch(a).tolist() != [2 * i] * 8 or client.fetch(b).tolist() != [i - 1] * (8 + i):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_client_of_a_platform_is_opened_once() -> None:
    found: list[Client] = []
    threads = [threading.Thread(target=lambda: found.append(open_client("xla_cpu_pjrt"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert open_client("cpu") is open_client("cpu") is not found[0]


# Wrong calls


def test_wrong_arguments_are_refused(client: Client) -> None:
    executable = client.compile(binary("add"), "my graph", DEFAULT)
    good = client.put(torch.ones(8))
    for arguments in ([good], [good] * 3, [good, client.put(torch.ones(7))], [good, None], [torch.ones(8)] * 2):
        with pytest.raises(BadCall, match="my graph"):
            executable.execute(arguments)
    assert client.fetch(executable.execute([good, good])[0]).tolist() == [2] * 8


DONATING = program(
    "%a: tensor<1024xf32> {tf.aliasing_output = 0 : i32}, %b: tensor<1024xf32>",
    "tensor<1024xf32>",
    "%0 = stablehlo.add %a, %b : tensor<1024xf32>\nreturn %0 : tensor<1024xf32>",
)


def test_a_donated_buffer_becomes_the_result(client: Client) -> None:
    executable = client.compile(DONATING, "test", DEFAULT)
    assert executable.memory_analysis().alias_size_in_bytes == 4096
    a, b = client.put(torch.ones(1024)), client.put(torch.ones(1024))
    memory = client.fetch(a).data_ptr()
    (result,) = executable.execute([a, b])
    assert client.fetch(result).data_ptr() == memory
    assert a.is_deleted() and not b.is_deleted()


@pytest.mark.parametrize("use", ["execute", "fetch", "ready"])
def test_a_donated_buffer_is_gone(client: Client, use: str) -> None:
    executable = client.compile(DONATING, "test", DEFAULT)
    a, b = client.put(torch.ones(1024)), client.put(torch.ones(1024))
    executable.execute([a, b])
    uses = {
        "execute": lambda: executable.execute([a, b]),
        "fetch": lambda: client.fetch(a),
        "ready": lambda: client.ready([a]),
    }
    with pytest.raises(BadCall, match="consumed"):
        uses[use]()


def test_one_buffer_twice_with_one_of_them_donated_is_refused_and_kept(client: Client) -> None:
    executable = client.compile(DONATING, "test", DEFAULT)
    a = client.put(torch.ones(1024))
    with pytest.raises(BadCall, match="donate"):
        executable.execute([a, a])
    assert client.fetch(a)[0] == 1


def test_donating_shared_memory_leaves_the_tensor_alone(client: Client) -> None:
    executable = client.compile(DONATING, "test", DEFAULT)
    t = torch.ones(1024)
    (result,) = executable.execute([client.share(t), client.put(torch.ones(1024))])
    assert client.fetch(result)[0] == 2 and t[0] == 1


def test_donating_while_an_export_lives_leaves_the_export_alone(client: Client) -> None:
    executable = client.compile(DONATING, "test", DEFAULT)
    a = client.put(torch.ones(1024))
    export = client.fetch(a)
    (result,) = executable.execute([a, client.put(torch.ones(1024))])
    assert client.fetch(result)[0] == 2 and export[0] == 1


def test_memory_that_is_not_there(client: Client) -> None:
    t = f"tensor<{1 << 44}xf32>"
    code = program(
        "%a: tensor<f32>", t, f"%0 = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> {t}\nreturn %0 : {t}"
    )
    executable = client.compile(code, "huge", DEFAULT)
    with pytest.raises(OutOfMemory, match="huge") as caught:
        client.ready(executable.execute([client.put(torch.tensor(1.0))]))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_a_failure_while_running_comes_with_the_wait() -> None:
    from jaxlib import _jax

    client = open_client("cpu")
    aval = types.SimpleNamespace(shape=(2,), dtype=np.dtype("f4"), weak_type=False, sharding=client._sharding)
    failed = _jax._make_error_array(client._raw, aval, "the program went wrong")
    for wait in (lambda: client.ready([failed]), lambda: client.fetch(failed)):
        with pytest.raises(DeviceError, match="the program went wrong") as caught:
            wait()
        assert caught.value.code == "INTERNAL"


# Compiling


def test_a_rejected_program_is_kept_with_the_message(client: Client, tmp_path: Path) -> None:
    code = b"""module @m { func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
      %0 = "stablehlo.cholesky"(%a) : (tensor<4xf32>) -> tensor<4xf32> loc(#l)
      return %0: tensor<4xf32> } }
    #l = loc("/home/me/model.py":12:3)"""
    with override(dump_to=str(tmp_path / "dumps")), pytest.raises(CompilationFailed) as caught:
        client.compile(code, "my graph", DEFAULT)
    error = caught.value
    assert "my graph" in str(error) and "(/home/me/model.py:12)" in str(error) and error.dump in str(error)
    assert Path(error.dump).parent == tmp_path / "dumps"
    assert (Path(error.dump) / "program.mlir").read_bytes() == code
    assert "rank >= 2" in (Path(error.dump) / "error.txt").read_text()


def test_every_failure_has_a_folder_of_its_own(client: Client, tmp_path: Path) -> None:
    folders = set()
    with override(dump_to=str(tmp_path)):
        for _ in range(2):
            with pytest.raises(CompilationFailed) as caught:
                client.compile(b"ML\xefR garbage", "a/b ../c", DEFAULT)
            folders.add(caught.value.dump)
            assert (Path(caught.value.dump) / "program.mlirbc").read_bytes() == b"ML\xefR garbage"
    assert len(folders) == 2 == len(list(tmp_path.iterdir()))


def test_an_unknown_custom_call_fails_to_compile(client: Client, tmp_path: Path) -> None:
    t = "tensor<4xf32>"
    body = f"%0 = stablehlo.custom_call @nope(%a) {{api_version = 4 : i32}} : ({t}) -> {t}\nreturn %0 : {t}"
    with override(dump_to=str(tmp_path)), pytest.raises(CompilationFailed) as caught:
        client.compile(program(f"%a: {t}", t, body), "test", DEFAULT)
    assert caught.value.code == "NOT_FOUND" and "nope" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("xla_nope", "1"), ("xla_cpu_enable_fast_math", "banana"), ("xla_gpu_autotune_level", "two")]
)
def test_an_option_that_xla_does_not_take_is_named(client: Client, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        client.compile(binary("add"), "test", CompileOptions(xla_options=((name, value),)))


@pytest.mark.parametrize("level", range(4))
def test_every_level_compiles(client: Client, level: int) -> None:
    (result,) = run(
        client, binary("add"), torch.ones(8), torch.ones(8), options=CompileOptions(optimization_level=level)
    )
    assert result.tolist() == [2] * 8


BF16_SUM = program(
    "%a: tensor<4096xbf16>, %b: tensor<4096xbf16>",
    "tensor<4096xbf16>",
    """%0 = stablehlo.add %a, %b : tensor<4096xbf16>
    %1 = stablehlo.subtract %0, %a : tensor<4096xbf16>
    return %1 : tensor<4096xbf16>""",
)


def test_bf16_is_rounded_at_every_step_as_torch_does(client: Client) -> None:
    a, b = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
    (strict,) = run(client, BF16_SUM, a, b)
    assert torch.equal(strict, (a + b) - a)
    assert not torch.equal(strict, b), "nothing was rounded: the test shows nothing"


@pytest.mark.parametrize(("op", "torch_op"), [("maximum", torch.maximum), ("minimum", torch.minimum)])
def test_nan_goes_through_maximum_and_minimum(client: Client, op: str, torch_op: Callable[..., torch.Tensor]) -> None:
    nan = float("nan")
    a, b = torch.tensor([nan, 1, 2, nan, 0, 5, 6, 7]), torch.tensor([1, nan, 3, nan, -0.0, 4, nan, 9])
    (result,) = run(client, binary(op), a, b)
    assert torch.equal(result.isnan(), torch_op(a, b).isnan())
    fast = CompileOptions(xla_options=(("xla_cpu_enable_fast_min_max", "true"),))
    (other,) = run(client, binary(op), a, b, options=fast)
    assert not torch.equal(other.isnan(), result.isnan()), "the option does nothing: this test no longer shows the pin"


def test_division_by_zero_is_ieee(client: Client) -> None:
    a = torch.tensor([0.0, 1, -1, float("nan"), float("inf"), 2, 3, 4])
    (result,) = run(client, binary("divide"), a, torch.zeros(8))
    assert torch.equal(result.isnan(), (a / 0).isnan()) and torch.equal(result.isinf(), (a / 0).isinf())


CHLO = {
    "erf_inv": torch.special.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "erfc": torch.erfc,
    "asinh": torch.asinh,
    "tan": torch.tan,
}


@pytest.mark.parametrize(("op", "torch_op"), CHLO.items(), ids=CHLO)
def test_chlo_compiles(client: Client, op: str, torch_op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    t = "tensor<64xf32>"
    x = torch.linspace(0.05, 0.95, 64)
    (result,) = run(client, program(f"%a: {t}", t, f"%0 = chlo.{op} %a : {t} -> {t}\nreturn %0 : {t}"), x)
    torch.testing.assert_close(result, torch_op(x), rtol=2e-6, atol=1e-6)


def test_chlo_top_k_compiles(client: Client) -> None:
    pair = "tensor<4x3xf32>, tensor<4x3xi32>"
    code = program(
        "%a: tensor<4x8xf32>",
        pair,
        f"%0:2 = chlo.top_k(%a, k = 3) : tensor<4x8xf32> -> ({pair})\nreturn %0#0, %0#1 : {pair}",
    )
    x = torch.randn(4, 8)
    values, indices = run(client, code, x)
    expected = torch.topk(x, 3)
    assert torch.equal(values, expected.values) and torch.equal(indices.long(), expected.indices)


# Inspecting, storing


def test_an_executable_says_what_it_is(client: Client) -> None:
    executable = client.compile(long_running(64), "test", DEFAULT)
    assert executable.as_text().startswith("HloModule m")
    cost, memory = executable.cost_analysis(), executable.memory_analysis()
    assert cost["flops"] >= 2 * 2 * 64**3 and cost["bytes accessed"] > 0
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (64 * 64 * 4, 64 * 64 * 4)
    assert memory.peak_memory_in_bytes >= 2 * 64 * 64 * 4


def test_an_executable_survives_serialization(client: Client) -> None:
    blob = client.compile(binary("add"), "test", DEFAULT).serialize()
    again = client.load(blob, "again", DEFAULT)
    (result,) = again.execute([client.put(torch.ones(8)), client.put(torch.ones(8))])
    assert client.fetch(result).tolist() == [2] * 8
    assert again.cost_analysis()["flops"] == 8 and again.as_text().startswith("HloModule m")
    assert client.fetch(client.load(again.serialize(), "third", DEFAULT).execute([result, result])[0])[0] == 4


@pytest.mark.parametrize("damage", ["garbage", "nothing", "half"])
def test_a_damaged_executable_is_refused(client: Client, damage: str) -> None:
    blob = client.compile(binary("add"), "test", DEFAULT).serialize()
    damaged = {"garbage": b"garbage", "nothing": b"", "half": blob[: len(blob) // 2]}[damage]
    with pytest.raises(DeviceError, match="cannot be loaded"):
        client.load(damaged, "test", DEFAULT)


def test_the_key_says_everything_that_decides_the_binary(client: Client) -> None:
    parts = client.key_parts(DEFAULT)
    assert parts == client.key_parts(CompileOptions())
    assert {"plugin", "platform", "platform_version", "device_kind", "device_assignment", "jaxlib"} <= set(parts)
    assert {"xla_flags", "libtpu_init_args", "host_cpu", *DEFAULT.key_parts()} <= set(parts)
    assert all(isinstance(value, str) for value in parts.values())
    assert parts != client.key_parts(CompileOptions(excess_precision=True))


def test_two_clients_of_one_platform_have_different_keys() -> None:
    assert open_client("cpu").key_parts(DEFAULT) != open_client("xla_cpu_pjrt").key_parts(DEFAULT)


def test_flags_from_the_environment_are_in_the_key(run_python: RunPython) -> None:
    code = """
        from tpu_compile.runtime import CompileOptions, open_client
        print(open_client("cpu").key_parts(CompileOptions())["xla_flags"])
    """
    env = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_dump_to=/tmp/nowhere"}
    assert run_python(code, env).stdout == "xla_cpu_enable_fast_math=false\n"


# Custom calls

CHOLESKY = program(
    "%a: tensor<3x3xf32>",
    "tensor<3x3xf32>, tensor<i32>",
    """%0:2 = stablehlo.custom_call @lapack_spotrf_ffi(%a) {
        backend_config = {uplo = 76 : ui8}, api_version = 4 : i32,
        operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
        result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<> : tensor<0xindex>],
        output_operand_aliases = [#stablehlo.output_operand_alias<
            output_tuple_indices = [0], operand_index = 0, operand_tuple_indices = []>]
    } : (tensor<3x3xf32>) -> (tensor<3x3xf32>, tensor<i32>)
    return %0#0, %0#1 : tensor<3x3xf32>, tensor<i32>""",
)


def test_a_lapack_call_runs_once_its_handler_is_registered() -> None:
    ffi.register(["lapack_spotrf_ffi"])
    ffi.register(["lapack_spotrf_ffi"])
    a = torch.randn(3, 3)
    a = a @ a.T + torch.eye(3)
    factor, info = run(open_client("cpu"), CHOLESKY, a)
    assert info.item() == 0
    torch.testing.assert_close(torch.tril(factor), torch.linalg.cholesky(a))


def test_an_unknown_handler_is_named() -> None:
    with pytest.raises(DeviceError, match=r"'lapack_spotrff'.*Did you mean 'lapack_spotrf_ffi'") as caught:
        ffi.register(["lapack_spotrff"])
    assert caught.value.code == "NOT_FOUND"


def test_a_stored_program_with_a_lapack_call_loads_in_a_new_process(run_python: RunPython, tmp_path: Path) -> None:
    ffi.register(["lapack_spotrf_ffi"])
    (tmp_path / "blob").write_bytes(open_client("cpu").compile(CHOLESKY, "test", DEFAULT).serialize())
    run_python("""
        import sys
        from pathlib import Path
        import torch
        from tpu_compile.runtime import CompileOptions, ffi, open_client

        ffi.register(["lapack_spotrf_ffi"])
        client = open_client("cpu")
        executable = client.load(Path("blob").read_bytes(), "test", CompileOptions())
        factor, info = executable.execute([client.put(4 * torch.eye(3))])
        assert torch.equal(client.fetch(factor), 2 * torch.eye(3))
        assert "jax" not in sys.modules
    """)


def test_handlers_and_jax_live_together(run_python: RunPython) -> None:
    run_python("""
        from tpu_compile.runtime import ffi, open_client

        open_client("cpu")
        ffi.register(["lapack_spotrf_ffi"])
        import jax
        jax.config.update("jax_platforms", "cpu")
        import jax.numpy as jnp
        assert float(jnp.linalg.cholesky(4 * jnp.eye(3))[0, 0]) == 2
        ffi.register(["lapack_dpotrf_ffi"])
    """)


# What a process pays


def test_importing_the_package_loads_neither_jaxlib_nor_torch(run_python: RunPython) -> None:
    run_python("""
        import sys
        import tpu_compile.runtime, tpu_compile.runtime.ffi, tpu_compile.runtime.topology
        assert not {"jaxlib", "jax", "torch", "numpy"} & set(sys.modules)
    """)


@pytest.mark.parametrize("platform", ["cpu", "xla_cpu_pjrt"])
def test_a_compile_and_a_call_never_import_jax_and_say_nothing(platform: str, run_python: RunPython) -> None:
    done = run_python(f"""
        import sys
        import torch
        from tpu_compile.errors import BadCall
        from tpu_compile.runtime import CompileOptions, open_client

        client = open_client({platform!r})
        executable = client.compile({binary("add")!r}, "test", CompileOptions())
        executable = client.load(executable.serialize(), "test", CompileOptions())
        executable.cost_analysis(), executable.memory_analysis(), executable.as_text()
        a = client.share(torch.ones(8))
        (result,) = executable.execute([a, client.put(torch.ones(8))])
        client.ready([result])
        assert client.fetch(result).tolist() == [2] * 8
        try:
            executable.execute([a])
        except BadCall:
            assert "jax" not in sys.modules
        else:
            raise SystemExit("not refused")
    """)
    said = [line for line in done.stderr.splitlines() if line.startswith("I") or "INFO" in line]
    assert said == []


def test_a_forked_child_is_told_so_rather_than_left_waiting(run_python: RunPython) -> None:
    run_python(
        f"""
        import os, signal
        import torch
        from tpu_compile.errors import DeviceError
        from tpu_compile.runtime import CompileOptions, open_client

        client = open_client("cpu")
        code = {binary("add")!r}
        executable = client.compile(code, "test", CompileOptions())
        a = client.put(torch.ones(8))
        uses = (
            lambda: executable.execute([a, a]),
            lambda: client.compile(code, "test", CompileOptions()),
            lambda: client.load(b"", "test", CompileOptions()),
            lambda: open_client("cpu"),
            lambda: open_client("xla_cpu_pjrt"),
        )
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            said = []
            for use in uses:
                try:
                    use()
                except DeviceError as error:
                    said.append(error.code + str("'spawn'" in str(error)))
            os._exit(0 if said == ["FAILED_PRECONDITIONTrue"] * len(uses) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert client.fetch(executable.execute([a, a])[0]).tolist() == [2] * 8
    """,
        timeout=60,
    )


def test_a_process_forked_before_the_first_client_has_its_own(run_python: RunPython) -> None:
    run_python(
        f"""
        import os
        import torch
        import tpu_compile.runtime.client
        from tpu_compile.runtime import CompileOptions, open_client

        child = os.fork()
        client = open_client("cpu")
        executable = client.compile({binary("add")!r}, "test", CompileOptions())
        a = client.put(torch.ones(8))
        assert client.fetch(executable.execute([a, a])[0]).tolist() == [2] * 8
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """,
        timeout=60,
    )
