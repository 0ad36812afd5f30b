"""torch.compile(model, backend="tpu"): PyTorch to StableHLO to PJRT, on any machine.

    compiled = torch.compile(model, backend="tpu")          the backend, found through torch's entry points
    tpu_compile.stats()                                      what happened, as a dict of counters
    with tpu_compile.override(cache=False): ...              knobs; see tpu_compile.config
    tpu_compile.trace(model, x).lower().compile()            the stages, one at a time
    tpu_compile.export(model, (x,), path="m.tpuc")           a model as one file
    tpu_compile.load("m.tpuc")(x)                            runs it where the model's code is not
    tpu_compile.aot(model, (x,))                             compiled and stored now; a new process does not trace
    tpu_compile.train_step(model, loss_fn, optimizer)        a whole training step as one program
    tpu_compile.repeat_layers(model, x)                      equal layers become a loop, forward and backward
    tpu_compile.lowers(my_op)                                a rule for an operator of your own, in StableHLO
    tpu_compile.lowers_jnp(my_op)                            the same, as a jax.numpy function

Importing this package loads neither torch, jaxlib nor jax. (`tpu_compile.stats` and `tpu_compile.config` are the
function and the object, not
their modules: inside the package, write `from tpu_compile.stats import count`.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpu_compile.config import config, override
from tpu_compile.errors import (
    BadCall,
    CacheError,
    CacheWarning,
    CompilationFailed,
    ConfigError,
    DamagedFile,
    DebugCheckFailed,
    DeviceError,
    ExportError,
    IndexOutOfRange,
    LoweringError,
    MissingDependency,
    NewerFile,
    NonFiniteResult,
    OutOfMemory,
    PluginNotFound,
    RuleMismatch,
    TpuCompileError,
    TpuCompileWarning,
    UnsupportedDtype,
    UnsupportedOp,
)
from tpu_compile.stats import reset_stats, stats

if TYPE_CHECKING:
    from tpu_compile.exporting.loading import load
    from tpu_compile.exporting.writing import export
    from tpu_compile.lowering.jnp import lowers_jnp
    from tpu_compile.lowering.registry import lowers
    from tpu_compile.repeating import repeat_layers
    from tpu_compile.stages import trace
    from tpu_compile.training.functional import functional_step
    from tpu_compile.training.step import train_step
    from tpu_compile.warm.ahead import aot

_LAZY = {
    "aot": "tpu_compile.warm.ahead",
    "export": "tpu_compile.exporting.writing",
    "load": "tpu_compile.exporting.loading",
    "trace": "tpu_compile.stages",
    "lowers": "tpu_compile.lowering.registry",
    "lowers_jnp": "tpu_compile.lowering.jnp",
    "repeat_layers": "tpu_compile.repeating",
    "functional_step": "tpu_compile.training.functional",
    "train_step": "tpu_compile.training.step",
}

__all__ = [
    "BadCall",
    "CacheError",
    "CacheWarning",
    "CompilationFailed",
    "ConfigError",
    "DamagedFile",
    "DebugCheckFailed",
    "DeviceError",
    "ExportError",
    "IndexOutOfRange",
    "LoweringError",
    "MissingDependency",
    "NewerFile",
    "NonFiniteResult",
    "OutOfMemory",
    "PluginNotFound",
    "RuleMismatch",
    "TpuCompileError",
    "TpuCompileWarning",
    "UnsupportedDtype",
    "UnsupportedOp",
    "aot",
    "config",
    "export",
    "functional_step",
    "load",
    "lowers",
    "lowers_jnp",
    "override",
    "repeat_layers",
    "reset_stats",
    "stats",
    "trace",
    "train_step",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tpu_compile' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
