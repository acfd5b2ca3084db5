"""Faults that people reported about bridges like this one, each as a test of its kind.

The number in a test's name is the one in the project's list of reported faults; the docstring says
where it was reported and what goes wrong there. Gradients (2, 10's derivation), symbolic sizes (30),
torch.func (32) and autocast (35) are tested in the files of their own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl
from torch._subclasses.fake_tensor import FakeTensorMode

import bridge
from bridge import device as simulated
from bridge import jax_op, to_jax, to_torch
from bridge import program as programs

simulated.register()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _identity(x: jax.Array) -> jax.Array:
    return x


def _plus_zero(x: jax.Array) -> jax.Array:
    return x + 0


def _double(x: jax.Array) -> jax.Array:
    return x * 2


IDENTITY = jax_op("test_faults::identity", _identity)
PLUS_ZERO = jax_op("test_faults::plus_zero", _plus_zero)
DOUBLE = jax_op("test_faults::double", _double)

LAYOUTS = {
    "step": lambda r: r(6, 8)[:, ::2],
    "diagonal": lambda r: r(5, 5).diagonal(),
    "expand": lambda r: r(1, 3).expand(4, 3),
    "transposed": lambda r: r(4, 3).t(),
    "permuted": lambda r: r(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda r: r(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "slice": lambda r: r(40)[1:],
    "row": lambda r: r(4, 3)[1],
}


# ---------------------------------------------------------------------------------- 1 to 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_1_strides(layout: str, device: torch.device) -> None:
    """jax-ml/jax#8082: sliced and broadcast tensors are refused, or silently read wrong."""
    x = LAYOUTS[layout](lambda *shape: torch.randn(*shape, device=device))
    before = x.clone()
    assert torch.equal(DOUBLE(x), before * 2)
    assert torch.equal(x, before)


def test_fault_4_unaligned_memory(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    """jax-ml/jax#29810: "zero-copy" copies in silence where data is not 64-byte aligned, and spams stderr."""
    shifted = torch.arange(64.0, device=device)[1:]
    np.testing.assert_array_equal(np.asarray(to_jax(shifted)), np.arange(1, 64))
    with pytest.raises(ValueError, match="copy=False.*64 bytes"):
        to_jax(shifted, copy=False)
    assert "64 bytes" in str(bridge.copy_reason(shifted))
    bridge.reset_stats()
    DOUBLE(shifted)
    to_jax(shifted)
    assert bridge.stats().copies == {"unaligned": 2}
    assert capfd.readouterr().err == ""


def test_fault_5_int64(device: torch.device) -> None:
    """jax-ml/jax#18385: int64 wraps to 32 bits where JAX's x64 is off: 2**33 + 5 becomes 5."""
    for values in ([2**33 + 5, -1], [2**63 - 1, -(2**63)], [3, 4]):
        x = torch.tensor(values, device=device)
        for op in (PLUS_ZERO, torch.compile(PLUS_ZERO, fullgraph=True, backend="aot_eager")):
            out = op(x)
            assert out.dtype is torch.int64 and out.tolist() == values

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return x[index]

    table = torch.arange(8.0, device=device)
    index = torch.tensor([5, 0], device=device)
    wide = jax_op(f"test_faults::take_{device.type}", take)
    narrow = jax_op(f"test_faults::take32_{device.type}", take, x64=False)
    assert wide(table, index).tolist() == [5, 0] == narrow(table, index).tolist()
    with pytest.raises(OverflowError, match=r"take32.*x64=False.*do not fit torch.int32"):
        narrow(table, torch.tensor([2**33 + 5], device=device))


def test_fault_6_float64(device: torch.device) -> None:
    """pytorch/pytorch PR#180252: float64 becomes float32 in silence."""
    x = torch.tensor([1 + 2**-40], dtype=torch.float64, device=device)
    for op in (PLUS_ZERO, torch.compile(PLUS_ZERO, fullgraph=True, backend="aot_eager")):
        assert op(x).dtype is torch.float64 and torch.equal(op(x), x)
    assert torch.autograd.gradcheck(
        DOUBLE, torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    )
    declared = jax_op(f"test_faults::f32_only_{device.type}", _double, x64=False)
    with pytest.raises(TypeError, match="f32_only.*x64=False.*float64"):
        declared(x)
    with pytest.raises(TypeError, match="narrow torch.float64 to 32 bits"):
        to_jax(x)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.uint16,
    ],
    ids=str,
)
def test_fault_8_narrow_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    """dmlc/dlpack#156: narrow dtypes lose bits (NaN payloads, -0) or are taken for others."""
    count = 2 ** (8 * dtype.itemsize)
    raw = torch.arange(count, dtype=torch.int32).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    every = raw.view(dtype).to(device)
    as_bits = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    assert torch.equal(to_torch(to_jax(every)).view(as_bits), raw)
    assert torch.equal(IDENTITY(every).cpu().view(as_bits), raw)

    def to_int4(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.int4)

    name = f"test_faults::int4_{str(dtype).removeprefix('torch.')}_{device.type}"
    with pytest.raises(TypeError, match=f"{name}.*int4"):
        jax_op(name, to_int4)(every)


ZERO_SIZED = {
    "rows": lambda r: r(0, 4),
    "middle": lambda r: r(2, 0, 4),
    "cache": lambda r: r(1, 8, 0, 128),
    "transposed": lambda r: r(4, 0).t(),
    "slice": lambda r: r(4, 3)[2:2],
}


def _gridded(x: jax.Array) -> jax.Array:
    """A kernel with one grid step per row, and none for no rows."""
    if x.size == 0:
        return x

    def kernel(x_ref, o_ref):  # type: ignore[no-untyped-def]
        o_ref[...] = x_ref[...] * 2

    flat = x.reshape(x.shape[0], -1)
    block = pl.BlockSpec((1, flat.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    return pl.pallas_call(kernel, grid=(flat.shape[0],), in_specs=[block], out_specs=block, out_shape=out)(
        flat
    ).reshape(x.shape)


GRIDDED = jax_op("test_faults::gridded", _gridded, reference=_double)


@pytest.mark.parametrize("shape", ZERO_SIZED)
def test_fault_9_zero_size(shape: str, device: torch.device) -> None:
    """microsoft/onnxruntime#27450: tensors without elements crash, or launch a kernel over nothing."""
    x = ZERO_SIZED[shape](lambda *sizes: torch.randn(*sizes, device=device)).detach().requires_grad_()
    for op in (DOUBLE, GRIDDED, torch.compile(DOUBLE, fullgraph=True, backend="aot_eager")):
        out = op(x)
        assert out.shape == x.shape and out.dtype is x.dtype and out.device == x.device
        x.grad = None
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape  # type: ignore[unreachable]
    np.testing.assert_array_equal(np.asarray(to_jax(x)), np.zeros(x.shape))
    assert to_torch(to_jax(x)).shape == x.shape
    torch.library.opcheck(DOUBLE, (x.detach(),))


def test_fault_10_requires_grad(device: torch.device) -> None:
    """pytorch/pytorch PR#169804: tensors that require grad can't be exported, or lose their gradient."""
    parameter = torch.nn.Parameter(torch.randn(4, device=device))
    with torch.no_grad():
        out = DOUBLE(parameter)
    assert torch.equal(out, parameter.detach() * 2) and not out.requires_grad

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter

        def forward(self) -> torch.Tensor:
            return DOUBLE(self.weight)

    assert Model().eval()().requires_grad

    def bare(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]), out_shape=out)(x)

    op = jax_op(f"test_faults::bare_{device.type}", bare)
    out = op(parameter)  # forward works
    assert torch.equal(out, parameter) and out.requires_grad
    with pytest.raises(NotImplementedError, match=f"test_faults::bare_{device.type} has no gradient"):
        out.sum().backward()
    assert parameter.grad is None


# ---------------------------------------------------------------------------------- 12 to 17: memory


def test_fault_12_writes_to_a_result(device: torch.device) -> None:
    """jax-ml/jax#19123: a write to the torch view changes an "immutable" JAX array, or a constant."""
    x = torch.randn(4, device=device)
    first = IDENTITY(x)
    kept = x.clone()
    first.fill_(9)
    assert torch.equal(x, kept) and torch.equal(IDENTITY(x), kept)

    table = jnp.arange(4.0)
    _ = str(table)  # whether it was printed before made a difference there

    def constant(x: jax.Array) -> jax.Array:
        return table

    op = jax_op(f"test_faults::constant_{device.type}", constant)
    for _ in range(3):
        out = op(x)
        assert out.tolist() == [0, 1, 2, 3]
        out.fill_(9)
    np.testing.assert_array_equal(np.asarray(table), np.arange(4))


def test_fault_13_stale_views(device: torch.device) -> None:
    """pytorch/xla#7198: an array is sometimes live and sometimes a snapshot; a cached one is stale."""
    t = torch.zeros(16, device=device)
    live, snapshot = to_jax(t), to_jax(t, copy=True)
    assert DOUBLE(t).sum().item() == 0
    t.add_(1)
    assert DOUBLE(t).sum().item() == 32
    assert float(live.sum()) == 16 and float(snapshot.sum()) == 0  # as to_jax says
    t.data = torch.full((16,), 3.0, device=device)
    assert DOUBLE(t).sum().item() == 96
    t.set_(torch.full((16,), 4.0, device=device))  # pyright: ignore[reportArgumentType]
    assert DOUBLE(t).sum().item() == 128
    t.resize_(8)
    assert DOUBLE(t).sum().item() == 64


def test_fault_14_writes_after_a_call(device: torch.device) -> None:
    """NVIDIA/DALI#5617: an in-place write after an asynchronous call races with its reads."""

    def slow(a: jax.Array) -> jax.Array:
        return jnp.sin(a) * 0 + a

    op = jax_op(f"test_faults::slow_{device.type}", slow)
    for layout in (lambda t: t, lambda t: t[16:], lambda t: t[1:], lambda t: t[::2]):
        x = torch.ones(1_000_000, device=device)
        for _ in range(5):
            x.fill_(1)
            view = layout(x)
            y = op(view)
            x.zero_()
            assert y.sum().item() == view.numel()


def test_fault_14_optimizer_step_after_backward(device: torch.device) -> None:
    """The same, where the write is an optimiser's."""

    def square(a: jax.Array) -> jax.Array:
        return a * a

    op = jax_op(f"test_faults::square_{device.type}", square)
    weight = torch.nn.Parameter(torch.ones(500_000, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    expected = 1.0
    for _ in range(5):
        optimizer.zero_grad()
        loss = op(weight).sum()
        loss.backward()
        optimizer.step()
        assert loss.item() == expected**2 * 500_000
        expected -= 0.25 * 2 * expected
        assert weight.detach().unique().tolist() == [expected]


def test_fault_16_pass_through(device: torch.device) -> None:
    """vllm-project/vllm PR#44130: at some shapes the result is the input itself."""

    def maybe_pad(x: jax.Array) -> jax.Array:
        return x if x.shape[0] % 8 == 0 else jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))

    op = jax_op(f"test_faults::maybe_pad_{device.type}", maybe_pad)
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        for rows in (8, 7):
            x = torch.ones(rows, 16, device=device)
            out = function(x)
            assert out.shape == (8, 16) and out.data_ptr() != x.data_ptr()
            out.zero_()
            assert x.sum().item() == rows * 16
            torch.library.opcheck(op, (x,))


def test_fault_17_two_results_in_one_buffer(device: torch.device) -> None:
    """pytorch/pytorch#134278: two results share a buffer, so a write to one changes the other."""

    def two(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        y = jnp.sin(x)
        return y, y, x, y.reshape(2, 2)

    op = jax_op(f"test_faults::two_{device.type}", two)
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        x = torch.randn(4, device=device)
        expected = x.sin()
        a, b, c, d = function(x)
        assert len({t.data_ptr() for t in (a, b, c, d, x)}) == 5
        for written in (a, c, d):
            written.zero_()
        torch.testing.assert_close(b, expected)
        assert x.count_nonzero().item() == 4


# ---------------------------------------------------------------------------------- 19 to 28


def test_fault_19_donation(device: torch.device) -> None:
    """pytorch/xla#8390: donated buffers are read afterwards, in silence. (More in test_donation.py.)"""

    def update(kv: jax.Array, x: jax.Array) -> jax.Array:
        return kv.at[0].set(x[0])

    op = jax_op(f"test_faults::update_{device.type}", update, donate_argnums=(0,))
    kv = torch.zeros(4, 3, device=device)
    for refused in [(kv, kv), (kv[:2], kv.clone()), (kv.clone().requires_grad_(), kv)]:
        with pytest.raises((ValueError, RuntimeError), match=op._qualname):
            op(*refused)
    op(kv, torch.ones(4, 3, device=device))
    with pytest.raises(RuntimeError, match=f"donated to {op._qualname}"):
        kv.sum()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_fault_21_read_only_memory(tmp_path: Path, device: torch.device) -> None:
    """jax-ml/jax#40789: read-only memory is refused, or written to."""
    (tmp_path / "file").write_bytes(np.arange(64, dtype=np.float32).tobytes())
    frozen = np.arange(64, dtype=np.float32)
    frozen.flags.writeable = False
    for source in (np.asarray(jnp.arange(64.0)), frozen, np.memmap(tmp_path / "file", np.float32, mode="r")):
        x = torch.from_numpy(source).to(device)
        out = DOUBLE(x)
        out.zero_()
        assert DOUBLE(x).sum().item() == 2 * sum(range(64))
        np.testing.assert_array_equal(source, np.arange(64))


def test_fault_22_scalars(device: torch.device) -> None:
    """jax-ml/jax PR#35116: scalars of different types share a cache entry, or every value compiles anew."""

    def scaled(x: jax.Array, scale: float, causal: bool, n: int) -> jax.Array:
        assert type(scale) is float and type(causal) is bool and type(n) is int
        return x * scale + (100 if causal else 0) + n

    op = jax_op(f"test_faults::scaled_{device.type}", scaled)
    x = torch.tensor(2.0, device=device)
    for scale, causal, n in [
        (1.0, True, 1),
        (1, True, 1),
        (1.0, False, 1),
        (True, True, True),
        (-0.0, False, 0),
    ]:
        out = op(x, scale, causal, n)
        assert out.shape == () and out.item() == 2 * scale + 100 * causal + n
    assert op(x, float("nan"), False, 0).isnan().item()
    for wrong in [(1.0, 1, 1), (1.0, True, 1.0), ("1", True, 1)]:
        with pytest.raises(TypeError, match=op._qualname):
            op(x, *wrong)
    for n in range(12):
        assert op(x, 0.5, False, n).item() == 1 + n
    assert len(op._table._programs) <= programs.MAX_PROGRAMS  # 1,000 values: test_schema.py


def test_fault_24_jax_in_use_before_the_bridge() -> None:
    """pytorch/xla#8793: who is imported first owns the device. (Import orders: device/test_imports.py.)"""
    script = (
        "import jax.numpy as jnp; jnp.ones(1) + 1\n"
        "import bridge, torch, jax\n"
        "def plus(x: jax.Array) -> jax.Array: return x + 1\n"
        "op = bridge.jax_op('order::plus', plus)\n"
        "for d in ('cpu', 'tpu'):\n"
        "    assert op(torch.zeros(2, device=d)).tolist() == [1, 1]\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_fault_25_fake_tensors(device: torch.device) -> None:
    """pytorch/helion PR#2728: fake tensors reach the bridge, which reads memory that is not there."""
    with FakeTensorMode() as mode:
        fake = torch.ones(3, device=device)
        with pytest.raises(TypeError, match="to_jax: a fake tensor has no memory"):
            to_jax(fake)
        out = DOUBLE(fake)
        assert type(out).__name__ == "FakeTensor" and out.shape == (3,) and out.device.type == device.type
    assert type(DOUBLE(mode.from_tensor(torch.ones(3)))).__name__ == "FakeTensor"
    meta = torch.ones(3, device="meta")
    with pytest.raises(TypeError, match="meta.*no values"):
        to_jax(meta)
    assert DOUBLE(meta).is_meta and DOUBLE(meta).shape == (3,)

    def raw(x: torch.Tensor) -> torch.Tensor:
        return to_torch(to_jax(x)) + 1

    x = torch.ones(3, device=device)
    assert torch.compile(DOUBLE, fullgraph=True, backend="aot_eager")(x).tolist() == [2, 2, 2]
    with pytest.raises(Exception, match="to_jax|Unsupported|graph break"):
        torch.compile(raw, fullgraph=True, backend="aot_eager")(x)
    assert torch.compile(raw, backend="eager")(x).tolist() == [2, 2, 2]  # a graph break, and right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_26_strides_of_results(layout: str, device: torch.device) -> None:
    """NVIDIA/cuEquivariance#223: the fake kernel copies strides of the input, the real one returns others."""
    x = LAYOUTS[layout](lambda *shape: torch.randn(*shape, device=device))
    torch.library.opcheck(DOUBLE, (x,))
    with FakeTensorMode() as mode:
        fake = DOUBLE(mode.from_tensor(x))
    assert fake.stride() == DOUBLE(x).stride() and DOUBLE(x).is_contiguous()


def test_fault_27_padded_sizes_do_not_leak(device: torch.device) -> None:
    """pytorch/pytorch#182328: a size padded inside shows in the result's shape, strides or storage."""

    def padded(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
        return (wide * 2)[:, : x.shape[1]]

    op = jax_op(f"test_faults::padded_{device.type}", padded)
    x = torch.randn(4, 80, device=device)
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        out = function(x)
        assert out.shape == (4, 80) and out.stride() == (80, 1)
        assert out.untyped_storage().nbytes() == 4 * 80 * 4


def test_fault_28_the_same_name_twice() -> None:
    """pytorch/pytorch PR#181623: a second op of the same name quietly takes the first one's place."""

    def sin(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def cos(x: jax.Array) -> jax.Array:
        return jnp.cos(x)

    x = torch.zeros(1)
    first = jax_op("test_faults::named", sin)
    with pytest.raises(ValueError, match="test_faults::named is registered already.*overwrite=True"):
        jax_op("test_faults::named", cos)
    with pytest.raises(ValueError, match="registered already"):
        jax_op("test_faults::named", sin)  # a module that is loaded again
    assert first(x).item() == 0 == torch.ops.test_faults.named(x).item()

    won: list[Any] = []
    barrier = threading.Barrier(2)

    def register(function: Any) -> None:
        barrier.wait()
        try:
            won.append(jax_op("test_faults::raced", function))
        except ValueError:
            pass

    threads = [threading.Thread(target=register, args=(f,)) for f in (sin, cos)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert won[0](x).item() == torch.ops.test_faults.raced(x).item()
