"""torch.compile on `tpu` tensors: buffers stay where they are, results are new cells, mutations donate."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tpu_compile
from tpu_compile.device.storage import cell_of


def compiled(fn, **options):
    return torch.compile(fn, backend="tpu", fullgraph=True, **options)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-5, atol=2e-5)


def test_training_moves_no_byte():
    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    device, x = copy.deepcopy(host).to("tpu"), torch.randn(3, 8)
    resident, step = x.to("tpu"), compiled(device)
    optimizer = torch.optim.AdamW(device.parameters(), lr=0.01, fused=True)
    for call in range(3):
        if call == 2:
            tpu_compile.reset_stats()
        optimizer.zero_grad()
        loss = step(resident).square().mean()
        loss.backward()
        optimizer.step()
    stats = tpu_compile.stats()
    assert stats["h2d_bytes"] == stats["d2h_bytes"] == stats["copied_arguments"] == stats["lowerings"] == 0
    reference = torch.optim.AdamW(host.parameters(), lr=0.01)
    for _ in range(3):
        reference.zero_grad()
        host(x).square().mean().backward()
        reference.step()
    for w, g in zip(host.parameters(), device.parameters(), strict=True):
        close(g.detach(), w.detach())


def test_a_large_literal_is_put_on_the_device_once():
    def fn(x):
        return x @ torch.tensor([[float(i * j % 7) for i in range(64)] for j in range(64)], device=x.device)

    x, call = torch.randn(3, 64), compiled(fn)
    close(call(x.to("tpu")), fn(x))


def test_mutated_arguments_receive_their_new_buffers():
    def bump(x, y):
        x.add_(y)
        return x * 2

    fn, a, b = compiled(bump), torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
    alias = a[1:]
    assert fn(a, b).tolist() == [4] * 4 and a.tolist() == [2] * 4 and alias.tolist() == [2] * 3
    assert fn(a, a).tolist() == [8] * 4 and a.tolist() == [4] * 4
    base = torch.zeros(3, 4, device="tpu")
    assert fn(base[1], b).tolist() == [2] * 4 and base.sum().item() == 4
    expanded = torch.ones(1, device="tpu").expand(4)
    assert fn(torch.zeros(4, device="tpu"), expanded).tolist() == [2] * 4


def test_eager_and_compiled_calls_interleave():
    fn = compiled(lambda x: x.sin() + 1)
    x = torch.linspace(0, 1, 6, device="tpu").view(2, 3)
    y = fn(x) * 2
    y[0] = 5
    z = fn(y.t())
    close(z, ((torch.stack([torch.full((3,), 5.0), y[1].cpu()])).t()).sin() + 1)
    assert z.stride() == y.t().stride() or z.is_contiguous()


def test_what_a_graph_makes_lives_on_the_device():
    def make(x):
        return (
            x + torch.arange(4, device=x.device) + torch.tensor([1.0, 2, 3, 4], device="tpu"),
            torch.zeros(2),
            x.cpu(),
        )

    fn, x = compiled(make), torch.ones(4, device="tpu")
    on_device, on_host, copied = fn(x)
    assert on_device.is_tpu and on_device.tolist() == [2, 4, 6, 8]
    assert on_host.device.type == copied.device.type == "cpu" and copied.tolist() == [1] * 4
    large = torch.randn(64, 64)
    table = large.to("tpu")
    close(compiled(lambda x: x @ table)(torch.eye(64, device="tpu")), large)


def test_host_numbers_and_tensors_among_the_arguments():
    fn = compiled(lambda x, s: x * s)
    x = torch.ones(3, device="tpu")
    assert fn(x, torch.tensor(2.0)).tolist() == [2] * 3 and fn(x, 2.5).tolist() == [2.5] * 3


def test_views_and_layouts_of_arguments():
    fn = compiled(lambda x: x * 2 + 1)
    base = torch.arange(24.0, device="tpu").view(4, 6)
    for view in (base[1:3], base.t(), base[:, ::2], base.view(-1), base[None].expand(2, 4, 6), base[2:2]):
        got = fn(view)
        close(got, view * 2 + 1)
    image = torch.randn(2, 3, 4, 4, device="tpu").to(memory_format=torch.channels_last)
    assert fn(image).stride() == image.stride()


def test_a_result_that_is_expanded():
    """Its axes repeat one element in memory, as FakeTensor promised Dynamo."""
    compiled = torch.compile(lambda x: (x * 2)[:, None].expand(3, 4), backend="tpu")
    got = compiled(torch.arange(3.0, device="tpu"))
    assert got.stride() == (1, 0) and got.is_tpu
    assert torch.equal(got.cpu(), (torch.arange(3.0) * 2)[:, None].expand(3, 4))


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_vary(dynamic):
    fn = compiled(lambda x: (x * x.shape[0]).sum(0), dynamic=dynamic)
    for n in (2, 3, 5):
        close(fn(torch.ones(n, 2, device="tpu")), torch.full((2,), float(n * n)))


def test_dropout_agrees_between_forward_and_backward():
    layer = compiled(torch.nn.Sequential(torch.nn.Dropout(0.5)).to("tpu"))
    x = torch.ones(1000, device="tpu", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu()) and 0.4 < (y == 0).float().mean().item() < 0.6


def test_fake_tensors_and_export():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert (torch.ones(3, device="tpu") + 1).device == torch.device("tpu", 0)
    assert mode.from_tensor(torch.ones(3, device="tpu")).device.type == "tpu"
    model, x = torch.nn.Linear(3, 4).to("tpu"), torch.randn(2, 3, device="tpu")
    close(torch.export.export(model, (x,)).module()(x), model(x))


def test_no_allocation_is_left_behind():
    fn, x = compiled(lambda x: (x.sin(), x.cos().sum())), torch.ones(100, device="tpu")
    fn(x)
    before = torch.tpu.memory_allocated()
    for _ in range(5):
        fn(x)
    assert torch.tpu.memory_allocated() == before


def test_parameters_are_read_as_they_are_now():
    """The plan keeps the buffers of what stayed the same: whatever changes a parameter has to end that."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3, bias=False) for _ in range(3)]).to("tpu").requires_grad_(False)
    first, second, third = model

    def weights():
        return sum(layer.weight for layer in model)

    fn, x = compiled(lambda x: weights() + x), torch.zeros(3, 3, device="tpu")

    def agree():
        for _ in range(3):
            close(fn(x), weights())

    agree()
    first.weight.add_(1)
    agree()
    first.weight[1:].mul_(2)
    agree()
    second.weight.data = torch.full((3, 3), 5.0, device="tpu")
    agree()
    second.weight = torch.nn.Parameter(torch.full((3, 3), 7.0, device="tpu"), requires_grad=False)
    agree()
    third.weight.set_(torch.full((3, 3), 9.0, device="tpu"))
    agree()
    third.weight.t_()
    third.weight.copy_(torch.arange(9.0).view(3, 3))
    agree()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    agree()
    x.fill_(3)
    close(fn(x), weights() + 3)


def test_a_plan_keeps_no_memory_alive():
    model, x = torch.nn.Linear(256, 256).to("tpu").requires_grad_(False), torch.ones(2, 256, device="tpu")
    fn = compiled(lambda model, x: model(x))
    for _ in range(3):
        fn(model, x)
    before, old = torch.tpu.memory_allocated(), weakref.ref(cell_of(model.weight).buffer)
    model.weight.copy_(torch.ones(256, 256, device="tpu"))
    assert old() is None
    old = weakref.ref(cell_of(model.weight).buffer)
    fn(model, x)
    model.weight = torch.nn.Parameter(torch.ones(1, 256, device="tpu"), requires_grad=False)
    assert old() is None and torch.tpu.memory_allocated() < before


def test_training_and_evaluation_take_turns():
    torch.manual_seed(0)
    host = torch.nn.Linear(4, 1)
    model, x = copy.deepcopy(host).to("tpu"), torch.randn(8, 4)
    fn, optimizers = compiled(model), [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, host)]
    for _ in range(4):
        for run, optimizer, given in zip((fn, host), optimizers, (x.to("tpu"), x), strict=True):
            optimizer.zero_grad()
            run(given).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            close(fn(x.to("tpu")), host(x))


def test_what_is_saved_for_the_backward_has_no_gaps():
    """Thirds of one projection are views with gaps: saved as they are, each would be laid out anew twice a step."""
    projection, x = torch.nn.Linear(8, 24).to("tpu"), torch.randn(2, 4, 8)

    def attend(projection, x):
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in projection(x).split(8, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    fn, resident = compiled(attend), x.to("tpu")
    for _ in range(2):
        tpu_compile.reset_stats()
        projection.zero_grad()
        fn(projection, resident).square().sum().backward()
    stats = tpu_compile.stats()
    assert stats["copied_arguments"] == stats["h2d_bytes"] == 0
    reference = torch.nn.Linear(8, 24)
    reference.load_state_dict({name: value.cpu() for name, value in projection.state_dict().items()})
    attend(reference, x).square().sum().backward()
    close(projection.weight.grad, reference.weight.grad)


def broken(x):
    """A graph break before eager ops of many kinds: Dynamo is at work while they run."""
    y = x + 1
    torch._dynamo.graph_break()
    found = torch.nonzero(y > 1)
    y[0].fill_(2.0)
    y.copy_(x * 3)
    return y.sum().item(), found, y.cpu(), torch.vander(x[0])


@pytest.mark.parametrize("backend", ["tpu", "eager"])
def test_dynamo_does_not_trace_the_kernels(backend):
    from torch._dynamo.convert_frame import register_bytecode_hook

    traced = []
    handle = register_bytecode_hook(lambda code, new: traced.append(code.co_filename))
    try:
        x = torch.arange(12.0).view(3, 4)
        torch.testing.assert_close(torch.compile(broken, backend=backend)(x.to("tpu"))[2], broken(x)[2])
    finally:
        handle.remove()
    assert set(traced) == {__file__}


def test_under_a_default_device():
    """What the package makes for itself stays on the host, whatever device the user's tensors default to."""

    def fn(x):
        noise = torch.rand(3, 4)
        kept = torch.where(x > 0, x, 1.0) + torch.tensor(2.0) + torch.arange(4)
        return kept, x[x > 0], noise.shape, torch.cov(x)

    x = torch.randn(3, 4)
    with torch.device("tpu"):
        results = torch.compile(fn, backend="tpu")(x.to("tpu"))
    for result, expected in zip(results, fn(x), strict=True):
        torch.testing.assert_close(result.cpu() if isinstance(result, torch.Tensor) else result, expected)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell], ids=["lstm", "gru"])
def test_recurrent_cells(cell, bias):
    """torch takes its fused cells on this device, one of which has no meta function, and one takes no missing bias."""
    torch.manual_seed(0)
    model = cell(4, 5, bias=bias)
    twin = copy.deepcopy(model).to("tpu")
    x = torch.randn(3, 4)
    compiled = torch.compile(twin, backend="tpu", fullgraph=True)
    for result, expected in zip(tree_leaves(compiled(x.to("tpu"))), tree_leaves(model(x)), strict=True):
        torch.testing.assert_close(result.cpu(), expected)
        (grad,) = torch.autograd.grad(result.sum(), [twin.weight_ih], retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.sum(), [model.weight_ih], retain_graph=True)
        torch.testing.assert_close(grad.cpu(), wanted)


@pytest.mark.parametrize("broken_before", [False, True], ids=["in the graph", "after a break"])
def test_every_function_of_the_device_module_in_a_compiled_function(broken_before):
    """A call to it breaks the graph where it acts on the device, and gives what it gives outside."""
    module = torch.tpu
    arguments = {
        "set_device": [0],
        "set_stream": [module.current_stream()],
        "set_mode": ["strict"],
        "manual_seed": [7],
        "manual_seed_all": [7],
        "set_rng_state": [module.get_rng_state()],
        "set_rng_state_all": [module.get_rng_state_all()],
    }
    for name in module.__all__:
        function, given = getattr(module, name), arguments.get(name, [])
        if isinstance(function, type) or name in ("default_generator", "mode", "stream"):
            continue

        def fn(x, function=function, given=given):
            if broken_before:
                torch._dynamo.graph_break()
            return x + 1, function(*given)

        torch._dynamo.reset()
        total, answer = torch.compile(fn, backend="eager")(torch.ones(2))
        assert total.tolist() == [2, 2], name
        if name not in ("seed", "seed_all"):
            assert str(answer) == str(function(*given)) or "Stream" in str(answer), name


def test_memory_is_measured_anew_at_each_call():
    measured = torch.compile(lambda x: (x + 1, torch.tpu.memory_allocated()), backend="eager")
    kept = []
    for size in (100, 200, 300):
        kept.append(torch.ones(size, device="tpu"))
        assert measured(torch.ones(2))[1] == torch.tpu.memory_allocated()


def test_a_forked_random_state_in_a_compiled_function():
    def fn(x):
        with torch.random.fork_rng(device_type="tpu"):
            torch.manual_seed(3)
            inside = torch.rand(2, device="tpu")
        return x + inside, torch.rand(2, device="tpu")

    x = torch.zeros(2, device="tpu")
    torch.manual_seed(0)
    wanted = fn(x)
    torch.manual_seed(0)
    for given, expected in zip(torch.compile(fn, backend="tpu")(x), wanted, strict=True):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
