"""PJRT's messages as typed errors."""

from __future__ import annotations

import pytest

from tpu_compile.errors import BadCall, DeviceError, OutOfMemory
from tpu_compile.runtime import status
from tpu_compile.runtime.exhausted import DeviceOutOfMemory


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("INVALID_ARGUMENT: No such compile option: 'x'", "INVALID_ARGUMENT"),
        ("jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory", "RESOURCE_EXHAUSTED"),
        ("execute(): incompatible function arguments", "UNKNOWN"),
        ("an op called NOT_FOUNDATION: x", "UNKNOWN"),
        ("", "UNKNOWN"),
    ],
)
def test_the_code_of_a_message(message: str, code: str) -> None:
    assert status.code(message) == code


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("UNKNOWN: /home/me/model.py:12:3: error: must have rank >= 2", "/home/me/model.py:12"),
        ("INTERNAL: while\nmodel.py:7:1: error: bad", "model.py:7"),
        ('%dot = f32[2] dot(a), metadata={op_name="x" source_file="a/b.py" source_line=31}', "a/b.py:31"),
        ("not found\n\n\nSuspected Python Code Location:\n  model.py:6 [xla::PythonStackTrace='']", "model.py:6"),
        ('UNKNOWN: see loc("m.py":4:2)', "m.py:4"),
        ("UNKNOWN: -:1:1: error: custom op 'foo' is unknown\n<unknown>:0: error: Failed to parse", ""),
        ("INTERNAL: nothing to go by", ""),
    ],
)
def test_the_line_that_a_message_blames(message: str, where: str) -> None:
    assert status.source_line(message) == where


def test_a_long_message_is_cut_and_says_so() -> None:
    assert status.excerpt("x" * 3000) == "x" * 2000 + "\n… (1000 more characters)"
    assert status.excerpt(" short\n") == "short"


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        ("the total memory required for HLO temporaries (48.00G) exceeds available HBM (15.75G).", 48 << 30, 63 << 28),
        ("Ran out of memory in memory space hbm. Used 19.50M of 15.75M hbm.", 39 << 19, 63 << 18),
        ("Out of memory allocating 4398046511104 bytes.", 4398046511104, 0),
        ("no sizes in here", 0, 0),
    ],
)
def test_the_sizes_of_an_out_of_memory(message: str, needed: int, available: int) -> None:
    error = status.device_error(RuntimeError(f"RESOURCE_EXHAUSTED: {message}"), "running")
    assert isinstance(error, OutOfMemory)
    assert (error.code, error.needed, error.available) == ("RESOURCE_EXHAUSTED", needed, available)


def test_a_call_error_is_about_the_arguments_or_about_the_device() -> None:
    wrong = status.call_error(RuntimeError("INVALID_ARGUMENT: supplied 2 arguments but expected 1"), "graph 3")
    assert type(wrong) is BadCall and "graph 3" in str(wrong) and wrong.code == "INVALID_ARGUMENT"
    assert type(status.call_error(TypeError("incompatible function arguments"), "g")) is BadCall
    broken = status.call_error(RuntimeError("INTERNAL: cuda said no"), "g")
    assert type(broken) is DeviceError and broken.code == "INTERNAL"
    assert type(status.call_error(RuntimeError("RESOURCE_EXHAUSTED: full"), "g")) is DeviceOutOfMemory


@pytest.mark.parametrize(
    "message",
    ["INVALID_ARGUMENT: Buffer has been deleted or donated.", "INVALID_ARGUMENT: to have 1 shards, got: [0]"],
)
def test_a_consumed_buffer_is_explained(message: str) -> None:
    for error in (
        status.call_error(RuntimeError(message), "g"),
        status.device_error(RuntimeError(message.replace("to have 1 shards, got: [0]", "deleted or donated")), "x"),
    ):
        assert isinstance(error, BadCall) and "consumed" in str(error)
