"""Makes torch know the `tpu` device: called by ``import torch`` through the entry point ``torch.backends``.

Nothing heavy happens here: no jaxlib, no kernels. The first op on the device registers those. Whatever goes wrong is
kept and told at the first use: an exception here would break ``import torch`` itself.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from tpu_compile.config import config
from tpu_compile.errors import ConfigError, TpuCompileError

NAME = "tpu"
_UNCLAIMED = "privateuseone"


class Autoload:
    """Whether this process has the device, or why not (``reason``)."""

    def __init__(self) -> None:
        self.reason = "torch has not asked for it: TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        self.enabled = False
        self._libraries: Any = None

    def __call__(self) -> None:
        """The entry point. Never raises."""
        try:
            self.reason = self._obstacle()
            if not self.reason:
                self._enable()
        except Exception as error:  # kept, and told by doctor and enable(): see above
            self.reason = f"{type(error).__name__}: {error}"

    def enable(self) -> None:
        """Have the device now, if it is not there yet.

        Raises:
            TpuCompileError: another backend holds torch's PrivateUse1, or it cannot be had for another reason.
        """
        if self.enabled:
            return
        owner = _owner()
        if owner != _UNCLAIMED:
            raise TpuCompileError(f"torch's PrivateUse1 backend is {owner!r} already: this process has no tpu device.")
        self._enable()

    def _obstacle(self) -> str:
        try:
            if not config.autoload:
                return "TPU_COMPILE_AUTOLOAD=0"
        except ConfigError as error:
            return str(error)
        if _owner() != _UNCLAIMED:
            return f"torch's PrivateUse1 backend is {_owner()!r} already"
        if find_spec("torch_tpu") is not None:
            return "torch_tpu is installed, and the device is its"
        others = [e.value for e in entry_points(group="torch.backends") if not e.value.startswith("tpu_compile.")]
        return f"another package brings a torch backend: {', '.join(others)}" if others else ""

    def _enable(self) -> None:
        import torch
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        from tpu_compile.device import hooks, module, saving
        from tpu_compile.device.untraced import implement, untraced

        _setup_privateuseone_for_python_backend(NAME, module, hooks.Hooks(), hooks.Guard())
        sys.modules["torch.tpu"] = module
        with contextlib.suppress(OSError, AttributeError):  # another platform, or names that have changed
            hooks.avoid_null_allocator()
        saving.register()
        self._libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        self._libraries[0].fallback(untraced(first_use), "PrivateUse1")
        implement(self._libraries[1], "_pin_memory", unpinned, "CPU")
        torch.set_autocast_dtype(NAME, torch.bfloat16)
        self.enabled, self.reason = True, ""


def _owner() -> str:
    import torch

    name: str = torch._C._get_privateuse1_backend_name()
    return name


def unpinned(t: Any, device: Any = None) -> Any:
    """``tensor.pin_memory()``: torch asks the accelerator for pinned memory, and this one has none. The tensor itself
    is as good, so that ``DataLoader(pin_memory=True)`` goes on working."""
    return t


def first_use(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Whatever has no kernel yet: the first op of all, which registers them, and operators of other libraries."""
    from tpu_compile.device.registration import registration

    return registration.unregistered(op, *args, **kwargs)


load = Autoload()
