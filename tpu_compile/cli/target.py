"""TARGET of a command: ``module:factory``, ``file.py:factory`` or ``file.pt2``, as a model with example arguments."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from tpu_compile.errors import nearest

HELP = """TARGET is module:factory or file.py:factory, where factory() returns (model, args) or (model, args, kwargs)
and is called after torch.manual_seed(0); or a .pt2 file of torch.export, with its example inputs."""


@dataclass(frozen=True)
class Target:
    """What to compile: a function or module, and one call's arguments."""

    name: str
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BadTarget(click.UsageError):
    """A TARGET that names nothing, or whose factory is none. Exit status 2."""


class FactoryFailed(click.ClickException):
    """The user's own module or factory raised. Exit status 1."""

    def __init__(self, what: str, error: BaseException, skip: str) -> None:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename != skip and "importlib" not in f.filename
        ]
        at = f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        super().__init__(f"{what} raised {type(error).__name__}: {error}{at}\n  --traceback shows all of it.")


def load(text: str) -> Target:
    """The target named on the command line.

    Raises:
        BadTarget: there is no such file, module or factory, or the factory returns something else.
        FactoryFailed: importing the module or calling the factory raised.
    """
    if text.endswith(".pt2"):
        return _exported(Path(text))
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise BadTarget(f"{text!r} is no target. {HELP}")
    return _called(text, _factory(_module(place), name, place))


def _exported(path: Path) -> Target:
    import torch

    from tpu_compile.tracing import callable_and_arguments

    if not path.is_file():
        raise BadTarget(f"There is no file {path}.")
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise FactoryFailed(f"loading {path}", error, __file__) from error
    if program.example_inputs is None:
        raise BadTarget(
            f"{path} holds no example inputs; name a factory that returns (torch.export.load(…).module(), args)."
        )
    model, args, kwargs = callable_and_arguments(program, (), {})
    return Target(str(path), model, args, kwargs)


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return _imported(place, lambda: importlib.import_module(place))
    if not path.is_file():
        raise BadTarget(f"There is no file {path}.")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` has it
    return _imported(place, lambda: _run_file(path))


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def _imported(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            raise BadTarget(
                f"There is no module {error.name!r} here, nor among what is installed. A file's name ends in .py."
            ) from None
        raise FactoryFailed(f"importing {place}", error, __file__) from error
    except Exception as error:
        raise FactoryFailed(f"importing {place}", error, __file__) from error


def _factory(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise BadTarget(f"{place} has no {name!r}.{nearest(name, known) if known else ''}")
    if not callable(found):
        raise BadTarget(f"{name!r} in {place} is a {type(found).__name__}, not a function that returns (model, args).")
    factory: Callable[[], Any] = found
    return factory


def factory(text: str) -> Callable[..., Any]:
    """The factory named on the command line, not called; its result is checked when it is. Of a ``.pt2`` file, one that
    returns what it holds.

    Raises:
        BadTarget, FactoryFailed: as ``load``.
    """
    if text.endswith(".pt2"):
        found = _exported(Path(text))
        return lambda: (found.model, found.args, found.kwargs)
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise BadTarget(f"{text!r} is no target. {HELP}")
    made = _factory(_module(place), name, place)

    @functools.wraps(made)
    def checked(**arguments: Any) -> Any:
        return _checked(text, made(**arguments))

    return checked


_Call = TypeVar("_Call", bound=Callable[..., Any])


def guarded(text: str, call: _Call) -> _Call:
    """``call``, which calls the factory named ``text``, with what that raises reported as the user's."""

    @functools.wraps(call)
    def guard(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except click.ClickException:
            raise
        except Exception as error:
            raise FactoryFailed(f"{text}()", error, __file__) from error

    return guard  # type: ignore[return-value]


def _called(text: str, factory: Callable[[], Any]) -> Target:
    import torch

    torch.manual_seed(0)  # so that a factory with random weights makes the same model each time
    try:
        made = factory()
    except Exception as error:
        raise FactoryFailed(f"{text}()", error, __file__) from error
    model, args, kwargs = _checked(text, made)
    return Target(text, model, tuple(args), dict(kwargs))


def _checked(text: str, made: Any) -> tuple[Any, Any, Any]:
    """What a factory returned, as (model, args, kwargs)."""
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[0]):
        raise BadTarget(f"{text}() returned {_describe(made)}; it must return (model, args) or (model, args, kwargs).")
    model, args, kwargs = (*made, {}) if len(made) == 2 else made
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise BadTarget(
            f"{text}() returned {_describe(made)}; args must be a tuple, as in (model, (x,)), and kwargs a dict."
        )
    return model, args, kwargs


def _describe(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__
