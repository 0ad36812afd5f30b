"""Compile options as plain data: what they say to the cache key, and what they become for XLA."""

from __future__ import annotations

import dataclasses

import pytest

from tpu_compile.runtime.compiling import xla_compile_options
from tpu_compile.runtime.options import CompileOptions


def overrides(options: CompileOptions, family: str = "cpu") -> dict[str, object]:
    return dict(xla_compile_options(options, family, [[0]]).env_option_overrides)


def test_the_key_ignores_the_order_of_xla_options() -> None:
    one = CompileOptions(xla_options=(("xla_a", "1"), ("xla_b", "2")))
    other = CompileOptions(xla_options=(("xla_b", "2"), ("xla_a", "1")))
    assert one.key_parts() == other.key_parts()
    assert list(one.key_parts()) == list(other.key_parts())


@pytest.mark.parametrize(
    "changed",
    [
        {"excess_precision": True},
        {"xla_options": (("xla_a", "1"),)},
        {"optimization_level": 2},
        {"num_replicas": 2},
        {"num_partitions": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_field_is_in_the_key(changed: dict[str, object]) -> None:
    assert dataclasses.replace(CompileOptions(), **changed).key_parts() != CompileOptions().key_parts()


def test_no_field_is_left_out_of_the_key() -> None:
    assert set(CompileOptions().key_parts()) == {field.name for field in dataclasses.fields(CompileOptions)}


def test_numerics_are_pinned_to_what_torch_computes() -> None:
    assert overrides(CompileOptions()) == {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": False,
        "xla_cpu_enable_fast_min_max": False,
    }
    assert overrides(CompileOptions(), "tpu") == {"xla_allow_excess_precision": False}


def test_excess_precision_is_allowed_on_request() -> None:
    assert overrides(CompileOptions(excess_precision=True))["xla_allow_excess_precision"] is True


def test_the_users_own_word_beats_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    given = CompileOptions(xla_options=(("xla_cpu_enable_fast_math", "true"),))
    assert overrides(given)["xla_cpu_enable_fast_math"] is True
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true")
    assert "xla_cpu_enable_fast_min_max" not in overrides(CompileOptions())


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("False", False), ("4", "4"), ("0.5", "0.5"), ("tpu,cpu", "tpu,cpu")]
)
def test_only_truth_values_are_parsed_here(text: str, value: object) -> None:
    assert overrides(CompileOptions(xla_options=(("xla_x", text),)))["xla_x"] == value


def test_levels_and_counts_reach_jaxlib() -> None:
    result = xla_compile_options(CompileOptions(optimization_level=2, num_partitions=2), "tpu", [[0, 1]])
    build = result.executable_build_options
    assert (result.num_partitions, build.num_partitions, build.use_spmd_partitioning) == (2, 2, True)
    assert result.device_assignment.computation_count() == 2
    assert int(build.optimization_level) == 2
