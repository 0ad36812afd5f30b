"""Which kernel serves which overload: decided from the schemas, once, at the first `tpu` tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_compile.config import config
from tpu_compile.device import attention, copies, ctc, fakes, fallback, lstsq, memory, modes, norms, sizes
from tpu_compile.device.autocasting import Autocast
from tpu_compile.device.kernels import Kernel
from tpu_compile.device.schemas import is_view
from tpu_compile.device.state import device
from tpu_compile.device.untraced import implement, untraced

_KEY = "PrivateUse1"
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_LEFT_TO_TORCH = frozenset(
    {
        "empty_like",  # composite kernels over empty and empty_strided: nothing is computed
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "allclose",
        "resize_as_",
        "lift",
        "lift_fresh",
        "detach",
        "is_pinned",
        "_pin_memory",
        "_pack_padded_sequence",
        "record_stream",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "sym_is_contiguous",
    }
)

OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": memory.empty,
    "empty_strided": memory.empty_strided,
    "resize_": memory.resize_,
    "set_.source_Storage_storage_offset": memory.set_storage,
    "set_.source_Storage": memory.set_source_storage,
    "set_.source_Tensor": memory.set_source_tensor,
    "set_": memory.set_nothing,
    "_copy_from": copies.copy_from,
    "_copy_from_and_resize": copies.copy_from_and_resize,
    "_local_scalar_dense": copies.item,
    "equal": copies.equal,
    "native_batch_norm": norms.native_batch_norm,
    "_ctc_loss": ctc.ctc_loss,
    "_ctc_loss.Tensor": ctc.ctc_loss,
    "_ctc_loss_backward": ctc.ctc_loss_backward,
    "_ctc_loss_backward.Tensor": ctc.ctc_loss_backward,
    "linalg_lstsq": lstsq.linalg_lstsq,
    "nonzero": sizes.nonzero,
    "nonzero.out": sizes.out_variant(sizes.nonzero),
    "masked_select": sizes.masked_select,
    "masked_select.out": sizes.out_variant(sizes.masked_select),
    "_unique": sizes.unique,
    "_unique2": sizes.unique2,
    "unique_consecutive": sizes.unique_consecutive,
    "bincount": sizes.bincount,
    "repeat_interleave.Tensor": sizes.repeat_interleave,
    "_has_compatible_shallow_copy_type": lambda a, b: True,  # .to() keeps Parameters: ties, grads, optimizers
}
"""Kernels that run no program of their own."""

AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "copy_": copies.copy_,
    "_to_copy": copies.to_copy,
    "index.Tensor": sizes.index,
    "_index_put_impl_": copies.index_put_impl,
    "unique_dim": partial(sizes.by_rows, rows=sizes.unique_dim),
    "unique_dim_consecutive": partial(sizes.by_rows, rows=sizes.unique_dim_consecutive),
}
"""What stands around the generic kernel of these."""


class Registration:
    """The kernels of this process. ``kernels`` holds the generic ones by overload name."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._everything = torch.library.Library("_", "IMPL")
        self._autocast = Autocast()
        self.kernels: dict[str, Callable[..., Any]] = {}
        self._others: dict[OpOverload, Callable[..., Any]] = {}
        self._lock = threading.RLock()

    def register(self) -> None:
        """Register a kernel for every aten overload that reaches a backend."""
        if not device.mode:
            modes.choose(config.eager_mode)
        self._autocast.register()
        fakes.register()
        attention.register(self._library)
        for key in ("AutogradPrivateUse1", _KEY):
            implement(self._library, "tensor_split.tensor_indices_or_sections", sizes.tensor_split, key)
        for layout in ("Sparse", "SparseCsr", "NestedTensor", "Quantized"):
            self._everything.fallback(untraced(fallback.refuse_layout), layout + _KEY)
        for name, op in _overloads():
            function = self._kernel(name, op)
            if function is not None:
                implement(self._library, name, function, _KEY)

    def unregistered(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """An op that has no kernel: the first of all makes them, one of another library gets its own."""
        with self._lock:
            if not self.kernels:
                self.register()
                return op(*args, **kwargs)
            # By the operator itself: a library may be destroyed, and another define an operator of the same name.
            if op not in self._others:
                self._others[op] = Kernel(op).function()
        return self._others[op](*args, **kwargs)

    def _kernel(self, name: str, op: OpOverload) -> Callable[..., Any] | None:
        if name in OWN:
            return OWN[name]
        if _has_kernel(op.name(), "CompositeImplicitAutograd") or op._schema.name[6:] in _LEFT_TO_TORCH:
            return None
        composite = _has_kernel(op.name(), "CompositeExplicitAutograd")
        if composite and "generator" in op._schema.overload_name:  # over empty and the in-place op, which draws
            return None
        if is_view(op) or torch.Tag.inplace_view in op.tags:
            return memory.view_kernel(op) if _has_kernel(op.name(), "CPU") and not composite else None
        function = Kernel(op).function()
        if name in AROUND:
            function = AROUND[name](function)
        self.kernels[name] = function
        return function


registration = Registration()


def _overloads() -> Iterator[tuple[str, OpOverload]]:
    """Every aten overload of this torch, with its name as ``Library.impl`` takes it."""
    for qualified in torch._C._dispatch_get_all_op_names():
        if qualified.startswith("aten::"):
            name = qualified.removeprefix("aten::")
            base, _, overload = name.partition(".")
            yield name, getattr(getattr(torch.ops.aten, base), overload or "default")
