"""Every knob, declared once: field, environment name, type, default, help, and whether its value belongs in the cache
key.

    tpu_compile.config.cache_dir                     the value in force
    with tpu_compile.override(cache=False): ...      a scope, for this thread and what it calls
    torch.compile(m, backend="tpu", options={...})   the same names, for one compiled function

Order: ``override`` > ``options`` > environment > default. Nobody else reads ``os.environ``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tpu_compile.errors import ConfigError, nearest

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _bool(text: str) -> bool:
    value = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }.get(text.strip().lower())
    if value is None:
        raise ValueError("expected 1 or 0")
    return value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match:
        raise ValueError("expected a size such as 20GB or 512MiB")
    return int(float(match[1]) * _SIZES[match[2]])


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("expected a number above 0 and at most 1")
    return value


def _pairs(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split(",") if item.strip())


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True)
class Knob:
    """One setting. ``parse`` reads it from text, ``kind`` is the Python type accepted from code, ``keyed`` puts it in
    the cache key."""

    name: str
    env: str
    kind: type
    parse: Callable[[str], Any]
    default: Any
    keyed: bool
    help: str

    def check(self, value: Any, origin: str) -> Any:
        """``value`` as this knob's type, or a ConfigError that names ``origin``."""
        try:
            if isinstance(value, str):
                return self.parse(value)
            if self.kind in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
                return self.parse(str(self.kind(value)))  # the range is checked there
            if isinstance(value, self.kind):
                return value
            raise ValueError(f"expected {self.kind.__name__}, got {type(value).__name__}")
        except ValueError as error:
            raise ConfigError(f"{origin}={value!r}: {error}. {self.help}") from None


def _knob(name: str, parse: Callable[[str], Any], default: Any, help: str, *, keyed: bool = False) -> Knob:
    return Knob(name, f"TPU_COMPILE_{name.upper()}", type(default), parse, default, keyed, help)


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        _knob(
            "platform",
            str,
            "",
            "Where programs run: cpu, tpu, cuda, or a PJRT plugin's path. Empty: a real TPU if there is one, else cpu.",
        ),
        _knob("plugin_options", _pairs, {}, "Client options for the PJRT plugin, as name=value,name=value."),
        _knob("cache", _bool, True, "Keep compiled executables on disk."),
        _knob("cache_dir", str, "", "Where. Empty: the platform's cache directory."),
        _knob(
            "cache_max_size",
            _bytes,
            20 * 2**30,
            "Size cap of the cache; least recently used entries go first. 0: no cap.",
        ),
        _knob(
            "cache_lock_timeout",
            float,
            600.0,
            "Seconds to wait for another process that compiles the same program, before compiling it here.",
        ),
        _knob(
            "cache_tracing",
            _bool,
            True,
            "Also keep what AOTAutograd makes of a graph, so that a new process traces nothing. torch pickles these "
            "entries: they stay in the local directory.",
        ),
        _knob("cache_min_compile_seconds", float, 0.0, "Compiles faster than this are not stored."),
        _knob(
            "cache_key",
            str,
            "",
            "Secret that signs cache entries. With it, entries signed otherwise or not at all are never loaded.",
        ),
        _knob(
            "cache_remote",
            str,
            "",
            "URL of a second, shared level (gs://, s3://, file://, ...; needs fsspec). Only read, unless:",
        ),
        _knob(
            "cache_remote_write",
            _bool,
            False,
            "Also write to `cache_remote`, in the background. Meant for one writer, such as CI.",
        ),
        _knob(
            "cache_remote_timeout",
            float,
            10.0,
            "Seconds that a look-up in `cache_remote`, and writing the last entries at exit, may take.",
        ),
        _knob(
            "fallback",
            _one_of("warn", "error"),
            "warn",
            "What an eager op on the tpu device does that nothing lowers: run on the CPU with one warning, or raise.",
        ),
        _knob(
            "eager_mode",
            _one_of("strict", "debug", "defer"),
            "strict",
            "How eager ops on the tpu device run: each at once, each at once and checked, or fused until a read.",
        ),
        _knob("autoload", _bool, True, "Make the tpu device known when torch is imported."),
        _knob("explain_cache_misses", _bool, False, "Log which part of the key differs from the nearest stored entry."),
        _knob("raise_cache_errors", _bool, False, "Raise cache faults instead of warning (for CI)."),
        _knob("log_compiles", _bool, False, "Log one line for each lowering and each compile."),
        _knob("dump_to", str, "", "Folder that receives the FX graph, StableHLO and HLO of every program."),
        _knob(
            "excess_precision",
            _bool,
            False,
            "Let XLA drop f32 → bf16 → f32 round trips. Faster, and no longer what torch computes.",
            keyed=True,
        ),
        _knob(
            "debug_checks",
            _bool,
            False,
            "Raise, as eager does, at an index out of range; and at the op that makes the first NaN or infinity.",
            keyed=True,
        ),
        _knob(
            "lowering",
            _one_of("native", "torch-mlir"),
            "native",
            "Who turns graphs into StableHLO: our own rules, or torch-mlir, a second opinion with half the operators.",
            keyed=True,
        ),
        _knob(
            "activation_memory_budget",
            _share,
            1.0,
            "Part of the activations' memory, above 0, that a backward may rely on: the rest is computed again.",
            keyed=True,
        ),
        _knob(
            "async_compile",
            _bool,
            False,
            "Run eagerly, op by op, until a thread has compiled the graph.",
        ),
        _knob(
            "scan_layers",
            _bool,
            False,
            "Compile layers that repeat as one loop, forward and backward: what follows Dynamo grows little with "
            "depth, a call costs a copy of the layers' parameters.",
            keyed=True,
        ),
        _knob(
            "target",
            str,
            "",
            "A TPU slice that need not be here, such as v6e:2x2: every program is compiled for it too, and a first "
            "call fails where one does not fit. What runs is this machine's.",
        ),
        _knob(
            "keep_temporaries",
            _bool,
            True,
            "Programs on the CPU client with temporaries above 32 MiB leave their memory with the process (glibc), "
            "up to twice the largest, instead of mapping it anew at each call.",
        ),
        _knob("xla_options", _pairs, {}, "XLA compiler options, as name=value,name=value.", keyed=True),
        _knob("optimization_level", int, -1, "XLA effort, 0 to 3; -1 leaves it to XLA.", keyed=True),
    )
}
OPTIONS = frozenset(
    "activation_memory_budget async_compile excess_precision xla_options optimization_level debug_checks scan_layers "
    "lowering cache dump_to log_compiles platform target".split()
)
"""Knobs that ``torch.compile(options=...)`` takes too."""

_overrides: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "tpu_compile_overrides", default=MappingProxyType({})
)


class Config:
    """The knobs' values in force, as attributes. Assigning sets the value for the whole process."""

    def __init__(self) -> None:
        object.__setattr__(self, "_process", {})

    def __getattr__(self, name: str) -> Any:
        knob = _find(name)
        scoped = _overrides.get()
        if name in scoped:
            return scoped[name]
        if name in self._process:
            return self._process[name]
        text = os.environ.get(knob.env, "")
        return knob.check(text, knob.env) if text else knob.default

    def __setattr__(self, name: str, value: Any) -> None:
        self._process[name] = _find(name).check(value, name)

    def __dir__(self) -> list[str]:
        return list(KNOBS)

    def keyed(self) -> dict[str, Any]:
        """Values that decide what the compiler produces."""
        return {name: getattr(self, name) for name, knob in KNOBS.items() if knob.keyed}


def _find(name: str) -> Knob:
    if name not in KNOBS:
        raise ConfigError(f"No knob is called {name!r}.{nearest(name, KNOBS)}")
    return KNOBS[name]


config = Config()


@contextlib.contextmanager
def override(**values: Any) -> Iterator[Config]:
    """Set knobs inside a ``with`` block, for this thread (and async task) only.

    Raises:
        ConfigError: a name that is no knob, or a value it cannot take.
    """
    checked = {name: _find(name).check(value, name) for name, value in values.items()}
    token = _overrides.set({**_overrides.get(), **checked})
    try:
        yield config
    finally:
        _overrides.reset(token)


def scoped(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` (of one compile's options) with the ``override`` scopes in force laid over them."""
    return {**values, **_overrides.get()}


def environment(name: str, default: str = "") -> str:
    """An environment variable that belongs to somebody else (XLA_FLAGS, LIBTPU_INIT_ARGS): read here, so that it is
    read in one place."""
    return os.environ.get(name, default)


def set_environment(**variables: str) -> None:
    """Set variables that a native library reads when it is loaded, in a process of our own."""
    os.environ.update(variables)


def set_environment_default(**variables: str) -> None:
    """Set variables that a native library reads when it is loaded, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
