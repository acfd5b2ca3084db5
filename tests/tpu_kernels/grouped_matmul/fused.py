"""Everything that `grouped_matmul` fuses, written out in float64, and how far roundings may be from it.

A `Call` has the arguments. `run` computes it with our function, `expected` in torch and float64, group by
group, and `bounds` what rounding may do:

- A sum of n products errs by at most n u times the sum of their magnitudes, u the unit roundoff of float32.
- An activation f with |f'| <= L makes of an error e at most L e, and some roundings of its own.
- Sums are kept for gradients in the dtype of `lhs` (roundoff v), and so are the gradients of sums: each
  relative error v. Operands of 8 bits are multiplied exactly in the forward; for gradients, what they stand
  for is rounded to the dtype that they are multiplied in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tpu_kernels import grouped_matmul

_QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_ROUNDINGS = 16
"""Roundings within one activation or its derivative: exp, erf and tanh of XLA err by some units."""

_FUNCTIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}
_SLOPES = {None: 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "sigmoid": 0.25}
_CURVATURES = {None: 0.0, "relu": 0.0, "silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.81, "sigmoid": 0.1}
"""The largest |f'| and |f''| of each."""


@dataclass(frozen=True)
class Call:
    """A call, and a cotangent of its output.

    Attributes:
        lhs: [M, K].
        rhs: one matrix for each group, or two; or one with both, if `gated`.
        sizes: of all groups.
        cotangent: [M, N], of values that all dtypes have which it may be rounded to.
        bias, rhs_scale: as many as `rhs`, or none.
        options: the other keyword arguments of `grouped_matmul`.
    """

    lhs: torch.Tensor
    rhs: tuple[torch.Tensor, ...]
    sizes: torch.Tensor
    cotangent: torch.Tensor
    bias: tuple[torch.Tensor, ...] = ()
    lhs_scale: torch.Tensor | None = None
    rhs_scale: tuple[torch.Tensor, ...] = ()
    existing_out: torch.Tensor | None = None
    gated: bool = False
    activation: Any = None
    transpose_rhs: bool = False
    group_offset: int | None = None
    out_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def plain(self) -> torch.dtype:
        """What gradients are computed in."""
        for tensor in (self.lhs, *self.rhs):
            if tensor.dtype not in _QUANTIZED:
                return tensor.dtype
        return self.result

    @property
    def result(self) -> torch.dtype:
        """The dtype of the output."""
        plain = [t.dtype for t in (self.lhs, *self.rhs) if t.dtype not in _QUANTIZED]
        return self.out_dtype or (plain[0] if plain else torch.float32)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets a gradient, by name."""
        found = {"lhs": self.lhs, "lhs_scale": self.lhs_scale, "existing_out": self.existing_out}
        for name in ("rhs", "bias", "rhs_scale"):
            found |= {f"{name} {place}": tensor for place, tensor in enumerate(getattr(self, name))}
        return {name: t for name, t in found.items() if t is not None and t.dtype not in _QUANTIZED}

    def with_leaves(self, leaves: dict[str, torch.Tensor]) -> Call:
        """The same with these tensors."""
        changed: dict[str, Any] = {n: leaves[n] for n in ("lhs", "lhs_scale", "existing_out") if n in leaves}
        for name in ("rhs", "bias", "rhs_scale"):
            old = getattr(self, name)
            changed[name] = tuple(leaves.get(f"{name} {place}", tensor) for place, tensor in enumerate(old))
        return replace(self, **changed)


# Ours ---------------------------------------------------------------------------------------------------


def compute(call: Call, device: str = "cpu", function: Any = grouped_matmul, **options: Any) -> torch.Tensor:
    """The output of the function."""

    def moved(tensors: tuple[torch.Tensor, ...]) -> Any:
        there = tuple(t.to(device) for t in tensors)
        return None if not there else there[0] if len(there) == 1 else there

    return function(
        call.lhs.to(device),
        moved(call.rhs),
        call.sizes.to(device),
        bias=moved(call.bias),
        lhs_scale=None if call.lhs_scale is None else call.lhs_scale.to(device),
        rhs_scale=moved(call.rhs_scale),
        existing_out=None if call.existing_out is None else call.existing_out.to(device),
        gated=call.gated,
        activation=call.activation,
        transpose_rhs=call.transpose_rhs,
        group_offset=call.group_offset,
        out_dtype=call.out_dtype,
        **call.options,
        **options,
    )


def run(
    call: Call, device: str = "cpu", function: Any = grouped_matmul, **options: Any
) -> dict[str, torch.Tensor]:
    """The output and all gradients, on the CPU."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in call.leaves().items()}
    output = compute(call.with_leaves(leaves), device, function, **options)
    return {"output": output.detach().cpu(), **_gradients(output, leaves, call.cotangent.to(output))}


def _gradients(output: torch.Tensor, leaves: dict[str, torch.Tensor], cotangent: torch.Tensor) -> Any:
    if not output.requires_grad:  # no leaves, or none that it depends on
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


# The oracle ---------------------------------------------------------------------------------------------


def _scaled(values: torch.Tensor, scale: torch.Tensor | None, axis: int) -> torch.Tensor:
    """`values` [..] times factors that have a size of their own along `axis`, or lack it."""
    values = values.double()
    if scale is None:
        return values
    scale = scale.double().unsqueeze(axis) if scale.dim() < values.dim() else scale.double()
    return values * scale.repeat_interleave(values.shape[axis] // scale.shape[axis], axis)


def _matrices(call: Call) -> list[torch.Tensor]:
    """The numbers that matrices stand for, [G, K, N] each, the two of a gated one apart."""
    found = []
    for place, rhs in enumerate(call.rhs):
        rhs = rhs.double().mT if call.transpose_rhs else rhs.double()
        found.append(_scaled(rhs, call.rhs_scale[place] if call.rhs_scale else None, 1))
    return list(found[0].chunk(2, 2)) if call.gated else found


def _biases(call: Call, like: list[torch.Tensor]) -> list[torch.Tensor]:
    if not call.bias:
        return [m.new_zeros(m.shape[0], m.shape[2]) for m in like]
    return [b.double() for b in (call.bias[0].chunk(2, 1) if call.gated else call.bias)]


def _groups(call: Call) -> torch.Tensor:
    """The number of each row's matrix, [M]; -1 for none."""
    numbers = torch.full((call.lhs.shape[0],), -1)
    begin = 0
    for group, size in enumerate(call.sizes.tolist()):
        place = group - (call.group_offset or 0)
        if 0 <= place < call.rhs[0].shape[0]:
            numbers[begin : begin + size] = place
        begin += size
    return numbers


def _by_group(call: Call, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Each row times its matrix; 0 for rows of none."""
    numbers, out = _groups(call), rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group in numbers.unique().tolist():
        if group >= 0:
            own = numbers == group
            out = out.index_put((own,), rows[own] @ matrices[group])
    return out


def _over_groups(call: Call, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The product of the two, summed over each group's rows, [G, K, N]."""
    numbers = _groups(call)
    return torch.stack(
        [rows[numbers == g].T @ others[numbers == g] for g in range(call.rhs[0].shape[0])]
        or [rows.new_zeros(rows.shape[1], others.shape[1])]
    )[: call.rhs[0].shape[0]]


def _output(call: Call) -> torch.Tensor:
    matrices, numbers = _matrices(call), _groups(call)
    lhs, has = _scaled(call.lhs, call.lhs_scale, 1), (numbers >= 0)[:, None]
    sums = [
        _by_group(call, lhs, m) + (b[numbers.clamp(min=0)] * has if b.shape[0] else 0)
        for m, b in zip(matrices, _biases(call, matrices), strict=True)
    ]
    first = _FUNCTIONS[call.activation](sums[0])
    out = torch.where(has, first if len(sums) == 1 else first * sums[1], 0.0)
    return out if call.existing_out is None else out + call.existing_out.double()


def expected(call: Call) -> dict[str, torch.Tensor]:
    """The exact output and gradients."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in call.leaves().items()}
    output = _output(call.with_leaves(leaves))
    return {"output": output.detach(), **_gradients(output, leaves, call.cotangent.double())}


# Rounding -----------------------------------------------------------------------------------------------


def bounds(call: Call) -> dict[str, torch.Tensor]:
    """How far each number may be from the exact one, before it is rounded to its own dtype."""
    wide = torch.float64 if call.plain == torch.float64 else torch.float32
    u, v = torch.finfo(wide).eps / 2, torch.finfo(call.plain).eps / 2
    slope, curvature = _SLOPES[call.activation], _CURVATURES[call.activation]
    matrices, numbers = [m.detach() for m in _matrices(call)], _groups(call)
    biases, lhs = _biases(call, matrices), _scaled(call.lhs, call.lhs_scale, 1)
    has = (numbers >= 0)[:, None]
    (m, k), n = lhs.shape, matrices[0].shape[2]
    terms = 2 * (k + 8)  # factors, bias; twice for what the oracle itself rounds

    def summed(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return _by_group(call, rows.abs(), matrix.abs())

    # The sums, as the forward has them, and as they are kept for gradients.
    quantized = v * sum(t.dtype in _QUANTIZED for t in (call.lhs, call.rhs[0]))
    sums, errors, kept = [], [], []
    for matrix, bias in zip(matrices, biases, strict=True):
        added = bias[numbers.clamp(min=0)] * has if bias.shape[0] else lhs.new_zeros(m, n)
        size = summed(lhs, matrix) + added.abs()
        sums.append(_by_group(call, lhs, matrix) + added)
        errors.append(terms * u * size)
        kept.append(errors[-1] + 1.01 * quantized * size + v * (sums[-1].abs() + errors[-1]))
    first = _FUNCTIONS[call.activation](sums[0]) * has
    own = _ROUNDINGS * u * (sums[0].abs() + (call.activation == "sigmoid"))
    gate, gate_error = (sums[1], errors[1]) if len(sums) == 2 else (torch.ones_like(first), 0 * first)
    output = (slope * errors[0] + own) * (gate.abs() + gate_error) + first.abs() * gate_error
    result = (first * gate).abs() + output
    if call.existing_out is not None:
        result = result + call.existing_out.double().abs()
    found = {"output": output + 2 * u * result, "existing_out": 0 * output}

    # The gradients of the sums.
    g = call.cotangent.double().abs() * has
    gate_kept = kept[1] if len(sums) == 2 else 0 * first
    at = sums[0].detach().requires_grad_()
    (exact,) = torch.autograd.grad(_FUNCTIONS[call.activation](at).sum(), at)
    bend = curvature * kept[0] + _ROUNDINGS * u * (1 + sums[0].abs() * (call.activation is not None))
    if call.activation == "relu":  # on the other side of its corner the slope is another
        bend = torch.where(sums[0].abs() <= kept[0], 1.0, bend)
    of_sums = [g * exact.abs() * gate.abs()]
    of_errors = [g * (bend * (gate.abs() + gate_kept) + exact.abs() * gate_kept)]
    if len(sums) == 2:
        of_sums.append(g * first.abs())
        of_errors.append(g * (slope * kept[0] + own))
    of_errors = [e + v * (s + e) for s, e in zip(of_sums, of_errors, strict=True)]

    # And what is made of these.
    step = 1.01 * quantized
    dlhs = sum(
        summed(e, w.mT) * (1 + step) + (step + 2 * (2 * n + 8) * u) * summed(s + e, w.mT)
        for s, e, w in zip(of_sums, of_errors, matrices, strict=True)
    )
    drhs = [
        _over_groups(call, lhs.abs(), e) * (1 + step)
        + (step + 2 * (m + 8) * u) * _over_groups(call, lhs.abs(), s + e)
        for s, e in zip(of_sums, of_errors, strict=True)
    ]
    ones = lhs.new_ones(m, 1)
    dbias = [
        (_over_groups(call, ones, e) + 2 * (m + 8) * u * _over_groups(call, ones, s + e))[:, 0]
        for s, e in zip(of_sums, of_errors, strict=True)
    ]
    if call.gated:
        drhs, dbias = [torch.cat(drhs, 2)], [torch.cat(dbias, 1)]
    exactly = expected(call)
    found["lhs"] = dlhs
    if call.lhs_scale is not None:
        size = _exact_dlhs(call)
        error = dlhs + v * (size + dlhs)
        found["lhs_scale"] = _folded(
            call.lhs.double().abs() * (error + 2 * (k + 8) * u * size), call.lhs_scale, 1
        )
    for place, rhs in enumerate(call.rhs):
        found[f"bias {place}"] = dbias[place]
        found[f"rhs {place}"] = drhs[place].mT if call.transpose_rhs else drhs[place]
        if call.rhs_scale:
            size = _exact_drhs(call, place)
            error = drhs[place] + v * (size + drhs[place])
            q = (rhs.double().mT if call.transpose_rhs else rhs.double()).abs()
            found[f"rhs_scale {place}"] = _folded(
                q * (error + 2 * (k + 8) * u * size), call.rhs_scale[place], 1
            )
    return {name: bound for name, bound in found.items() if name in exactly}


def _folded(values: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Sums over what shares a factor."""
    blocks = scale.shape[axis] if scale.dim() == values.dim() else 1
    summed = values.unflatten(axis, (blocks, -1)).sum(axis + 1)
    return summed if scale.dim() == values.dim() else summed.squeeze(axis)


def _exact_dlhs(call: Call) -> torch.Tensor:
    """Magnitudes of the gradient of the numbers that `lhs` stands for."""
    lhs = _scaled(call.lhs, call.lhs_scale, 1).requires_grad_()
    output = _output(replace(call, lhs=lhs, lhs_scale=None))
    return _gradients(output, {"lhs": lhs}, call.cotangent.double())["lhs"].abs()


def _exact_drhs(call: Call, place: int) -> torch.Tensor:
    """The same for a matrix, [G, K, N]."""
    scale = call.rhs_scale[place]
    rhs = call.rhs[place].double()
    matrix = _scaled(rhs.mT if call.transpose_rhs else rhs, scale, 1).requires_grad_()
    matrices = [
        _scaled(r.double().mT if call.transpose_rhs else r.double(), s, 1)
        for r, s in zip(call.rhs, call.rhs_scale, strict=True)
    ]
    matrices[place] = matrix
    output = _output(replace(call, rhs=tuple(matrices), rhs_scale=(), transpose_rhs=False))
    return _gradients(output, {"rhs": matrix}, call.cotangent.double())["rhs"].abs()


def check(call: Call, found: dict[str, torch.Tensor]) -> None:
    """Shapes, dtypes and numbers are right."""
    want, allowed = expected(call), bounds(call)
    dtypes = {"output": call.result} | {name: t.dtype for name, t in call.leaves().items()}
    assert found.keys() == want.keys()
    for name, got in found.items():
        assert (got.shape, got.dtype) == (want[name].shape, dtypes[name]), name
        rounding = torch.finfo(got.dtype)
        bound = allowed[name]
        bound = bound + rounding.eps / 2 * (want[name].abs() + bound) + rounding.smallest_normal
        error = (got.double() - want[name]).abs()
        assert bool((error <= bound).all()), (
            f"{name}: off by {float(error.max()):.3g}, by {float((error / bound).max()):.3g} of what is "
            f"allowed; {call.note}"
        )
