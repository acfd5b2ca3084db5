"""Arrays: memory is shared, both ways, or the copy has a reason; what has no memory is refused."""

from __future__ import annotations

import gc
import resource
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bridge
from bridge import copy_reason, device, jax_op, to_jax, to_torch
from bridge.arrays import ALIGNMENT, Borrowing
from bridge.dtypes import FLOAT4_PACKED, SHAREABLE, WIDE

device.register()

DTYPES = sorted(SHAREABLE, key=str)
SMALL = [d for d in DTYPES if d.itemsize <= 2 and d is not torch.bool]
DEVICES = ("cpu", "tpu")


def _identity(x: jax.Array) -> jax.Array:
    return x


IDENTITY = jax_op("test_arrays::identity", _identity)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def some(dtype: torch.dtype, shape: tuple[int, ...] = (4, 6), device: Any = "cpu") -> torch.Tensor:
    """Any bit patterns but, for bool, those it has."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape).to(device)


def pointer(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def exact(array: jax.Array) -> np.ndarray:
    return np.asarray(array)


def x64(dtype: torch.dtype) -> Any:
    return jax.enable_x64(dtype in WIDE)


# ---------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_and_its_array_share_memory(dtype: torch.dtype, device: torch.device) -> None:
    tensor = some(dtype, device=device)
    with x64(dtype):
        array = to_jax(tensor, copy=False)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.shape == tensor.shape
    assert pointer(array) == tensor.data_ptr()
    assert copy_reason(tensor) is None
    assert exact(array).tobytes() == bits(tensor).numpy().tobytes()
    other = some(dtype, device=device)
    tensor.copy_(other)  # a shared array is a live view: the write shows through the array's memory
    assert exact(to_jax_again(tensor, dtype)).tobytes() == bits(other).numpy().tobytes()
    live = torch.from_numpy(exact(array).copy().view(np.uint8).reshape(-1))
    assert torch.equal(live, bits(other))


def to_jax_again(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    with x64(dtype):
        return to_jax(tensor, copy=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_and_its_tensor_share_memory(dtype: torch.dtype) -> None:
    source = some(dtype)
    with x64(dtype):
        array = to_jax(source, copy=True)
        tensor = to_torch(array, copy=False)
    assert tensor.dtype is dtype and tensor.shape == source.shape
    assert tensor.data_ptr() == pointer(array) != source.data_ptr()
    assert torch.equal(bits(tensor), bits(source))
    # Proved by a write, through NumPy's window onto the array's memory:
    tensor.view(torch.uint8).zero_() if tensor.element_size() == 1 else tensor.zero_()
    assert not exact(to_jax_again(tensor, dtype)).view(np.uint8).any()
    assert pointer(to_jax_again(tensor, dtype)) == pointer(array)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_bit_pattern_survives(dtype: torch.dtype, device: torch.device) -> None:
    count = 2 ** (8 * dtype.itemsize)
    every = torch.arange(count, dtype=torch.int32).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    tensor = every.view(dtype).to(device)
    for way in (None, True, False):
        assert torch.equal(bits(to_torch(to_jax(tensor, copy=way))), bits(every))
        assert torch.equal(bits(to_torch(to_jax(tensor), copy=way)), bits(every))
    assert torch.equal(bits(IDENTITY(tensor)), bits(every))  # NaN payloads and -0.0, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint64, torch.complex128])
def test_wide_bit_patterns_survive_an_op(dtype: torch.dtype, device: torch.device) -> None:
    tensor = some(dtype, (1000,), device)
    assert torch.equal(bits(IDENTITY(tensor)), bits(tensor))
    assert IDENTITY(tensor).dtype is dtype


@pytest.mark.parametrize("device", DEVICES)
def test_packed_float4(device: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    tensor = every.view(FLOAT4_PACKED).to(device)
    array = to_jax(tensor)
    assert array.shape == (2, 256) and array.dtype == jnp.float4_e2m1fn
    # The low bits come first; 0x21 holds 0.5 (code 1) and then 1.0 (code 2).
    assert [float(v) for v in exact(array)[0, 0x21 * 2 : 0x21 * 2 + 2]] == [0.5, 1.0]
    assert torch.equal(to_torch(array).view(torch.uint8), every)
    out = IDENTITY(tensor)
    assert out.dtype is FLOAT4_PACKED and out.device.type == device
    assert torch.equal(out.cpu().view(torch.uint8), every)
    assert "share a byte" in str(copy_reason(tensor))
    with pytest.raises(ValueError, match="share a byte"):
        to_jax(tensor, copy=False)
    with pytest.raises(ValueError, match="share a byte"):
        to_torch(array, copy=False)


def test_float4_that_does_not_pack() -> None:
    for shape in [(), (3,), (2, 5)]:
        with pytest.raises(ValueError, match="last dimension must be even"):
            to_torch(jnp.zeros(shape, jnp.float4_e2m1fn))
    flat = torch.zeros((), dtype=torch.uint8).view(FLOAT4_PACKED)
    with pytest.raises(TypeError, match="float4"):
        to_jax(flat)
    with pytest.raises(TypeError, match="test_arrays::identity.*float4"):
        IDENTITY(flat)


def test_int4_is_refused_by_name_both_ways() -> None:
    for wanted in (torch.int4, torch.uint4):
        shell = torch.empty(4, dtype=wanted)
        for refuse in (to_jax, copy_reason, IDENTITY):
            with pytest.raises(TypeError, match=str(wanted)):
                refuse(shell)
    with pytest.raises(TypeError, match="int4"):
        to_torch(jnp.ones(4, jnp.int4))

    def narrow(x: jax.Array) -> jax.Array:
        return x.astype(jnp.int4)

    op = jax_op("test_arrays::int4", narrow)
    with pytest.raises(TypeError, match=r"test_arrays::int4: result 0.*int4"):
        op(torch.ones(4))
    with pytest.raises(TypeError, match="key<fry>"):
        to_torch(jax.random.key(0))


# ---------------------------------------------------------------------------------- layouts


def _layouts() -> dict[str, tuple[Any, str | None]]:
    """name -> (make a tensor of a base tensor, a word of the reason for a copy or None for sharing)"""
    return {
        "0-d": (lambda t: t[0, 0, 0, 0].clone(), None),
        "contiguous": (lambda t: t, None),
        "transposed": (lambda t: t.transpose(0, 2), None),
        "permuted": (lambda t: t.permute(3, 0, 2, 1), None),
        "channels_last": (lambda t: t.contiguous(memory_format=torch.channels_last), None),
        "size 1": (lambda t: t[:1, :1], None),
        "first rows": (lambda t: t[:2], None),
        "unsqueezed": (lambda t: t[:, None].mT, None),
        "zero-size": (lambda t: t[:0], None),
        "zero-size transposed": (lambda t: t[:, :, :0].transpose(0, 3), None),
        "zero-size expanded": (lambda t: t[:, :1, :0].expand(-1, 7, -1, -1), None),
        "step": (lambda t: t[..., ::2], "gaps"),
        "inner": (lambda t: t[:, :, 1:3], "gaps"),
        "expanded": (lambda t: t[:, :1].expand(-1, 5, -1, -1), "repeat"),
        "scalar expanded": (lambda t: t.flatten()[0].expand(3, 4), "repeat"),
        "diagonal": (lambda t: t[0, 0].diagonal(), "gaps"),
        "windows": (lambda t: t.flatten().unfold(0, 4, 1), "repeat"),
        "unaligned": (lambda t: t.flatten()[1:], "64 bytes"),
        "unaligned 0-d": (lambda t: t[0, 0, 0, 1], "64 bytes"),
        "negative bit": (lambda t: torch._neg_view(t), "negation"),
        "column": (lambda t: t[:, :, :, 0], "gaps"),
    }


@pytest.mark.parametrize("name", _layouts())
def test_layouts(name: str, device: torch.device) -> None:
    make, why = _layouts()[name]
    base = torch.arange(4 * 3 * 4 * 5, dtype=torch.float32).reshape(4, 3, 4, 5).to(device)
    tensor = make(base)
    expected = tensor.cpu().resolve_neg().numpy().copy()
    array = to_jax(tensor)
    np.testing.assert_array_equal(exact(array), expected)
    assert array.shape == tensor.shape
    if why is None:
        assert copy_reason(tensor) is None
        np.testing.assert_array_equal(exact(to_jax(tensor, copy=False)), expected)
        if tensor.numel():
            assert pointer(array) == tensor.data_ptr()
    else:
        assert why in str(copy_reason(tensor))
        with pytest.raises(ValueError, match=f"copy=False.*{why}"):
            to_jax(tensor, copy=False)
    back = to_torch(array)
    np.testing.assert_array_equal(back.numpy(), expected)
    op = IDENTITY(tensor)
    assert op.is_contiguous() and op.device == tensor.device
    np.testing.assert_array_equal(op.cpu().numpy(), expected)
    snapshot = to_jax(tensor, copy=True)
    base.fill_(-1)
    np.testing.assert_array_equal(exact(snapshot), expected)


def test_a_slice_that_happens_to_be_aligned_is_shared(device: torch.device) -> None:
    base = torch.arange(64.0, device=device)
    for start in range(33):
        part = base[start:]
        aligned = part.data_ptr() % ALIGNMENT == 0
        assert (copy_reason(part) is None) == aligned == (start % 16 == 0)
        np.testing.assert_array_equal(exact(to_jax(part)), np.arange(start, 64, dtype=np.float32))


def test_transposed_memory_comes_back_transposed() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    back = to_torch(to_jax(tensor, copy=False), copy=False)
    assert back.stride() == tensor.stride() and back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugates_and_negations(dtype: torch.dtype, device: torch.device) -> None:
    tensor = torch.randn(3, 4, dtype=dtype, device=device)
    for view, word in [(tensor.conj(), "conjugate"), (tensor.conj().t(), "conjugate"), (tensor.imag, "gaps"),
                       (tensor.conj().imag, "negation")]:  # fmt: skip
        assert word in str(copy_reason(view))
        with x64(view.dtype):
            array = to_jax(view)
        np.testing.assert_array_equal(exact(array), view.cpu().resolve_conj().resolve_neg().numpy())
        assert torch.equal(IDENTITY(view).cpu(), view.cpu().resolve_conj().resolve_neg())


def test_every_copy_is_counted_by_its_reason(device: torch.device) -> None:
    bridge.reset_stats()
    to_jax(torch.ones(4, 6, device=device))
    assert bridge.stats().copies == {}
    to_jax(torch.ones(4, 6, device=device)[:, ::2])
    to_jax(torch.ones(40, device=device)[1:])
    to_jax(torch.ones(4, device=device), copy=True)
    IDENTITY(torch.ones(4, 6, device=device)[:, ::2])
    IDENTITY(torch.ones(40, device=device)[1:])
    assert bridge.stats().copies == {"stride": 2, "unaligned": 2, "requested": 1}


# ---------------------------------------------------------------------------------- copy=


def test_copy_is_none_false_or_true() -> None:
    tensor = torch.arange(4.0)
    assert pointer(to_jax(tensor)) == pointer(to_jax(tensor, copy=False)) == tensor.data_ptr()
    assert pointer(to_jax(tensor, copy=True)) != tensor.data_ptr()
    array = jnp.arange(4.0)
    assert to_torch(array).data_ptr() == to_torch(array, copy=False).data_ptr() == pointer(array)
    mine = to_torch(array, copy=True)
    mine.zero_()
    np.testing.assert_array_equal(exact(array), np.arange(4.0))


# ---------------------------------------------------------------------------------- read-only memory


def test_read_only_numpy_memory_and_memmap_are_read_and_never_written(
    tmp_path: Path, device: torch.device
) -> None:
    source = np.arange(64, dtype=np.float32)
    source.tofile(tmp_path / "numbers")
    for memory in (
        source,
        np.memmap(tmp_path / "numbers", np.float32, mode="r"),
        np.asarray(jnp.arange(64.0)),
    ):
        memory.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about tensors over read-only arrays
            tensor = torch.from_numpy(memory).to(device)
        np.testing.assert_array_equal(exact(to_jax(tensor)), np.arange(64))
        out = IDENTITY(tensor)
        out.zero_()
        np.testing.assert_array_equal(memory, np.arange(64))
    np.testing.assert_array_equal(np.fromfile(tmp_path / "numbers", np.float32), np.arange(64))


# ---------------------------------------------------------------------------------- grad


def test_tensors_that_require_grad_are_read(device: torch.device) -> None:
    leaf = torch.arange(4.0, device=device, requires_grad=True)
    parameter = torch.nn.Parameter(torch.arange(4.0, device=device))
    for tensor in (leaf, parameter, leaf * 1, parameter[:2]):
        array = to_jax(tensor, copy=False)
        assert pointer(array) == tensor.data_ptr()
        for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with mode:
                np.testing.assert_array_equal(exact(to_jax(tensor)), exact(array))
    with torch.inference_mode():
        made = torch.ones(3, device=device)
        np.testing.assert_array_equal(exact(to_jax(made)), np.ones(3))
    assert not to_torch(to_jax(leaf)).requires_grad


# ---------------------------------------------------------------------------------- refusals


class _Wrapper(torch.Tensor):
    """Like a DTensor: it has a shape, and its values are in another tensor."""

    values_inside: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.values_inside = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on a tensor that should have been refused")


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about its own prototypes
@pytest.mark.parametrize(
    "make, says",
    [
        (_fake, "fake tensor has no memory"),
        (lambda: torch.ones(3, device="meta"), "meta.*no values"),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo.*to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr.*to_dense"),
        (lambda: torch.randn(3, 3).to_mkldnn(), "mkldnn.*to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised.*dequantize"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: _Wrapper(torch.ones(3)), "_Wrapper keeps its values in other tensors.*to_local"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "torch.complex32.*complex64"),
        (lambda: torch.empty(3, dtype=torch.bits8), "torch.bits8"),
        (lambda: np.ones(3), "torch.Tensor, got ndarray"),
        (lambda: jnp.ones(3), "torch.Tensor, got ArrayImpl"),
        (lambda: None, "torch.Tensor, got NoneType"),
    ],
)  # fmt: skip
def test_what_has_no_memory_to_read_is_refused(make: Any, says: str) -> None:
    given = make()
    for refuse in (to_jax, copy_reason, lambda t: to_jax(t, copy=True)):
        with pytest.raises(TypeError, match=says):
            refuse(given)
    if type(given) is torch.Tensor and not given.is_meta:  # a meta tensor gives a meta result
        with pytest.raises(TypeError, match=f"test_arrays::identity.*{says}"):
            IDENTITY(given)


def test_inside_fake_tensor_mode() -> None:
    real = torch.arange(3.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match="fake"):
            to_jax(torch.ones(3))
        array = to_jax(real)  # real memory is still real
        copied = to_jax(real, copy=True)
        tensor = to_torch(array, copy=True)
    np.testing.assert_array_equal(exact(array), np.arange(3.0))
    np.testing.assert_array_equal(exact(copied), np.arange(3.0))
    assert pointer(array) == real.data_ptr() and torch.equal(tensor, real)
    with FakeTensorMode():
        out = IDENTITY(torch.ones(3))
    assert type(out).__name__ == "FakeTensor" and out.shape == (3,)


def test_inside_torch_func_transforms() -> None:
    outside = torch.arange(3.0)

    def reads_its_argument(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match=r"torch\.func transform; call a jax_op"):
            to_jax(x)
        np.testing.assert_array_equal(exact(to_jax(outside, copy=False)), np.arange(3.0))
        np.testing.assert_array_equal(exact(to_jax(outside, copy=True)), np.arange(3.0))
        return x.sum()

    torch.func.grad(reads_its_argument)(torch.ones(3))
    torch.vmap(reads_its_argument)(torch.ones(2, 3))


def test_a_storage_that_was_freed_or_shrunk_is_refused(device: torch.device) -> None:
    for left in (0, 40):
        tensor = torch.ones(100)
        tensor.untyped_storage().resize_(left)
        for refuse in (to_jax, copy_reason, IDENTITY):
            with pytest.raises(RuntimeError, match=f"needs 400 bytes.*holds {left}"):
                refuse(tensor)


def test_torchs_zero_tensor_is_zeros() -> None:
    zeros = torch._efficientzerotensor((2, 3))
    np.testing.assert_array_equal(exact(to_jax(zeros)), np.zeros((2, 3)))
    assert torch.equal(IDENTITY(zeros), torch.zeros(2, 3))
    assert "without memory" in str(copy_reason(zeros))
    with pytest.raises(ValueError, match="without memory"):
        to_jax(zeros, copy=False)


def test_what_is_no_concrete_array_is_refused() -> None:
    for given in (np.ones(3), torch.ones(3), 1.0, None):
        with pytest.raises(TypeError, match="concrete JAX array"):
            to_torch(given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="concrete JAX array, got .*Tracer"):
        jax.jit(lambda x: to_torch(x) and x)(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        to_torch(gone)


# ---------------------------------------------------------------------------------- 64 bits


@pytest.mark.parametrize("dtype", sorted(WIDE, key=str), ids=str)
def test_wide_dtypes_are_exact_or_an_error(dtype: torch.dtype, device: torch.device) -> None:
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    tensor = torch.tensor([2**33 + 5, 7], dtype=dtype, device=device)
    with pytest.raises(TypeError, match=rf"narrow {dtype} to 32 bits.*enable_x64"):
        to_jax(tensor)
    with jax.enable_x64(True):
        array = to_jax(tensor, copy=False)
        assert exact(array + 1).tolist() == [2**33 + 6, 8]
        assert to_torch(array).dtype is dtype
    for given in (tensor, tensor[:0], tensor[::2]):
        out = IDENTITY(given)
        assert out.dtype is dtype and torch.equal(out, given)
    zeros = IDENTITY(torch._efficientzerotensor((2,), dtype=dtype))
    assert zeros.dtype is dtype and zeros.tolist() == [0, 0]


# ---------------------------------------------------------------------------------- lifetimes


def test_an_array_keeps_the_memory_of_a_tensor_that_is_gone(device: torch.device) -> None:
    arrays = []
    for n in range(50):
        tensor = torch.full((1000,), float(n), device=device)
        arrays.append(to_jax(tensor, copy=False))
        del tensor
    gc.collect()
    junk = [torch.full((1000,), -1.0) for _ in range(100)]  # would land in memory that was freed
    for n, array in enumerate(arrays):
        np.testing.assert_array_equal(exact(array), np.full(1000, n, np.float32))
    del junk


def test_a_tensor_keeps_the_memory_of_an_array_that_is_gone() -> None:
    tensors = [to_torch(jnp.full(1000, float(n)), copy=False) for n in range(50)]
    gc.collect()
    junk = [jnp.full(1000, -1.0) for _ in range(100)]
    assert [t.unique().tolist() for t in tensors] == [[float(n)] for n in range(50)]
    del junk


def test_an_array_lets_go_of_its_tensor() -> None:
    memory = np.zeros(64)
    owner = weakref.ref(memory)
    start = -memory.ctypes.data % ALIGNMENT // memory.itemsize
    with jax.enable_x64(True):
        array = to_jax(torch.from_numpy(memory[start : start + 8]), copy=False)
    del memory
    assert owner() is not None
    del array
    gc.collect()
    assert owner() is None


def test_memory_that_is_used_again_is_not_mistaken_for_what_it_held(device: torch.device) -> None:
    """The allocator hands the same address out again, for other shapes and dtypes; each call reads what is
    there now."""
    buffer = torch.zeros(4096, dtype=torch.uint8, device=device)
    for n in range(3):
        for dtype in (torch.float32, torch.int32, torch.uint8, torch.bfloat16):
            for shape in [(8, 16), (16, 8), (128,)]:
                tensor = buffer.view(dtype)[:128].view(shape)
                assert tensor.data_ptr() == buffer.data_ptr()
                tensor.fill_(n + shape[0])
                out = IDENTITY(tensor)
                assert out.shape == shape and out.dtype is dtype
                assert out.unique().tolist() == [n + shape[0]]


def test_many_calls_do_not_grow(device: torch.device) -> None:
    tensor = torch.ones(64, 1024, device=device)

    def some_calls() -> None:
        for _ in range(1000):
            to_torch(to_jax(tensor))
            IDENTITY(tensor)
        gc.collect()

    some_calls()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    some_calls()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1000 * tensor.nbytes / 10  # keeping a tenth of the results would show


def test_borrowed_arrays_are_bounded_and_right_in_threads() -> None:
    borrowing = Borrowing(capacity=32)
    tensors = [torch.full((4, 16), float(n)) for n in range(100)]
    wrong: list[Any] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, len(tensors), 2000)
        for n in order:
            array, owner = borrowing.array(tensors[n], "test")
            if owner is not tensors[n] or pointer(array) != owner.data_ptr() or array.shape != (4, 16):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(borrowing._arrays) <= 32


# ---------------------------------------------------------------------------------- quiet


def test_nothing_on_stderr(capfd: pytest.CaptureFixture[str], device: torch.device) -> None:
    base = torch.arange(64.0, device=device)
    for tensor in (base, base[1:], base[::2], base[:0], base[0], base[3].expand(4)):
        for _ in range(3):
            to_torch(to_jax(tensor))
            IDENTITY(tensor)
    captured = capfd.readouterr()
    assert captured.err == "" and captured.out == ""
