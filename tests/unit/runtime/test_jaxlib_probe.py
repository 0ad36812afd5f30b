"""What we use of jaxlib that it does not promise. When jaxlib moves, this file fails first and says where.

Each line names the member, the parameters we pass by position or name, and who in ``runtime`` relies on it.
"""

from __future__ import annotations

import importlib
import re
from functools import reduce
from typing import Any

import pytest

CALLED = [
    # client.py: tensors in and out, without jax
    ("xla_client.batched_device_put", "aval sharding xs devices committed force_copy host_buffer_semantics enable_x64"),
    ("xla_client.array_result_handler", "aval sharding committed _skip_checks"),
    ("xla_client.batched_block_until_ready", ""),
    ("_jax.buffer_to_dlpack_managed_tensor", "buffer stream"),
    ("_jax.ArrayImpl._single_device_array_to_np_array_did_copy", "self"),
    ("_jax.ArrayImpl.is_deleted", "self"),
    ("xla_client.HloSharding.replicate", ""),
    # client.py: programs
    ("_jax.Client.compile_and_load", "self computation executable_devices compile_options"),
    ("_jax.Client.deserialize_executable", "self serialized executable_devices compile_options"),
    ("_jax.Client.local_devices", "self"),
    ("xla_client.register_custom_call_target", "name fn platform api_version"),
    ("_jax.custom_call_targets", "platform"),
    ("_jax.mlir.mlir_module_to_xla_computation", "mlir_module"),
    ("_jax.hlo_module_cost_analysis", ""),
    # executable.py
    ("_jax.LoadedExecutable.execute_sharded", "self arguments"),
    ("_jax.ExecuteResults.consume_with_handlers", "self out_handlers strict"),
    ("_jax.LoadedExecutable.get_output_memory_kinds", "self"),
    ("_jax.LoadedExecutable.serialize", "self"),
    ("_jax.LoadedExecutable.hlo_modules", "self"),
    ("_jax.LoadedExecutable.cost_analysis", "self"),
    ("_jax.LoadedExecutable.get_compiled_memory_stats", "self"),
    # plugin.py
    ("xla_client.load_pjrt_plugin_dynamically", "plugin_name library_path"),
    ("xla_client.pjrt_plugin_loaded", "plugin_name"),
    ("xla_client.pjrt_plugin_initialized", "plugin_name"),
    ("xla_client.initialize_pjrt_plugin", "plugin_name"),
    ("xla_client.make_c_api_client", "plugin_name options"),
    ("xla_client.generate_pjrt_gpu_plugin_options", ""),
    # tpu_worker.py
    ("xla_client.make_c_api_device_topology", "c_api topology_name"),
    ("_jax.DeviceTopology._make_compile_only_devices", "self"),
    ("_jax.CompileOnlyPyClient.compile", "self computation executable_devices compile_options"),
    ("mlir._mlir_libs._jax_mlir_ext.register_dialects", ""),
    # ffi.py
    ("lapack.registrations", ""),
    ("cpu_sparse.registrations", ""),
    ("cpu._lapack.initialize", ""),
]


def member(path: str) -> Any:
    """``jaxlib.<path>``: the longest part that is a module, then attributes."""
    names = path.split(".")
    for cut in range(len(names) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(("jaxlib", *names[:cut])))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, names[cut:], module)
    raise AssertionError(f"jaxlib has no module at the start of {path}")


def signature(function: Any) -> str:
    """A function's parameters as text, whether Python or nanobind made it."""
    if code := getattr(function, "__code__", None):
        return ", ".join(code.co_varnames[: code.co_argcount])
    made = getattr(function, "__nb_signature__", None)
    return " | ".join(overload[0] for overload in made) if made else str(function.__doc__)


@pytest.mark.parametrize(("path", "parameters"), CALLED, ids=[path for path, _ in CALLED])
def test_what_is_called_is_there_with_its_parameters(path: str, parameters: str) -> None:
    function = member(path)
    assert callable(function)
    found = signature(function)
    in_order = r"\b.*?\b".join(map(re.escape, parameters.split()))
    assert re.search(rf"\b{in_order}\b" if in_order else "", found, re.DOTALL), found


@pytest.mark.parametrize("name", ["ZERO_COPY", "IMMUTABLE_ONLY_DURING_CALL"])
def test_ways_of_reading_host_memory(name: str) -> None:
    assert hasattr(member("xla_client.HostBufferSemantics"), name)


def test_one_device_is_a_sharding_that_can_be_subclassed() -> None:
    from jaxlib import xla_client as xc

    class Ours(xc.SingleDeviceSharding):  # type: ignore[misc]
        memory_kind = None

    device = xc.make_cpu_client().local_devices()[0]
    assert Ours(device)._device is device


def test_compile_options_have_what_we_set() -> None:
    from jaxlib import xla_client as xc

    options = xc.CompileOptions()
    settable = "device_assignment env_option_overrides num_replicas num_partitions".split()
    assert [name for name in settable if not hasattr(options, name)] == []
    build = options.executable_build_options
    settable = "num_replicas num_partitions use_spmd_partitioning use_shardy_partitioner optimization_level".split()
    assert [name for name in settable if not hasattr(build, name)] == []


def test_memory_statistics_have_every_name_that_we_report() -> None:
    from dataclasses import fields

    from tpu_compile.runtime.executable import MemoryAnalysis

    stats = member("_jax.CompiledMemoryStats")
    assert [field.name for field in fields(MemoryAnalysis) if not hasattr(stats, field.name)] == []


def test_handlers_are_listed_as_name_function_version() -> None:
    for module in ("lapack", "cpu_sparse"):
        assert all(
            isinstance(name, str) and version in (0, 1)
            for name, _, version in member(f"{module}.registrations")()["cpu"]
        )


def test_the_error_of_pjrt_is_a_runtime_error() -> None:
    assert issubclass(member("xla_client.XlaRuntimeError"), RuntimeError)
