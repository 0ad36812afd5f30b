"""What a tensor shows of a buffer: the grid its strides make, and where in it the window begins."""

from __future__ import annotations

import itertools

import pytest
import torch

from tpu_compile.device.storage import layout_of
from tpu_compile.lowering.memory import BOX, FLAT, MERGED, PLACES, WHOLE, grid

VIEWS = {
    "all": (lambda t: t, WHOLE),
    "transposed": (lambda t: t.permute(2, 0, 1), WHOLE),
    "row": (lambda t: t[1], BOX),
    "column": (lambda t: t[..., 2], BOX),
    "block": (lambda t: t[1:3, 2:4, 1:5], BOX),
    "every second": (lambda t: t[::2, :, 1::2], BOX),
    "broadcast": (lambda t: t[:, :1].expand(4, 3, 6), BOX),
    "reshaped row": (lambda t: t.view(8, 15)[3], FLAT),
    "reshaped block": (lambda t: t.view(8, 15)[1:3, 2:5], FLAT),
    "flat piece": (lambda t: t.view(-1)[7:25].view(3, 6), MERGED),
    "diagonal": (lambda t: t[0].diagonal(), FLAT),
    "overlapping": (lambda t: t.view(-1).unfold(0, 4, 2), PLACES),
    "scalar": (lambda t: t[1, 2, 3], BOX),
    "nothing": (lambda t: t[2:2], WHOLE),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_found_in_its_memory(name):
    """A window's start and grid lead to the same elements as its strides."""
    view, mode = VIEWS[name]
    base = torch.arange(4 * 5 * 6).view(4, 5, 6)
    t = view(base)
    window = layout_of((4, 5, 6), torch.int64).window(tuple(t.shape), tuple(t.stride()), t.storage_offset())
    assert window.signature.mode == mode
    if mode in (BOX, FLAT, MERGED):
        found = grid((4, 5, 6), t.shape, t.stride(), mode)
        assert found is not None and window.start is not None
        padded = torch.cat([base.reshape(-1), torch.zeros(found.padding, dtype=torch.int64)]).view(found.dims)
        cut = padded[tuple(slice(s, s + n) for s, n in zip(window.start, found.sizes, strict=True))]
        assert sorted(cut.reshape(-1).tolist()) == sorted(set(t.reshape(-1).tolist()))


def test_windows_that_differ_in_their_place_alone_share_a_program():
    layout = layout_of((4, 6), torch.float32)
    signatures = {id(layout.window((6,), (1,), 6 * row).signature) for row in range(4)}
    assert len(signatures) == 1 and [layout.window((6,), (1,), 6 * row).start[0] for row in range(4)] == [0, 1, 2, 3]


def test_a_row_that_would_run_over_an_edge_has_no_start():
    found = grid((4, 6), (2, 6), (6, 1), BOX)
    assert found is not None and found.start(6) is not None and found.start(7) is None


@pytest.mark.parametrize("size", list(itertools.product((1, 2), (1, 3), (1, 4))))
def test_axes_of_size_one_never_matter(size):
    t = torch.empty(4, 5, 6)[: size[0], : size[1], : size[2]]
    window = layout_of((4, 5, 6), torch.float32).window(tuple(t.shape), tuple(t.stride()), 0)
    assert window.signature.mode == BOX
