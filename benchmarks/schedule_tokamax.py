"""The times that the installed Tokamax ships, and the kernels they were taken of: see benchmarks/README.md.

Tokamax tunes on hardware and ships, for each problem, the configuration that won and its times. Its own code
reads its tables, binds the arguments and names the configurations that its tuner tries, so that what is
compiled here is what was measured there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.resources.abc
import json
import math
import statistics
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autotune.score import Workload
from bridge.aot.avals import describe
from bridge.chips import Chip, chip, chips

KERNELS = ("ragged_dot", "attention", "attention_vjp")

_FILES = {
    "ragged_dot": "pallas_mosaic_tpu_ragged_dot.json",
    "attention": "pallas_mosaic_tpu_flash_attention.json",
    "attention_vjp": "pallas_mosaic_tpu_flash_attention_vjp.json",
}

ACCUMULATOR_BYTES = 4
"""Results are summed up, and the weights of attention computed, in float32."""


@dataclass(frozen=True)
class Entry:
    """One problem of one of Tokamax's tables.

    Attributes:
        kernel: one of `KERNELS`.
        form: `forward`, `dlhs` or `drhs` of ragged_dot; `causal` or `full` of attention.
        chip: the chip it was measured on.
        arguments: of Tokamax's op, arrays as `jax.ShapeDtypeStruct`.
        config: the configuration that won, an object of Tokamax.
        milliseconds: the median of the times with it.
    """

    kernel: str
    form: str
    chip: str
    arguments: Mapping[str, Any]
    config: Any
    milliseconds: float

    @property
    def name(self) -> str:
        """The problem in words."""
        arrays = ("lhs", "rhs") if self.kernel == "ragged_dot" else ("q", "k", "v")
        residuals = " and residuals" if self.arguments["return_residuals"] else ""
        shapes = " ".join(describe(self.arguments[array]) for array in arrays)
        return f"{self.kernel} {self.form}{residuals} {shapes}"

    def workload(self, config: Any = None) -> Workload:
        """Tokamax's own kernel for the problem, with `config` or the one that won."""
        op = _op(self.kernel).replace(config=config or self.config)
        arguments, sizes = dict(self.arguments), None
        if self.kernel == "ragged_dot":
            sizes = np.asarray(arguments["group_sizes"].representative_value, np.int32)
            arguments["group_sizes"] = jax.ShapeDtypeStruct(sizes.shape, sizes.dtype)
        leaves, tree = jax.tree.flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

        def call(*arrays: jax.Array) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            return op(**jax.tree.unflatten(tree, filled))

        avals = tuple(leaves[place] for place in places)
        values = {place: sizes for place, aval in enumerate(avals) if sizes is not None and aval.ndim == 1}
        return Workload(self.name, call, avals, values)

    def configurations(self) -> list[Any]:
        """What Tokamax's tuner tries, in an order that does not change: its ranges and its heuristic."""
        offered = _op(self.kernel).bind(**self.arguments).autotuning_configs
        return sorted(offered, key=lambda config: json.dumps(dataclasses.asdict(config), default=str))

    def steps(self, config: Any) -> int:
        """Steps of the grid with a configuration, groups that share a tile left out."""
        shape = self._sizes()
        if self.kernel == "ragged_dot":
            return math.prod(math.ceil(shape[axis] / getattr(config, f"tile_{axis}")) for axis in "mkn")
        backward = "_dkv" if self.kernel == "attention_vjp" else ""
        blocks = {"q": f"block_q{backward}", "kv": f"block_kv{backward}"}
        return math.prod(math.ceil(shape[axis] / getattr(config, block)) for axis, block in blocks.items())

    def fits(self, config: Any, on: Chip) -> bool:
        """Whether the blocks alone fit in the VMEM that a kernel may use; the compiler needs more."""
        shape = self._sizes()
        if self.kernel == "ragged_dot":
            m, k, n = (config.tile_m, config.tile_k, config.tile_n)
            left, right, out = (m * k, m * n, k * n) if self.form == "drhs" else (m * k, k * n, m * n)
            copies = config.input_buffer_count
            inputs = copies * left + (copies if self.form == "drhs" else 2) * right
            return 2 * (inputs + 2 * out) + ACCUMULATOR_BYTES * out <= on.vmem_limit_bytes
        backward = "_dkv" if self.kernel == "attention_vjp" else ""
        q, kv = getattr(config, f"block_q{backward}"), getattr(config, f"block_kv{backward}")
        moved = 2 * 2 * (2 * q + 2 * kv) * shape["dim"]
        inner = getattr(config, f"block_kv{backward}_compute")
        return moved + ACCUMULATOR_BYTES * q * inner <= on.vmem_limit_bytes

    def _sizes(self) -> dict[str, int]:
        if self.kernel == "ragged_dot":
            lhs, rhs = self.arguments["lhs"].shape, self.arguments["rhs"].shape
            return {"m": lhs[0], "k": lhs[1], "n": rhs[1] if self.form in ("dlhs", "drhs") else rhs[2]}
        q, k = self.arguments["q"].shape, self.arguments["k"].shape
        return {"q": q[-3], "kv": k[-3], "dim": q[-1]}


@dataclass(frozen=True)
class Table:
    """One table, and the sample taken of it.

    Attributes:
        release: of Tokamax.
        chip, kernel: whose times it has.
        problems: problems in it.
        timed: those with times that the installed kernel can be compiled for.
        entries: the sample: evenly spaced in the order of the table, first and last included.
    """

    release: str
    chip: str
    kernel: str
    problems: int
    timed: int
    entries: tuple[Entry, ...] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class Release:
    """The tables of a release of Tokamax: of the installed one, or of a wheel that need not be installable.

    Attributes:
        version: such as `0.0.12`.
        root: the folder of the tables.
    """

    version: str
    root: importlib.resources.abc.Traversable

    @classmethod
    def installed(cls) -> Release:
        """The installed release."""
        root = importlib.resources.files("tokamax") / "data" / "autotuning"
        return cls(importlib.metadata.version("tokamax"), root)

    @classmethod
    def of_wheel(cls, wheel: Path) -> Release:
        """That of a wheel. Its kernels are not used, but those of the installed release."""
        return cls(wheel.name.split("-")[1], zipfile.Path(wheel, "tokamax/data/autotuning/"))

    def tables(self, count: int, kernels: Sequence[str] = KERNELS) -> Iterator[Table]:
        """Every table for the kernels here, sampled to `count` entries."""
        for on in chips().values():
            for kernel in kernels:
                text = self.text(on, kernel)
                if text:
                    found = _read(self.version, on, kernel, text)
                    places = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
                    entries = tuple(found[place] for place in np.unique(places))
                    yield Table(self.version, on.name, kernel, len(json.loads(text)), len(found), entries)

    def chips_without_times(self) -> dict[str, str]:
        """Chips for which there are no times of any kernel here, and the folder that is missing."""
        return {
            name: f"Tokamax {self.version} has no data/autotuning/{_folder(on)}"
            for name, on in chips().items()
            if not any(self.text(on, kernel) for kernel in KERNELS)
        }

    def text(self, on: Chip, kernel: str) -> str:
        """A table as it came; empty if there is none."""
        path = self.root / _folder(on) / _FILES[kernel]
        return path.read_text() if path.is_file() else ""


def short(config: Any) -> dict[str, Any]:
    """A configuration without Tokamax's classes."""
    return {field: getattr(value, "name", value) for field, value in dataclasses.asdict(config).items()}


def _folder(on: Chip) -> str:
    """How Tokamax names the folder of a chip: after the kind of the device."""
    return on.device_kind.lower().replace(" ", "_")


def _read(release: str, on: Chip, kernel: str, text: str) -> list[Entry]:
    """The problems of a table that have times."""
    # Private: Tokamax reads its tables only for the device that it runs on.
    from tokamax._src.autotuning import cache  # pyright: ignore[reportMissingImports]

    op = _op(kernel)
    found = []
    known = json.dumps(_known(op, json.loads(text)))
    for recorded, data in cache._get_cache_adapter(op).validate_json(known).items():
        if not data:
            continue
        arguments = dict(op.bind(**recorded).arguments)
        config = data.fastest_config
        milliseconds = statistics.median(data[config].evaluation_times_ms)
        if kernel == "ragged_dot":
            form = _ragged_form(arguments)
            arguments["group_sizes"] = _measured_sizes(arguments["group_sizes"], release)
        else:
            form = "causal" if arguments["mask"].is_causal else "full"
        found.append(Entry(kernel, form, on.name, arguments, config, milliseconds))
    return found


def _known(op: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """The problems that the installed op knows: later releases have more arguments, and quantized arrays."""
    names = op._fwd_signature.parameters
    kept = {}
    for recorded, data in table.items():
        problem = json.loads(recorded)
        more = [value for name, value in problem.items() if name not in names]
        if not any(more) and all(isinstance(problem.get(side, ""), str) for side in ("lhs", "rhs")):
            kept[json.dumps({name: value for name, value in problem.items() if name in names})] = data
    return kept


@functools.cache
def _op(kernel: str) -> Any:
    """Tokamax's op for a kernel, on a device that is not there."""
    # Private: the public functions choose by the device they run on, and there is none.
    from tokamax._src.ops.attention import pallas_mosaic_tpu as attention  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.attention import pallas_mosaic_tpu_vjp as vjp  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as ragged  # pyright: ignore[reportMissingImports]

    base = {
        "ragged_dot": ragged.PallasMosaicTpuRaggedDot,
        "attention": attention.PallasMosaicTpuFlashAttention,
        "attention_vjp": vjp.PallasMosaicTpuFlashAttentionVjp,
    }[kernel]

    def supported_on(op: Any, device: Any) -> bool:
        return True

    return type(base.__name__, (base,), {"supported_on": supported_on, "__module__": __name__})()


def _ragged_form(arguments: Mapping[str, Any]) -> str:
    """`forward`, or the gradient of the left (`dlhs`) or right side (`drhs`)."""
    numbers = arguments["ragged_dot_dimension_numbers"]
    if not numbers.rhs_group_dimensions:
        return "drhs"
    return "dlhs" if tuple(numbers.dot_dimension_numbers[0][1]) == (2,) else "forward"


# Group sizes --------------------------------------------------------------------------------------


def _measured_sizes(recorded: Any, release: str) -> Any:
    """The group sizes that an entry was measured with, an object of Tokamax.

    Where a table has their number and sum only, Tokamax draws sizes that hardly differ. But the times of
    release 0.0.12 are of other sizes: those that its tables had until 0.0.11. See benchmarks/README.md.
    """
    if not isinstance(recorded.repr_value_or_total_size, int) or release != "0.0.12":
        return recorded
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    groups, total = len(recorded.representative_value), recorded.repr_value_or_total_size
    return base.GroupSizes(jax.ShapeDtypeStruct((groups,), np.int32), sizes_until_0_0_11(groups, total))


def sizes_until_0_0_11(groups: int, total: int) -> tuple[int, ...]:
    """Group sizes of Tokamax's problems before 0.0.12, as its tables recorded them then.

    Its two problems with 8 groups have all 4096 rows in the first one, or equal groups. The others have
    sizes in proportion to uniform random numbers, of which one in ten, by chance, is 0; what rounding
    leaves goes to the first group.
    """
    if groups == 8:
        return (total, *[0] * 7) if total == 4096 else (total // groups,) * groups
    random = np.random.RandomState(0)
    weights = random.uniform(size=groups)
    weights = weights * random.binomial(1, 0.9, groups)
    sizes = [int(size) for size in weights / weights.sum() * total]
    return total - sum(sizes[1:]), *sizes[1:]


def check_sizes() -> None:
    """Raise `ValueError` unless the sizes that Tokamax's table of v5e has are those computed here."""
    release = Release.installed()
    for recorded in map(json.loads, json.loads(release.text(chip("v5e"), "ragged_dot"))):
        sizes = recorded["group_sizes"]
        if isinstance(sizes, list) and sum(sizes) > len(sizes):
            computed = sizes_until_0_0_11(len(sizes), sum(sizes))
            if computed != tuple(sizes):
                raise ValueError(
                    f"Tokamax {release.version} records other sizes of {len(sizes)} groups, {sum(sizes)} rows"
                )
