"""The parts that read and execute schedules, on small listings written by hand. No compiler is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.schedule.bundles import parse_listing
from autotune.schedule.errors import DumpError, RunawayError
from autotune.schedule.harvest import harvest
from autotune.schedule.hlo import ArrayType, instructions, kernel_names, twin
from autotune.schedule.layout import words
from autotune.schedule.program import core_rates, load_program
from autotune.schedule.records import Rates
from autotune.schedule.scalar import translate
from autotune.schedule.timeline import Machine
from autotune.schedule.utilization import read_utilization, unit_use
from autotune.schedule.values import Unknown, select
from autotune.schedule.vmem import read_vmem_report
from bridge.chips import chip

HEAD = "LB: loop body\n= control target key end\n\n"
DELAY_SLOTS = 2
RATES = Rates(bytes_per_cycle=64.0, latency_cycles=100.0, granule_bytes=32)


def listing(code: str) -> str:
    """A listing of the instructions of `code`, one bundle per line; a line may begin with `LB:` or `PF:`."""
    lines = []
    for address, line in enumerate(code.strip().splitlines()):
        mark, _, rest = line.strip().rpartition("|")
        lines.append(f"{address:#6x} {mark:2} :  {{ {rest} }} /* a comment {{}} */")
    return HEAD + "\n".join(lines).replace("   0x0 ", "     0 ", 1) + "\n"


def run(code: str, arguments: tuple[Any, ...] = (), machine: Any = None) -> tuple[list[int], int, Any]:
    """Execute `code`; returns the counts of its blocks, its cycles, and the machine."""
    function = translate(parse_listing("f", listing(code)), DELAY_SLOTS)
    if machine is None:
        machine = SimpleNamespace(memory={}, empty=Unknown("empty"), core=1, count_loop_trip=lambda: None)
    counts = [0] * len(function.blocks)
    with pytest.raises(StopIteration) as ended:  # at once: there is nobody to wait for
        next(function.execute(machine, 0, arguments, counts, 0))
    return counts, ended.value.value, machine


def stored(code: str) -> list[Any]:
    """What `code` stores to the cells of allocation 0, in order of address."""
    memory = run(code)[2].memory
    return [memory[address] for address in sorted(memory)]


# Parsing ------------------------------------------------------------------------------------------


def test_a_listing_keeps_what_decides_control_flow_and_copies() -> None:
    text = HEAD + (
        "     0   :  { %s8_s0 = inlined_call_operand.hbm [shape: bf16[16,128], index: 0, kind: input, "
        "shape index: {}] /* a window; bf16[16,128] */  ;;  %s9_s1 = inlined_call_operand.<no memory space> "
        "[shape: s32[], index: 1, kind: output, shape index: {}] } /* Start region 0 */\n"
        "   0x1 LB: > { %v3_v0 = vld [vmem:[#allocation3] sm:$0xff]  ;;  %p2_p0 = scmp.lt.s32.totalorder "
        "%s9_s1, 4 }\n"
        "   0x2   : > {}\n"
        "   0x3   : > { %7 = dma.hbm_to_vmem [thread:$0]  (!%p2_p0), /*hbm=*/%s8_s0, "
        "/*size_in_granules=*/64, /*vmem=*/[#allocation3 + $0x8], /*dst_syncflagno=*/[#allocation5] /* \n"
        "base_bounds: (128, 8) */ }\n"
        "   0x4   :  { %20 = sbr.rel (!%p2_p0) target bundleno = 1 (0x1), region = 94 }\n"
        "   0x5   :  { %s3_s2 = sld [smem:[#allocation0]] /* megacore core id */ }\n"
        "   0x6   :  { %4 = inlined_call %s3_s2 /* %matmul.1 = custom-call(%x, %y) */ }\n"
    )
    found = parse_listing("f", text)
    assert found.length == 7
    assert [(p.name, p.space, p.shape, p.output) for p in found.parameters] == [
        ("s8", "hbm", "bf16[16,128]", False),
        ("s9", "", "s32[]", True),
    ]
    compare, copy, load, call = found.instructions
    assert (compare.opcode, compare.target) == ("scmp.lt.s32.totalorder", "p2")
    assert copy.predicate == "!p2"
    assert dict(copy.operands) == {
        "hbm": "s8",
        "size_in_granules": "64",
        "vmem": "[#allocation3 + $0x8]",
        "dst_syncflagno": "[#allocation5]",
    }
    assert load.core_id
    assert call.callee == "matmul.1"
    assert (found.branches[4].target, found.branches[4].predicate) == (1, "!p2")
    assert found.depth == {0: 0, 1: 1, 3: 1, 4: 0, 5: 0, 6: 0}


@pytest.mark.parametrize(
    ("text", "words_of_error"),
    [
        ("nonsense", "control target key"),
        (HEAD, "no bundles"),
        (HEAD + "   0x1   :  { %1 = sbr.rel somewhere }\n", "no target"),
        (HEAD + "   0x2   :  {}\n   0x1   :  {}\n", "must increase"),
        (HEAD + "   0x1   :  { %s1_s0 = inlined_call_operand.hbm what }\n", "cannot read the operand"),
        (HEAD + "   0x1   :  { ??? }\n", "cannot read the instruction"),
    ],
)
def test_text_of_another_form_is_an_error(text: str, words_of_error: str) -> None:
    with pytest.raises(DumpError, match=words_of_error):
        parse_listing("f", text)


# Execution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("sadd.s32 4294967295, 3", 2),
        ("ssub.s32 3, 5", -2),
        ("smul.u32 2147483647, 2", -2),
        ("smulhi.u32 2290649225, 15", 8),
        ("sshll.u32 5, 30", 1 << 30),
        ("sshra.s32 4294967280, 2", -4),
        ("sshrl.u32 4294967280, 28", 15),
        ("sand.u32 12, 10", 8),
        ("sor.u32 12, 10", 14),
        ("sxor.u32 12, 10", 6),
        ("smin.u32 4294967295, 3", 3),
        ("smin.s32 4294967295, 3", -1),
        ("smax.s32 4294967295, 3", 3),
        ("scalar_lea.hbm 100, 4294967288 [#allocation2]", 92),
        ("smov.u32 $0x10", 16),
        ("int_to_ptr.hbm [resolvable:$true] 7", 7),
        ("sld [smem:[#allocation9]] /* core id */", 1),
        ("scmp.lt.s32.totalorder 4294967295, 3", True),
        ("scmp.lt.u32.totalorder 4294967295, 3", False),
        ("scmp.eq.s32.totalorder 3, 3", True),
        ("pmov 1", True),
    ],
)
def test_scalar_instructions(instruction: str, expected: int | bool) -> None:
    assert stored(f"%s1_s0 = {instruction}\n%2 = sst [smem:[#allocation0]] %s1_s0") == [expected]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("por", True), ("pand", False), ("pnand", True), ("pnor", False), ("pxor", True)],
)
def test_predicate_instructions(operation: str, expected: bool) -> None:
    code = f"""%p1_p0 = scmp.lt.s32.totalorder 1, 2
               %p2_p1 = pneg %p1_p0
               %p3_p2 = {operation} %p1_p0, %p2_p1
               %4 = sst [smem:[#allocation0]] %p3_p2"""
    assert stored(code) == [expected]


def test_predicated_move_and_select_choose() -> None:
    code = """%p1_p0 = scmp.lt.s32.totalorder 2, 1
              %s1_s0 = smov.u32 7
              %s2_s0 = smov.u32 (%p1_p0, %s1_s0), 8
              %s3_s0 = smov.u32 (!%p1_p0, %s1_s0), 9
              %s4_s1 = scalar_select /*predicate=*/%p1_p0, /*on_true=*/1, /*on_false=*/2
              %5 = sst [smem:[#allocation0]] %s2_s0
              %6 = sst [smem:[#allocation0 + $0x1]] %s3_s0
              %7 = sst [smem:[#allocation0 + $0x2]] %s4_s1"""
    assert stored(code) == [7, 9, 2]


def test_a_loop_runs_its_trips_and_its_delay_slots() -> None:
    code = """%s1_s0 = smov.u32 0
              LB|%s2_s0 = sphi %s1_s0, %s3_s0
              %s3_s0 = sadd.s32 1, %s2_s0 ;; %p1_p0 = scmp.ge.s32.totalorder %s2_s0, 4
              %5 = sbr.rel (!%p1_p0) target bundleno = 1 (0x1), region = 3
              %6 = sst [smem:[#allocation0]] %s2_s0
              %v1_v0 = vld [vmem:[#allocation3] sm:$0xff]
              %7 = sst [smem:[#allocation0 + $0x1]] %s3_s0"""
    counts, cycles, machine = run(code)
    assert counts == [1, 5, 1]
    assert cycles == 1 + 5 * 5 + 1
    assert sorted(machine.memory.values()) == [4, 5]


def test_values_that_meet_after_a_branch_are_those_written_last() -> None:
    code = """%s1_s0 = smov.u32 10
              %p1_p0 = scmp.lt.s32.totalorder {}, 2
              %3 = sbr.rel (%p1_p0) target bundleno = 6 (0x6), region = 3
              %4 = vnop
              %5 = vnop
              %s2_s0 = smov.u32 20
              PF|%s3_s0 = sphi %s1_s0, %s2_s0
              %6 = sst [smem:[#allocation0]] %s3_s0"""
    assert stored(code.format(1)) == [10]
    assert stored(code.format(3)) == [20]


def test_code_that_this_chip_cannot_have_is_an_error() -> None:
    into_slots = """%1 = sbr.rel target bundleno = 1 (0x1), region = 3
                    %2 = vnop
                    %3 = vnop
                    %4 = vnop"""
    with pytest.raises(DumpError, match="lands in delay slots"):
        run(into_slots)
    with pytest.raises(DumpError, match="nothing defines s9"):
        run("%1 = sst [smem:[#allocation0]] %s9_s0")
    loop = "%1 = sbr.rel target bundleno = 0 (0x0), region = 3"
    goes_on = listing("\n".join([loop, *["%2 = vnop"] * 3])).replace(" :  {", " : > {")
    with pytest.raises(DumpError, match="more than 2 delay slots"):
        translate(parse_listing("f", goes_on), DELAY_SLOTS)


def test_an_unknown_value_spreads_with_its_reason() -> None:
    unknown = Unknown("somewhere")
    for result in (unknown + 1, 1 - unknown, unknown << 4, unknown < 3, unknown & 7, unknown | 1):
        assert isinstance(result, Unknown)
        assert result.reason == "somewhere"
    assert (unknown & False) is False
    assert (False & unknown) is False
    assert (unknown | True) is True
    assert select(unknown, 1, 2) is unknown
    assert select(Unknown("set by the runtime", runtime=True), 1, 2) == 2
    with pytest.raises(TypeError, match="somewhere"):
        bool(unknown)


# Time ---------------------------------------------------------------------------------------------


def machine_for(code: str, **keywords: Any) -> Machine:
    function = translate(parse_listing("TLP", listing(code)), DELAY_SLOTS)
    return Machine(RATES, {"TLP": function}, {}, {}, **keywords)


COPY = (
    "%1 = dma.{0}_to_{1} /*{0}=*/100, /*size_in_granules=*/{2}, /*{1}=*/200, "
    "/*dst_syncflagno=*/[#allocation{3}]"
)


def test_a_wait_stalls_until_the_copy_arrived() -> None:
    machine = machine_for(
        f"{COPY.format('hbm', 'vmem', 20, 1)}\n%2 = dma.done.wait [#allocation1], 20\n%3 = vnop"
    )
    cycles = machine.run("TLP")
    arrival = 20 * 32 / 64 + 100
    assert cycles == arrival + 2
    assert machine.stalled_on == [arrival - 1, 0, 0, 0]
    assert (list(machine.copies.nbytes), list(machine.copies.kind)) == ([640], [0])


def test_copies_share_the_channel_and_waits_take_what_they_saw() -> None:
    code = f"""{COPY.format("hbm", "vmem", 20, 1)}
               {COPY.format("vmem", "hbm", 40, 2)}
               %3 = dma.done.wait [#allocation2], 40
               %4 = vsyncadd [#allocation2], 4294967256
               %5 = dma.done.wait [#allocation1], 20
               %6 = dma.done.wait [#allocation2], 40"""
    machine = machine_for(code)
    machine.run("TLP")
    assert list(machine.copies.begin) == [0, 10]
    assert list(machine.copies.end) == [10, 30]
    assert machine.stalled_on == [0, 130 - 2, 0, 0]
    assert list(machine.unknowns["TLP"]) == [
        "waits for a signal that this core never sends: a copy or signal of another core or chip"
    ]


def test_copies_of_any_kind_are_named_by_their_addresses() -> None:
    code = """%s1_s0 = scalar_lea.hbm 64, 64
              %s2_s1 = int_to_ptr.vmem [resolvable:$true] 32
              %3 = dma.general /*src=*/{}, /*size_in_granules=*/2, /*dst=*/{}, /*dst_syncflagno=*/4, {}"""
    rest = "/*src_syncflagno=*/5, /*stridedescaddr=*/[#allocation9], /*overrides=*/{} /* bounds: (1, 2) */"
    for places, kind in ((("%s1_s0", "%s2_s1"), 0), (("%s2_s1", "%s1_s0"), 1), (("%s2_s1", "%s2_s1"), 2)):
        machine = machine_for(code.format(*places, rest.format(0)))
        machine.run("TLP")
        assert list(machine.copies.kind) == [kind]
        assert not machine.unknowns
    machine = machine_for(code.format("%s2_s1", "%s2_s1", rest.format(0x8004003)))
    machine.run("TLP")
    assert not machine.copies.kind
    assert "another core or chip, and no mesh says where that is" in str(machine.unknowns)


def test_a_copy_or_branch_on_an_unknown_value_is_noted() -> None:
    code = """%s1_s0 = spop.sfrf %9
              %p1_p0 = scmp.lt.s32.totalorder %s1_s0, 2
              {}
              %4 = sbr.rel (%p1_p0) target bundleno = 6 (0x6), region = 3
              %5 = vnop
              %6 = vnop
              PF|%7 = vnop"""
    copy = COPY.format("hbm", "vmem", 2, 5).replace("to_vmem", "to_vmem (%p1_p0),")
    machine = machine_for(code.format(copy))
    machine.run("TLP")
    assert sorted(machine.unknowns["TLP"]) == [
        "the branch at 0x3 depends on the result of vector code at 0x0",
        "the start of a copy from hbm to vmem depends on the result of vector code at 0x0",
    ]


def test_a_failing_bounds_check_is_noted_and_a_passing_one_is_not() -> None:
    code = "%p1_p0 = scmp.lt.s32.totalorder {}, 2\n%2 = shalt.err (%p1_p0)"
    for value, noted in ((1, 1), (3, 0)):
        machine = machine_for(code.format(value))
        machine.run("TLP")
        assert len(machine.unknowns) == noted


@pytest.mark.parametrize("instruction", ["dma.vmem_to_remote /*vmem=*/1, /*size_in_granules=*/2", "sfly 1"])
def test_instructions_that_are_not_known_are_noted(instruction: str) -> None:
    machine = machine_for(f"%1 = {instruction}")
    machine.run("TLP")
    assert "not known" in str(machine.unknowns)


def test_code_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.schedule.timeline.LOOP_TRIPS_LIMIT", 100)
    with pytest.raises(RunawayError):
        machine_for("%1 = sbr.rel target bundleno = 0 (0x0), region = 1\n%2 = vnop\n%3 = vnop").run("TLP")


def test_signals_of_this_core_end_a_wait() -> None:
    machine = machine_for("%1 = vsyncadd [#allocation1], 2\n%2 = vwait.ge [#allocation1], 2")
    assert machine.run("TLP") == 2
    assert not machine.unknowns


def test_a_semaphore_may_be_counted_down_before_it_is_waited_for() -> None:
    code = f"""{COPY.format("hbm", "vmem", 20, 1)}
               %2 = vsyncadd [#allocation1], 4294967276
               %3 = vwait.ge [#allocation1], 0
               %4 = vwait.ge [#allocation1], 0"""
    machine = machine_for(code)
    arrival = 20 * 32 / 64 + 100
    assert machine.run("TLP") == arrival + 2
    assert not machine.unknowns
    short = machine_for(code.replace("4294967276", "4294967275"))  # one more than ever arrives
    short.run("TLP")
    assert "never sends" in str(short.unknowns)


# Files --------------------------------------------------------------------------------------------

PROGRAM = """%s1_s0 = scalar_parameter_address 0
             %2 = inlined_call %s1_s0, %s1_s0 /* %double.1 = custom-call(%x) */
             %3 = inlined_call %s1_s0, %s1_s0 /* %double.2 = custom-call(%x) */
             %4 = inlined_call %s1_s0, %s1_s0 /* %add.1 = fusion(%x) */
             %5 = inlined_call /* <late-finalization> */"""
KERNEL = """%s1_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input, shape index: {}]
            %2 = dma.hbm_to_vmem /*hbm=*/%s1_s0, /*size_in_granules=*/128, /*vmem=*/3, /*dst_syncflagno=*/4
            %3 = dma.done.wait 4, 128
            %4 = vsyncadd 4, 4294967168"""
HLO = """HloModule m

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %double.1 = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", metadata={a}
  %double.2 = f32[8,128]{1,0:T(8,128)} custom-call(%double.1), custom_call_target="tpu_custom_call"
  ROOT %add.1 = f32[8,128]{1,0:T(8,128)} fusion(%double.2), kind=kLoop, calls=%c
}
"""
TABLE = "== CAPACITY:\nMATMUL, VALU, VLOAD:FILL, VSTORE:SPILL\n 4 2 3 1\n== UTILIZATION:\n" + "2 1 0 1\n" * 4


def write_dumps(folder: Path) -> None:
    """A program that calls one kernel twice, of which there is one dump, and an operation without a dump."""
    for name, code in (("TLP", PROGRAM), ("double.1", KERNEL)):
        (folder / f"17-{name}-01-packed-bundles-post-ra.txt").write_text(listing(code))
    (folder / "17-double.1-02-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(TABLE)
    (folder / "17-double.1-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("not a schedule")
    (folder / "17-TLP-hlo.txt").write_text(HLO)


def test_a_program_is_harvested_executed_and_added_up(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    assert set(harvest(tmp_path).functions) == {"TLP", "double.1"}
    v5e = chip("v5e")
    (ran,) = load_program(tmp_path, v5e).run()
    by_name = {function.name: function for function in ran.functions}
    assert set(by_name) == {"TLP", "double.1", "double.2", "add.1"}
    assert [by_name[name].bytes_read for name in ("double.1", "double.2")] == [4096, 4096]
    assert by_name["add.1"].estimated
    assert not by_name["double.2"].estimated
    units = by_name["double.1"].units
    assert units is not None
    assert units.busy_cycles == {"mxu": 4 * 2 / 4, "vpu": 4 * 1 / 2}
    assert (units.spill_stores, units.spill_loads) == (4, 0)
    rates = core_rates(v5e, 1)
    one = 4 + 4096 / rates.bytes_per_cycle + rates.latency_cycles - 1
    estimate = round(2 * 4096 / rates.bytes_per_cycle + 2 * rates.latency_cycles)
    assert ran.cycles == pytest.approx(2 * one + estimate + 5)
    assert (ran.bytes_read, ran.bytes_written) == (8192, 0)


def test_cores_of_a_device_share_the_bandwidth(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    runs = load_program(tmp_path, chip("v5p")).run()
    assert [run.core for run in runs] == [0, 1]
    assert runs[0].rates == core_rates(chip("v5p"), 2)


def test_missing_or_ambiguous_dumps_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="got 0"):
        harvest(tmp_path)
    write_dumps(tmp_path)
    (tmp_path / "18-TLP-01-packed-bundles-post-ra.txt").write_text(listing(PROGRAM))
    with pytest.raises(DumpError, match="got 2"):
        harvest(tmp_path)


def test_a_utilization_table_must_fit_the_code(tmp_path: Path) -> None:
    path = tmp_path / "u.txt"
    path.write_text(TABLE)
    function = translate(parse_listing("f", listing("%1 = vnop\n%2 = vnop")), DELAY_SLOTS)
    with pytest.raises(DumpError, match="4 rows for code of 2 cycles"):
        unit_use(read_utilization("f", path), function.blocks, [1])
    for text, word in (
        ("what", "headings"),
        (TABLE.replace("2 1 0 1", "2 x 0 1"), "numbers"),
        ("\n" * 9, "head"),
    ):
        path.write_text(text)
        with pytest.raises(DumpError, match=word):
            read_utilization("f", path)


def test_the_vmem_report(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    breakdowns = {
        name: {"blocks": [{"allocations": [{"padding": 2, "size": 6}], "block_size": 8, "block_type": kind}]}
        for name, kind in (("a", "SCOPED"), ("b", "HLO_SPILL"))
    }
    data = json.dumps({"hlo_breakdowns": breakdowns})
    path.write_text(f"<script>const DATA ={data}; const heading = 1;</script>")
    report = read_vmem_report(path)
    assert (report["a"].kernel, report["a"].total, report["b"].spills) == (8, 8, 8)
    for text in ("nothing", "const DATA = {}", "const DATA = {"):
        path.write_text(text)
        with pytest.raises(DumpError):
            read_vmem_report(path)


def test_hlo_instructions_with_types_layouts_and_twins() -> None:
    module = instructions(
        HLO.replace(
            "%x = f32",
            "%t = (s8[1,8]{1,0:T(8,128)(4,1)S(1)}, /*index=1*/u32[]{:S(2)}) copy-start(%x), a={(}\n"
            "  %x = f32",
        )
    )
    assert module["t"].results == (
        ArrayType("s8", (1, 8), (1, 0), ((8, 128), (4, 1)), 1),
        ArrayType("u32", (), (), (), 2),
    )
    assert module["t"].operands == ("x",)
    assert kernel_names(module) == ("double.1", "double.2")
    assert twin("double.2", module, iter(["x", "double.1"])) == "double.1"
    assert twin("add.1", module, iter(["double.1"])) is None


# Layouts ------------------------------------------------------------------------------------------


def test_words_of_packed_bytes() -> None:
    rows, columns = 11, 150
    array = np.random.default_rng(0).integers(-128, 128, (rows, columns)).astype(np.int8)
    laid_out = words(array, ArrayType("s8", array.shape, (1, 0), ((8, 128), (4, 1)), 0)).view(np.int8)
    assert len(laid_out) == 16 * 256
    for row, column in ((0, 0), (3, 5), (5, 127), (10, 149), (8, 128)):
        tile = (row // 8 * 2 + column // 128) * 8 * 128
        within = (row % 8 // 4 * 128 + column % 128) * 4 + row % 4
        assert laid_out[tile + within] == array[row, column]


@pytest.mark.parametrize(
    ("shape", "order", "tiles", "expected"),
    [
        ((), (), ((128,),), [0] + [0] * 127),
        ((3,), (0,), ((128,),), [0, 1, 2] + [0] * 125),
        ((2, 3), (1, 0), (), [0, 1, 2, 3, 4, 5]),
        ((2, 3), (0, 1), (), [0, 3, 1, 4, 2, 5]),
        ((2, 3), (1, 0), ((2, 2),), [0, 1, 3, 4, 2, 0, 5, 0]),
        ((3,), (0,), ((2, 2),), [0, 1, 0, 0, 2, 0, 0, 0]),
    ],
)
def test_words_of_integers(
    shape: tuple[int, ...], order: tuple[int, ...], tiles: tuple[tuple[int, ...], ...], expected: list[int]
) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    assert words(array, ArrayType("s32", shape, order, tiles, 0)).tolist() == expected


def test_words_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="expected an array of shape"):
        words(np.zeros(3, np.int32), ArrayType("s32", (4,), (0,), (), 0))
