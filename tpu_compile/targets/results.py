"""Results of ``estimate`` and ``advise`` in the cache: asked again with nothing changed, they cost calling the factory.

The key holds all that decides a result: the factory's model (its modules, shapes, configuration), every module of the
user's that is loaded, versions of everything installed, our own sources, and what was asked.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpu_compile.cache import open_store
from tpu_compile.cache.key import CacheKey
from tpu_compile.config import config, environment
from tpu_compile.executables import options_in_force
from tpu_compile.targets.workload import Made
from tpu_compile.warm import sources


def remembered(
    name: str, asked: Mapping[str, Any], made: Made, compute: Callable[[], list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], bool]:
    """(the result as plain data, whether it was stored).

    Args:
        name: for listings.
        asked: what was asked: plain data.
    """
    key, store = _key(name, asked, made), open_store()
    entry = store.get(key) if store else None
    if entry is not None:
        found: list[dict[str, Any]] = json.loads(entry.payload)
        return found, True
    start = time.perf_counter()
    found = json.loads(json.dumps(compute()))
    if store:
        payload = json.dumps(found).encode()
        store.put(key, payload, compile_seconds=time.perf_counter() - start, metadata={}, even_if_quick=True)
    return found, False


def _key(name: str, asked: Mapping[str, Any], made: Made) -> CacheKey:
    parts = {
        "result": json.dumps(asked, sort_keys=True),
        "model": hashlib.sha256("\n".join(_model(made)).encode()).hexdigest(),
        "user_modules": _user_modules(),
        "installed": _installed(),
        "sources": sources.digest(),
        "knobs": json.dumps(config.keyed(), sort_keys=True, default=str),
        "flags": f"{environment('XLA_FLAGS')} {environment('LIBTPU_INIT_ARGS')}",
        **options_in_force().key_parts(),
    }
    return CacheKey.of(name, parts)


def _model(made: Made) -> Iterator[str]:
    """All that a model shows of itself."""
    model = made.model
    module = getattr(getattr(model, "recipe", None), "model", model)
    yield repr(module) if isinstance(module, torch.nn.Module) else f"{module.__module__}.{module.__qualname__}"
    if isinstance(module, torch.nn.Module):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{name} {_spec(tensor)} {tensor.requires_grad}"
        for name, each in module.named_modules():
            plain = {k: v for k, v in vars(each).items() if isinstance(v, (int, float, str, bool, tuple, type(None)))}
            yield f"{name} {sorted(plain.items(), key=str)}"
        yield str(getattr(module, "config", ""))
    for leaf in tree_leaves((made.args, dict(made.kwargs))):
        yield _spec(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _spec(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"


def _user_modules() -> str:
    """One digest over the files of the loaded modules that no package of this environment holds."""
    paths = sysconfig.get_paths()
    installed = tuple({paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")})
    own = tuple(str(Path(each).parent) for each in _own_files())
    total = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith((*installed, *own)) and Path(file).is_file():
            total.update(f"{name}\0".encode() + Path(file).read_bytes())
    return total.hexdigest()


def _own_files() -> Iterator[str]:
    for package in ("tpu_compile", "tpu_compile.lowering", "tpu_compile.runtime", "tpu_compile.cache"):
        file = getattr(sys.modules.get(package), "__file__", None)
        if file:
            yield file


def _installed() -> str:
    """One digest over every installed package and its version."""
    names = sorted(f"{each.metadata['Name']}=={each.version}" for each in distributions())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
