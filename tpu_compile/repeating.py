"""Layers that repeat, kept as one: ``repeat_layers``.

N equal layers become one whose parameters are stacked, [N, ...], and which torch's ``scan`` runs N times. Dynamo then
traces one layer, its gradient is one loop too, and nothing that compiles grows with the depth; nor is anything stacked
at a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tpu_compile.errors import BadCall, TpuCompileWarning
from tpu_compile.tolerances import TOLERANCE

Tensor = torch.Tensor
FEWEST = 3
"""Layers that are worth a loop."""


class Repeated(nn.Module):
    """Equal layers, run one after another: each is given the result of the one before, and the same other arguments.

    The parameters and buffers are those of ``layer``, with the layers as their first axis.
    """

    def __init__(self, layers: Sequence[nn.Module], returns_tuple: bool) -> None:
        super().__init__()
        self.depth, self.returns_tuple = len(layers), returns_tuple
        self.layer = layers[0]
        for name, first in list(_tensors(self.layer).items()):
            rows = torch.stack([_tensors(layer)[name].detach() for layer in layers])
            owner, _, last = name.rpartition(".")
            module = self.layer.get_submodule(owner)
            if isinstance(first, nn.Parameter):
                setattr(module, last, nn.Parameter(rows, first.requires_grad))
            else:
                setattr(module, last, rows)

    def __getattr__(self, name: str) -> Any:
        """What models ask a layer for, beside its result: its kind, its device."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the last layer returns. Compiled, the layers are a loop."""

        def turn(x: Tensor, row: dict[str, Tensor]) -> tuple[Tensor, tuple[()]]:
            result = functional_call(self.layer, row, (x, *args), kwargs)
            return (result[0] if self.returns_tuple else result).clone(memory_format=torch.contiguous_format), ()

        rows = _tensors(self.layer)
        if torch.compiler.is_compiling():
            x, _ = scan(turn, x.contiguous(), rows)
        else:
            for k in range(self.depth):
                x, _ = turn(x, {name: t[k] for name, t in rows.items()})
        return (x,) if self.returns_tuple else x


def repeat_layers(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Make one stacked layer of each list of equal layers that a model runs one after another, in place.

        tpu_compile.repeat_layers(model, input_ids, use_cache=False)
        optimizer = torch.optim.AdamW(model.parameters())  # the parameters are other ones now

    ``state_dict`` keeps the names and shapes of single layers. A parameter is a stack of the layers': an optimizer that
    treats each number by itself computes the same; Adafactor and Muon do not, nor does a norm of single parameters.

    Args:
        model: its layers are in a ``ModuleList`` or ``Sequential``.
        args, kwargs: a call of the model, to see that the layers do follow one another and that the results stay the
            same. It runs two times or more, without gradients. A cache that layers write to is nothing that repeats.

    Returns:
        ``model``.

    Raises:
        BadCall: no list of three or more layers can be stacked; with the reason for each.
    """
    reasons: dict[str, str] = {}
    stacked: list[str] = []
    for name, layers in _lists(model):
        if any(name.startswith(f"{outer}.") for outer in stacked):
            continue
        reason = _differences(list(layers)) or _stack(model, layers, args, kwargs)
        if reason:
            reasons[name] = reason
        else:
            stacked.append(name)
    told = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    if not stacked:
        raise BadCall(f"no layers of {type(model).__name__} can be stacked.{told}", "INVALID_ARGUMENT")
    if told:
        warnings.warn(f"layers that repeat_layers leaves as they are:{told}", TpuCompileWarning, stacklevel=2)
    return model


def _lists(model: nn.Module) -> list[tuple[str, nn.ModuleList | nn.Sequential]]:
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [(name, layers) for name, layers in found if len(layers) >= FEWEST and _tensors(layers)]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---- may they be stacked?


def _differences(layers: Sequence[nn.Module]) -> str:
    """What tells the layers apart, beside the values of their parameters and their number in the list; "" if
    nothing."""
    first = _description(layers[0])
    for k, layer in enumerate(layers[1:], 1):
        other = _description(layer)
        if other.keys() != first.keys():
            return f"layer {k} has other parts than layer 0"
        for name, value in other.items():
            numbered = type(value) is int and value == k and first[name] == 0
            if not numbered and not _equal(value, first[name]):
                return f"{name or 'the class'} of layer {k} is {value!r}, and {first[name]!r} of layer 0"
    if len({id(t) for layer in layers for t in _tensors(layer).values()}) < len(layers) * len(_tensors(layers[0])):
        return "layers share parameters"
    return ""


_OWN = frozenset(vars(nn.Module()))


def _description(layer: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        found[name] = type(module)
        for key, value in vars(module).items():
            if key not in _OWN:
                found[f"{name}.{key}".lstrip(".")] = value
    found.update({name: _Spec(t) for name, t in _tensors(layer).items()})
    return found


class _Spec:
    """A tensor, but for its values."""

    def __init__(self, t: Tensor) -> None:
        self.key = tuple(t.shape), t.dtype, t.device, t.requires_grad, type(t)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and other.key == self.key

    def __repr__(self) -> str:
        return f"{self.key[1]}{list(self.key[0])}"

    __hash__ = None  # type: ignore[assignment]


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))


# ---- stacking, and looking whether it was right


def _stack(model: nn.Module, layers: Any, args: Any, kwargs: Any) -> str:
    """Stack a list's layers; "" if the model computes the same afterwards, else why they are as they were."""
    before = list(layers)
    with _watched(before) as calls:
        wanted = _run(model, args, kwargs)
    reason = _flow(calls, before)
    if reason:
        return reason
    saved = [dict(module._parameters) | dict(module._buffers) for module in before[0].modules()]
    _refill(layers, [Repeated(before, isinstance(calls[0][2], tuple))])
    try:
        same = _close(wanted, _run(model, args, kwargs))
        reason = "" if same else "the results differ when layer 0 stands for all (a cache? use_cache=False)"
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        reason = f"the model does not run when one layer stands for all: {error}"
    if reason:
        for module, tensors in zip(before[0].modules(), saved, strict=True):
            for name, t in tensors.items():
                setattr(module, name, t)
        _refill(layers, before)
        return reason
    _keep_names(layers, len(before))
    return ""


_Call = tuple[tuple[Any, ...], dict[str, Any], Any]


@contextmanager
def _watched(layers: Sequence[nn.Module]) -> Iterator[list[_Call]]:
    """Notes the calls of ``layers``, in order: arguments, named arguments, result."""
    calls: list[_Call] = []

    def note(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.append((args, kwargs, result))

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pytree.tree_leaves(model(*args, **kwargs))


def _flow(calls: Sequence[_Call], layers: Sequence[nn.Module]) -> str:
    """Why these calls are not a loop over the layers; "" if they are."""
    if len(calls) != len(layers):
        return f"its {len(layers)} layers were called {len(calls)} times"
    if not all(args and isinstance(args[0], Tensor) for args, _, _ in calls):
        return "the first argument of its layers is no tensor"
    others = [pytree.tree_flatten((args[1:], kwargs)) for args, kwargs, _ in calls]
    for k, (leaves, tree) in enumerate(others):
        result = calls[k][2]
        if not isinstance(_first(result), Tensor) or any(r is not None for r in pytree.tree_leaves(result)[1:]):
            return f"layer {k} returns more than one tensor"
        if tree != others[0][1] or not all(map(_equal, leaves, others[0][0])):
            return f"layer {k} is given other arguments than layer 0"
        if k and calls[k][0][0] is not _first(calls[k - 1][2]):
            return f"layer {k} is not given the result of layer {k - 1}"
    return ""


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) and result else result


def _close(wanted: list[Any], got: list[Any]) -> bool:
    if len(wanted) != len(got):
        return False
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, Tensor):
            relative, absolute = TOLERANCE.get(a.dtype, (0.0, 0.0))
            if a.shape != b.shape or not torch.allclose(a.cpu(), b.cpu(), relative, absolute, equal_nan=True):
                return False
        elif type(a) in (bool, int, float, str) and a != b:
            return False
    return True


def _refill(layers: nn.ModuleList | nn.Sequential, modules: Sequence[nn.Module]) -> None:
    layers._modules.clear()
    for k, module in enumerate(modules):
        layers.add_module(str(k), module)


def _keep_names(layers: nn.Module, depth: int) -> None:
    """Let ``state_dict`` and ``load_state_dict`` have the names and shapes of single layers."""

    def apart(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        stacked = f"{prefix}0.layer."
        rows = {key.removeprefix(stacked): state.pop(key) for key in _of(state, stacked)}
        for k in range(depth):
            state.update({f"{prefix}{k}.{name}": t[k] for name, t in rows.items()})

    def together(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in _of(state, f"{prefix}0."):
            name = key.removeprefix(f"{prefix}0.")
            if all(f"{prefix}{k}.{name}" in state for k in range(depth)):
                state[f"{prefix}0.layer.{name}"] = torch.stack([state.pop(f"{prefix}{k}.{name}") for k in range(depth)])

    layers.register_state_dict_post_hook(apart)
    layers.register_load_state_dict_pre_hook(together)


def _of(state: dict[str, Any], prefix: str) -> list[str]:
    return [key for key in state if key.startswith(prefix)]


__all__ = ["Repeated", "repeat_layers"]
