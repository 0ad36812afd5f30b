"""``out=``: a tensor of another shape than the result is resized before the op runs, with torch's warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from tpu_compile.device.schemas import Schema
from tpu_compile.device.tracing import NotTraced, isolated, quiet


def resize(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Give the ``out=`` tensors of a call the shapes that FakeTensor says; tells whether any changed.

    Raises:
        NotTraced: FakeTensor refuses the call.
    """
    given = [(name, out) for name in schema.outs for out in _tensors(schema.argument(name, args, kwargs))]
    wanted = isolated(lambda: _shapes(schema, args, kwargs))
    if wanted is None:
        return False
    changed = False
    for (_, out), shape in zip(given, wanted, strict=True):
        if tuple(out.shape) != shape:
            _warn(out, shape)
            out.resize_(shape)
            changed = True
    return changed


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for t in value if isinstance(t, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


def _shapes(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, ...]] | None:
    """The shapes of the results; None where FakeTensor cannot tell."""
    with FakeTensorMode(), quiet():

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def empty(value: Any) -> Any:
            return torch.empty(0, dtype=value.dtype, device="cpu") if isinstance(value, torch.Tensor) else value

        faked = {k: tree_map(empty if k in schema.outs else fake, v) for k, v in kwargs.items()}
        try:
            schema.op(*tree_map(fake, tuple(args)), **faked)
        except NotImplementedError:  # no meta function: only the op itself knows
            return None
        except Exception as error:
            raise NotTraced(error) from error
        return [tuple(t.shape) for name in schema.outs for t in _tensors(faked[name])]


def _warn(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
            f"match the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=2,
        )
