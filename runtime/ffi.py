"""Handlers of custom calls: a program names those it needs, and they are registered before it is compiled or loaded.

jax registers all of jaxlib's handlers when it is imported. A program from the cache runs in a process that never
imports jax.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from tpu_compile.errors import DeviceError, nearest


def register(handlers: Iterable[str]) -> None:
    """Make the named custom-call targets known to the CPU client. A target registered before is left alone.

    Raises:
        DeviceError: a name that jaxlib has no handler for; ``code`` is ``NOT_FOUND``.
    """
    for name in handlers:
        _register(name)


@cache
def _register(name: str) -> None:
    from tpu_compile.runtime import client

    known = _available()
    if name not in known:
        raise DeviceError(f"jaxlib has no handler for the custom call {name!r}.{nearest(name, known)}", "NOT_FOUND")
    client.register_custom_call(name, *known[name])


@cache
def _available() -> dict[str, tuple[Any, int]]:
    """(function, API version) by name of every CPU handler that jaxlib carries."""
    from jaxlib import cpu_sparse, lapack
    from jaxlib.cpu import _lapack

    # LAPACK itself is scipy's: a handler called before this would jump to a null pointer.
    _lapack.initialize()
    tables = (module.registrations()["cpu"] for module in (lapack, cpu_sparse))
    return {name: (function, version) for table in tables for name, function, version in table}


def available() -> list[str]:
    """The names that ``register`` takes."""
    return sorted(_available())
