"""torch's semantics on the tpu device: views, writes, outputs, devices, copies, random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bridge.device import extension


def on_both(function) -> None:  # type: ignore[no-untyped-def]
    """The same function of a device gives the same on cpu and tpu, bit for bit."""
    expected, got = function("cpu"), function("tpu")
    torch.testing.assert_close(
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, got), expected, rtol=0, atol=0
    )


# -- views and writes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1],
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t.view(2, 12),
        lambda t: t.reshape(-1)[3:7],
        lambda t: t.unsqueeze(0).squeeze(0),
        lambda t: t.diagonal(),
        lambda t: t.unfold(1, 3, 2),
        lambda t: t.as_strided((2, 2), (6, 1), 1),
        lambda t: t.split(2)[1],
        lambda t: t.unbind(1)[2],
        lambda t: t.view(torch.int32),
        lambda t: t.detach(),
        lambda t: t.view(2, 2, 6).movedim(0, 2),
    ],
)
def test_views_share_storage_and_see_writes(view) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.arange(24.0, device="tpu").reshape(4, 6)
    part = view(tensor)
    assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    version = tensor._version
    part.fill_(9)
    assert tensor._version == version + 1 or not part._is_view()
    reference = torch.arange(24.0).reshape(4, 6)
    view(reference).fill_(9)
    assert tensor.tolist() == reference.tolist()


def test_setting_and_indexing() -> None:
    def run(device: str):  # type: ignore[no-untyped-def]
        t = torch.arange(30.0, device=device).reshape(5, 6)
        index = torch.tensor([3, 0, 3], device=device)
        t[1] = 7
        t[:, 2] = torch.arange(5.0, device=device)
        t[index] = -1.0
        t[t > 20] = 0.5
        t.index_add_(0, index[:2], torch.ones(2, 6, device=device))
        return t, t[index], t[..., None, 1:3], t[t < 0], t.nonzero(), t[index, index], t[[True] * 5]

    on_both(run)


def test_cpu_index_tensors_index_as_on_cuda() -> None:
    tensor = torch.arange(6.0, device="tpu")
    assert tensor[torch.tensor([4, 1])].tolist() == [4, 1]
    tensor[torch.tensor([0])] = 3.0
    assert tensor[0].item() == 3


def test_in_place_ops_that_change_geometry() -> None:
    tensor = torch.arange(6.0, device="tpu").reshape(2, 3)
    storage = tensor.untyped_storage().data_ptr()
    assert tensor.t_() is tensor and tensor.shape == (3, 2)
    tensor.unsqueeze_(0).squeeze_(0).transpose_(0, 1).as_strided_((2, 2), (3, 1), 1)
    assert tensor.tolist() == [[1, 2], [4, 5]]
    assert tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == 1


def test_resize_keeps_elements() -> None:
    tensor = torch.arange(6.0, device="tpu")
    tensor.resize_(2, 2)
    assert tensor.tolist() == [[0, 1], [2, 3]]
    tensor.resize_(3, 4)
    assert tensor.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    tensor.resize_(0)
    assert tensor.numel() == 0
    image = torch.empty(0, device="tpu").resize_((1, 2, 3, 3), memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_set_shares_the_source() -> None:
    source = torch.arange(6.0, device="tpu")
    tensor = torch.empty(0, device="tpu").set_(source)  # pyright: ignore[reportArgumentType]
    tensor[0] = 5
    assert source[0].item() == 5
    tensor.set_(source.untyped_storage(), 2, (2,), (2,))
    assert tensor.tolist() == [2, 4]
    tensor.set_()  # pyright: ignore[reportCallIssue]
    assert tensor.numel() == 0 and tensor.device.type == "tpu"


def test_assigning_data() -> None:
    tensor = torch.zeros(2, device="tpu")
    other = torch.ones(3, device="tpu")
    tensor.data = other
    assert tensor.tolist() == [1, 1, 1] and tensor.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("out_shape", [(0,), (2, 3)])
def test_out_arguments(out_shape: tuple[int, ...]) -> None:
    a = torch.arange(6.0, device="tpu").reshape(2, 3)
    out = torch.empty(out_shape, device="tpu")
    assert torch.add(a, 1, out=out) is out
    assert out.tolist() == [[1, 2, 3], [4, 5, 6]]
    values, indices = torch.empty(0, device="tpu"), torch.empty(0, dtype=torch.long, device="tpu")
    torch.max(a, 1, out=(values, indices))
    assert values.tolist() == [2, 5] and indices.tolist() == [2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda a, out: torch.mm(a, a, out=out),
        lambda a, out: torch.mm(a.T, a, out=out),
        lambda a, out: torch.addmm(a, a, a, out=out),
        lambda a, out: torch.bmm(a[None], a[None], out=out[None])[0],
        lambda a, out: torch.linalg.multi_dot([a, a, a], out=out),
        lambda a, out: torch.linalg.matrix_power(a, 3, out=out),
        lambda a, out: torch.mean(a.T[None], 0, out=out),
        lambda a, out: torch.cumsum(a, 0, out=out),
        lambda a, out: out.addmm_(a, a),
        lambda a, out: out[None].baddbmm_(a[None], a[None])[0],
        lambda a, out: out[0].addmv_(a, a[1]),
    ],
)
def test_a_result_over_its_own_inputs(call: Callable[..., torch.Tensor]) -> None:
    """As on a TPU, which writes results at the end. On the CPU some are silently wrong, by processor."""
    a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.5]], device="tpu")
    before = a.clone()
    expected = call(a, a.clone())
    result = call(a, a)
    assert torch.equal(result, expected) and not torch.equal(result, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: torch.cat([a[:1], a[1:]], out=a),
        lambda a: torch.gather(a, 0, torch.zeros(3, 3, dtype=torch.int64, device=a.device), out=a),
        lambda a: torch.index_select(a, 0, torch.tensor([1, 0, 1], device=a.device), out=a),
        lambda a: torch.add(a, a.T, out=a),
    ],
)
def test_a_result_over_inputs_that_torch_refuses(call: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="single memory location|input tensor|same memory"):
        call(torch.ones(3, 3, device="tpu"))


def test_out_that_is_a_strided_view() -> None:
    a = torch.arange(9.0, device="tpu").reshape(3, 3)
    expected = a.tolist()
    wide = torch.zeros(3, 6, device="tpu")
    torch.add(a, 0, out=wide[:, ::2])
    assert wide[:, ::2].tolist() == expected and wide[:, 1::2].abs().sum().item() == 0


def test_out_of_the_wrong_size_warns_and_of_the_wrong_dtype_raises() -> None:
    a = torch.ones(4, device="tpu")
    out = torch.empty(2, device="tpu")
    with pytest.warns(UserWarning, match="was resized since it had shape"):
        torch.add(a, a, out=out)
    assert out.tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(a, a, out=torch.empty(4, dtype=torch.int32, device="tpu"))


def test_overlapping_memory_is_refused_as_on_cpu() -> None:
    tensor = torch.arange(6.0, device="tpu")
    with pytest.raises(RuntimeError, match="single memory location"):
        tensor[1:].copy_(tensor[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        tensor[1:].add_(tensor[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1, device="tpu").expand(3).add_(1)
    assert tensor.add_(tensor).tolist() == [0, 2, 4, 6, 8, 10]


def test_results_own_their_memory() -> None:
    tensor = torch.ones(2, 3, device="tpu")
    for copy in (tensor.clone(), tensor + 0, tensor.to(torch.float64), tensor.contiguous().add(0)):
        copy.fill_(5)
        assert tensor.eq(1).all()


def test_numbers_in_place_of_tensors() -> None:
    def run(device: str):  # type: ignore[no-untyped-def]
        integers, scalar = (
            torch.arange(1, 6, device=device),
            torch.tensor(7, dtype=torch.int32, device=device),
        )
        half = torch.arange(1, 6, device=device, dtype=torch.float16)
        out = torch.empty(5, dtype=torch.int64, device=device)
        return (
            *(f(integers) for f in (lambda t: t % 2, lambda t: t + 0.5, lambda t: 7 // t, lambda t: 2**t)),
            *(f(half) for f in (lambda t: t % 2.5, lambda t: t * 3, lambda t: torch.maximum(t, half / 2))),
            *(f(scalar) for f in (lambda t: t % 5, lambda t: t - 1.5, lambda t: t << 2, lambda t: t == 7)),
            integers.clone().remainder_(3),
            torch.remainder(integers, 3, out=out),
            torch.take_along_dim(integers, torch.tensor([2, 4], device=device)),
        )

    on_both(run)


# -- complex, lazily conjugated and negated ------------------------------------------------------


def test_conjugate_and_negative_views() -> None:
    def run(device: str):  # type: ignore[no-untyped-def]
        z = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, -2 + 0j]], device=device)
        c = z.conj()
        part = c.imag
        z[0, 0] = 4 + 5j  # pyright: ignore[reportArgumentType]
        return (
            c.resolve_conj(),
            part.resolve_neg(),
            part + 1,
            c @ z,
            c.clone(),
            part.clone(),
            z.real,
            torch.view_as_real(z),
            c.sum(),
            z.mH.resolve_conj(),
            torch.zeros(2, 2, dtype=torch.complex64, device=device).copy_(c),
        )

    on_both(run)


def test_gradient_of_sgn_copies_a_zero_tensor() -> None:
    z = torch.tensor([1 + 1j, 2j], device="tpu", requires_grad=True)
    x = torch.tensor([1.0, -2.0], device="tpu", requires_grad=True)
    torch.sgn(x).sum().backward()
    torch.sgn(z).abs().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0]
    zero = torch._efficientzerotensor((2, 3), device="tpu")
    assert zero.clone().tolist() == zero.cpu().tolist() == [[0, 0, 0]] * 2


# -- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda tpu, cpu: tpu + cpu,
        lambda tpu, cpu: cpu + tpu,
        lambda tpu, cpu: tpu.add_(cpu),
        lambda tpu, cpu: cpu.add_(tpu),
        lambda tpu, cpu: cpu.sum().add_(tpu.sum()),
        lambda tpu, cpu: torch.cat([tpu, cpu]),
        lambda tpu, cpu: tpu @ cpu,
        lambda tpu, cpu: torch.where(tpu > 0, tpu, cpu),
        lambda tpu, cpu: torch.add(tpu, tpu, out=cpu),
        lambda tpu, cpu: torch.add(cpu, cpu, out=tpu),
        lambda tpu, cpu: torch.nn.functional.linear(tpu, cpu),
        lambda tpu, cpu: torch.nn.functional.embedding(torch.tensor([0], device="tpu"), cpu),
        lambda tpu, cpu: cpu[torch.tensor([0], device="tpu")],
        lambda tpu, cpu: tpu.index_put_((torch.tensor([0]),), cpu[0]),
        lambda tpu, cpu: torch._foreach_add([tpu], [cpu]),
        lambda tpu, cpu: tpu + torch.zeros(3, 3, device="meta"),
    ],
)
def test_mixed_devices_raise_as_on_cuda(call) -> None:  # type: ignore[no-untyped-def]
    tpu, cpu = torch.ones(3, 3, device="tpu"), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="at least two devices|same device|Tensor on device meta"):
        call(tpu, cpu)
    assert tpu.eq(1).all() and cpu.eq(1).all()


def test_zero_dimensional_cpu_tensors_are_operands() -> None:
    tpu, scalar = torch.ones(3, device="tpu"), torch.tensor(2.0)
    for result in (tpu + scalar, scalar + tpu, tpu.clone().add_(scalar)):
        assert result.device.type == "tpu" and result.tolist() == [3, 3, 3]
    assert torch.where(tpu > 5, tpu, scalar).tolist() == [2, 2, 2]
    assert (tpu.to(torch.float16) * scalar).dtype is torch.float16


def test_one_device_only() -> None:
    with pytest.raises(RuntimeError, match="invalid device tpu:1"):
        torch.zeros(2, device="tpu:1")
    with pytest.raises(RuntimeError, match="invalid device tpu:1"):
        torch.zeros(2, device="tpu").to("tpu:1")


@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested|torch.quantize_per")
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.to_sparse(),
        lambda t: t.to_sparse_csr(),
        lambda t: torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.long, device="tpu"), t[0], (3,)),
        lambda t: torch.empty(3, layout=torch.sparse_coo, device="tpu"),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: torch.nested.nested_tensor([t, t]),
        lambda t: torch.eye(3).to_sparse().to("tpu"),
        lambda t: torch.eye(3).to_sparse() @ t,
        lambda t: t + torch.eye(3).to_sparse(),
        lambda t: t.copy_(torch.eye(3).to_sparse()),
        lambda t: (
            torch.nn.functional.embedding(torch.tensor([1], device="tpu"), t.requires_grad_(), sparse=True)
            .sum()
            .backward()
        ),
    ],
)
def test_other_layouts_are_refused_by_name(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotImplementedError, match="dense .strided. tensors only"):
        make(torch.ones(3, 3, device="tpu"))


# -- copies, printing, scalars -------------------------------------------------------------------


def test_copies_between_devices() -> None:
    cpu = torch.arange(6.0).reshape(2, 3).t()
    tpu = cpu.to("tpu", non_blocking=True)
    assert tpu.stride() == cpu.stride()
    assert torch.equal(tpu.to("cpu", non_blocking=True), cpu)
    assert tpu.to("tpu") is tpu and tpu.cpu().data_ptr() != tpu.data_ptr()
    assert tpu.to("tpu", torch.int64).tolist() == cpu.long().tolist()
    assert torch.empty(3, 2).copy_(tpu).tolist() == cpu.tolist()
    assert torch.empty(3, 2, dtype=torch.int32, device="tpu").copy_(cpu).tolist() == cpu.tolist()
    assert tpu.to("meta").device.type == "meta"
    assert tpu.type(torch.float64).dtype is torch.float64
    assert cpu.tpu().device == torch.device("tpu:0") and cpu.tpu().is_tpu
    assert torch.tensor([1, 2], device="tpu").tolist() == [1, 2]
    assert torch.as_tensor(cpu.numpy(), device="tpu").tolist() == cpu.tolist()


def test_printing_and_scalars() -> None:
    assert repr(torch.tensor([1.0, 2.5], device="tpu")) == "tensor([1.0000, 2.5000], device='tpu:0')"
    assert repr(torch.tensor(3, device="tpu")) == "tensor(3, device='tpu:0')"
    assert torch.tensor(2.5, device="tpu").item() == 2.5
    assert f"{torch.tensor(0.25, device='tpu'):.1f}" == "0.2"
    assert bool(torch.tensor(True, device="tpu"))
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        torch.ones(2, device="tpu").numpy()


def test_pinned_memory_asked_for_is_a_copy() -> None:
    tensor = torch.arange(3.0)
    assert tensor.pin_memory().tolist() == [0, 1, 2]


def test_factories() -> None:
    def run(device: str):  # type: ignore[no-untyped-def]
        like = torch.ones(2, 3, dtype=torch.float64, device=device)
        return (
            torch.zeros(2, device=device),
            torch.full((2,), 3.5, device=device),
            torch.arange(2, 9, 3, device=device),
            torch.linspace(0, 1, 5, device=device),
            torch.eye(3, device=device),
            torch.tril_indices(3, 3, device=device),
            torch.zeros_like(like),
            like.new_full((2,), 4),
            torch.hann_window(6, device=device),
        )

    on_both(run)
    with torch.device("tpu"):
        assert torch.zeros(2).device.type == "tpu"


# -- random numbers ------------------------------------------------------------------------------


def test_random_numbers_follow_the_seed() -> None:
    def draw() -> list[torch.Tensor]:
        values = [torch.randn(4, device="tpu"), torch.rand(4, device="tpu")]
        values += [torch.randint(100, (4,), device="tpu"), torch.randperm(6, device="tpu")]
        values += [
            torch.empty(4, device="tpu").uniform_(),
            torch.bernoulli(torch.full((9,), 0.5, device="tpu")),
        ]
        return [*values, torch.nn.functional.dropout(torch.ones(9, device="tpu"), 0.5)]

    torch.manual_seed(7)
    first = draw()
    torch.tpu.manual_seed(7)
    again = draw()
    other = draw()
    state = torch.tpu.get_rng_state()
    third = draw()
    torch.tpu.set_rng_state(state)
    for a, b in zip(first + third, again + draw(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], other[0])
    with torch.random.fork_rng():
        torch.randn(3, device="tpu")
    assert torch.equal(torch.randn(3, device="tpu"), _after(state, draw))


def _after(state: torch.Tensor, draw) -> torch.Tensor:  # type: ignore[no-untyped-def]
    torch.tpu.set_rng_state(state)
    draw()
    return torch.randn(3, device="tpu")


def test_a_generator_reproduces() -> None:
    native = extension.loaded() is not None
    generator = torch.Generator("tpu" if native else "cpu").manual_seed(5)
    first = torch.randn(3, generator=generator, device="tpu")
    assert torch.equal(first, torch.randn(3, generator=generator.manual_seed(5), device="tpu"))


def test_integers_are_counted() -> None:
    """torch.histc has integers on accelerators alone; transformers counts the tokens of experts with it."""
    ids = torch.tensor([0, 3, 3, 7, 2, 9, 11, 3], device="tpu", dtype=torch.int32)
    for given in (ids, ids.long(), ids.float()):
        found = torch.histc(given, bins=8, min=0, max=7)
        assert found.tolist() == [1, 0, 1, 3, 0, 0, 0, 1]
        assert found.dtype == given.dtype and found.device.type == "tpu"
    assert torch.histc(ids, bins=2).tolist() == [5, 3]  # from the least to the most: 0 to 11
