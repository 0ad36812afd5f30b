"""PJRT's statuses ("INVALID_ARGUMENT: …") as the errors of this package. The only place that reads their text."""

from __future__ import annotations

import re

from tpu_compile.errors import BadCall, DeviceError, OutOfMemory

_STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    r"|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED): "
)
_LOCATIONS = (
    re.compile(r'source_file="(?P<file>[^"]+)" source_line=(?P<line>\d+)'),
    re.compile(r'loc\("(?P<file>[^"]+)":(?P<line>\d+)'),
    re.compile(r"(?m)^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):\d+: error:"),
)
_EXCERPT = 2000


def code(message: str) -> str:
    """The status code that opens a PJRT message; ``UNKNOWN`` when it has none."""
    found = _STATUS.search(message)
    return found[1] if found else "UNKNOWN"


def source_line(message: str) -> str:
    """``file:line`` of the op that a message blames, or nothing."""
    for pattern in _LOCATIONS:
        if found := pattern.search(message):
            return f"{found['file']}:{found['line']}"
    return ""


def excerpt(message: str) -> str:
    """The part of a message that a person reads: XLA appends whole programs to some."""
    message = message.strip()
    left = len(message) - _EXCERPT
    return message if left <= 0 else f"{message[:_EXCERPT]}\n… ({left} more characters)"


def device_error(error: Exception, doing: str) -> DeviceError:
    """The error to raise from ``error``, which PJRT raised while it was ``doing`` something."""
    message = str(error)
    status = code(message)
    return (OutOfMemory if status == "RESOURCE_EXHAUSTED" else DeviceError)(f"{doing}: {excerpt(message)}", status)


def call_error(error: Exception, name: str) -> DeviceError:
    """The error of a failed execution of program ``name``: one about its arguments is a BadCall."""
    message = str(error)
    if code(message) != "INVALID_ARGUMENT" and not isinstance(error, TypeError):
        return device_error(error, f"{name} failed")
    # jaxlib's words for a deleted buffer are "Expected args … to have 1 shards, got: [0]".
    deleted = "shards, got: [0]" in message
    hint = "\nA buffer that an earlier call consumed (a donated one) was passed again." if deleted else ""
    return BadCall(f"{name} was called with arguments it does not take: {excerpt(message)}{hint}", code(message))
