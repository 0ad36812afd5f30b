"""One trace, many shapes: every binding of the symbols is lowered and compiled once, in memory and on disk."""

from __future__ import annotations

import torch
from torch import nn

import tpu_compile


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT / 4).masked_fill(~mask, -torch.inf)
        return self.out(scores.softmax(-1) @ v)


def test_twenty_lengths_are_two_traces_and_twenty_programs():
    model = Attention().eval()
    compiled = torch.compile(model, backend="tpu", fullgraph=True)
    lengths = [torch.randint(0, 50, (2, n)) for n in range(5, 25)]
    with torch.no_grad():
        for ids in lengths:
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)
        first = tpu_compile.stats()
        assert first["graphs"] <= 2
        assert first["xla_compiles"] == 20 and first["executions"] == 20
        for ids in lengths:
            compiled(ids)
    second = tpu_compile.stats()
    assert second["xla_compiles"] == 20 and second["executions"] == 40
    # The first length met a graph of fixed sizes; the dynamic graph lowers it anew, to the very same program.
    assert second["lowerings"] == 21 and second["memory_hits"] == 1


def test_dynamic_true_needs_one_trace(agrees):
    def fn(x):
        n, m = x.shape
        grid = torch.arange(n, dtype=x.dtype)[:, None] * m + torch.arange(m)
        return n * x, x.sum() / (n * m), grid, x.reshape(m, n), torch.full((n // 2, m + 1), n / m), x[: n // 2]

    compiled = torch.compile(fn, backend="tpu", dynamic=True, fullgraph=True)
    for n, m in ((4, 3), (8, 5), (5, 3), (4, 3)):
        x = torch.randn(n, m)
        want, got = fn(x), compiled(x)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, torch.as_tensor(w) if isinstance(g, torch.Tensor) else w)
    assert tpu_compile.stats()["graphs"] == 1
    assert tpu_compile.stats()["lowerings"] == 3


def test_marked_dynamic_batch_trains():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="tpu", fullgraph=True)
    for n in (3, 5, 9, 5):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0)
        model.zero_grad()
        model(x).square().sum().backward()
        want = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        compiled(x).square().sum().backward()
        for p, w in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, w, rtol=1e-4, atol=1e-5)
    assert tpu_compile.stats()["graphs"] == 2, "one forward, one backward"


def test_bindings_are_found_on_disk_by_the_next_process(run_python):
    code = """
        import torch, tpu_compile
        f = torch.compile(lambda x: x.softmax(0) @ x.mT, backend="tpu", dynamic=True, fullgraph=True)
        for n in (3, 4, 5):
            x = torch.randn(n, 6)
            torch.testing.assert_close(f(x), x.softmax(0) @ x.mT)
        s = tpu_compile.stats()
        print(s["xla_compiles"], s["disk_hits"])
    """
    assert run_python(code).stdout.split() == ["3", "0"]
    assert run_python(code).stdout.split() == ["0", "3"]
