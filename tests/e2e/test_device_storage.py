"""Storages of the `tpu` device: views alias, writes reach every view, memory lives exactly as long as its tensors."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import tpu_compile

VIEWS = {
    "row": lambda t: t[1],
    "columns": lambda t: t[:, 1:3],
    "rows of the transpose": lambda t: t.t()[1:3],
    "diagonal": lambda t: t.diagonal(),
    "every fifth": lambda t: t.view(-1)[::5],
    "reshaped": lambda t: t.reshape(2, 12)[1],
    "unfolded": lambda t: t.unfold(0, 2, 2),
    "transposed rows": lambda t: t[1:3].transpose(0, 1),
    "as_strided": lambda t: t.as_strided((2, 2), (7, 2), 1),
    "squeezed": lambda t: t[..., None].squeeze(-1)[2:],
    "as integers": lambda t: t.view(torch.int32)[1],
    "moved axes": lambda t: t.movedim(0, 1)[::2],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "detached": lambda t: t.detach()[2],
    "data": lambda t: t.data[0],
    "one element": lambda t: t[2, 3],
    "narrowed": lambda t: t.narrow(1, 2, 3),
    "no rows": lambda t: t[4:4],
    "no columns": lambda t: t[:, 2:2],
    "nothing of every other": lambda t: t[1::2, 6:],
}
COMPLEX_VIEWS = {
    "real": lambda t: t.real,
    "imag": lambda t: t.imag,
    "parts": lambda t: torch.view_as_real(t)[..., 1],
    "imag of conj": lambda t: t.conj().imag,
    "real of a row": lambda t: t.mH.conj()[1].real,
}


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", VIEWS)
def test_writes_through_a_view_reach_the_base(name):
    view, want = VIEWS[name], torch.arange(24.0).reshape(4, 6)
    base = want.to("tpu")
    other = base[1:]
    same(view(base), view(want))
    view(want).add_(1)
    view(base).add_(1)
    same(base, want)
    view(want).fill_(3)
    view(base).fill_(3)
    same(base, want)
    same(other, want[1:])
    assert view(base).stride() == view(want).stride() and view(base).storage_offset() == view(want).storage_offset()


@pytest.mark.parametrize("name", COMPLEX_VIEWS)
def test_writes_through_parts_of_complex_numbers(name):
    view, want = COMPLEX_VIEWS[name], torch.arange(6.0).to(torch.complex64).reshape(2, 3) * (1 + 1j)
    base = want.to("tpu")
    view(want).add_(1)
    view(base).add_(1)
    same(base, want)
    same(base.conj() @ base.t(), want.conj() @ want.t())


def test_writing_through_an_expanded_tensor_is_torchs_error():
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.ones(1, device=device).expand(3).add_(1)


def test_reading_the_same_window_elsewhere_compiles_nothing():
    t = torch.arange(40.0, device="tpu").view(10, 4)
    (t[0] + 1).cpu()
    before = tpu_compile.stats()["lowerings"]
    for i in range(1, 10):
        same(t[i] + 1, torch.arange(4.0 * i, 4 * i + 4) + 1)
    assert tpu_compile.stats()["lowerings"] == before


def test_overlapping_copies_read_before_they_write():
    t = torch.arange(8.0, device="tpu")
    t[1:].copy_(t[:-1].clone())
    same(t, torch.tensor([0.0, 0, 1, 2, 3, 4, 5, 6]))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_empty_and_zero_dimensional(shape):
    want = torch.ones(shape)
    t = torch.ones(shape, device="tpu")
    same(t + 1, want + 1)
    same(t.sum(), want.sum())
    same(t.clone().reshape(-1), want.reshape(-1))
    assert t.shape == want.shape and t.untyped_storage().nbytes() == want.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex128])
def test_dtypes_go_and_come(dtype):
    want = torch.tensor([0, 1, 2, 3]).to(dtype)
    same(want.to("tpu"), want)
    same(want.to("tpu").to(torch.float64 if not dtype.is_complex else dtype).to(dtype), want)


def test_memory_formats():
    want = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    t = want.to("tpu")
    assert t.is_contiguous(memory_format=torch.channels_last) and (t * 2).stride() == want.stride()
    same(t.contiguous(), want)
    assert (
        t.clone(memory_format=torch.contiguous_format).is_contiguous() and torch.empty_like(t).stride() == want.stride()
    )
    t.add_(1)
    same(t[:, 1], want[:, 1] + 1)


def test_what_was_never_written_reads_as_zeros():
    same(torch.empty(3, device="tpu") + 1, torch.ones(3))


# ---- lifetimes


def test_buffers_die_with_their_last_alias():
    gc.collect()
    cells, before = torch.tpu.memory_stats()["allocation.all.current"], torch.tpu.memory_allocated()
    t = torch.ones(100, device="tpu")
    view, detached = t[3:], t.detach().requires_grad_()
    assert torch.tpu.memory_allocated() == before + 400
    del t, view
    assert torch.tpu.memory_allocated() == before + 400
    del detached
    assert torch.tpu.memory_allocated() == before
    assert torch.tpu.memory_stats()["allocation.all.current"] == cells


def test_finalisers_do_not_replace_a_users_exception():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(2, 3, device="tpu") @ torch.ones(2, 3, device="tpu")
    with pytest.raises(IndexError, match="out of bounds"):
        torch.ones(2, device="tpu")[5]
    with pytest.raises(ZeroDivisionError):
        _ = (torch.ones(2, device="tpu") + 1, torch.ones(2, device="tpu") * 2, 1 / 0)


def test_addresses_tell_storages_apart():
    a, b = torch.ones(3, device="tpu"), torch.ones(3, device="tpu")
    assert (
        a.data_ptr() != b.data_ptr() and a[1:].data_ptr() == a.data_ptr() + 4 and a.detach().data_ptr() == a.data_ptr()
    )


# ---- storages as objects


def test_set_and_resize():
    t = torch.arange(6.0, device="tpu")
    other = torch.empty(0, device="tpu").set_(t)
    other[0] = 9
    same(t[0], torch.tensor(9.0))
    t.resize_(4, 4)
    same(t.flatten()[:6], torch.tensor([9.0, 1, 2, 3, 4, 5]))
    other[1] = 8
    same(t.flatten()[1], torch.tensor(8.0))
    other.set_(t.untyped_storage(), 1, (2,), (1,))
    same(other, torch.tensor([8.0, 2]))
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        other.set_(t.untyped_storage(), 15, (2,), (1,))


def test_untyped_storage():
    t = torch.arange(3.0, device="tpu")
    storage = t.untyped_storage()
    assert storage.nbytes() == 12 and storage.device == torch.device("tpu", 0) and len(storage.tolist()) == 12
    again = torch.empty(0, device="tpu").set_(storage.clone(), 0, (3,), (1,))
    again[0] = 7
    same(again, torch.tensor([7.0, 1, 2]))
    same(t, torch.arange(3.0))
    storage.resize_(0)
    assert storage.nbytes() == 0 and torch.tpu.memory_allocated() >= 0
    storage.resize_(12)
    same(t, torch.zeros(3))
    with pytest.raises(RuntimeError, match="cannot grow in place"):
        storage.resize_(16)


def test_a_storage_made_by_hand_is_an_error_and_no_crash(run_python):
    done = run_python(
        """
        import torch
        made = torch.UntypedStorage(12, device="tpu")
        assert made.device.type != "tpu"
        """
    )
    assert done.returncode == 0


def test_deep_copies_keep_aliases():
    t = torch.arange(6.0, device="tpu").reshape(2, 3)
    for _ in range(2):  # a copy of a copy takes another way through torch
        base, view = copy.deepcopy((t, t[1]))
        view.add_(1)
        same(base[1], view.cpu())
        same(t[1], torch.tensor([3.0, 4, 5]))
        t = copy.deepcopy(t)


def test_out_is_resized_with_torchs_warning():
    a = torch.ones(2, 2, device="tpu")
    out = torch.empty(0, device="tpu")
    torch.add(a, a, out=out)
    same(out, torch.full((2, 2), 2.0))
    out = torch.empty(3, device="tpu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(a, a, out=out)
    same(out, torch.full((2, 2), 2.0))
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        torch.add(a, a, out=torch.empty(2, 2, dtype=torch.int64, device="tpu"))
