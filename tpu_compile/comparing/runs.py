"""One run of a model, call after call, with everything a user could look at afterwards, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpu_compile.errors import ConfigError

SEED = 0
"""Before every run: both sides draw the same initial numbers, and the same directions for their gradients."""


@dataclass(frozen=True)
class Subject:
    """A model (or function) with one call's arguments."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def copied(self) -> Subject:
        """A copy that shares nothing with this one; what shares memory in it goes on doing so.

        Raises:
            ConfigError: something in it cannot be copied.
        """
        try:
            return Subject(*copy.deepcopy((self.model, self.args, self.kwargs)))
        except Exception as error:
            raise ConfigError(
                f"compare runs copies of the model and its arguments, and they cannot be copied: {error}"
            ) from error

    def to(self, dtype: torch.dtype) -> Subject:
        """A copy whose floating-point parameters, buffers and arguments have another dtype."""

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

        ours = self.copied()
        model = ours.model.to(dtype) if isinstance(ours.model, torch.nn.Module) else ours.model
        args, kwargs = pytree.tree_map(converted, (ours.args, ours.kwargs))
        return Subject(model, args, kwargs)


def run(subject: Subject, call: Callable[..., Any], *, calls: int = 1, grad: bool = False) -> list[dict[str, Any]]:
    """Call a subject's model ``calls`` times with its arguments, which keep what the model writes into them.

    Args:
        call: what to call: the model itself, or the model compiled.
        grad: run under autograd, and pull random directions back through the results.

    Returns:
        For each call by name: results, gradients, arguments and buffers as it left them, and parameters that it wrote.
    """
    torch.manual_seed(SEED)
    seen = []
    for index in range(calls):
        parameters = {name: t._version for name, t in _parameters(subject)}
        with torch.set_grad_enabled(grad):
            result = call(*subject.args, **subject.kwargs)
            found = dict(leaves(result, "result"))
            if grad:
                pull_back(result, SEED + index)
        found.update(_state(subject))
        found.update(_take_gradients(subject))
        written = {name: t for name, t in _parameters(subject) if t._version != parameters.get(name)}
        seen.append({name: _copy(value) for name, value in {**found, **written}.items()})
    return seen


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _parameters(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(subject.model, torch.nn.Module):
        yield from ((f"parameter {name}", t) for name, t in subject.model.named_parameters())


def _state(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a call may write into, but for parameters, which are large and seldom written."""
    given = [*leaves(list(subject.args), "args"), *leaves(subject.kwargs, "kwargs")]
    yield from ((f"argument {name}", t) for name, t in given if isinstance(t, torch.Tensor))
    if isinstance(subject.model, torch.nn.Module):
        yield from ((f"buffer {name}", t) for name, t in subject.model.named_buffers())


def _take_gradients(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of leaves, which lose them, so that the next call's stand alone."""
    for name, leaf in (*_parameters(subject), *_state(subject)):
        if leaf.requires_grad and leaf.is_leaf and leaf.grad is not None:
            yield f"gradient of {name.removeprefix('parameter ')}", leaf.grad
            leaf.grad = None


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in nested results, dataclasses and other registered structures, with its path."""
    if is_dataclass(tree) and not isinstance(tree, type) and pytree._get_node_type(tree) not in pytree.SUPPORTED_NODES:
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name), f"{name}.{field.name}")
        return
    children, spec = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if spec.is_leaf():
        if isinstance(tree, (torch.Tensor, int, float, str, bool)):
            yield name, tree
        return
    for path, child in children:
        yield from leaves(child, name + pytree.keystr(path))


def pull_back(result: Any, seed: int) -> None:
    """Backward through everything in ``result`` that has a gradient, from directions that the seed fixes.

    Raises:
        ConfigError: nothing in it has a gradient.
    """
    heads = [t for _, t in leaves(result, "") if isinstance(t, torch.Tensor) and t.requires_grad]
    if not heads:
        raise ConfigError("--grad: nothing in the model's result requires a gradient.")
    generator = torch.Generator().manual_seed(seed)
    torch.autograd.backward(heads, [_direction(t, generator) for t in heads])


def _direction(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Eighths between -1 and 1: the same numbers in every floating dtype, so that runs in two of them compare."""
    return (torch.randint(-8, 9, t.shape, generator=generator, device="cpu") / 8).to(t.device, t.dtype)
