"""What decides a binary besides its program: compiler flags and the host's CPU, as labelled text for the cache key."""

from __future__ import annotations

import hashlib
import itertools
import platform
import re

from tpu_compile.config import environment

_INERT = re.compile(r"dump|debug|log|trace|profil|vmodule|verbos|stderr")
"""Flags that say what a compile reports, not what it produces."""


def flags(text: str) -> dict[str, str]:
    """The flags of XLA_FLAGS or LIBTPU_INIT_ARGS by name, the last of each; a flag with no value reads ``true``."""
    pairs = (word.lstrip("-").partition("=") for word in text.split() if word.startswith("-"))
    return {name: value if equals else "true" for name, equals, value in pairs}


def flags_part(variable: str) -> str:
    """An environment variable's flags, sorted, without those that leave the binary alone."""
    kept = {name: value for name, value in flags(environment(variable)).items() if not _INERT.search(name)}
    return " ".join(f"{name}={value}" for name, value in sorted(kept.items()))


def host_cpu() -> str:
    """The host's CPU as ``model #digest``; the digest covers the instruction set, which XLA's code depends on."""
    facts = _cpu_facts()
    model = facts.get("model name") or facts.get("CPU part") or platform.processor() or platform.machine()
    features = sorted((facts.get("flags") or facts.get("Features") or "").split())
    identity = [platform.machine(), *(f"{k}={v}" for k, v in sorted(facts.items()) if k in _MODEL), *features]
    return f"{model} #{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}"


_MODEL = frozenset(
    ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
)


def _cpu_facts() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as lines:
            # The first processor only: on a machine with hundreds the whole file takes the kernel a tenth of a second.
            block = list(itertools.takewhile(str.strip, lines))
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block)}
