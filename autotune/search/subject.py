"""What is tuned: tilings, what is scored of each, and how its results are checked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.problem import Problem
from autotune.score.protocol import Workload
from autotune.spec import Candidate, KernelSpec
from bridge.chips import Chip

Check = Callable[[Any], str]
"""Runs a tiling and compares with a reference: what is wrong, in a sentence; empty if nothing is."""


@dataclass(frozen=True)
class Subject:
    """Something with tilings to choose from.

    Attributes:
        name: what it is: a kernel at given shapes.
        chip: the chip that a tiling is chosen for.
        candidates: all tilings, legal and not, in a fixed order. No tiling is there twice.
        workloads: what is scored of a tiling; the times are added up.
        default: the tiling used when nobody chose, where a search begins; None if there is none.
        check: see `Check`; None if results can't be checked.
    """

    name: str
    chip: Chip
    candidates: tuple[Candidate, ...]
    workloads: Callable[[Any], tuple[Workload, ...]]
    default: Any = None
    check: Check | None = None


def tiling_text(tiling: Any) -> str:
    """A tiling as reports and names of workloads have it: `[tile_m=128, tile_n=256]`."""
    sizes = (f"{field.name}={getattr(tiling, field.name)}" for field in dataclasses.fields(tiling))
    return f"[{', '.join(sizes)}]"


# A kernel of a catalog ----------------------------------------------------------------------------


def kernel_subject(
    problem: Problem,
    spec: KernelSpec,
    chip: Chip,
    *,
    phases: Sequence[str] | None = None,
    fields: Sequence[str] | None = None,
    check_on: Problem | None = None,
) -> Subject:
    """A kernel of a catalog, or your own `KernelSpec`, at a problem.

    Args:
        problem: shapes, dtypes and parameters.
        spec: the kernel.
        chip: the chip.
        phases: `forward`, `backward` or both: what is timed; None for all that the kernel has.
        fields: sizes of the tiling that are varied, the others stay as they are in the default; None for
            all. For one phase, name the sizes that it depends on, and no program is scored twice.
        check_on: the problem that results are checked on; None for this one if it is small, else the
            largest of the kernel's small examples.

    Raises:
        ValueError: a phase or a field that the kernel does not have.
    """
    from autotune.search.gate import kernel_check

    known = tuple(spec.costs(problem))
    phases = known if phases is None else tuple(phases)
    if not phases or set(phases) - set(known):
        raise ValueError(f"{spec.name}: phases must be of {', '.join(known)}, got {', '.join(phases)}")
    default = None if spec.unsupported_reasons(problem, chip) else spec.default_tiling(problem, chip)
    candidates = spec.space(problem, chip)
    if fields is not None:
        candidates = _varied(candidates, default, fields, spec)

    def workloads(tiling: Any) -> tuple[Workload, ...]:
        from autotune.targets import kernel_workloads

        made = {w.name.rpartition(" ")[2]: w for w in kernel_workloads(spec, problem, tiling)}
        return tuple(
            dataclasses.replace(made[phase], name=f"{problem} {phase} {tiling_text(tiling)}")
            for phase in phases
        )

    return Subject(
        name=str(problem),
        chip=chip,
        candidates=_once_each(candidates),
        workloads=workloads,
        default=default,
        check=kernel_check(problem, spec, chip, gradients="backward" in phases, check_on=check_on),
    )


def field_groups(subject: Subject) -> tuple[tuple[str, ...], ...]:
    """Sizes that are varied together, in groups that don't depend on each other.

    Where a space varies the sizes of one phase with those of the others at their default, as catalogs do,
    each group can be tuned by itself (`kernel_subject(fields=group)`), and the best sizes of all groups are
    the best tiling. Raises `ValueError` if there is no default.
    """
    if subject.default is None:
        raise ValueError(f"{subject.name} has no default, from which groups of sizes differ")
    names = [field.name for field in dataclasses.fields(subject.default)]
    groups: list[set[str]] = []
    for candidate in subject.candidates:
        changed = {n for n in names if getattr(candidate.tiling, n) != getattr(subject.default, n)}
        touched = [group for group in groups if group & changed]
        if changed:
            groups = [group for group in groups if group not in touched] + [changed.union(*touched)]
    ordered = sorted(groups, key=lambda group: min(names.index(name) for name in group))
    return tuple(tuple(name for name in names if name in group) for group in ordered)


def _varied(
    candidates: Sequence[Candidate], default: Any, fields: Sequence[str], spec: KernelSpec
) -> tuple[Candidate, ...]:
    """The candidates that differ from the default in nothing but `fields`."""
    names = [field.name for field in dataclasses.fields(spec.tiling_type)]
    if set(fields) - set(names):
        raise ValueError(f"{spec.name} has tile sizes {', '.join(names)}, got {', '.join(fields)}")
    kept = [name for name in names if name not in fields]
    return tuple(c for c in candidates if all(getattr(c.tiling, n) == getattr(default, n) for n in kept))


def _once_each(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return tuple({candidate.tiling: candidate for candidate in candidates}.values())


# A function ---------------------------------------------------------------------------------------


def function_subject(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    sizes: Mapping[str, Sequence[Any]],
    chip: Chip,
    *,
    name: str | None = None,
    default: Mapping[str, Any] | None = None,
    vmem_bytes: Callable[..., int] | None = None,
    vmem_limit_bytes: int | None = None,
    illegal_reasons: Callable[..., Sequence[str]] | None = None,
    reference: Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
    tolerance: float | None = None,
    **work: Any,
) -> Subject:
    """A JAX function `fn(*arrays, **sizes)` with all combinations of some sizes.

    Args:
        fn: the function.
        avals: its arrays, as in `autotune.score.Workload`.
        sizes: the values of each size to try.
        chip: the chip.
        name: how reports call it; the function's own name if None.
        default: the sizes used when nobody chose; by default there are none, and a search begins anywhere.
        vmem_bytes: `vmem_bytes(**sizes)`: the least VMEM that the kernel needs. A combination that needs
            more than the limit is not tried.
        vmem_limit_bytes: that limit; what the chip allows a kernel if None.
        illegal_reasons: `illegal_reasons(**sizes)`: why a combination can't run, a sentence each.
        reference: `reference(*arrays)`, plain JAX: what `fn` should give. Without it nothing is checked.
        example: arrays to check with; by default they have the shapes of `avals` and normal values.
        tolerance: the error allowed, as a share of the largest value; by default a few roundings.
        work: what else is known of the work: fields of `Workload` such as `matmul_flops` and `values`.

    Raises:
        ValueError: there are no sizes, or the default has others.
    """
    from autotune.search.gate import function_check

    if not sizes or not all(sizes.values()):
        raise ValueError(f"expected at least one value of each size, got {dict(sizes)}")
    if default is not None and set(default) != set(sizes):
        raise ValueError(f"the default must have the sizes {', '.join(sizes)}, got {', '.join(default)}")
    label = name or getattr(fn, "__name__", "function")
    tiling_type = named_sizes(tuple(sizes))
    limit = chip.vmem_limit_bytes if vmem_limit_bytes is None else vmem_limit_bytes

    def candidate(chosen: Mapping[str, Any]) -> Candidate:
        needed = 0 if vmem_bytes is None else vmem_bytes(**chosen)
        reasons = tuple(illegal_reasons(**chosen)) if illegal_reasons else ()
        if needed > limit:
            reasons += (f"it needs at least {needed} bytes of VMEM and {chip.name} allows {limit}",)
        return Candidate(tiling_type(**chosen), needed, reasons)

    def workloads(tiling: Any) -> tuple[Workload, ...]:
        chosen = functools.partial(fn, **dataclasses.asdict(tiling))
        return (Workload(f"{label} {tiling_text(tiling)}", chosen, tuple(avals), **work),)

    combinations = (dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values()))
    check = None
    if reference is not None:
        check = function_check(fn, reference, avals if example is None else example, chip, tolerance)
    return Subject(
        name=label,
        chip=chip,
        candidates=_once_each([candidate(chosen) for chosen in combinations]),
        workloads=workloads,
        default=None if default is None else tiling_type(**default),
        check=check,
    )


@functools.cache
def named_sizes(names: tuple[str, ...]) -> type:
    """A frozen dataclass with these fields, for tilings that have no type of their own."""
    return dataclasses.make_dataclass("Sizes", [(name, Any) for name in names], frozen=True)
