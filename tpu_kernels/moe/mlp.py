"""The experts: a gated MLP for each group of rows."""

from __future__ import annotations

import torch

from tpu_kernels._checks import check_floating
from tpu_kernels._integers import check_integers
from tpu_kernels._select import Implementation
from tpu_kernels.grouped_matmul.api import grouped_matmul
from tpu_kernels.grouped_matmul.epilogue import ACTIVATIONS, Activation
from tpu_kernels.moe.checks import check_choice, check_same_device

_OP = "gated_mlp"


def gated_mlp(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    down: torch.Tensor,
    group_sizes: torch.Tensor | None = None,
    *,
    gate_up: torch.Tensor | None = None,
    activation: Activation = "silu",
    transpose_weights: bool = False,
    impl: Implementation = "auto",
) -> torch.Tensor:
    """`(act(x @ gate[i]) * (x @ up[i])) @ down[i]` for the rows of each group i.

    A gated linear unit between two products (Shazeer, arXiv 2002.05202): SwiGLU with `silu`, GEGLU with
    `gelu`. The groups follow each other from row 0 on, as in `grouped_matmul`: rows behind the last are 0 in
    the output, and pass no gradient on. The sizes are data.

    Differentiable in `x` and the weights, any number of times.

    Args:
        x: [M, K], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        gate, up: [G, K, N], of the same dtype; or None, with `gate_up`.
        down: [G, N, D], of the same dtype.
        group_sizes: integers [G], at least 0, and M together at most; see `grouped_matmul`. None: the weights
            have no first dimension G, and all rows are theirs.
        gate_up: [G, K, 2 N], gate and up beside each other, gate first; it stands in for both.
        activation: `silu`, `gelu` (exact), `gelu_tanh` (its approximation), `relu` or `sigmoid`.
        transpose_weights: the weights are [G, N, K], [G, D, N] and [G, 2 N, K], as those of `torch.nn.Linear`
            and of Hugging Face are. It costs nothing.
        impl: of the products; see `grouped_matmul`.

    Returns:
        [M, D] in the dtype of `x`. The first two products and what is made of them are float32 (float64 for
        float64) inside of one kernel, and are rounded to the dtype of `x` once, for the third.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: `gate_up` beside `gate` or `up`, or none of them; an unknown activation; sizes out of
            range; `impl` cannot compute this, and why.
    """
    check_choice(_OP, "activation", activation, ACTIVATIONS)
    if gate_up is not None and (gate is not None or up is not None):
        raise ValueError(f"{_OP}: gate_up stands in for gate and up; give None for them")
    if gate_up is None and (gate is None or up is None):
        raise ValueError(f"{_OP}: give gate and up, or gate_up in place of both")
    first = {"gate_up": gate_up} if gate_up is not None else {"gate": gate, "up": up}
    weights = {name: weight for name, weight in (first | {"down": down}).items() if weight is not None}
    _check(x, weights, group_sizes, transpose_weights)
    if group_sizes is None:
        group_sizes = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        weights = {name: weight[None] for name, weight in weights.items()}

    if gate_up is not None:
        pair = weights["gate_up"]
    else:
        pair = weights["gate"], weights["up"]
    hidden = grouped_matmul(
        x,
        pair,
        group_sizes,
        transpose_rhs=transpose_weights,
        gated=gate_up is not None,
        activation=activation,
        impl=impl,
    )
    return grouped_matmul(hidden, weights["down"], group_sizes, transpose_rhs=transpose_weights, impl=impl)


def _check(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    group_sizes: torch.Tensor | None,
    transpose_weights: bool,
) -> None:
    check_floating(_OP, x=x, **weights)
    for name, weight in weights.items():
        if weight.dtype != x.dtype:
            raise TypeError(f"{_OP}: x and {name} must have the same dtype, got {x.dtype} and {weight.dtype}")
    if group_sizes is not None:
        check_integers(_OP, "group_sizes", group_sizes)
    if not isinstance(transpose_weights, bool):
        raise TypeError(f"{_OP}: transpose_weights must be a bool, got {transpose_weights!r}")
    check_same_device(_OP, x=x, **weights, group_sizes=group_sizes)
    dims = 2 if group_sizes is None else 3
    into, out = (-1, -2) if transpose_weights else (-2, -1)
    down = weights["down"]
    fits = x.dim() == 2 and all(weight.dim() == dims for weight in weights.values())
    if fits:
        inner = down.shape[into]
        fits = all(
            weight.shape[into] == x.shape[1]
            and weight.shape[out] == (2 * inner if name == "gate_up" else inner)
            and weight.shape[:-2] == down.shape[:-2]
            for name, weight in weights.items()
            if name != "down"
        )
    if not fits:
        raise RuntimeError(
            f"{_OP}: {_expected(weights, dims, transpose_weights)}, got "
            + ", ".join(f"{name} {list(t.shape)}" for name, t in {"x": x, **weights}.items())
        )
    if group_sizes is not None and tuple(group_sizes.shape) != tuple(down.shape[:1]):
        raise RuntimeError(
            f"{_OP}: group_sizes must be [{down.shape[0]}], a size for each group of the weights, got "
            f"{list(group_sizes.shape)}"
        )


def _expected(weights: dict[str, torch.Tensor], dims: int, transpose_weights: bool) -> str:
    """The shapes that belong together, in words."""
    group = "G, " if dims == 3 else ""
    shapes = {"gate": ("K", "N"), "up": ("K", "N"), "gate_up": ("K", "2 N"), "down": ("N", "D")}
    shown = {name: shapes[name][::-1] if transpose_weights else shapes[name] for name in weights}
    words = ", ".join(f"{name} [{group}{', '.join(shape)}]" for name, shape in shown.items())
    sizes = "with group_sizes" if dims == 3 else "without group_sizes"
    layout = f"with transpose_weights={transpose_weights}"
    return f"x must be [M, K] and, {sizes} and {layout}, {words}"
