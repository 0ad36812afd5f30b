"""PJRT's statuses ("INVALID_ARGUMENT: …") as the errors of this package. The only place that reads their text."""

from __future__ import annotations

import re

from tpu_compile.errors import BadCall, DeviceError, OutOfMemory

_STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED"
    r"|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
    r"|UNAUTHENTICATED): "
)
_LOCATIONS = (
    re.compile(r'source_file="(?P<file>[^"]+)" source_line=(?P<line>\d+)'),
    re.compile(r'loc\("(?P<file>[^"]+)":(?P<line>\d+)'),
    re.compile(r"(?m)(?:^|: )(?P<file>[^\s:][^:\n]*):(?P<line>\d+):\d+: error:"),
    re.compile(r"Suspected Python Code Location:\s*(?P<file>\S[^:\n]*):(?P<line>\d+)"),
)
_SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)"
_MEMORY = (
    re.compile(rf"\({_SIZE}\) exceeds available \S+ \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE}"),
    re.compile(rf"allocating {_SIZE} bytes()()"),
)
_EXCESS = re.compile(rf"Exceeded hbm capacity by {_SIZE}")
"""libtpu says the total to three digits, and by how much it is too large to more."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXCERPT = 2000


def code(message: str) -> str:
    """The status code that opens a PJRT message; ``UNKNOWN`` when it has none."""
    found = _STATUS.search(message)
    return found[1] if found else "UNKNOWN"


def source_line(message: str) -> str:
    """``file:line`` of the op that a message blames, or nothing."""
    for pattern in _LOCATIONS:
        if (found := pattern.search(message)) and found["file"] not in ("-", "<unknown>"):
            return f"{found['file']}:{found['line']}"
    return ""


def excerpt(message: str) -> str:
    """The part of a message that a person reads: XLA appends whole programs to some."""
    message = message.strip()
    left = len(message) - _EXCERPT
    return message if left <= 0 else f"{message[:_EXCERPT]}\n… ({left} more characters)"


def out_of_memory(text: str, message: str, dump: str = "") -> OutOfMemory:
    """An OutOfMemory that says ``text``, with the sizes in PJRT's ``message``."""
    # Not above: libtpu's worker has use for this module, but none for torch.
    from tpu_compile.runtime.exhausted import DeviceOutOfMemory

    for pattern in _MEMORY:
        if found := pattern.search(message):
            needed, unit, available, available_unit = found.groups()
            sizes = (_bytes(needed, unit), _bytes(available or "0", available_unit))
            if excess := _EXCESS.search(message):
                sizes = (sizes[1] + _bytes(*excess.groups()), sizes[1])
            return DeviceOutOfMemory(text, "RESOURCE_EXHAUSTED", dump, *sizes)
    return DeviceOutOfMemory(text, "RESOURCE_EXHAUSTED", dump)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def device_error(error: Exception, doing: str) -> DeviceError:
    """The error to raise from ``error``, which PJRT raised while it was ``doing`` something."""
    message = str(error)
    text = f"{doing}: {excerpt(message)}"
    if _consumed(message):
        return BadCall(f"{text}\n{_CONSUMED}", code(message))
    return out_of_memory(text, message) if code(message) == "RESOURCE_EXHAUSTED" else DeviceError(text, code(message))


def call_error(error: Exception, name: str) -> DeviceError:
    """The error of a failed execution of program ``name``: one about its arguments is a BadCall."""
    message = str(error)
    if code(message) != "INVALID_ARGUMENT" and not isinstance(error, TypeError):
        return device_error(error, f"{name} failed")
    hint = f"\n{_CONSUMED}" if _consumed(message) else ""
    return BadCall(f"{name} was called with arguments it does not take: {excerpt(message)}{hint}", code(message))


_CONSUMED = "A buffer that an earlier call consumed (its argument is donated) was used again."


def _consumed(message: str) -> bool:
    """jaxlib's words for a buffer deleted on its own side are "Expected args … to have 1 shards, got: [0]"."""
    return "deleted or donated" in message or "1 shards, got: [0]" in message
