"""``UntypedStorage`` of the device. torch's own methods ask for an allocator, which a backend in Python cannot give, or
change a storage's size, which it cannot reach: these do neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from tpu_compile.device.storage import Cell


class TpuStorage(torch.UntypedStorage):
    """The Python side of a storage. torch keeps this object as long as the storage lives, and with it the cell."""

    _tpu_cell: Cell

    def _bytes(self) -> torch.Tensor:
        """The contents as uint8 on the CPU; not to be written."""
        from tpu_compile.device import contents

        flat = contents.host_bytes(self._tpu_cell)
        return flat[: super().nbytes()]

    def clone(self) -> TpuStorage:
        """A storage with a copy of the contents, on the device."""
        from tpu_compile.device import contents

        made: TpuStorage = contents.copied(self._tpu_cell)
        return made

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        known = memo.setdefault("torch", {})
        if self._cdata not in known:
            known[self._cdata] = _plain(self.clone())
        return known[self._cdata]

    def _write_file(self, f: Any, is_real_file: bool, save_size: bool, element_size: int) -> Any:
        return self.cpu()._write_file(f, is_real_file, save_size, element_size)

    def _set_from_file(self, f: Any, offset: Any, is_real_file: bool, element_size: int) -> TpuStorage:
        from tpu_compile.device import contents

        read = torch.UntypedStorage(super().nbytes())
        read._set_from_file(f, offset, is_real_file, element_size)
        contents.refill(self._tpu_cell, torch.empty(0, dtype=torch.uint8, device="cpu").set_(read))
        return self

    def cpu(self) -> torch.UntypedStorage:
        """A copy on the CPU."""
        return self._bytes().clone().untyped_storage()

    def to(self, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        """A copy on another device; itself on this one."""
        wanted = torch.device(device)
        if wanted.type == "tpu":
            return self
        return self.cpu() if wanted.type == "cpu" else self.cpu().to(device=wanted, non_blocking=non_blocking)

    def resize_(self, size: int) -> TpuStorage:
        """Give up the contents (0), or make room again after that: torch cannot be told another size.

        Raises:
            RuntimeError: more than the storage had when it was made.
        """
        from tpu_compile.device import contents

        if size > super().nbytes():
            raise RuntimeError(
                f"A storage of the tpu device cannot grow in place ({super().nbytes()} to {size} bytes): use "
                "tensor.resize_(), or make a new tensor."
            )
        contents.release(self._tpu_cell, size)
        return self

    def nbytes(self) -> int:
        """The bytes in use: fewer than were made after ``resize_``."""
        return min(super().nbytes(), self._tpu_cell.nbytes)

    def size(self) -> int:
        """The same."""
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def __getitem__(self, index: Any) -> Any:
        values = self._bytes()[index]
        return values.item() if isinstance(index, int) else values.tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        view = torch.empty(0, dtype=torch.uint8, device="tpu").set_(self, 0, (super().nbytes(),), (1,))
        view[index] = value

    def tolist(self) -> list[int]:
        return self._bytes().tolist()

    def share_memory_(self) -> NoReturn:
        raise RuntimeError("The tpu device's memory cannot be shared with other processes: send tensor.cpu().")

    def is_shared(self) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> NoReturn:
        raise TypeError("Only CPU memory can be pinned.")


def _plain(storage: Any) -> Any:
    """The storage as an object of torch's own class, which ``TypedStorage`` insists on for a deep copy. What torch
    calls on it is an attribute of the object then."""
    storage.__class__ = torch.UntypedStorage
    handle = storage._tpu_cell

    def clone() -> Any:
        from tpu_compile.device import contents

        return _plain(contents.copied(handle))

    def cpu() -> torch.UntypedStorage:
        from tpu_compile.device import contents

        return contents.host_bytes(handle).clone().untyped_storage()

    storage.clone, storage.cpu = clone, cpu
    return storage
