"""Decides, for one Pallas kernel, which of JAX's interpreters gives what a TPU gives.

Plain interpretation (`interpret=True`) copies each aliased input into the output before it starts, moves
blocks with slices that clamp an out-of-range start, keeps what an output block held at an earlier visit,
and forgets what a kernel writes to its scalar-prefetch operands. A TPU shares the memory of aliased
operands and loses a block it has left. A kernel that can tell the difference is recognised here by its
index maps (evaluated over the whole grid, in `index_maps`) and its use of each ref (`ref_usage`).

Private JAX names that describe a kernel are used here, in `index_maps` and in `ref_usage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import core
from jax._src.indexing import Slice
from jax._src.interpreters import mlir
from jax._src.pallas import core as pallas_core
from jax._src.state import discharge

from bridge.interpretation.index_maps import block_visits
from bridge.interpretation.ref_usage import ref_usage, subjaxprs

KERNEL_PRIMITIVES = ("pallas_call", "core_map", "mpmd_map")

# What JAX's TPU interpreter handles by itself; everything else it runs as the CPU would.
_TPU_INTERPRETER_PRIMITIVES = frozenset(
    "load masked_load get swap masked_swap delay prng_seed prng_random_bits axis_index cond scan while jit "
    "run_scoped dma_start dma_wait get_barrier_semaphore semaphore_signal semaphore_wait".split()
)
# Both interpreters replace them with the position in the grid.
_GRID_PRIMITIVES = ("program_id", "num_programs")
# Needs a TPU's own random number generator, reached through a JAX key.
_TPU_KEY_TAGS = ("pl", "_pl_stateful")


def is_kernel(eqn: core.JaxprEqn) -> bool:
    """Whether the equation launches a Pallas kernel."""
    return eqn.primitive.name in KERNEL_PRIMITIVES


def kernel_name(eqn: core.JaxprEqn) -> str:
    """The kernel's given name, else its function's name."""
    return eqn.params.get("name") or next(iter(_bodies(eqn))).debug_info.func_name


@dataclass(frozen=True)
class Verdict:
    """What is known about one kernel, each as a sentence, or None if nothing is.

    Attributes:
        fault: why no TPU runs it as it is meant, and the fix.
        not_fast: why plain interpretation can't run it, or runs it wrongly.
        not_tpu: why JAX's TPU interpreter can't run it.
    """

    fault: str | None
    not_fast: str | None
    not_tpu: str | None


def examine(eqn: core.JaxprEqn) -> Verdict:
    """Judges one kernel equation."""
    not_tpu = _why_not_tpu(eqn)
    if eqn.primitive.name != "pallas_call":
        lost = "Plain interpretation loses what a kernel over a core mesh (pl.kernel, core_map) writes."
        return Verdict(None, lost, not_tpu)
    unsupported = _unsupported_operand(eqn)
    if unsupported is not None:
        return Verdict(None, unsupported, not_tpu)
    launch = Launch(eqn)
    not_fast = (
        _mutable_array(eqn)
        or _plain_cannot_lower(eqn)
        or _writes_scalars(launch)
        or _writes_input(launch)
        or _overlaps_output(launch)
        or _alias_problem(launch)
    )
    return Verdict(_fault(launch), not_fast, not_tpu)


def _why_not_tpu(eqn: core.JaxprEqn) -> str | None:
    """Why JAX's TPU interpreter can't run this kernel, as a sentence; None if nothing is known against it."""
    for body in _bodies(eqn):
        for inner in _equations(body):
            reason = _tpu_interpreter_cannot(inner)
            if reason:
                return reason
    if eqn.primitive.name != "pallas_call":
        return None
    grid_mapping = eqn.params["grid_mapping"]
    for var in eqn.params["jaxpr"].invars[grid_mapping.slice_scratch_ops]:
        if str(getattr(var.aval, "memory_space", "")) in ("hbm", "any"):
            return "It has scratch memory in HBM, which the TPU interpreter does not allocate."
    for mapping in grid_mapping.block_mappings:
        elements = [dim for dim in mapping.block_shape if isinstance(dim, pallas_core.Element)]
        if any(tuple(dim.padding) != (0, 0) for dim in elements):
            return "It has an Element block dimension with padding, which the TPU interpreter does not pad."
    for _, output in eqn.params["input_output_aliases"]:
        mapping = list(grid_mapping.block_mappings_output)[output]
        sizes = pallas_core._get_block_shape(mapping.block_shape)
        if any(size and extent % size for extent, size in zip(mapping.array_aval.shape, sizes, strict=True)):
            return (
                f"Output {output} is aliased and its blocks {tuple(sizes)} do not divide its shape "
                f"{mapping.array_aval.shape}, which the TPU interpreter does not support."
            )
    return _unsupported_operand(eqn)


def is_never_launched(eqn: core.JaxprEqn) -> bool:
    """Whether the kernel has nothing to do: an empty grid, or nothing but empty outputs."""
    if eqn.primitive.name != "pallas_call" or any(_is_ref(var.aval) for var in eqn.invars):
        return False
    sizes = [aval.size for aval in eqn.params["out_avals"]]
    return 0 in eqn.params["grid_mapping"].grid or (len(sizes) > 0 and not any(sizes))


def has_wide_elements(eqn: core.JaxprEqn) -> bool:
    """Whether an operand's dtype has no TPU tiling in the TPU interpreter (64-bit numbers, e8m0 scales)."""
    return has_64_bit_elements(eqn) or any(str(dtype) == "float8_e8m0fnu" for dtype in _dtypes(eqn))


def has_64_bit_elements(eqn: core.JaxprEqn) -> bool:
    """Whether an operand's or a scratch's elements are 64 bits wide."""
    return any(getattr(dtype, "itemsize", 1) > 4 for dtype in _dtypes(eqn))


def _dtypes(eqn: core.JaxprEqn) -> list[Any]:
    avals = [getattr(var.aval, "inner_aval", var.aval) for body in _bodies(eqn) for var in body.invars]
    return [getattr(aval, "dtype", None) for aval in avals]


# Primitives -------------------------------------------------------------------------------------


def _bodies(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    return subjaxprs({name: eqn.params[name] for name in ("jaxpr", "jaxprs") if name in eqn.params})


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation of a kernel body, those of nested jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from _equations(inner)


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def _plain_cannot_lower(eqn: core.JaxprEqn) -> str | None:
    names = set(eqn.params["grid_mapping"].grid_names or ())
    for inner in _equations(eqn.params["jaxpr"]):
        name = inner.primitive.name
        if _uses_tpu_key(inner):
            return "It draws random numbers from a TPU's generator through a JAX key."
        if name == "axis_index" and inner.params["axis_name"] in names:
            return f"It asks for its position along the named grid axis {inner.params['axis_name']!r}."
        if name == "get_barrier_semaphore":
            return "It uses the barrier semaphore, which plain interpretation does not have."
        if name in ("dma_start", "semaphore_signal") and _targets_a_device(inner):
            return "It names a device or core in a copy or a semaphore signal."
        if name == "dma_start" and _has_dynamic_size(inner):
            return "It copies slices whose size is known only when it runs (a ragged pipeline)."
        if not (_lowers_on_cpu(inner.primitive) or _is_discharged(inner.primitive)):
            return f"It uses {name}, which has no plain interpretation."
    return None


def _tpu_interpreter_cannot(eqn: core.JaxprEqn) -> str | None:
    name = eqn.primitive.name
    if _uses_tpu_key(eqn):
        return (
            "It draws random numbers from a TPU's generator through a JAX key; use pltpu.prng_seed and "
            "pltpu.prng_random_bits, or a threefry key."
        )
    if name in ("get", "swap", "load", "masked_load", "masked_swap") and _ref_transforms(eqn) - {"NDIndexer"}:
        return f"It reads or writes a ref through {', '.join(sorted(_ref_transforms(eqn) - {'NDIndexer'}))}."
    if name in _TPU_INTERPRETER_PRIMITIVES:
        return None
    if any(_is_ref(var.aval) for var in eqn.invars):
        return f"It uses {name} on a ref, which the TPU interpreter does not do."
    if not _lowers_on_cpu(eqn.primitive):
        return f"It uses {name}, which has no interpretation."
    return None


def _lowers_on_cpu(primitive: core.Primitive) -> bool:
    if primitive.name in _GRID_PRIMITIVES:
        return True
    return primitive in mlir._lowerings or primitive in mlir._platform_specific_lowerings["cpu"]


def _is_discharged(primitive: core.Primitive) -> bool:
    return primitive in discharge._discharge_rules or primitive in discharge._partial_discharge_rules


def _uses_tpu_key(eqn: core.JaxprEqn) -> bool:
    dtypes = [getattr(var.aval, "dtype", None) for var in (*eqn.invars, *eqn.outvars)]
    return any(getattr(getattr(dtype, "_impl", None), "tag", None) in _TPU_KEY_TAGS for dtype in dtypes)


def _targets_a_device(eqn: core.JaxprEqn) -> bool:
    tree = eqn.params["tree"] if "tree" in eqn.params else eqn.params["args_tree"]
    operands = tree.unflatten(eqn.invars)
    # dma_start: (src, dst, dst_sem, src_sem, device); semaphore_signal: (ref, transforms, inc, device, core)
    targets = operands[4:] if eqn.primitive.name == "dma_start" else operands[3:]
    return any(target is not None for target in targets)


def _indexers(eqn: core.JaxprEqn) -> list[Any]:
    tree = eqn.params["tree"] if "tree" in eqn.params else eqn.params["args_tree"]
    leading = len(eqn.invars) - tree.num_leaves  # get (ref) and swap (ref, value) keep these out of the tree
    pending, found = [tree.unflatten(eqn.invars[leading:])], []
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending.extend(value)
        elif hasattr(value, "transforms"):
            pending.extend(value.transforms)
        elif type(value).__module__.startswith("jax._src") and not isinstance(value, core.Var | core.Literal):
            found.append(value)
    return found


def _ref_transforms(eqn: core.JaxprEqn) -> set[str]:
    return {type(indexer).__name__ for indexer in _indexers(eqn)}


def _has_dynamic_size(eqn: core.JaxprEqn) -> bool:
    indices = [index for indexer in _indexers(eqn) for index in getattr(indexer, "indices", ())]
    slices = [index for index in indices if isinstance(index, Slice)]
    return any(not isinstance(index.size, int) for index in slices)


# Operands and their blocks ----------------------------------------------------------------------


class Launch:
    """One `pallas_call` equation, as the checks below look at it.

    Attributes:
        blocks: the block mapping of each input, then of each output.
        inputs: how many of them are inputs.
        usages: how the kernel body uses each of them.
        scalars: the same for the scalar-prefetch operands.
        visits: the blocks each of them visits; None where that depends on run-time values.
        aliases: (input, index into `blocks` of its output) of each aliased pair.
    """

    def __init__(self, eqn: core.JaxprEqn) -> None:
        grid_mapping: pallas_core.GridMapping = eqn.params["grid_mapping"]
        first = grid_mapping.num_index_operands
        usages = ref_usage(eqn.params["jaxpr"])
        self.blocks = list(grid_mapping.block_mappings)
        self.inputs = grid_mapping.num_inputs
        self.usages = usages[first : first + len(self.blocks)]
        self.scalars = usages[:first]
        self.visits = [block_visits(mapping, grid_mapping.grid) for mapping in self.blocks]
        pairs = eqn.params["input_output_aliases"]
        self.aliases = [
            (operand - first, self.inputs + output) for operand, output in pairs if operand >= first
        ]

    def describe(self, index: int) -> str:
        """ "input 0", "output 1", ..."""
        return f"input {index}" if index < self.inputs else f"output {index - self.inputs}"


def _fault(launch: Launch) -> str | None:
    """Why no TPU runs this kernel as it is meant, and the fix, as sentences; None if it is sound so far."""
    aliased = {output for _, output in launch.aliases}
    for index, (mapping, usage, seen) in enumerate(
        zip(launch.blocks, launch.usages, launch.visits, strict=True)
    ):
        if seen is None:
            continue
        if seen.out_of_bounds is not None:
            return (
                f"The index map of {launch.describe(index)} leaves its array, of shape "
                f"{mapping.array_aval.shape}: {seen.out_of_bounds}. Correct the grid or the index map."
            )
        if index >= launch.inputs and index not in aliased and seen.comes_back and not usage.overwritten:
            return (
                f"It comes back to a block of {launch.describe(index)} after it has left it, and on a TPU "
                "what the block held is lost by then. Reorder the grid so that a block's visits follow each "
                "other, or alias the output to an input (input_output_aliases) and read the earlier content "
                "from there."
            )
    return None


def _unsupported_operand(eqn: core.JaxprEqn) -> str | None:
    known = (pallas_core.Squeezed, pallas_core.Element, pallas_core.Blocked)
    for mapping in eqn.params["grid_mapping"].block_mappings:
        for dim in mapping.block_shape:
            if not isinstance(dim, known):
                return f"It has a {type(dim).__name__} block dimension (in {mapping.origin})."
        if 0 in mapping.array_aval.shape:
            return f"The array of {mapping.origin} is empty, shape {mapping.array_aval.shape}."
        if getattr(mapping.array_aval.dtype, "kind", "") == "c":
            return f"The array of {mapping.origin} is complex, which a TPU kernel can't use."
    return None


def _mutable_array(eqn: core.JaxprEqn) -> str | None:
    if any(_is_ref(var.aval) for var in eqn.invars):
        return "It is given a mutable array, which plain interpretation handles as an aliased operand."
    return None


def _writes_scalars(launch: Launch) -> str | None:
    if any(usage.written for usage in launch.scalars):
        return "It writes a scalar-prefetch operand, which plain interpretation forgets after each grid step."
    return None


def _writes_input(launch: Launch) -> str | None:
    for index in range(launch.inputs):
        mapping, seen = launch.blocks[index], launch.visits[index]
        once = mapping.has_trivial_window() or (seen is not None and seen.once)
        if launch.usages[index].written and not once:
            return f"It writes input {index}, whose blocks may be fetched again at later grid steps."
    return None


def _overlaps_output(launch: Launch) -> str | None:
    aliased = {output for _, output in launch.aliases}
    for index in range(launch.inputs, len(launch.blocks)):
        seen = launch.visits[index]
        if (
            index not in aliased
            and seen is not None
            and not seen.once
            and not launch.usages[index].overwritten
        ):
            return f"Different blocks of {launch.describe(index)} overlap."
    return None


def _alias_problem(launch: Launch) -> str | None:
    """Why it matters that plain interpretation keeps an aliased input and its output apart."""
    for operand, output in launch.aliases:
        problem = _pair_problem(launch, operand, output)
        if problem is not None:
            return f"Input {operand} is aliased to output {output - launch.inputs}, and {problem}."
    return None


def _pair_problem(launch: Launch, operand: int, output: int) -> str | None:
    input_in_vmem, output_in_vmem = _is_in_vmem(launch.blocks[operand]), _is_in_vmem(launch.blocks[output])
    input_used = launch.usages[operand].used
    if not output_in_vmem and not input_used:
        return None  # only the output's ref is used, and it starts as a copy of the input
    if not (input_in_vmem and output_in_vmem):
        return "the kernel reads the input's memory while it writes the output's"
    if not launch.usages[output].overwritten:
        return "not every grid step overwrites the whole output block, whose old content a TPU does not load"
    if not input_used:
        return None
    read, written = launch.visits[operand], launch.visits[output]
    if read is None or written is None:
        return "whether a block is read after it was written depends on values known only when it runs"
    if not (written.once and read.same_blocks(written)):
        return "a block may be read at one grid step after another step has written it"
    return None


def _is_in_vmem(mapping: pallas_core.BlockMapping) -> bool:
    return str(mapping.transformed_block_aval.memory_space) not in ("any", "hbm")


def interpreter_effects() -> frozenset[Any]:
    """The effects of an equation that runs in JAX's TPU interpreter (it calls back into Python)."""
    from jax.experimental.pallas import tpu as pltpu

    return frozenset(pallas_core.get_interpret_effects(pltpu.InterpretParams()))


def uninitialized(aval: Any) -> np.ndarray:
    """What an output holds that no grid step has written: NaN, or the smallest integer, or False."""
    import jax.numpy as jnp

    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.full(aval.shape, np.nan, aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return np.full(aval.shape, jnp.iinfo(aval.dtype).min, aval.dtype)
    return np.zeros(aval.shape, aval.dtype)
