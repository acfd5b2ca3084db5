"""Compiling for TPU chips without one: chips, topologies, meshes, and what a compiled program tells."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from bridge import jax_op
from bridge.chips import KINDS, Chip, chip, chips
from bridge.topology import (
    CompilerMissing,
    Topology,
    VmemExceeded,
    compile_for,
    compiler_versions,
    mesh,
    topology,
)

CHIPS = tuple(chips())
ROOT = Path(__file__).parents[2]


def double(x: jax.Array) -> jax.Array:
    """A kernel over blocks of 8 rows."""

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // 8,),
        in_specs=[rows],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="double",
    )(x)


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of two 1024-cubes in tiles of 256, summed in a scratch."""

    def body(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == 3)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    tile = functools.partial(pl.BlockSpec, (256, 256))
    return pl.pallas_call(
        body,
        grid=(4, 4, 4),
        in_specs=[tile(lambda i, j, k: (i, k)), tile(lambda i, j, k: (k, j))],
        out_specs=tile(lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((1024, 1024), x.dtype),
        scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32)],
        name="matmul",
    )(x, y)


# Chips --------------------------------------------------------------------------------------------


def test_every_figure_of_a_chip_has_a_kind_and_a_source() -> None:
    figures = {field.name for field in dataclasses.fields(Chip)} - {"name", "provenance"}
    for entry in chips().values():
        assert {field for field, _ in entry.provenance} == figures
        for _, provenance in entry.provenance:
            kind, _, source = provenance.partition(": ")
            assert kind in KINDS and source


def test_figures_of_a_chip_fit_together() -> None:
    for entry in chips().values():
        computed = entry.clock_hz * entry.mxu_flops_per_cycle * entry.tensor_cores
        assert computed == pytest.approx(entry.bf16_flops_per_second, rel=0.01)
        assert entry.vmem_limit_bytes <= entry.vmem_bytes < entry.hbm_bytes
        assert entry.cores_per_device * entry.devices_per_chip == entry.tensor_cores


@pytest.mark.parametrize("name", CHIPS)
def test_figures_agree_with_those_jax_has(name: str) -> None:
    ours = chip(name)
    with jax.sharding.use_abstract_mesh(mesh(name, "x", 1)):
        theirs = pltpu.get_tpu_info()
    assert theirs.vmem_capacity_bytes == ours.vmem_bytes
    assert theirs.smem_capacity_bytes == ours.smem_bytes
    assert theirs.mxu_column_size == ours.mxu_size
    assert theirs.num_mxus == ours.mxus_per_core
    assert theirs.num_cores == ours.cores_per_device
    per_chip = theirs.bf16_ops_per_second * ours.tensor_cores
    if ours.tensor_cores == 1 or theirs.num_cores == 1:
        assert per_chip == pytest.approx(ours.bf16_flops_per_second, rel=0.01)


def test_unknown_chip_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="unknown chip 'v9'; expected one of v4, v5e, v5p, v6e, tpu7x"):
        chip("v9")
    with pytest.raises(ValueError, match="expected one of v4"):
        compile_for(double, ["f32[8,128]"], "TPU v5e")


# Topologies and meshes ----------------------------------------------------------------------------


def test_topology_counts_devices() -> None:
    assert (topology("v5e").name, topology("v5e").devices) == ("v5e:2x2", 4)
    assert (topology("v4", "1x1x1").name, topology("v4", "1x1x1").devices) == ("v4:1x1x1", 1)
    assert topology("v5e", (2, 4)) == topology("v5e", "2x4")
    assert topology("v5p", "2x2x4").devices == 16
    assert topology("tpu7x", "2x2x1").devices == 8  # two for each chip


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("v5e", "2x2x2", "2 axes"),
        ("v5p", (2, 2), "3 axes"),
        ("v5e", (2, 0), "at least one chip"),
        ("v5e", (3, 2), "even number"),
        ("v5e", "two", r"'2x4', got 'two'"),
    ],
)
def test_topologies_that_do_not_exist_are_refused(name: str, shape: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        topology(name, shape)


def test_mesh_refuses_names_that_do_not_fit() -> None:
    for names, shape in [(("x", "y"), 4), (("x", "x"), (2, 2)), ("x", 0)]:
        with pytest.raises(ValueError, match="a mesh needs"):
            mesh("v5e", names, shape)


@pytest.mark.parametrize("name", CHIPS)
def test_all_reduce_over_a_mesh_of_every_chip(name: str) -> None:
    over = mesh(name, ("x",), (8,))

    @functools.partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P(), check_vma=False)
    def total(x):
        return jax.lax.psum(double(x), "x")

    compiled = compile_for(total, ["f32[64,128]"], name, mesh=over, in_specs=[P("x")], out_specs=P())
    assert compiled.topology.devices == len(compiled.devices) == 8
    assert len({device[0] for device in compiled.devices}) == 8
    assert [kernel.name.split(".")[0] for kernel in compiled.kernels] == ["double"]
    assert compiled.memory.argument_bytes == 8 * 128 * 4  # of each device
    assert "all-reduce" in compiled.hlo


def test_remote_copies_between_devices_compile() -> None:
    over = mesh("v5e", ("x",), (4,))

    def pass_on(x_ref, y_ref, send_sem, receive_sem):
        right = jax.lax.rem(jax.lax.axis_index("x") + 1, 4)
        copy = pltpu.make_async_remote_copy(
            x_ref, y_ref, send_sem, receive_sem, device_id=(right,), device_id_type=pl.DeviceIdType.MESH
        )
        copy.start()
        copy.wait()

    @functools.partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def shift(x):
        return pl.pallas_call(
            pass_on,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            name="shift",
        )(x)

    compiled = compile_for(
        shift, ["f32[32,128]"], "v5e", mesh=over, in_specs=[P("x")], topology=topology("v5e", "2x2")
    )
    assert [kernel.name.split(".")[0] for kernel in compiled.kernels] == ["shift"]
    assert {device[1][:2] for device in compiled.devices} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_meshes_and_topologies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="pass mesh="):
        compile_for(double, ["f32[8,128]"], "v5e", in_specs=[P("x")])
    with pytest.raises(ValueError, match="TPU v6 lite devices, and v5e is compiled for"):
        compile_for(double, ["f32[8,128]"], "v5e", mesh=mesh("v6e", "x", 2))
    with pytest.raises(ValueError, match="v5e:1x1 has 1 devices, the mesh has 2"):
        compile_for(double, ["f32[8,128]"], "v5e", mesh=mesh("v5e", "x", 2), topology=topology("v5e", "1x1"))
    with pytest.raises(ValueError, match="is of v6e, and v5e is compiled for"):
        compile_for(double, ["f32[8,128]"], "v5e", topology=topology("v6e"))
    with pytest.raises(ValueError, match="made by bridge.topology.mesh"):
        real: Any = jax.make_mesh((1,), ("x",))
        compile_for(double, ["f32[8,128]"], "v5e", mesh=real)
    with pytest.raises(ValueError, match="one PartitionSpec for each array argument, 1, got 2"):
        compile_for(double, ["f32[8,128]"], "v5e", mesh=mesh("v5e", "x", 2), in_specs=[P("x"), P()])


# What is compiled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHIPS)
def test_compiled_program_tells_memory_and_kernels(name: str) -> None:
    compiled = compile_for(matmul, ["bf16[1024,1024]", "bf16[1024,1024]"], name)
    assert compiled.chip is chip(name)
    assert compiled.topology == Topology(chip(name), compiled.topology.shape)
    assert compiled.memory.argument_bytes == 2 * 1024 * 1024 * 2
    assert compiled.memory.output_bytes == 1024 * 1024 * 2
    assert compiled.memory.code_bytes > 0
    (kernel,) = compiled.kernels
    assert kernel.name == "matmul.1"
    # three blocks of bfloat16, twice each, and the float32 sum
    assert kernel.vmem_bytes is not None and kernel.vmem_bytes >= 256 * 256 * (3 * 2 * 2 + 4)
    assert "matmul.1 = bf16[1024,1024]" in compiled.hlo
    assert 'custom_call_target="tpu_custom_call"' in compiled.hlo
    assert '"body":"<' in compiled.hlo and len(compiled.hlo) < 20_000
    assert compiled.dumps is None


def test_versions_name_the_compiler() -> None:
    versions = compiler_versions()
    assert versions["jax"] == jax.__version__
    assert versions["libtpu"].startswith("0.0.")
    assert "TFRT TPU" in versions["platform"]
    assert compile_for(double, ["f32[8,128]"], "v5e").versions == versions


def test_code_that_asks_for_the_chip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.interpretation import target_chip

    monkeypatch.setenv("BRIDGE_CHIP", "v6e")
    seen = []

    def asks(x):
        info = pltpu.get_tpu_info()
        seen.append((target_chip(), str(info.chip_version), info.num_cores))
        return x + 1

    for name in CHIPS:
        compile_for(asks, ["f32[8,128]"], name)
    assert seen == [
        ("v4", "v4", 2),
        ("v5e", "v5e", 1),
        ("v5p", "v5p", 2),
        ("v6e", "v6e", 1),
        ("tpu7x", "7x", 1),
    ]
    assert target_chip() == "v6e"


def test_pipeline_inside_a_kernel_compiles() -> None:
    def add_one(x):
        def outer(x_ref, y_ref):
            def body(x_ref, y_ref):
                y_ref[...] = x_ref[...] + 1

            block = pl.BlockSpec((128, 128), lambda i: (i, 0))
            pltpu.emit_pipeline(body, grid=(8,), in_specs=[block], out_specs=[block])(x_ref, y_ref)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            outer, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[anywhere], out_specs=anywhere
        )(x)

    assert len(compile_for(add_one, ["f32[1024,128]"], "tpu7x").kernels) == 1


def test_scalar_prefetch_and_closures_compile() -> None:
    scale = 3.0  # not an argument

    def gather(index, x):
        def body(index_ref, x_ref, y_ref):
            y_ref[...] = x_ref[...] * scale

        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(2,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, index: (index[i], 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, index: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
        )(index, x)

    compiled = compile_for(gather, [torch.zeros(2, dtype=torch.int32), "f32[64,128]"], "v6e")
    assert len(compiled.kernels) == 1


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aval",
    [
        "bf16[16,128]",
        "bfloat16[16, 128]",
        jax.ShapeDtypeStruct((16, 128), jnp.bfloat16),
        jnp.zeros((16, 128), jnp.bfloat16),
        torch.empty(16, 128, dtype=torch.bfloat16, device="meta"),
        torch.empty(16, 128, dtype=torch.bfloat16),
        torch.empty(16, 128, dtype=torch.bfloat16, device="tpu"),
    ],
    ids=["short", "long", "struct", "array", "meta", "cpu", "tpu"],
)
def test_arrays_may_be_given_in_any_form(aval: Any) -> None:
    assert "double.1 = bf16[16,128]" in compile_for(double, [aval], "v5e").hlo


def test_other_arguments_are_static_and_nested_ones_are_found() -> None:
    def combine(pair, factor, negate, bias):
        assert factor == 2.5 and negate is True and bias is None
        return pair["a"] * factor - pair["b"]

    compiled = compile_for(combine, [{"a": "f32[8,128]", "b": "f32[8,128]"}, 2.5, True, None], "v5e")
    assert compiled.memory.argument_bytes == 2 * 8 * 128 * 4
    assert compiled.kernels == ()


def test_64_bit_arguments_stay_64_bit() -> None:
    assert compile_for(lambda i: i + 1, ["s64[8,128]"], "v5e").memory.argument_bytes == 8 * 128 * 8
    seen = []
    compile_for(lambda x: seen.append(jnp.arange(3).dtype) or x, ["c64[8,128]"], "v5e")
    with jax.enable_x64(True):
        compile_for(lambda x: seen.append(jnp.arange(3).dtype) or x, ["f32[8,128]"], "v5e")
    assert seen == [jnp.int32, jnp.int64]


def test_donation_of_a_jitted_function_is_kept() -> None:
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert compile_for(donating, ["f32[128,128]"], "v5e").memory.alias_bytes == 128 * 128 * 4
    assert compile_for(lambda x: x + 1, ["f32[128,128]"], "v5e").memory.alias_bytes == 0


def test_ops_of_the_bridge_compile() -> None:
    @jax_op("test_topology::scale", donate_argnums=(0,))
    def scale(x: jax.Array, factor: float) -> jax.Array:
        return double(x) * factor

    compiled = compile_for(scale, [torch.empty(8, 128, device="meta"), 2.0], "v5e")
    assert len(compiled.kernels) == 1
    assert compiled.memory.alias_bytes == 8 * 128 * 4


def test_compiler_options_reach_the_compiler() -> None:
    options = {"xla_tpu_scoped_vmem_limit_kib": 512}
    with pytest.raises(VmemExceeded, match="a kernel may use 0.50 MiB"):
        compile_for(matmul, ["bf16[1024,1024]"] * 2, "v5e", compiler_options=options)


@pytest.mark.parametrize(
    ("avals", "words"),
    [
        (["f31[8,128]"], "unknown dtype 'f31'.*expected one of pred, bf16"),
        ("f32[8,128]", "avals must be a sequence"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(avals: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        compile_for(double, avals, "v5e")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a JAX function"):
        compile_for(3, ["f32[8,128]"], "v5e")


# Dumps --------------------------------------------------------------------------------------------


def test_dumps_hold_the_schedule_of_this_program_and_go_with_it() -> None:
    with compile_for(matmul, ["bf16[1024,1024]"] * 2, "v5e", dumps=True) as first:
        second = compile_for(double, ["f32[8,128]"], "v5e", dumps=True)
        assert first.dumps is not None and second.dumps is not None
        names = [file.name for file in first.dumps.iterdir()]
        kept = ("packed-bundles-post-ra.txt", "per-bundle-utilization.txt", "vmem_report.html", "TLP-hlo.txt")
        assert all(any(name.endswith(end) for name in names) for end in kept)
        assert all(name.endswith(kept) for name in names)
        assert any("-matmul.1-" in name for name in names)
        assert not any("double" in name for name in names)
        assert any("-double.1-" in file.name for file in second.dumps.iterdir())
    assert not first.dumps.exists()
    folder = second.dumps
    del second
    gc.collect()
    assert not folder.exists()


def test_dumps_of_a_program_compiled_before_are_written_again() -> None:
    for _ in range(2):
        with compile_for(double, ["f32[8,128]"], "v5e", dumps=True) as compiled:
            assert compiled.dumps is not None and list(compiled.dumps.glob("*double.1*"))


# Without libtpu -----------------------------------------------------------------------------------


def test_missing_compiler_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(CompilerMissing, match="pip install libtpu"):
        compile_for(double, ["f32[8,128]"], "v5e")


def test_without_a_tpu_jax_is_kept_from_looking_for_one() -> None:
    """libtpu, which is installed here, would complain on stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    for start in (
        "import bridge.op, jax; jax.devices()",
        "from bridge.topology import compile_for; compile_for(abs, ['f32[8,128]'], 'v5e')",
    ):
        command = [sys.executable, "-c", start]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


def test_calling_process_loads_no_libtpu_and_jax_stays_as_it_is() -> None:
    check = """
import jax, jax.numpy as jnp
before = jnp.arange(4.0)
from bridge.topology import compile_for
compiled = compile_for(lambda x: x @ x, ["f32[128,128]"], "v5e")
assert "libtpu" not in open("/proc/self/maps").read()
assert [d.platform for d in jax.devices()] == ["cpu"]
assert float((before * 2).sum()) == 12.0
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment, cwd=ROOT)


def test_importing_chips_and_topology_imports_neither_torch_nor_jax() -> None:
    check = "import sys, bridge.chips, bridge.topology; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)
