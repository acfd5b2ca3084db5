"""The page: one HTML file with everything in it, to be opened, mailed or kept beside a benchmark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib import resources

from autotune.report.activity import CodeBlock, Window, code_blocks, occupancy, window
from autotune.report.svg import area, bar, element, nice_ticks, picture, text, title
from autotune.schedule.runs import Run
from autotune.score.protocol import KernelScore, Score
from autotune.score.schedule import Explanation
from bridge.chips import Chip

UNIT_NAMES: Mapping[str, str] = {
    "hbm": "HBM channel",
    "ici": "ICI, the busiest link",
    "mxu": "MXU, matrix multiply",
    "mxu_push": "MXU, loading weights",
    "vpu": "VPU, vector arithmetic",
    "eup": "EUP, exp, tanh, reciprocal",
    "xlu": "XLU, transposes, reductions",
    "pop": "results from MXU, EUP, XLU",
    "load": "VMEM loads",
    "store": "VMEM stores",
    "scalar": "scalar unit",
}

BOUND_TEXTS: Mapping[str, str] = {
    "hbm": "HBM bandwidth: copies keep the channel busy nearly all the time. Only fewer bytes would help.",
    "ici": "A link between chips, or waiting for other devices. Fewer bytes, both directions of links, or "
    "more work while copies are under way would help.",
    "dma_latency": "Waiting for copies that do not fill the bandwidth. Larger blocks or more buffers help.",
    "mxu": "The matrix units.",
    "vpu": "Vector arithmetic.",
    "eup": "The unit for exp, tanh and reciprocals.",
    "xlu": "The cross-lane unit: transposes and reductions across lanes.",
    "load": "Loads from VMEM.",
    "store": "Stores to VMEM.",
    "scalar": "Scalar code: index arithmetic and the bookkeeping of grid steps. Larger blocks would help.",
    "latency": "No unit is busy: the code waits for its own results, or the grid steps are small.",
}

CONFIDENCE_TEXTS: Mapping[str, str] = {
    "high": "Predictions for this chip agreed with published times.",
    "medium": "Nothing is unknown, but such predictions were not compared with measured times.",
    "low": "Do not rely on this time.",
}

OCCUPANCY_BINS = 220
VECTOR_LANES = 8 * 128
"""Numbers in a vector register of 32-bit items."""

CODE_ROWS = 12


def report_page(explanations: Sequence[Explanation]) -> str:
    """The page about one score or several."""
    style = resources.files("autotune.report").joinpath("style.css").read_text(encoding="utf-8")
    names = ", ".join(explanation.workload.name for explanation in explanations)
    bodies = "".join(_body(explanation) for explanation in explanations)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(names)}</title><style>{style}</style></head><body><main>{bodies}</main></body></html>\n"
    )


def _body(explanation: Explanation) -> str:
    score, chip = explanation.score, explanation.program.chip
    run = max(explanation.runs, key=lambda run: run.cycles)
    parts = [
        _headline(explanation, run),
        f'<div class="columns">{_roofline_section(explanation)}{_units_section(score)}</div>',
        _timeline_section(run, score, chip),
        _window_section(run, chip),
        _kernels_section(score.kernels, score.time_s),
        _code_section(code_blocks(run.functions, CODE_ROWS), run.cycles),
        _footer(score, chip),
    ]
    return "".join(parts)


# Headline -----------------------------------------------------------------------------------------


def _headline(explanation: Explanation, run: Run) -> str:
    score, chip = explanation.score, explanation.program.chip
    moved = score.dma_bytes_read + score.dma_bytes_written
    figures = [
        (seconds(score.time_s), "predicted time"),
        (score.bound.replace("_", " "), "bound"),
        (f"{score.units.get('hbm', 0):.0%}", "HBM channel busy"),
        (f"{score.units.get('mxu', 0):.0%}", "matrix units busy"),
        (size(moved), f"moved ({size(score.dma_bytes_read)} read)"),
        (size(score.vmem_bytes), "VMEM of the largest kernel"),
        ("-" if score.grid_steps is None else f"{score.grid_steps:,}", "grid steps"),
        (f"{score.spills:,}", "register spills and fills"),
    ]
    if score.devices > 1:
        figures += [
            (f"{score.devices}", f"devices; number {run.rank} takes longest" if run.rank else "devices"),
            (f"{score.units.get('ici', 0):.0%}", "busiest link busy"),
            (size(score.ici_bytes_sent), f"sent ({size(score.ici_bytes_received)} received)"),
        ]
    cells = "".join(
        f'<div class="figure"><b>{html.escape(v)}</b><span>{name}</span></div>' for v, name in figures
    )
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in score.reasons)
    cores = "" if len(explanation.runs) == 1 else f"; core {run.core} of {len(explanation.runs)} is shown"
    return (
        f"<section><h1>{html.escape(explanation.workload.name)} on {chip.name}</h1>"
        f"<p>Predicted from the schedule of the TPU compiler; nothing ran on a TPU{cores}.</p>"
        f"<div>{html.escape(BOUND_TEXTS[score.bound])}</div>"
        f'<div class="figures">{cells}</div>'
        f'<div class="confidence"><span class="badge {score.confidence}">{score.confidence} confidence'
        "</span> "
        f"{CONFIDENCE_TEXTS[score.confidence]}</div>"
        + (f"<ul>{reasons}</ul>" if reasons else "")
        + "</section>"
    )


# Roofline -----------------------------------------------------------------------------------------


def _roofline_section(explanation: Explanation) -> str:
    score, chip = explanation.score, explanation.program.chip
    moved = score.dma_bytes_read + score.dma_bytes_written
    kind, operations, peak = _operations(explanation)
    share = chip.cores_per_device / chip.tensor_cores
    body = "<p>Neither operations nor copies to draw.</p>"
    if operations and moved:
        bandwidth = chip.hbm_bytes_per_second * share
        body = _roofline_picture(operations / moved, operations / score.time_s, bandwidth, peak)
    return (
        f"<section><h2>Roofline</h2><p>{kind} per second over operations per byte moved; "
        f"the roof is what a device has.</p>{body}</section>"
    )


def _operations(explanation: Explanation) -> tuple[str, float, float]:
    """What is counted, how many of it, and how many a device could do in a second."""
    score, chip, workload = explanation.score, explanation.program.chip, explanation.workload
    device_cycles = score.time_s * chip.sustained_clock_hz * len(explanation.runs)
    peak = chip.bf16_flops_per_second * chip.cores_per_device / chip.tensor_cores
    if workload.matmul_flops:
        return "Useful operations of the matrix units", workload.matmul_flops / score.devices, peak
    if score.units.get("mxu"):
        return (
            "Operations of the matrix units",
            score.units["mxu"] * device_cycles * chip.mxu_flops_per_cycle,
            peak,
        )
    slots = max(
        (f.units.capacity.get("vpu", 0) for run in explanation.runs for f in run.functions if f.units),
        default=0,
    )
    in_a_cycle = slots * VECTOR_LANES * chip.cores_per_device
    done = score.units.get("vpu", 0.0) * score.time_s * chip.sustained_clock_hz * in_a_cycle
    return "Vector operations", done, in_a_cycle * chip.sustained_clock_hz


def _roofline_picture(intensity: float, rate: float, bandwidth: float, peak: float) -> str:
    width, height, left, right, top, bottom = 440.0, 270.0, 58.0, 12.0, 16.0, 34.0
    ridge = peak / bandwidth
    low_x = math.floor(math.log2(min(intensity, ridge)) - 2)
    high_x = math.ceil(math.log2(max(intensity, ridge)) + 2)
    high_y = math.ceil(math.log10(peak) + 0.15)
    low_y = math.floor(min(math.log10(rate), math.log10(bandwidth * 2.0**low_x)) - 0.1)

    def x(value: float) -> float:
        return left + (math.log2(value) - low_x) / (high_x - low_x) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - (math.log10(value) - low_y) / (high_y - low_y) * (height - top - bottom)

    roof = [(2.0**low_x, bandwidth * 2.0**low_x), (ridge, peak), (2.0**high_x, peak)]
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    floor = f"{x(2.0**high_x):.1f},{height - bottom:.1f} {left:.1f},{height - bottom:.1f}"
    attainable = min(peak, bandwidth * intensity)
    parts = [element("polygon", points=f"{line} {floor}", class_="roof-fill")]
    for power in range(low_y, high_y + 1):
        parts.append(
            element("line", x1=left, x2=width - right, y1=y(10.0**power), y2=y(10.0**power), class_="axis")
        )
        parts.append(text(left - 6, y(10.0**power) + 4, rate_text(10.0**power), anchor="end"))
    for power in range(low_x, high_x + 1, max(1, (high_x - low_x) // 6)):
        parts.append(text(x(2.0**power), height - bottom + 15, f"{2.0**power:g}", anchor="middle"))
    parts += [
        element("polyline", points=line, class_="roof"),
        text(width - right, y(peak) - 6, rate_text(peak), anchor="end"),
        text(width - right, height - 3, "operations per byte", anchor="end"),
        element("line", x1=x(intensity), x2=x(intensity), y1=y(rate), y2=y(attainable), class_="drop"),
        element(
            "circle",
            title(f"{rate_text(rate)} at {intensity:.3g} op/byte"),
            cx=x(intensity),
            cy=y(rate),
            r=6,
            class_="dot",
        ),
        text(
            x(intensity) + 10,
            y(rate) + 4,
            f"{rate_text(rate)}, {rate / attainable:.0%} of the roof",
            "strong",
        ),
    ]
    return picture(width, height, parts, "roofline")


# Units --------------------------------------------------------------------------------------------


def _units_section(score: Score) -> str:
    width, row, left = 440.0, 25.0, 176.0
    parts: list[str] = []
    for number, (unit, share) in enumerate(score.units.items()):
        y = number * row
        parts += [
            text(0, y + 15, UNIT_NAMES.get(unit, unit), "strong" if unit == score.bound else "label"),
            bar(left, y + 4, width - left - 46, 14, "track", ""),
            bar(
                left,
                y + 4,
                min(share, 1.0) * (width - left - 46),
                14,
                unit if unit in ("hbm", "ici") else "compute",
                f"{share:.1%}",
            ),
            text(width, y + 15, f"{share:.1%}", anchor="end"),
        ]
    drawing = picture(width, row * len(score.units), parts, "share of the time in which each unit is busy")
    return (
        "<section><h2>Use of the units</h2>"
        f"<p>Least cycles that each unit needs for its work, as a share of the time.</p>{drawing}</section>"
    )


# Time ---------------------------------------------------------------------------------------------


def _timeline_section(run: Run, score: Score, chip: Chip) -> str:
    width, left, lane = 1000.0, 92.0, 44.0
    inner = width - left
    shares = occupancy(run, OCCUPANCY_BINS)
    kernels = {kernel.name for kernel in score.kernels if kernel.is_kernel}
    parts = [text(0, 16, "running")]
    for span in sorted(run.spans, key=lambda span: span.begin - span.end):
        if span.name == "TLP":
            continue
        x, wide = left + span.begin / run.cycles * inner, (span.end - span.begin) / run.cycles * inner
        name = f"{span.name}: {seconds((span.end - span.begin) / chip.sustained_clock_hz)}"
        parts.append(bar(x, 3, wide, 18, "compute" if span.name in kernels else "xla", name))
    lanes = [("read", "HBM reads", "read"), ("write", "HBM writes", "write")]
    lanes += [("sent", "ICI sends", "sent")] if run.bytes_sent else []
    lanes.append(("stalled", "core stalled", "stall"))
    for number, (key, label, class_) in enumerate(lanes):
        bottom = 34 + (number + 1) * lane
        parts += [
            text(0, bottom - lane / 2 + 8, label),
            element("line", x1=left, x2=width, y1=bottom, y2=bottom, class_="axis"),
            area(
                shares[key],
                left,
                bottom,
                inner,
                lane - 8,
                class_,
                f"{label}: {shares[key].mean():.1%} of the time",
            ),
        ]
    height = 34 + len(lanes) * lane
    parts += _time_axis(0.0, run.cycles, chip, left, inner, height)
    drawing = picture(width, height + 24, parts, "what happened over the whole run")
    return (
        "<section><h2>The whole run</h2><p>Kernels (green) and operations of XLA (grey); below, the share of "
        f"the time in which the channel and the core are busy or stalled.</p>{drawing}</section>"
    )


def _window_section(run: Run, chip: Chip) -> str:
    chosen = window(run)
    if chosen is None:
        return ""
    return (
        "<section><h2>A closer look</h2><p>Single copies on the HBM channel in the middle of the kernel that "
        "copies most, and when the core computes (green) or waits (grey).</p>"
        f"{_window_picture(chosen, chip)}</section>"
    )


def _window_picture(chosen: Window, chip: Chip) -> str:
    width, left, lane = 1000.0, 92.0, 30.0
    inner = width - left
    span = max(chosen.end - chosen.begin, 1e-9)

    def bars(intervals: Sequence, y: float, class_: str) -> list[str]:
        found = []
        for interval in intervals:
            begin, end = max(interval.begin, chosen.begin), min(interval.end, chosen.end)
            x, wide = left + (begin - chosen.begin) / span * inner, (end - begin) / span * inner
            found.append(bar(x, y, max(wide - 0.5, 0), lane - 10, class_, interval.label))
        return found

    lanes = [("HBM reads", chosen.reads, "read"), ("HBM writes", chosen.writes, "write")]
    lanes += [("ICI sends", chosen.sends, "sent")] if chosen.sends else []
    parts: list[str] = []
    for number, (label, intervals, class_) in enumerate(lanes):
        parts += [text(0, number * lane + 17, label), *bars(intervals, number * lane + 3, class_)]
    last = len(lanes) * lane
    parts += [text(0, last + 17, "core"), bar(left, last + 3, inner, lane - 10, "compute", "computing")]
    parts += bars(chosen.stalls, last + 3, "stall")
    parts += _time_axis(chosen.begin, chosen.end, chip, left, inner, last + lane)
    return picture(width, last + lane + 24, parts, "single copies and stalls")


def _time_axis(begin: float, end: float, chip: Chip, left: float, width: float, y: float) -> list[str]:
    """Marks in microseconds between two times in cycles."""
    per_cycle = 1e6 / chip.sustained_clock_hz
    low, high = begin * per_cycle, end * per_cycle
    parts = [element("line", x1=left, x2=left + width, y1=y, y2=y, class_="axis")]
    for tick in nice_ticks(low, high, 8):
        x = left + (tick - low) / max(high - low, 1e-12) * width
        parts += [
            element("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis"),
            text(x, y + 16, f"{tick:g} us", anchor="middle" if x < left + width - 20 else "end"),
        ]
    return parts


# Tables -------------------------------------------------------------------------------------------


def _kernels_section(kernels: Sequence[KernelScore], total: float) -> str:
    linked = any(kernel.ici_bytes_sent for kernel in kernels)
    rows = [
        (
            f"<code>{html.escape(kernel.name)}</code>" + (" (roofline)" if kernel.estimated else ""),
            "kernel" if kernel.is_kernel else "XLA",
            f"{kernel.calls:,}",
            seconds(kernel.time_s),
            f"{kernel.time_s / total:.1%}" if total else "-",
            f"{kernel.stalled_s / kernel.time_s:.0%}" if kernel.time_s else "-",
            kernel.bound.replace("_", " "),
            f"{kernel.units.get('mxu', 0):.0%}",
            size(kernel.dma_bytes_read + kernel.dma_bytes_written),
            size(kernel.vmem_bytes),
            *((size(kernel.ici_bytes_sent),) if linked else ()),
        )
        for kernel in sorted(kernels, key=lambda kernel: -kernel.time_s)
    ]
    header = ("name", "kind", "calls", "time", "share", "stalled", "bound", "MXU busy", "moved", "VMEM")
    header += ("sent",) if linked else ()
    return (
        "<section><h2>Kernels and operations</h2><p>Copies that XLA starts in between are the program's, not "
        f"theirs.</p>{_table(header, rows, numbers=range(2, 11))}</section>"
    )


def _code_section(blocks: Sequence[CodeBlock], total: float) -> str:
    rows = [
        (
            f"<code>{html.escape(block.function)} {block.start:#x}-{block.end - 1:#x}</code>",
            f"{block.executions:,}",
            f"{block.cycles // block.executions:,}",
            f"{block.cycles / total:.1%}",
            f"{UNIT_NAMES.get(block.unit, 'none')} {block.unit_share:.0%}" if block.unit else "-",
        )
        for block in blocks
    ]
    header = ("code (addresses in the schedule)", "executions", "cycles each", "of the time", "busiest unit")
    return (
        "<section><h2>Where the time goes</h2><p>Stretches of code without a branch, stalls not counted.</p>"
        f"{_table(header, rows, numbers=range(1, 4))}</section>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: range) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="number">{value}</{tag}>' if place in numbers else f"<{tag}>{value}</{tag}>"
            for place, value in enumerate(values)
        )

    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells(header, "th")}</tr>{lines}</table></div>'


def _footer(score: Score, chip: Chip) -> str:
    used = [
        "clock_hz",
        "hbm_bytes_per_second",
        "hbm_efficiency",
        "dma_latency_seconds",
        "mxu_flops_per_cycle",
    ]
    if score.devices > 1:
        used += ["ici_bytes_per_second", "ici_latency_seconds"]
        used += ["on_chip_bytes_per_second", "on_chip_latency_seconds"] if chip.devices_per_chip > 1 else []
    figures = dict(chip.provenance)
    constants = "; ".join(f"{name} {getattr(chip, name):g} ({figures[name]})" for name in used)
    versions = ", ".join(
        f"{name} {version}" for name, version in score.versions.items() if name != "platform"
    )
    return f"<footer>{html.escape(versions)}. {html.escape(constants)}.</footer>"


# Numbers ------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A time with a unit that suits it: `12.3 us`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def size(value: float) -> str:
    """A number of bytes with a unit that suits it: `18 MiB`."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.0f} B"


def rate_text(value: float) -> str:
    """Operations per second: `197 Top/s`."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor * 0.999:
            return f"{value / factor:.3g} {unit}op/s"
    return f"{value:.3g} op/s"
