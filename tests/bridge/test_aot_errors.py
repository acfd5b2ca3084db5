"""What people read when a kernel does not compile: the class, the words, the line, the advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from bridge.aot.explain import explain_compiler
from bridge.chips import chip
from bridge.topology import (
    CompileError,
    CompilerMissing,
    KernelRefused,
    MemoryExceeded,
    VmemExceeded,
    compile_for,
    mesh,
)

SQUARE = jax.ShapeDtypeStruct((128, 128), jnp.float32)
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


def kernel(body: Callable[..., None], out: Any = SQUARE, **options: Any) -> Callable[..., Any]:
    return lambda *arrays: pl.pallas_call(body, out_shape=out, name="wrong", **options)(*arrays)


def blocks(shape: tuple[int, ...]) -> dict[str, Any]:
    spec = pl.BlockSpec(shape, lambda i: (i, *[0] * (len(shape) - 1)))
    return {"grid": (2,), "in_specs": [spec], "out_specs": spec}


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


# Refused: one function for each kind, marked where it goes wrong -----------------------------------


def sorts(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=-1)  # here


def uses_an_array_from_outside(x_ref, o_ref):
    o_ref[...] = x_ref[...] + jnp.array([1.0, 2.0, 3.0, 4.0] * 32)  # here


def stores_a_scalar(x_ref, o_ref):
    o_ref[3, 5] = jnp.float32(1)  # here


def reads_hbm(x_ref, o_ref):
    o_ref[...] = x_ref[...]  # here


def slices_lanes_anywhere(i_ref, x_ref, o_ref):
    o_ref[...] = x_ref[:, pl.ds(i_ref[0], 8)]  # here


def copies_from_anywhere(i_ref, x_ref, o_ref, sem):
    source = x_ref.at[:, pl.ds(i_ref[0], 128)]
    pltpu.make_async_copy(source, o_ref, sem).start()  # here


def copies_between_shapes(x_ref, o_ref, sem):
    pltpu.make_async_copy(x_ref, o_ref.at[:64], sem).start()  # here


def doubles(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2  # here


def reshapes(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(60, 100)  # here


def strides_lanes(x_ref, o_ref):
    o_ref[...] = x_ref[:, ::2]  # here


def contracts_two(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.einsum("bik,bkj->ij", x_ref[...], y_ref[...])  # here


def multiplies_integers(x_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], x_ref[...])  # here


def counts_in_floats(x_ref, o_ref):
    o_ref[...] = x_ref[...] + jnp.arange(128.0)  # here


def prints_floats(x_ref, o_ref):
    pl.debug_print("x {}", x_ref[0, 0])  # here
    o_ref[...] = x_ref[...]


CASES = {
    "block of the wrong size": (
        kernel(copy, **blocks((7, 100))),
        ["f32[128,128]"],
        r"block \(7, 100\) of \S+, an array \(128, 128\).*multiples of 8 and 128.*pad the array",
        copy,
    ),
    "1-D block of the wrong size": (
        kernel(copy, jax.ShapeDtypeStruct((1000,), jnp.float32), **blocks((100,))),
        ["f32[1000]"],
        r"block \(100,\) of \S+, an array \(1000,\).*multiple of 1024.*\(1, n\)",
        copy,
    ),
    "operation that is missing": (kernel(sorts), ["f32[128,128]"], "no `sort` for TPU kernels", sorts),
    "array from outside": (
        kernel(uses_an_array_from_outside),
        ["f32[128,128]"],
        r"arrays from outside: \[f32\[128\]\].*Pass them as inputs",
        None,  # JAX names the kernel
    ),
    "scalar to VMEM": (
        kernel(stores_a_scalar),
        ["f32[128,128]"],
        "VMEM, which takes vectors",
        stores_a_scalar,
    ),
    "load from HBM": (
        kernel(reads_hbm, in_specs=[ANYWHERE]),
        ["f32[128,128]"],
        "stays in HBM.*make_async_copy",
        reads_hbm,
    ),
    "unaligned load": (
        kernel(
            slices_lanes_anywhere,
            jax.ShapeDtypeStruct((128, 8), jnp.float32),
            in_specs=[SCALARS, pl.BlockSpec()],
        ),
        ["s32[1]", "f32[128,128]"],
        r"index into dimension 1 .* multiple of 128.*pl.multiple_of\(index, 128\)",
        slices_lanes_anywhere,
    ),
    "unaligned copy": (
        kernel(
            copies_from_anywhere,
            in_specs=[SCALARS, ANYWHERE],
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        ["s32[1]", "f32[128,512]"],
        r"start at a multiple of 128 in dimension 1.*pl.multiple_of",
        copies_from_anywhere,
    ),
    "copy between shapes": (
        kernel(copies_between_shapes, in_specs=[ANYWHERE], scratch_shapes=[pltpu.SemaphoreType.DMA]),
        ["f32[128,128]"],
        "copy between refs of different shapes",
        copies_between_shapes,
    ),
    "float16": (
        kernel(doubles, jax.ShapeDtypeStruct((128, 128), jnp.float16)),
        ["f16[128,128]"],
        "no float16 in kernels.*bfloat16 or float32",
        doubles,
    ),
    "reshape": (
        kernel(reshapes, jax.ShapeDtypeStruct((60, 100), jnp.float32)),
        ["f32[100,60]"],
        "reshape would move elements between vector registers",
        reshapes,
    ),
    "stride over lanes": (
        kernel(strides_lanes, jax.ShapeDtypeStruct((128, 64), jnp.float32)),
        ["f32[128,128]"],
        "stride in the last dimension",
        strides_lanes,
    ),
    "two contracted dimensions": (
        kernel(contracts_two),
        ["f32[8,128,128]", "f32[8,128,128]"],
        "sums over more than one dimension",
        contracts_two,
    ),
    "product of integers": (
        kernel(multiplies_integers, jax.ShapeDtypeStruct((128, 128), jnp.int32)),
        ["s32[128,128]"],
        r"matrix units can't multiply these operands \(i(nt|32)\)",
        multiplies_integers,
    ),
    "range of floats": (kernel(counts_in_floats), ["f32[128,128]"], "broadcasted_iota", counts_in_floats),
    "print of floats": (kernel(prints_floats), ["f32[128,128]"], "32-bit integers only", prints_floats),
    "complex numbers": (
        kernel(doubles, jax.ShapeDtypeStruct((128, 128), jnp.complex64)),
        ["c64[128,128]"],
        "the real and the imaginary part",
        doubles,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal_says_what_where_and_what_to_do(name: str) -> None:
    fn, avals, words, body = CASES[name]
    with pytest.raises(KernelRefused, match=words) as caught:
        compile_for(fn, avals, "v5e")
    error = caught.value
    assert error.chip == "v5e" and str(error).startswith("v5e: ")
    assert error.kernel == "wrong" or body is None or error.kernel == body.__name__
    assert error.advice and error.advice in str(error)
    assert len(error.details) > len(error.what) / 2
    file, _, line = error.where.rpartition(":")
    assert Path(file) == Path(__file__)
    if body not in (None, copy):
        assert int(line) == marked_line(body)


def marked_line(body: Callable[..., None]) -> int:
    """The line of a function that ends in the comment "here"."""
    lines, first = inspect.getsourcelines(body)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize("dtype", ["s64", "f64"])
def test_64_bit_operands_of_a_kernel_are_refused(dtype: str) -> None:
    def call(x):
        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(KernelRefused, match="a kernel can't take.*Use 32-bit types"):
        compile_for(call, [f"{dtype}[128,128]"], "v5e")


def test_what_one_chip_can_do_another_can_not() -> None:
    def body(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)

    compile_for(kernel(body), ["f8e4m3fn[128,128]"], "tpu7x")
    with pytest.raises(KernelRefused, match="v4: its matrix units can't multiply f8E4M3FN operands"):
        compile_for(kernel(body), ["f8e4m3fn[128,128]"], "v4")


def test_unwrapped_kernel_on_a_mesh_is_told_to_use_shard_map() -> None:
    over = mesh("v5e", "x", 4)
    with pytest.raises(KernelRefused, match="jax.shard_map"):
        compile_for(kernel(copy), ["f32[128,128]"], "v5e", mesh=over, in_specs=[P("x")])


# Memory -------------------------------------------------------------------------------------------


def large_blocks(x):
    spec = pl.BlockSpec((1024, 4096), lambda i: (i, 0))
    return pl.pallas_call(
        doubles,
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="large",
    )(x)


def test_vmem_exceeded_has_sizes_and_the_way_out() -> None:
    with pytest.raises(VmemExceeded) as caught:
        compile_for(large_blocks, ["f32[4096,4096]"], "v5e")
    error = caught.value
    assert (error.space, error.needed, error.limit) == ("vmem", 4 * 1024 * 4096 * 4, 16 * 2**20)
    assert error.kernel == "large" and Path(error.where.rpartition(":")[0]) == Path(__file__)
    assert "needs 64.00 MiB of VMEM, and a kernel may use 16.00 MiB" in str(error)
    assert "vmem_limit_bytes=67108864" in error.advice
    assert "smaller blocks" in error.advice

    def allowed(x):
        spec = pl.BlockSpec((1024, 4096), lambda i: (i, 0))
        return pl.pallas_call(
            doubles,
            grid=(4,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=error.needed),
        )(x)

    assert compile_for(allowed, ["f32[4096,4096]"], "v5e").kernels[0].vmem_bytes == error.needed


def test_vmem_of_the_whole_chip_exceeded() -> None:
    with pytest.raises(VmemExceeded) as caught:
        compile_for(large_blocks, ["f32[4096,4096]"], "v4")
    assert caught.value.limit == chip("v4").vmem_bytes
    assert "vmem_limit_bytes" not in caught.value.advice  # it would not help


def test_too_many_scalars() -> None:
    def body(index_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * index_ref[0].astype(jnp.float32)

    spec = pl.BlockSpec((128, 128), lambda i, index: (0, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(1,), in_specs=[spec], out_specs=spec
    )
    with pytest.raises(MemoryExceeded, match="SMEM for one allocation.*SMEM holds scalars") as caught:
        compile_for(kernel(body, grid_spec=grid_spec), ["s32[400000]", "f32[128,128]"], "v6e")
    error = caught.value
    assert (error.space, error.needed, error.limit) == ("smem", 1_600_000, chip("v6e").smem_bytes)
    assert not isinstance(error, VmemExceeded)


def test_hbm_exceeded() -> None:
    with pytest.raises(MemoryExceeded, match="of HBM.*spread the arrays over a mesh") as caught:
        compile_for(lambda x: jnp.sort(x, axis=0), ["f32[65536,65536]"], "v5e")
    assert caught.value.space == "hbm"
    assert caught.value.needed > caught.value.limit > 0.9 * chip("v5e").hbm_bytes


# Errors of Python ---------------------------------------------------------------------------------


def test_errors_of_the_function_itself_stay_as_they_are() -> None:
    def misspelt(x):
        return x + undefined_name  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(NameError, match="undefined_name") as caught:
        compile_for(misspelt, ["f32[8,128]"], "v5e")
    assert any(entry.name == "misspelt" for entry in caught.traceback)
    assert any("while tracing misspelt for v5e with float32[8,128]" in n for n in caught.value.__notes__)


# Texts --------------------------------------------------------------------------------------------


def test_message_that_no_rule_knows_is_given_as_it_came() -> None:
    text = (
        "INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `<no name>` HLO name `k.2`: "
        'E9999: Something: a thing nobody has seen\nat location: loc("get"("/a/b.py":7:1 to :9))\n'
    )
    error = explain_compiler(text, chip("v6e"))
    assert type(error) is KernelRefused
    assert error.what == "the compiler refuses it: a thing nobody has seen"
    assert (error.kernel, error.where, error.details) == ("k", "/a/b.py:7", text)


def test_refusal_that_is_not_about_a_kernel_blames_none() -> None:
    error = explain_compiler("UNIMPLEMENTED: an operation of XLA", chip("v6e"), [("innocent", "a.py:1")])
    assert (error.kernel, error.where) == ("", "")
    assert error.what == "the compiler refuses it: UNIMPLEMENTED: an operation of XLA"


def test_compiler_too_old_for_jax_is_named_as_such() -> None:
    text = "INTERNAL: Failed to deserialize the Mosaic module: Unsupported version: expected <= 9 but got 11"
    error = explain_compiler(text, chip("v5e"))
    assert isinstance(error, CompilerMissing)
    assert "too old for this JAX" in str(error) and "pip install -U libtpu" in str(error)


@pytest.mark.parametrize(
    ("text", "space", "needed", "limit"),
    [
        (
            "Ran out of memory in memory space vmem. Used 128.00M of 63.94M vmem. Exceeded vmem capacity by",
            "vmem",
            128 * 2**20,
            round(63.94 * 2**20),
        ),
        (
            "Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm capacity.",
            "hbm",
            round(17.5 * 2**30),
            round(15.75 * 2**30),
        ),
        ("Scoped allocation with size 20K and limit 16.00K exceeded scoped vmem limit", "vmem", 20480, 16384),
    ],
)
def test_sizes_are_read_from_each_form_of_message(text: str, space: str, needed: int, limit: int) -> None:
    error = explain_compiler(text, chip("v5p"))
    assert isinstance(error, MemoryExceeded)
    assert (error.space, error.needed, error.limit) == (space, needed, limit)


def test_every_error_is_a_compile_error() -> None:
    assert issubclass(VmemExceeded, MemoryExceeded) and issubclass(MemoryExceeded, KernelRefused)
    assert issubclass(KernelRefused, CompileError)
