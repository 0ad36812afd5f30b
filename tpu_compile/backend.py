"""The Dynamo backend: options in, AOTAutograd around, ``compile_graph`` for every graph it makes.

Found through the entry points ``tpu`` and ``tpu_compile``; nothing heavy is imported until the first compile.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpu_compile.config import OPTIONS, config, override, scoped
from tpu_compile.errors import ConfigError, TpuCompileError, TpuCompileWarning, nearest


def tpu(
    graph_module: Any,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a Dynamo graph: ``torch.compile(model, backend="tpu", options={...})``.

    Args:
        mode: accepted, since torch passes it; there is nothing for it to choose here.
        options: knobs of ``tpu_compile.config`` that a compile may set; see ``tpu_compile.config.OPTIONS``.

    Raises:
        ConfigError: an unknown option, with the nearest known name.
        UnsupportedOp: under ``fullgraph=True``, every op that nothing lowers, with its line.
    """
    try:
        chosen = check_options(options or {})
        if mode not in (None, "default"):
            _warn_once(f"mode={mode!r} has no effect on backend='tpu': XLA always optimises. Leave it out.")
        return _compile(graph_module, example_inputs, chosen)
    except TpuCompileError as error:
        from tpu_compile.capture import through_dynamo

        raise through_dynamo(error)  # noqa: B904 -- the same error


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are ours. Inductor's, which ``torch.compile(mode=...)`` sends along by itself, are dropped with
    one warning.

    Raises:
        ConfigError: a name that neither we nor inductor know.
    """
    ours = {}
    for name, value in options.items():
        if name in OPTIONS:
            ours[name] = value
        elif _inductor_has(name):
            _warn_once(f"option {name!r} is inductor's and has no effect on backend='tpu'.")
        else:
            raise ConfigError(f"backend='tpu' has no option {name!r}.{nearest(name, OPTIONS)}")
    return ours


def _inductor_has(name: str) -> bool:
    from torch._inductor import config as inductor

    return name.replace("-", "_") in inductor._config  # type: ignore[attr-defined]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, TpuCompileWarning, stacklevel=4)


def ahead(name: str) -> Callable[[Any, Sequence[Any]], Any]:
    """A backend for one function that Dynamo compiles for an artifact, with the knobs in force. It is one graph."""
    return lambda graph_module, example_inputs: _compile(graph_module, example_inputs, {}, name)


_FIRST_STEPS = 2
"""How often an optimizer's step is compiled anyway: before its state exists, and then with it."""


def _note_optimizer(step: tuple[Any, Any] | None) -> None:
    """Warn once where a schedule makes Dynamo compile an optimizer's step again and again."""
    if step is not None and next(_compiles(step)) == _FIRST_STEPS:
        _warn_once(
            "an optimizer's step is compiled for the third time: torch builds a learning rate that is a Python number "
            "into the program. Pass lr=torch.tensor(0.1), or make the whole step one program: tpu_compile.train_step."
        )


@functools.cache
def _compiles(step: tuple[Any, Any]) -> Iterator[int]:
    """Counts the compiles of one optimizer's step."""
    return itertools.count()


def _compile(graph_module: Any, example_inputs: Sequence[Any], chosen: dict[str, Any], ahead: str = "") -> Any:
    from tpu_compile import capture
    from tpu_compile.warm.autograd import keeper

    one_graph, name = bool(ahead) or capture.one_graph(), ahead or capture.frame_name()
    capture.note_break()
    _note_optimizer(capture.optimizer_step())
    scope = scoped(chosen)

    def compile_one(graph: Any, kind: str) -> Any:
        with override(**scope):  # also a backward that is compiled when it is first needed
            return capture.compile_captured(graph, f"{name}_{kind}", kind, one_graph, keeping)

    with override(**scope):
        keeping = None if config.async_compile else keeper(graph_module, example_inputs, name, one_graph)
        return capture.aot_graphs(graph_module, example_inputs, compile_one, keeping)
