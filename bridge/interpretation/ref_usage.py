"""What a kernel body does to each of its refs: read, written, wholly overwritten at every grid step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax._src import core
from jax._src.indexing import Slice
from jax._src.state.indexing import NDIndexer


@dataclass
class Usage:
    """How a kernel uses one ref.

    Attributes:
        read: some equation may read it.
        written: some equation may write it.
        overwritten: every grid step writes the whole ref before it reads any of it.
    """

    read: bool = False
    written: bool = False
    overwritten: bool = False

    @property
    def used(self) -> bool:
        return self.read or self.written


def subjaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs held directly by the parameters of an equation."""
    pending = list(params.values())
    while pending:
        value = pending.pop(0)
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            pending.extend(value)


def ref_usage(jaxpr: core.Jaxpr) -> list[Usage]:
    """The usage of each operand of a kernel body, in order. Errs on the side of "used"."""
    usages = [Usage() for _ in jaxpr.invars]
    _walk(jaxpr, dict(zip(jaxpr.invars, usages, strict=True)), always=True)
    return usages


def _walk(jaxpr: core.Jaxpr, refs: dict[core.Var, Usage], always: bool) -> None:
    """Records what `jaxpr` does. `always`: its equations run at every grid step."""
    needed = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, core.Var)}
    needed.update(atom for atom in jaxpr.outvars if isinstance(atom, core.Var))
    for eqn in jaxpr.eqns:
        touched = [refs.get(var) if isinstance(var, core.Var) else None for var in eqn.invars]
        if not any(touched):
            continue
        inner = list(subjaxprs(eqn.params))
        if inner:
            for body, offset in _bodies(eqn, inner):
                scoped = eqn.primitive.name == "run_scoped"  # what it closes over comes as constants
                operands = [*body.constvars, *body.invars] if scoped else body.invars
                known = zip(operands, touched[offset:], strict=False)
                same_step = eqn.primitive.name in ("jit", "closed_call", "run_scoped")
                _walk(body, {var: usage for var, usage in known if usage is not None}, always and same_step)
        else:
            _record(eqn, touched, needed, always)


def _bodies(eqn: core.JaxprEqn, inner: list[core.Jaxpr]) -> Iterator[tuple[core.Jaxpr, int]]:
    """Each nested jaxpr, and the index of the operand its first input stands for."""
    if eqn.primitive.name == "cond":
        yield from ((body, 1) for body in inner)
    elif eqn.primitive.name == "while":
        params = eqn.params
        yield params["cond_jaxpr"].jaxpr, 0
        yield params["body_jaxpr"].jaxpr, params["cond_nconsts"]
    else:
        yield from ((body, 0) for body in inner)


def _record(eqn: core.JaxprEqn, touched: list[Usage | None], needed: set[core.Var], always: bool) -> None:
    name = eqn.primitive.name
    if name in ("get", "load", "masked_load"):
        _read(touched[0])
    elif name in ("swap", "masked_swap"):
        if eqn.outvars[0] in needed:  # a swap returns the old content; a plain store ignores it
            _read(touched[0])
        _write(touched[0], always and _covers_all(eqn))
    elif name == "dma_start":
        source, target, *_ = eqn.params["tree"].unflatten(_usages_in_place(eqn.invars, touched))
        _read(_usage_of(source))
        _write(_usage_of(target), False)
    elif name in ("dma_wait", "semaphore_signal", "semaphore_wait", "semaphore_read"):
        pass  # moves no data
    else:
        for usage in touched:
            _read(usage)
            _write(usage, False)


def _usages_in_place(invars: Any, touched: list[Usage | None]) -> list[Any]:
    return [var if usage is None else usage for var, usage in zip(invars, touched, strict=True)]


def _usage_of(ref: Any) -> Usage | None:
    ref = getattr(ref, "ref", ref)
    return ref if isinstance(ref, Usage) else None


def _read(usage: Usage | None) -> None:
    if usage is not None:
        usage.read = True


def _write(usage: Usage | None, whole: bool) -> None:
    if usage is not None:
        usage.overwritten = usage.overwritten or (whole and not usage.read)
        usage.written = True


def _covers_all(eqn: core.JaxprEqn) -> bool:
    """Whether a store writes every element of its ref."""
    if "tree" in eqn.params:
        transforms, mask = eqn.params["tree"].unflatten(eqn.invars[2:]), None
    else:
        _, transforms, _, mask = eqn.params["args_tree"].unflatten(eqn.invars)
    return mask is None and all(
        isinstance(transform, NDIndexer) and _is_full(transform) for transform in transforms
    )


def _is_full(indexer: NDIndexer) -> bool:
    return all(
        isinstance(index, Slice) and index.start == 0 and index.size == size and index.stride == 1
        for index, size in zip(indexer.indices, indexer.shape, strict=True)
    )
