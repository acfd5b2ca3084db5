"""Copies and semaphores between devices: how they are read, and what they take.

The upper part needs no compiler: short listings run on a few devices. The lower part compiles kernels with
remote copies, and compares bytes and times with what follows from the chip's figures and the places of the
devices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from autotune.commands.explain import record
from autotune.report import report_page
from autotune.report.activity import occupancy
from autotune.report.page import BOUND_TEXTS, UNIT_NAMES
from autotune.schedule.bundles import parse_listing
from autotune.schedule.collectives import collective, least_cycles, link_bytes, moved_bytes
from autotune.schedule.hlo import instructions
from autotune.schedule.network import Network, Place, Slice
from autotune.schedule.operands import kernel_calls
from autotune.schedule.ranks import Ranks
from autotune.schedule.records import STALLS, Identity, Rates
from autotune.schedule.roles import with_identities, with_semaphores
from autotune.schedule.scalar import translate
from autotune.schedule.timeline import Machine
from autotune.score import Score, Workload
from autotune.score.roofline import RooflineScorer
from autotune.score.schedule import Explanation, ScheduleScorer
from bridge.chips import chip
from bridge.topology import mesh, topology

V5E = chip("v5e")
CLOCK = V5E.sustained_clock_hz
LINK = V5E.ici_bytes_per_second / CLOCK  # bytes per cycle
HOP = V5E.ici_latency_seconds * CLOCK
RATES = Rates(bytes_per_cycle=64.0, latency_cycles=100.0, granule_bytes=32)

HEAD = "= control target key start\n= control target key end\n\n"
ONE_WAY = 134234112
"""The overrides of a copy to the VMEM of the chip whose number is added, as dumps of v5e have it."""


def line(count: int) -> Slice:
    """Chips in a row."""
    return Slice(V5E, (count, 1), tuple(Place(n, (n, 0, 0), 0) for n in range(count)))


def together(code: str, around: Slice, groups: dict[str, Any] | None = None) -> tuple[list[Machine], Ranks]:
    """Run `code`, one instruction a line, on every device of a slice."""
    lines = [
        f"{address:#6x}   :  {{ {text.strip()} }}" for address, text in enumerate(code.strip().splitlines())
    ]
    text = HEAD + "\n".join(lines).replace("   0x0 ", "     0 ", 1) + "\n"
    function = translate(parse_listing("TLP", text), 2, len(around.places))
    ranks = Ranks(around, 17, groups or {})
    machines = [
        Machine(
            RATES,
            {"TLP": function},
            {},
            {},
            Identity(rank, place.device, place.core),
            {"sum.1": 500.0},
            ranks,
        )
        for rank, place in enumerate(around.places)
    ]
    ranks.run(machines, "TLP")
    return machines, ranks


def send(to: str, granules: int, predicate: str) -> str:
    """Instruction that copies to the chip in register `to`, from semaphore 2 here to semaphore 1 there."""
    return (
        f"%9 = dma.general ({predicate}), /*src=*/16, /*size_in_granules=*/{granules}, /*dst=*/32, "
        f"/*dst_syncflagno=*/[#allocation1], /*src_syncflagno=*/[#allocation2], "
        f"/*stridedescaddr=*/[#allocation7], /*overrides=*/{to}, /*dst_syncflagno_1=*/0 /* vmem-to-vmem */"
    )


LOCAL_COPY = (
    "%8 = dma.hbm_to_vmem {} /*hbm=*/1, /*size_in_granules=*/10, /*vmem=*/2, "
    "/*dst_syncflagno=*/[#allocation3]"
)
CHIP = "%s1_s0 = sld [smem:[#allocation9]] /* logical chip id */"


# Time between devices -----------------------------------------------------------------------------


def test_a_copy_occupies_every_link_of_its_way_and_is_waited_for_at_both_ends() -> None:
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 0
               {send(str(ONE_WAY + 2), 90, "%p1_p0")}
               %4 = dma.done.wait (%p1_p0), [#allocation2], 90
               %p2_p1 = scmp.eq.s32.totalorder %s1_s0, 2
               %5 = dma.done.wait (%p2_p1), [#allocation1], 90"""
    (first, middle, last), ranks = together(code, line(3))
    nbytes = 90 * 32
    begin, end = 2.0, 2.0 + nbytes / LINK
    assert (list(first.copies.begin), list(first.copies.end)) == ([begin], [end])
    assert ranks.network.busy == {((0, 0, 0), 0, 1): nbytes / LINK, ((1, 0, 0), 0, 1): nbytes / LINK}
    assert first.stalled_on == [0, 0, 0, end + RATES.latency_cycles - 3]
    assert last.stalled_on == [0, 0, 0, end + 2 * HOP - 5]
    assert middle.stalled_on == [0, 0, 0, 0]
    assert not any(machine.unknowns for machine in (first, middle, last))
    assert [list(machine.copies.nbytes) for machine in (first, middle, last)] == [[nbytes], [], [nbytes]]


def test_links_are_given_to_copies_in_the_order_of_time() -> None:
    # Rank 0 is busy with a local copy first, so rank 1 gets the link that both need, although it runs later.
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 0
               %p2_p1 = scmp.eq.s32.totalorder %s1_s0, 1
               %p3_p2 = scmp.eq.s32.totalorder %s1_s0, 2
               {LOCAL_COPY.format("(%p1_p0),")}
               %4 = dma.done.wait (%p1_p0), [#allocation3], 10
               {send(str(ONE_WAY + 2), 900, "%p1_p0")}
               {send(str(ONE_WAY + 2), 900, "%p2_p1")}
               %8 = dma.done.wait (%p3_p2), [#allocation1], 1800"""
    (first, second, last), _ = together(code, line(3))
    local = 4 + 10 * 32 / RATES.bytes_per_cycle + RATES.latency_cycles
    length = 900 * 32 / LINK
    assert list(second.copies.begin) == [7]
    assert local + 1 < 7 + length
    assert list(first.copies.begin)[1:] == [7 + length]
    assert last.stalled_on[-1] == 7 + 2 * length + 2 * HOP - 8


def test_both_directions_of_a_link_are_channels_of_their_own() -> None:
    code = f"""{CHIP}
               %s2_s1 = sxor.u32 %s1_s0, 1
               %s3_s2 = sor.u32 {ONE_WAY}, %s2_s1
               {send("%s3_s2", 90, "%p1_p0")}
               %4 = dma.done.wait [#allocation1], 90""".replace("(%p1_p0), ", "")
    (first, second), ranks = together(code, line(2))
    assert list(first.copies.begin) == list(second.copies.begin) == [3, 3]  # one sent, one received
    assert set(ranks.network.busy) == {((0, 0, 0), 0, 1), ((1, 0, 0), 0, -1)}


def test_hbm_is_busy_at_both_ends() -> None:
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 0
               {send(str(0x4000 + 1), 90, "%p1_p0")}
               {LOCAL_COPY.format("")}
               %5 = dma.done.wait [#allocation3], 10""".replace("vmem-to-vmem", "hbm-to-hbm")
    (first, second), _ = together(code, line(2))
    busy = 90 * 32 / RATES.bytes_per_cycle
    own = 10 * 32 / RATES.bytes_per_cycle + RATES.latency_cycles
    # Each one's own copy comes after what is read here and written there.
    assert first.stalled_on[STALLS.index("read")] == 2 + busy + own - 4
    assert second.stalled_on[STALLS.index("read")] == 2 + busy + own - 4
    assert [list(machine.copies.kind) for machine in (first, second)] == [[0, 3, 0], [1, 4, 0]]


def test_signals_are_seen_a_hop_later_and_a_wait_ends_with_the_first_that_will_do() -> None:
    # Ranks 1 and 2 signal rank 0; rank 1, which is nearer, does so later, but still before rank 2 is heard.
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 2
               %p2_p1 = scmp.eq.s32.totalorder %s1_s0, 1
               %p3_p2 = scmp.eq.s32.totalorder %s1_s0, 0
               %s9_s5 = smov.u32 [#allocation4]
               %s2_s1 = sor.u32 32768, %s9_s5
               %5 = vsyncadd.remote (%p1_p0), %s2_s1, 1
               %6 = vnop
               %7 = vsyncadd.remote (%p2_p1), %s2_s1, 1
               %8 = vwait.ge (%p3_p2), [#allocation4], 1"""
    (first, *_), _ = together(code, line(3))
    assert first.stalled_on == [0, 0, 0, 8 + HOP - 9]


def test_a_signal_may_name_a_semaphore_by_its_number_alone() -> None:
    code = f"""{CHIP}
               %s2_s1 = sxor.u32 %s1_s0, 1
               %s3_s2 = sshll.u32 %s2_s1, 17
               %s4_s3 = sor.u32 32776, %s3_s2
               %5 = vsyncadd.remote %s4_s3, 1
               %6 = vsyncadd [#allocation4], 4294967295
               %7 = vwait.ge [#allocation4], 0"""
    machines, _ = together(code, line(2))
    assert [machine.stalled_on[-1] for machine in machines] == [4 + HOP - 6] * 2
    assert not any(machine.unknowns for machine in machines)
    # With two that it may mean, nobody can tell.
    machines, _ = together(code + "\n%8 = vwait.ge [#allocation5], 0", line(2))
    assert "not known which one" in str(machines[0].unknowns)


def test_ranks_that_wait_for_each_other_are_found_and_named() -> None:
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 1
               %3 = dma.done.wait [#allocation1], 90
               {send(str(ONE_WAY), 90, "%p1_p0")}"""
    machines, _ = together(code, line(2))
    found = [str(dict(machine.unknowns.get("TLP", {}))) for machine in machines]
    assert (
        "ranks wait for each other: rank 0 waits for the semaphore #allocation1, which never comes"
        in found[0]
    )
    assert "rank 1 waits for the semaphore #allocation1" in found[1]


def test_devices_meet_in_a_collective_operation() -> None:
    code = f"""{CHIP}
               %p1_p0 = scmp.eq.s32.totalorder %s1_s0, 0
               {LOCAL_COPY.format("(%p1_p0),")}
               %4 = dma.done.wait (%p1_p0), [#allocation3], 10
               %5 = inlined_call %s1_s0 /* %sum.1 = all-reduce(%x) */"""
    machines, _ = together(code, line(4), {"sum.1": ((0, 1), (2, 3))})
    local = 10 * 32 / RATES.bytes_per_cycle + RATES.latency_cycles - 1
    assert [machine.stalled_on[-1] for machine in machines] == [500, 500 + local, 500, 500]
    machines, _ = together(code, line(4), {"sum.1": ((0, 1), (2, 3, 4))})  # of which there is no fourth
    assert "waits for the other devices in sum.1" in str(machines[2].unknowns)


# Reading ------------------------------------------------------------------------------------------


def parsed(code: str, partitions: int) -> list[Any]:
    lines = [f"{n:#6x}   :  {{ {text.strip()} }}" for n, text in enumerate(code.strip().splitlines())]
    listing = parse_listing("f", HEAD + "\n".join(lines).replace("   0x0 ", "     0 ", 1) + "\n")
    return list(with_identities(with_semaphores(listing.instructions), partitions))


@pytest.mark.parametrize(
    ("product", "partitions", "found"),
    [
        ("sshll.u32 %s2_s1, 2", 4, True),
        ("smul.u32 %s2_s1, 6", 6, True),
        ("smul.u32 6, %s2_s1", 6, True),
        ("sshll.u32 %s2_s1, 2", 8, False),
        ("sshll.u32 %s2_s1, 2", 1, False),
    ],
)
def test_the_place_in_the_mesh_shows_in_the_sum_that_is_made_of_it(
    product: str, partitions: int, found: bool
) -> None:
    code = f"""%s1_s0 = sld [smem:[#allocation6]]
               %s2_s1 = sld [smem:[#allocation7]]
               %s3_s2 = {product}
               %s4_s3 = sadd.s32 %s3_s2, %s1_s0"""
    first, second, *_ = parsed(code, partitions)
    assert (first.partition_id, second.replica_id) == (found, found)
    written, *_ = parsed(code + "\n%5 = sst [smem:[#allocation6]] %s4_s3", partitions)
    assert not written.partition_id


def test_semaphores_are_told_from_memory_also_through_registers() -> None:
    code = """%s1_s0 = smov.u32 [#allocation3]
              %s2_s1 = scalar_lea.sflag [#allocation4], %s9_s9
              %s3_s2 = sor.u32 16384, %s2_s1
              %s4_s3 = smov.u32 [#allocation5]
              %5 = dma.general /*src=*/%s4_s3, /*dst_syncflagno=*/%s3_s2, /*src_syncflagno=*/%s1_s0
              %6 = vwait.ge [#allocation6 + $0x1], 0"""
    names = [[text for _, text in instruction.operands if "#" in text] for instruction in parsed(code, 1)]
    assert names == [
        ["[#semaphore3]"],
        ["[#semaphore4]"],
        [],
        ["[#allocation5]"],
        [],
        ["[#semaphore6 + $0x1]"],
    ]


def test_the_runtimes_own_code_before_a_program_is_left_out() -> None:
    code = """     0   :  { %1 = vtrace 2952790016 }
  0x1   :  { %s2_s0 = sld [smem:[#allocation1]] }
  0x2   :  { %3 = vwait.ge [#allocation2], %s2_s0 /* global-barrier-wait */ }
  0x3   :  { %4 = sbr.rel target bundleno = 0 (0x0), region = 4 }
  0x4   :  { %5 = dma.done.wait [#allocation3], 1 /* enhanced-barrier-wait */ }
  0x5   :  { %6 = vtrace 3221225472 }
  0x6   :  { %7 = vwait.ge [#allocation4], 1 }
"""
    found = parse_listing("TLP", HEAD + code)
    assert [instruction.opcode for instruction in found.instructions] == ["sld", "vwait.ge"]
    assert not found.branches
    assert len(parse_listing("f", HEAD + code.replace("enhanced-barrier", "other")).instructions) == 4


# Links --------------------------------------------------------------------------------------------


def test_routes_go_along_one_axis_after_the_other_the_shorter_way_round() -> None:
    flat = Slice(V5E, (4, 4), ())
    a, b = Place(0, (0, 3, 0), 0), Place(1, (2, 0, 0), 0)
    assert flat.route(a, b) == (
        ((0, 3, 0), 0, 1),
        ((1, 3, 0), 0, 1),
        ((2, 3, 0), 1, -1),
        ((2, 2, 0), 1, -1),
        ((2, 1, 0), 1, -1),
    )
    cube = Slice(chip("v5p"), (4, 4, 4), ())  # whose axes are rings
    assert cube.route(a, b)[2:] == (((2, 3, 0), 1, 1),)
    assert flat.route(a, a) == ()
    one_chip = Slice(chip("tpu7x"), (2, 2, 1), ())
    assert one_chip.route(a, dataclasses.replace(a, core=1)) == (((0, 3, 0), -1, 1),)


def test_a_copy_waits_until_all_links_of_its_way_are_free() -> None:
    around = line(3)
    network = Network(around)
    first, second, third = around.places
    assert network.send(around.route(second, third), 10.0, 3000) == (10, 10 + 3000 / LINK)
    assert network.send(around.route(first, third), 20.0, 3000) == (10 + 3000 / LINK, 10 + 6000 / LINK)
    assert network.send(around.route(second, first), 20.0, 3000) == (20, 20 + 3000 / LINK)


SQUARE = Slice(V5E, (2, 2), tuple(Place(n, (n % 2, n // 2, 0), 0) for n in range(4)))
HLO = """HloModule m

%inner (a: f32[8,128]) -> f32[2,128] {
  %a = f32[8,128]{1,0} parameter(0)
  ROOT %rs = f32[2,128]{1,0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %gather = f32[32,128]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %rows = f32[16,128]{1,0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %sum = f32[8,128]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
  %swap = f32[8,128]{1,0} all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %shift = (f32[8,128]{1,0}, f32[8,128]{1,0}) collective-permute-start(%x), source_target_pairs={{0,3},{3,0}}
  %line = f32[8,128]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{3,3}}
  %part = f32[2,128]{1,0} fusion(%x), kind=kCustom, calls=%inner
  ROOT %y = f32[8,128]{1,0} add(%x, %sum)
}
"""
BYTES = 8 * 128 * 4


@pytest.mark.parametrize(
    ("name", "group", "busiest", "sent", "hops"),
    [
        ("gather", (0, 1, 2, 3), 3 * BYTES / 2, 3 * BYTES, 2),  # three parts, through two links
        ("rows", (0, 2), BYTES, BYTES, 1),
        ("sum", (0, 1, 2, 3), 2 * BYTES * 3 / 4 / 2, 2 * BYTES * 3 // 4, 4),  # there and back
        (
            "swap",
            (0, 1, 2, 3),
            2 * BYTES / 4,
            BYTES * 3 // 4,
            2,
        ),  # to the neighbour, and to the one behind it
        ("shift", (0, 1, 2, 3), BYTES, BYTES, 2),
        ("part", (0, 1, 2, 3), BYTES * 3 / 4 / 2, BYTES * 3 // 4, 2),
    ],
)
def test_the_least_that_collective_operations_take(
    name: str, group: tuple[int, ...], busiest: float, sent: int, hops: int
) -> None:
    module = instructions(HLO)
    operation = collective(module[name], module, 4)
    assert operation is not None
    assert group in operation.groups
    assert max(link_bytes(operation, group, SQUARE).values()) == pytest.approx(busiest)
    assert moved_bytes(operation, group, group[0]) == (sent, sent)
    assert least_cycles(operation, group, SQUARE) == pytest.approx(busiest / LINK + hops * HOP)
    assert collective(module["y"], module, 4) is None


def test_a_permutation_moves_what_its_pairs_say() -> None:
    module = instructions(HLO)
    for name, moved in {
        "shift": [(BYTES, BYTES), (0, 0), (0, 0), (BYTES, BYTES)],
        "line": [(BYTES, 0), (BYTES, BYTES), (0, BYTES), (0, 0)],
    }.items():
        operation = collective(module[name], module, 4)
        assert operation is not None
        assert [moved_bytes(operation, (0, 1, 2, 3), rank) for rank in range(4)] == moved


def test_devices_of_one_chip_share_its_links() -> None:
    module = instructions(HLO)
    operation = collective(module["gather"], module, 4)
    assert operation is not None
    chips = Slice(chip("tpu7x"), (2, 2, 1), tuple(Place(n, (n // 2, 0, 0), n % 2) for n in range(4)))
    loads = link_bytes(operation, (0, 1, 2, 3), chips)
    # Half of the result comes from the other chip, once; each device hands the other half of what it lacks.
    assert loads[(0, 0, 0), 0, 1] == loads[(1, 0, 0), 0, -1] == 4 * BYTES / 2
    assert loads[(0, 0, 0), -1, 1] == 4 * BYTES / 2


# Operands -----------------------------------------------------------------------------------------


def test_each_device_has_operands_of_its_own() -> None:
    chips = mesh("v5e", ("x", "y"), (2, 2))

    def body(rows_ref, place_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def kernel(rows, x):
        place = (lax.axis_index("x") * 10 + lax.axis_index(("y", "x"))).astype(jnp.int32).reshape(1)
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec((8, 128), lambda *_: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda *_: (0, 0)),
        )
        return pl.pallas_call(body, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(
            rows + lax.psum(jnp.int32(1), "x") * 0, place, lax.psum(x, "y")
        )

    sharded = jax.shard_map(kernel, mesh=chips, in_specs=(P(("y", "x")), P()), out_specs=P(), check_vma=False)
    rows = np.arange(8, dtype=np.int32)
    traced = jax.make_jaxpr(sharded)(rows, np.zeros((8, 128), np.float32))
    calls = kernel_calls(traced, {0: rows}, ranks=4)
    places = [np.asarray(call.operands[1]).tolist() for (call,) in calls]
    assert places == [[0], [2], [11], [13]]
    assert [call.operands[2] for (call,) in calls] == [None] * 4


# Kernels ------------------------------------------------------------------------------------------

SEMAPHORE = pltpu.SemaphoreType
MESH, LOGICAL = pl.DeviceIdType.MESH, pl.DeviceIdType.LOGICAL
ROWS, COLUMNS = 512, 1024
SHARD = ROWS * COLUMNS * 2  # bytes


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("libtpu", reason="needs the TPU compiler, libtpu")


def in_hbm(
    body: Callable[..., None], result: Sequence[int], scratch: Sequence[Any], barrier: bool = False
) -> Callable[[Any], Any]:
    """A kernel whose argument and result are in HBM."""

    def kernel(x):
        space = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(
            body,
            in_specs=[space],
            out_specs=space,
            out_shape=pltpu.HBM(tuple(result), x.dtype),
            scratch_shapes=list(scratch),
            compiler_params=pltpu.CompilerParams(collective_id=0 if barrier else None, has_side_effects=True),
            name="kernel",
        )(x)

    return kernel


def explained(
    fn: Callable[[Any], Any], on: str, shape: tuple[int, ...], spec: Any = None, out: Any = None
) -> Explanation:
    names = ("x", "y")[: len(shape)]
    chips, spec = mesh(on, names, shape), P(names) if spec is None else spec
    sharded = jax.shard_map(
        fn, mesh=chips, in_specs=spec, out_specs=spec if out is None else out, check_vma=False
    )
    whole = jax.ShapeDtypeStruct((ROWS * int(np.prod(shape)), COLUMNS), jnp.bfloat16)
    workload = Workload(
        "test", sharded, (whole,), mesh=chips, in_specs=(spec,), out_specs=spec if out is None else out
    )
    return ScheduleScorer(chip(on)).explain(workload)


def meet(*neighbours: Any, **keywords: Any) -> None:
    """Wait until the neighbours are here, too."""
    barrier = pltpu.get_barrier_semaphore()
    for neighbour in neighbours:
        pl.semaphore_signal(barrier, 1, device_id=neighbour, **keywords)
    pl.semaphore_wait(barrier, len(neighbours))


def ring_gather(count: int) -> Callable[[Any], Any]:
    def body(x_ref, o_ref, local, sent, received):
        me = lax.axis_index("x")
        right, left = lax.rem(me + 1, count), lax.rem(me + count - 1, count)
        meet((right,), (left,), device_id_type=MESH)
        own = pltpu.make_async_copy(x_ref, o_ref.at[me], local)
        own.start()
        own.wait()

        def step(index, _):
            part = o_ref.at[lax.rem(me - index + count, count)]
            copy = pltpu.make_async_remote_copy(
                part, part, sent, received, device_id=(right,), device_id_type=MESH
            )
            copy.start()
            copy.wait()
            return 0

        lax.fori_loop(0, count - 1, step, 0)

    return in_hbm(body, (count, ROWS, COLUMNS), [SEMAPHORE.DMA] * 3, barrier=True)


def hops(explanation: Explanation, source: int, destination: int) -> int:
    """Links between two devices of a mesh of up to 8, none of whose axes is a ring."""
    around = explanation.program.around
    assert around is not None
    a, b = (np.array(around.places[rank].coordinates) for rank in (source, destination))
    return int(np.abs(a - b).sum())


def way(explanation: Explanation, source: int, destination: int) -> float:
    """Cycles from the end of what one device sends to the moment the other sees it."""
    on, around = explanation.program.chip, explanation.program.around
    assert around is not None
    same_chip = around.places[source].coordinates == around.places[destination].coordinates
    seconds = on.ici_latency_seconds * hops(explanation, source, destination)
    if same_chip and source != destination:
        assert on.on_chip_latency_seconds is not None
        seconds = on.on_chip_latency_seconds
    return seconds * on.sustained_clock_hz


def kernel_cycles(explanation: Explanation) -> list[float]:
    """Cycles that the kernel takes on each device."""
    return [
        next(f.cycles for f in run.functions if f.name.startswith("kernel"))
        for run in explanation.everywhere
        if run.core == 0
    ]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("count", [4, 8])
def test_a_ring_of_copies_takes_what_its_links_and_hops_take(count: int) -> None:
    explanation = explained(ring_gather(count), "v5e", (count,))
    score, runs = explanation.score, explanation.everywhere
    assert score.devices == len(runs) == count
    assert {(run.bytes_sent, run.bytes_received) for run in runs} == {((count - 1) * SHARD,) * 2}
    assert (score.ici_bytes_sent, score.ici_bytes_received) == ((count - 1) * SHARD,) * 2
    # HBM: the own part and each part that is sent are read, each part that comes is written.
    assert score.kernels[0].dma_bytes_read == count * SHARD
    assert score.kernels[0].dma_bytes_written == (count - 1) * SHARD

    link = SHARD / LINK
    latency = V5E.dma_latency_seconds * CLOCK
    local = SHARD / (V5E.hbm_bytes_per_second * V5E.hbm_efficiency / CLOCK) + latency
    left = [(rank - 1) % count for rank in range(count)]
    right = [(rank + 1) % count for rank in range(count)]
    far = [hops(explanation, left[rank], rank) for rank in range(count)]
    assert max(far) == (1 if count == 4 else 2)
    times = [HOP * max(far[rank], hops(explanation, right[rank], rank)) + local for rank in range(count)]
    for _ in range(count - 1):  # a step ends when its copy is sent and the one from the left is here
        times = [
            link + max(times[rank] + latency, times[left[rank]] + HOP * far[rank]) for rank in range(count)
        ]
    found = kernel_cycles(explanation)
    assert min(found) >= (count - 1) * link
    # The rest is the kernel's own code: some dozen cycles in each step.
    for cycles, expected in zip(found, times, strict=True):
        assert expected <= cycles <= expected + 100 * count
    assert runs[0].link_cycles == pytest.approx((count - 1) * link)
    assert score.units["ici"] == pytest.approx((count - 1) * link / CLOCK / score.time_s)
    assert score.bound == "ici"
    assert score.breakdown["stalled_on_remote"] > 0.8 * score.time_s
    assert score.confidence == "medium"
    assert any("copies between devices" in reason for reason in score.reasons)
    assert not score.unknowns


PROGRAM = 3000
"""Cycles that the program around a kernel or an operation may take, some tenth of what that takes: scalar
code, and the begin of copies. One remote copy more would take seven times as many."""

OWN_CODE = 400
"""Cycles that a kernel of a few copies may take besides them and their ways, 1 or 2 % of what they take: some
dozen for each copy and for each device in a barrier."""


def shift(count: int, ids: Any, axis: str = "x") -> Callable[[Any], Any]:
    def body(x_ref, o_ref, sent, received):
        right = lax.rem(lax.axis_index("x") + 1, count)
        to = right if ids == LOGICAL else (right,)
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, received, device_id=to, device_id_type=ids)
        copy.start()
        copy.wait()

    return in_hbm(body, (ROWS, COLUMNS), [SEMAPHORE.DMA] * 2)


def check_shift(explanation: Explanation) -> None:
    """Each of four devices takes as long as its own copy and the one that it gets; no two share a link."""
    on, around = explanation.program.chip, explanation.program.around
    assert around is not None
    clock, ranks = on.sustained_clock_hz, range(4)
    shared = [a.coordinates == b.coordinates for a, b in zip(around.places, around.places[1:], strict=False)]
    on_chip = [*shared, around.places[3].coordinates == around.places[0].coordinates]
    rates = [on.on_chip_bytes_per_second if here else on.ici_bytes_per_second for here in on_chip]
    lengths = [SHARD / rate * clock for rate in rates if rate is not None]
    ends = [
        max(
            lengths[rank] + on.dma_latency_seconds * clock,
            lengths[rank - 1] + way(explanation, (rank - 1) % 4, rank),
        )
        for rank in ranks
    ]
    # Without a barrier of its own the compiler gives the kernel one: all tell one device, which tells all.
    # For the furthest that is the way there and back, each time through a chip of two devices.
    within = (on.on_chip_latency_seconds or 0.0) * clock
    barrier = 2 * (max(way(explanation, 0, rank) for rank in ranks) + within)
    for cycles, end in zip(kernel_cycles(explanation), ends, strict=True):
        assert end <= cycles <= end + barrier + OWN_CODE


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("on", ["v5e", "v6e", "v5p", "tpu7x"])
def test_devices_are_named_by_their_place_in_the_mesh_or_by_their_number_in_it(on: str) -> None:
    by_place, by_number = (explained(shift(4, ids), on, (4,)) for ids in (MESH, LOGICAL))
    for explanation in (by_place, by_number):
        assert explanation.score.confidence == "medium", explanation.score.reasons
        assert {run.bytes_sent for run in explanation.everywhere if run.core == 0} == {SHARD}
        assert explanation.score.time_s > SHARD / chip(on).ici_bytes_per_second
        check_shift(explanation)
    assert kernel_cycles(by_place) == pytest.approx(kernel_cycles(by_number))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("on", "shape"), [("v5e", (2, 2)), ("v5e", (2, 4)), ("v6e", (4, 2))])
def test_rings_over_either_axis_of_a_mesh(on: str, shape: tuple[int, int], axis: int) -> None:
    size = shape[axis]

    def body(x_ref, o_ref, sent, received):
        place = [lax.axis_index("x"), lax.axis_index("y")]

        def neighbour(step: int) -> tuple[Any, ...]:
            return (*place[:axis], lax.rem(place[axis] + step, size), *place[axis + 1 :])

        meet(neighbour(1), neighbour(size - 1), device_id_type=MESH)
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sent, received, device_id=neighbour(1), device_id_type=MESH
        )
        copy.start()
        copy.wait()

    explanation = explained(in_hbm(body, (ROWS, COLUMNS), [SEMAPHORE.DMA] * 2, barrier=True), on, shape)
    the_chip, clock = chip(on), chip(on).sustained_clock_hz
    hop, link = the_chip.ici_latency_seconds * clock, SHARD / the_chip.ici_bytes_per_second * clock
    stride = 1 if axis else shape[1]
    ranks = range(shape[0] * shape[1])

    def along(rank: int, step: int) -> int:
        place = rank // stride % size
        return rank + ((place + step) % size - place) * stride

    around = explanation.program.around
    assert around is not None
    routes = [around.route(around.places[rank], around.places[along(rank, 1)]) for rank in ranks]
    begins = [hop * max(hops(explanation, along(rank, step), rank) for step in (1, -1)) for rank in ranks]
    # A copy goes when all its links are free, and of two that need one the one that was ready first.
    loads = Counter(part for route in routes for part in route)
    for part in loads:
        ready = [begins[rank] for rank in ranks if part in routes[rank]]
        assert len(set(ready)) == len(ready)
    free: dict[Any, float] = {}
    sent = dict.fromkeys(ranks, 0.0)
    for rank in sorted(ranks, key=lambda rank: begins[rank]):
        sent[rank] = link + max(begins[rank], *(free.get(part, 0.0) for part in routes[rank]))
        free |= dict.fromkeys(routes[rank], sent[rank])
    ends = [
        max(
            sent[rank] + the_chip.dma_latency_seconds * clock,
            sent[along(rank, -1)] + hop * hops(explanation, along(rank, -1), rank),
        )
        for rank in ranks
    ]
    found = kernel_cycles(explanation)
    assert all(cycles >= end for cycles, end in zip(found, ends, strict=True))
    assert found == pytest.approx(ends, abs=100)
    assert explanation.everywhere[0].link_cycles == pytest.approx(max(loads.values()) * link)
    assert explanation.score.ici_bytes_sent == SHARD
    assert not explanation.score.unknowns


@pytest.mark.usefixtures("compiler")
def test_both_devices_of_a_chip_are_nearer_than_those_of_two() -> None:
    tpu7x = chip("tpu7x")
    explanation = explained(shift(2, MESH), "tpu7x", (2,))
    assert tpu7x.on_chip_bytes_per_second is not None
    busy = SHARD / tpu7x.on_chip_bytes_per_second
    assert explanation.everywhere[0].link_cycles == pytest.approx(busy * tpu7x.sustained_clock_hz)
    assert explanation.score.confidence == "medium"
    assert explanation.score.time_s < SHARD / tpu7x.ici_bytes_per_second


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("on", ["v5e", "tpu7x"])
def test_every_device_sends_to_every_other(on: str) -> None:
    count, part = 4, ROWS // 4

    def body(x_ref, o_ref, sent, received):
        me = lax.axis_index("x")
        copies = []
        for step in range(1, count):
            to = lax.rem(me + step, count)
            copies.append(
                pltpu.make_async_remote_copy(
                    x_ref.at[pl.ds(to * part, part)],
                    o_ref.at[pl.ds(me * part, part)],
                    sent.at[step - 1],
                    received.at[step - 1],
                    device_id=(to,),
                    device_id_type=MESH,
                )
            )
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    scratch = [SEMAPHORE.DMA((count - 1,))] * 2
    explanation = explained(in_hbm(body, (ROWS, COLUMNS), scratch), on, (count,))
    sent = {(run.bytes_sent, run.bytes_received) for run in explanation.everywhere}
    assert sent == {(3 * SHARD // 4,) * 2}
    assert explanation.score.confidence == "medium", explanation.score.reasons
    around = explanation.program.around
    assert around is not None
    load: dict[Any, float] = {}
    for a in around.places:
        for b in around.places:
            for link in around.route(a, b):
                load[link] = load.get(link, 0) + SHARD / 4
    ici = [nbytes for (_, axis, _), nbytes in load.items() if axis >= 0]
    clock = chip(on).sustained_clock_hz
    busiest = max(ici) / chip(on).ici_bytes_per_second * clock
    assert explanation.everywhere[0].link_cycles == pytest.approx(busiest)
    assert min(kernel_cycles(explanation)) > busiest / 2  # some devices are not on the busiest link


@pytest.mark.usefixtures("compiler")
def test_a_kernel_in_a_loop_meets_its_neighbours_every_time() -> None:
    once = explained(ring_gather(4), "v5e", (4,))

    def thrice(x):
        return lax.fori_loop(0, 3, lambda _, y: ring_gather(4)(y)[0], x)

    score = explained(thrice, "v5e", (4,)).score
    (kernel,) = [kernel for kernel in score.kernels if kernel.is_kernel]
    assert kernel.calls == 3
    assert kernel.ici_bytes_sent == 3 * once.score.ici_bytes_sent
    assert kernel.time_s == pytest.approx(3 * once.score.kernels[0].time_s, rel=0.02)
    assert not score.unknowns


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("on", ["v5e", "tpu7x"])
def test_a_signal_that_nobody_sends_is_found(on: str) -> None:
    def body(x_ref, o_ref, sent, received):
        me = lax.axis_index("x")
        right = lax.rem(me + 1, 4)
        barrier = pltpu.get_barrier_semaphore()

        @pl.when(me != 1)
        def _():
            pl.semaphore_signal(barrier, 1, device_id=(right,), device_id_type=MESH)

        pl.semaphore_wait(barrier, 1)
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sent, received, device_id=(right,), device_id_type=MESH
        )
        copy.start()
        copy.wait()

    score = explained(in_hbm(body, (ROWS, COLUMNS), [SEMAPHORE.DMA] * 2, barrier=True), on, (4,)).score
    assert score.confidence == "low"
    (reason,) = score.reasons
    assert "ranks wait for each other: rank 2 waits for the barrier semaphore, which never comes" in reason


@pytest.mark.usefixtures("compiler")
def test_devices_that_all_wait_before_they_send_are_found() -> None:
    def body(x_ref, o_ref, sent, received):
        right = lax.rem(lax.axis_index("x") + 1, 4)
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sent, received, device_id=(right,), device_id_type=MESH
        )
        copy.wait_recv()
        copy.start()
        copy.wait_send()

    score = explained(in_hbm(body, (ROWS, COLUMNS), [SEMAPHORE.DMA] * 2), "v5e", (4,)).score
    assert score.confidence == "low"
    assert any("waits for the semaphore of scratch argument 1" in reason for reason in score.reasons)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("on", ["v5e", "v6e", "tpu7x"])
def test_collective_operations_around_a_kernel_are_a_named_roofline(on: str) -> None:
    explanation = explained(lambda x: lax.psum(shift(4, MESH)(x), "x"), on, (4,), out=P())
    score, the_chip = explanation.score, chip(on)
    kernel, total = (
        next(k for k in score.kernels if k.is_kernel == is_kernel and (is_kernel or k.estimated))
        for is_kernel in (True, False)
    )
    assert total.ici_bytes_sent == 2 * SHARD * 3 // 4
    # On v5e and v6e each of the four chips has two links to others; on tpu7x there are two chips, with one.
    links, share = (2, 3 / 4) if the_chip.devices_per_chip == 1 else (1, 1 / 2)
    clock, found = the_chip.sustained_clock_hz, kernel_cycles(explanation)
    # There and back, each time as far as the furthest device is.
    ways = 2 * max(way(explanation, 0, rank) for rank in range(4))
    least = 2 * SHARD * share / links / the_chip.ici_bytes_per_second * clock + ways
    # The first device waits in it for the last to be through with the kernel.
    assert total.time_s * clock == pytest.approx(least + max(found) - found[0])
    check_shift(explanation)
    assert score.time_s > kernel.time_s + total.time_s
    # The program around them is a few dozen instructions, and the start of a copy or two.
    assert score.time_s * clock < max(found) + least + PROGRAM
    assert score.ici_bytes_sent == SHARD + total.ici_bytes_sent
    assert score.confidence == "low"
    (reason,) = score.reasons
    assert f"of the time is a roofline of XLA operations: {total.name}" in reason


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("on", "executed"), [("v5e", True), ("v6e", True), ("v5p", True), ("tpu7x", False)])
def test_permutations_of_xla_are_executed_or_a_named_roofline(on: str, executed: bool) -> None:
    """Four devices are a whole slice of v5e, v6e and v5p; of tpu7x they are half of one."""
    pairs = [(n, (n + 1) % 4) for n in range(4)]
    explanation = explained(lambda x: lax.ppermute(x, "x", pairs), on, (4,))
    score, the_chip = explanation.score, chip(on)
    assert score.confidence == ("medium" if executed else "low"), score.reasons
    assert any(kernel.estimated for kernel in score.kernels) != executed
    assert (score.ici_bytes_sent, score.ici_bytes_received) == (SHARD, SHARD)
    clock, furthest = the_chip.sustained_clock_hz, max(way(explanation, *pair) for pair in pairs)
    link = SHARD / the_chip.ici_bytes_per_second * clock
    hbm = SHARD / (the_chip.hbm_bytes_per_second * the_chip.hbm_efficiency) * clock
    # Those that are executed tell their neighbours first that they are there. The result is then copied to
    # where it belongs: it is read and written, one after the other where it does not fit the VMEM.
    copied = 2 * (hbm + the_chip.dma_latency_seconds * clock)
    assert link + furthest <= score.time_s * clock <= link + 2 * furthest + copied + PROGRAM
    assert score.bound == "ici"
    if not executed:
        (reason,) = score.reasons
        assert "roofline of XLA operations: ppermute" in reason


@pytest.mark.usefixtures("compiler")
def test_reports_show_what_goes_over_the_links() -> None:
    explanation = explained(ring_gather(4), "v5e", (4,))
    score = explanation.score
    assert Score.from_json(score.to_json()) == score
    fields = record(explanation.workload, score)
    assert fields["ici_bytes_sent"] == fields["ici_bytes_received"] == 3 * SHARD
    page = report_page([explanation])
    for text in ("ICI sends", UNIT_NAMES["ici"], BOUND_TEXTS["ici"], "ici_bytes_per_second", "3 MiB"):
        assert text in page
    busy = occupancy(explanation.runs[0], 50)
    link = 3 * SHARD / LINK / explanation.runs[0].cycles
    assert busy["sent"].mean() == pytest.approx(link)
    assert "ICI sends" not in report_page([explained(lambda x: x * 2, "v5e", (4,))])


@pytest.mark.usefixtures("compiler")
def test_devices_that_all_do_the_same_are_executed_once() -> None:
    explanation = explained(lambda x: x * 2, "v5e", (4,))
    assert explanation.score.devices == 4
    assert len(explanation.everywhere) == 1
    assert explanation.score.confidence == "high"
    assert (explanation.score.ici_bytes_sent, "ici" in explanation.score.units) == (0, False)
    assert "stalled_on_remote" not in explanation.score.breakdown


def test_the_roofline_of_a_mesh_is_that_of_all_its_devices() -> None:
    aval = jax.ShapeDtypeStruct((8, 128), np.float32)
    alone, four = (
        RooflineScorer(V5E).score(
            Workload("double", lambda x: x, (aval,), bytes_read=10**6, bytes_written=0, mesh=over)
        )
        for over in (None, mesh("v5e", "x", 4))
    )
    assert four.time_s == pytest.approx(alone.time_s / 4)
    assert four.devices == 4
    assert topology("v5e", "2x2").devices == 4
