"""How the arrays of a distributed op lie on its mesh: partition specs, local and global shapes.

A rank has its part of an array (a local shape); the op's function sees the whole (a global shape). Programs
derived from an op have specs that follow: the cotangent of a result lies as the result, a gradient as its
input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bridge.avals import Avals
from bridge.schema import ONE, OpSignature, Structure


@dataclass(frozen=True)
class Sharding:
    """How an op's arguments and results lie on its mesh.

    Attributes:
        mesh: positions are ranks.
        inputs: one spec for each tensor argument of the signature.
        outputs: one for each result; None if they follow from the function.
    """

    mesh: Mesh
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...] | PartitionSpec | None

    @property
    def explicit(self) -> bool:
        """Whether JAX keeps track of how arrays lie while it traces: `jax.make_mesh` has such axes."""
        return any(kind == AxisType.Explicit for kind in self.mesh.axis_types)

    def of_arrays(self, structure: Structure) -> tuple[PartitionSpec, ...]:
        """A spec for each array of a call."""
        counts = [0 if count is None else 1 if count == ONE else count for count in structure]
        return tuple(spec for spec, count in zip(self.inputs, counts, strict=True) for _ in range(count))

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """The spec on the mesh."""
        return NamedSharding(self.mesh, spec)


def read_sharding(signature: OpSignature, mesh: Any, inputs: Any, outputs: Any) -> Sharding | None:
    """The sharding that the arguments of `jax_op` ask for; None if they ask for none.

    Raises:
        ValueError: specs without a mesh, another number of them than of tensor arguments, or an axis that the
            mesh does not have.
        TypeError: a mesh or a spec of another type.
    """
    op = signature.op
    if mesh is None:
        if inputs is not None or outputs is not None:
            raise ValueError(f"jax_op {op}: partition specs say how arrays lie on a mesh; pass mesh=")
        return None
    if not isinstance(mesh, Mesh):
        from bridge.ranks.mesh import mesh_of_device_mesh

        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"jax_op {op}: mesh must come from get_pallas_mesh, or be a jax.sharding.Mesh or a "
                f"DeviceMesh, got {type(mesh).__name__}"
            )
        mesh = mesh_of_device_mesh(mesh)
    parameters = signature.tensor_parameters
    if inputs is None:
        inputs = PartitionSpec()
    if _is_spec(inputs):
        found = [inputs] * len(parameters)
    else:
        found = list(inputs)
        if len(found) == len(signature.parameters) != len(parameters):
            found = [found[p.index] for p in parameters]  # one for each argument, static ones too
    if len(found) != len(parameters):
        raise ValueError(
            f"jax_op {op}: input_partition_specs must have one spec for each tensor argument "
            f"({', '.join(p.name for p in parameters)}), got {len(found)}"
        )
    checked = tuple(
        _checked(op, spec, mesh, f"of argument {p.name!r}") for p, spec in zip(parameters, found, strict=True)
    )
    if outputs is not None:
        count = signature.returns.count
        if _is_spec(outputs):
            outputs = _checked(op, outputs, mesh, "of the results")
        else:
            outputs = tuple(_checked(op, spec, mesh, f"of result {i}") for i, spec in enumerate(outputs))
            if count is not None and len(outputs) != count:
                raise ValueError(
                    f"jax_op {op}: output_partition_specs must have one spec for each result ({count}), got "
                    f"{len(outputs)}"
                )
    return Sharding(mesh, checked, outputs)


def _is_spec(value: Any) -> bool:
    """Whether it is one spec: torch_tpu takes a plain tuple of names for one, too."""
    return isinstance(value, PartitionSpec) or (
        isinstance(value, tuple)
        and bool(value)
        and all(v is None or isinstance(v, str) for v in value)
        and any(isinstance(v, str) for v in value)
    )


def _checked(op: str, spec: Any, mesh: Mesh, place: str) -> PartitionSpec:
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        if not isinstance(spec, tuple | list):
            raise TypeError(f"jax_op {op}: the spec {place} must be a PartitionSpec, got {spec!r}")
        spec = PartitionSpec(*spec)
    names = [name for entry in spec for name in names_of(entry)]
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"jax_op {op}: the spec {place} is {spec}; the mesh has the axes {', '.join(mesh.axis_names)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"jax_op {op}: the spec {place} is {spec}; an axis can divide one dimension only")
    return spec


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes that divide a dimension, from its entry in a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


# Shapes -------------------------------------------------------------------------------------------


def _parts(spec: PartitionSpec, mesh: Mesh, dimensions: int, place: str) -> list[int]:
    """In how many parts each dimension is divided."""
    if len(spec) > dimensions:
        raise ValueError(f"{place} has {dimensions} dimensions, and its partition spec {spec} {len(spec)}")
    parts = [math.prod(mesh.shape[name] for name in names_of(entry)) for entry in spec]
    return parts + [1] * (dimensions - len(spec))


def global_shape(
    shape: Sequence[Any], spec: PartitionSpec, mesh: Mesh, place: str = "an array"
) -> tuple[Any, ...]:
    """The shape of the whole, from that of a part.

    Raises:
        ValueError: it has fewer dimensions than its spec.
    """
    return tuple(n * p for n, p in zip(shape, _parts(spec, mesh, len(shape), place), strict=True))


def local_shape(
    shape: Sequence[Any], spec: PartitionSpec, mesh: Mesh, place: str = "an array"
) -> tuple[Any, ...]:
    """The shape of a part, from that of the whole.

    Raises:
        ValueError: it has fewer dimensions than its spec, or one that can't be divided in equal parts.
    """
    parts = _parts(spec, mesh, len(shape), place)
    uneven = [n for n, p in zip(shape, parts, strict=True) if isinstance(n, int) and n % p]
    if uneven:
        raise ValueError(
            f"{place} is {tuple(shape)} in all, and lies as {spec} on {dict(mesh.shape)}: its dimension of "
            f"{uneven[0]} can't be divided into equal parts"
        )
    return tuple(n // p if p > 1 else n for n, p in zip(shape, parts, strict=True))


# Of programs ----------------------------------------------------------------------------------------


class Definition(Protocol):
    """Of an op, what is asked for here."""

    @property
    def name(self) -> str: ...

    @property
    def sharding(self) -> Sharding | None: ...


class Program(Protocol):
    """Of `bridge.program.Program`, which asks here, what is asked for in turn."""

    @property
    def definition(self) -> Definition: ...

    @property
    def structure(self) -> Structure: ...

    @property
    def derived_from(self) -> tuple[Program, str] | None: ...

    def avals_of(
        self, shapes: tuple[tuple[Any, ...], ...], dtypes: tuple[np.dtype, ...], wide: bool
    ) -> Avals: ...

    def out_avals(self, avals: Avals) -> tuple[jax.ShapeDtypeStruct, ...]: ...

    def abstract(self, evaluate: Callable[..., Any], avals: Avals) -> Any: ...

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any: ...


def of_inputs(
    program: Program, shapes: tuple[tuple[Any, ...], ...], dtypes: tuple[np.dtype, ...], wide: bool
) -> tuple[PartitionSpec, ...]:
    """A spec for each input of a program, from the local shapes of all of them.

    Raises:
        NotImplementedError: a derivation that has none, such as vmap.
    """
    sharding = program.definition.sharding
    assert sharding is not None
    if program.derived_from is None:
        return sharding.of_arrays(program.structure)
    parent, kind, numbers = _derivation(program)
    if kind == "vjp":
        count = numbers[0]
        inputs = of_inputs(parent, shapes[:count], dtypes[:count], wide)
        avals = parent.avals_of(shapes[:count], dtypes[:count], wide)
        outs = zip(parent.out_avals(avals), of_outputs(parent, avals), strict=True)
        return (*inputs, *[spec for out, spec in outs if _is_float(out)])
    count = len(shapes) - len(numbers)
    inputs = of_inputs(parent, shapes[:count], dtypes[:count], wide)
    return (*inputs, *[inputs[i] for i in numbers])


def cotangents(program: Program) -> slice:
    """Which inputs of a program are cotangents of a result."""
    if program.derived_from is None:
        return slice(0)
    _, kind, numbers = _derivation(program)
    return slice(numbers[0], None) if kind == "vjp" else slice(0)


def replicas(spec: PartitionSpec, mesh: Mesh) -> list[list[int]]:
    """Positions of the mesh that have the same part of an array, together."""
    names = {name for entry in spec for name in names_of(entry)}
    found: dict[tuple[int, ...], list[int]] = {}
    for position, place in enumerate(np.ndindex(*mesh.devices.shape)):
        own = tuple(i for i, name in zip(place, mesh.axis_names, strict=True) if name in names)
        found.setdefault(own, []).append(position)
    return list(found.values())


def of_outputs(program: Program, avals: Avals) -> tuple[PartitionSpec, ...]:
    """A spec for each result of a program, from the global shapes of its inputs."""
    return program.remember(("specs", avals), lambda: _of_outputs(program, avals))


def _of_outputs(program: Program, avals: Avals) -> tuple[PartitionSpec, ...]:
    sharding = program.definition.sharding
    assert sharding is not None
    if program.derived_from is None:
        return _of_results(program, sharding, avals)
    parent, kind, numbers = _derivation(program)
    if kind == "vjp":
        inputs = avals.specs[: numbers[0]]
        return tuple(inputs[i] for i in numbers[1:])
    own = avals.first(len(avals.shapes) - len(numbers))
    outs = zip(parent.out_avals(own), of_outputs(parent, own), strict=True)
    return tuple(spec for out, spec in outs if _is_float(out))


def _derivation(program: Program) -> tuple[Program, str, tuple[int, ...]]:
    assert program.derived_from is not None
    parent, suffix = program.derived_from
    match = re.fullmatch(r"(vjp|jvp)\(([\d,]*)\)", suffix)
    if match is None:
        raise NotImplementedError(
            f"{program.definition.name} runs on a mesh of ranks, and has no {suffix.partition('(')[0]}; call "
            f"it outside of torch.vmap"
        )
    return parent, match[1], tuple(int(n) for n in match[2].split(",") if n)


def _of_results(program: Program, sharding: Sharding, avals: Avals) -> tuple[PartitionSpec, ...]:
    count = len(program.out_avals(avals))
    if isinstance(sharding.outputs, PartitionSpec):
        return (sharding.outputs,) * count
    if sharding.outputs is not None:
        if len(sharding.outputs) != count:
            raise ValueError(
                f"{program.definition.name}: output_partition_specs has {len(sharding.outputs)} specs, and "
                f"the function returns {count} arrays"
            )
        return sharding.outputs
    traced: ClosedJaxpr = program.abstract(lambda fn, structs: jax.make_jaxpr(fn)(*structs), avals)
    found = []
    for index, var in enumerate(traced.jaxpr.outvars):
        spec = _inferred(traced.jaxpr, var, avals.specs)
        if spec is None and sharding.explicit:
            spec = getattr(getattr(var.aval, "sharding", None), "spec", None)
        if spec is None:
            raise ValueError(
                f"{program.definition.name}: how result {index} lies on the mesh does not follow from the "
                f"function, as it does not come from a jax.shard_map; pass output_partition_specs="
            )
        found.append(spec)
    return tuple(found)


_SAME_SHAPE = ("convert_element_type", "copy", "copy_p", "neg", "stop_gradient", "optimization_barrier")


def _inferred(jaxpr: Any, var: Any, specs: Sequence[PartitionSpec | None]) -> PartitionSpec | None:
    """The spec of a variable that comes from a shard_map, or is an input; None if it can't be told."""
    if not isinstance(var, Var):
        return PartitionSpec()
    for place, given in enumerate(jaxpr.invars):
        if given is var:
            return specs[place]
    for eqn in jaxpr.eqns:
        if var not in eqn.outvars:
            continue
        index = eqn.outvars.index(var)
        if eqn.primitive.name == "shard_map":
            return eqn.params["out_specs"][index]
        if eqn.primitive.name in _SAME_SHAPE:
            return _inferred(jaxpr, eqn.invars[index], specs)
        inner = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params), None)
        inner = getattr(inner, "jaxpr", inner)
        if inner is None or len(inner.invars) != len(eqn.invars):
            return None
        own = [_inferred(jaxpr, invar, specs) for invar in eqn.invars]
        return _inferred(inner, inner.outvars[index], own)
    return None


def _is_float(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact))
