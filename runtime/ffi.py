"""Handlers of custom calls: a program names those it needs, and they are registered before it is compiled or loaded.

jax registers all of jaxlib's handlers when it is imported. A program from the cache runs in a process that never
imports jax. They reach the CPU client inside jaxlib only: a plugin has a registry of its own, and the CPU plugin that
exists (xla-cpu-pjrt 0.0.1) refuses handlers built for jaxlib's newer FFI version, so that such a program fails to
compile there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from tpu_compile.errors import DeviceError, nearest


def register(handlers: Iterable[str]) -> None:
    """Make the named custom-call targets known to the CPU client; a name registered before costs a look-up.

    Raises:
        DeviceError: a name that jaxlib has no handler for; ``code`` is ``NOT_FOUND``.
    """
    for name in handlers:
        _register(name)


def available() -> list[str]:
    """The names that ``register`` takes."""
    return sorted(_available())


@cache
def _register(name: str) -> None:
    from tpu_compile.runtime.client import register_custom_call

    known = _available()
    if name not in known:
        raise DeviceError(f"jaxlib has no handler for the custom call {name!r}.{nearest(name, known)}", "NOT_FOUND")
    register_custom_call(name, known[name])


@cache
def _available() -> dict[str, Any]:
    """The typed handlers that jaxlib carries for the CPU, by name."""
    from jaxlib import cpu_sparse, lapack
    from jaxlib.cpu import _lapack

    # LAPACK itself is scipy's: a handler called before this would jump to a null pointer.
    _lapack.initialize()
    tables = (module.registrations()["cpu"] for module in (lapack, cpu_sparse))
    return {name: function for table in tables for name, function, version in table if version == 1}
