"""What is tuned: kernels of a catalog and functions. What can't run is known before it is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from autotune.search import Subject, field_groups, function_subject, kernel_subject
from autotune.search.gate import difference, problem_to_check
from autotune.search.subject import tiling_text
from autotune.tune import NothingWorks, tune
from bridge.chips import chip
from tpu_kernels.catalog import CATALOG

from .formulas import FormulaScorer, make_subject, score

SPECS = {spec.name: spec for spec in CATALOG}
SHAPES = {
    "rms_norm": {"x": (64, 200)},
    "layer_norm": {"x": (64, 200)},
    "splash_attention": {"q": (1, 1, 256, 64)},
    "grouped_matmul": {"lhs": (256, 128), "rhs": (2, 128, 128)},
}
X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def subject_of(name: str, **options: Any) -> Subject:
    spec = SPECS[name]
    return kernel_subject(spec.make_problem(SHAPES[name], "float32"), spec, chip("v6e"), **options)


# Kernels of a catalog -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_the_space_of_a_kernel(spec: Any) -> None:
    subject = subject_of(spec.name)
    problem = spec.make_problem(SHAPES[spec.name], "float32")
    assert {c.tiling for c in subject.candidates} == {c.tiling for c in spec.space(problem, chip("v6e"))}
    assert subject.default == spec.default_tiling(problem, chip("v6e"))
    forward, backward = subject.workloads(subject.default)
    assert forward.name == f"{problem} forward {tiling_text(subject.default)}"
    assert backward.name == f"{problem} backward {tiling_text(subject.default)}"
    assert forward.bytes_read == spec.costs(problem)["forward"].bytes_read
    (only,) = subject_of(spec.name, phases=("backward",)).workloads(subject.default)
    assert only.name == backward.name


def test_sizes_that_are_not_varied_stay_at_the_default() -> None:
    fields = ("tile_q", "tile_kv", "sub_q", "sub_kv")
    subject = subject_of("splash_attention", fields=fields)
    assert len(subject.candidates) > 1
    names = [field.name for field in dataclasses.fields(subject.default)]
    varied = {n for n in names if len({getattr(c.tiling, n) for c in subject.candidates}) > 1}
    assert varied == set(fields)


def test_groups_of_sizes() -> None:
    assert field_groups(subject_of("rms_norm")) == (("tile_rows",),)
    output, dlhs, drhs = field_groups(
        kernel_subject(
            SPECS["grouped_matmul"].make_problem({"lhs": (1024, 512)}, "bfloat16"),
            SPECS["grouped_matmul"],
            chip("v6e"),
        )
    )
    assert output == ("tile_m", "tile_k", "tile_n")
    assert dlhs == tuple(f"dlhs_{name}" for name in output)
    assert drhs == tuple(f"drhs_{name}" for name in output)
    with pytest.raises(ValueError, match="no default"):
        field_groups(dataclasses.replace(make_subject(), default=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": ("sideways",)}, "phases must be of forward, backward, got sideways"),
        ({"phases": ()}, "phases must be of"),
        ({"fields": ("tile_z",)}, "has tile sizes tile_rows, got tile_z"),
    ],
)
def test_phases_and_fields_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subject_of("rms_norm", **options)


@pytest.mark.parametrize("name", ["v5e", "v6e", "tpu7x"])
def test_what_needs_more_vmem_than_the_chip_has_is_left_out(name: str) -> None:
    spec, on = SPECS["rms_norm"], chip(name)
    subject = kernel_subject(spec.make_problem({"x": (8192, 4096)}, "float32"), spec, on)
    for candidate in subject.candidates:
        assert candidate.legal == (candidate.vmem_bytes <= on.vmem_limit_bytes)
    illegal = [candidate for candidate in subject.candidates if not candidate.legal]
    assert illegal and all(f"{name} allows" in candidate.reasons[0] for candidate in illegal)
    scorer = FormulaScorer(lambda tiling: 1.0)
    scored: list[Any] = []

    def one(workload: Any) -> Any:
        scored.append(workload.name)
        return score(1.0, on=name)

    scorer.score = one
    tuned = tune(subject, scorer, strategy="exhaustive", budget=99, check=False)
    assert set(tuned.pruned) == set(illegal)
    assert not any(tiling_text(candidate.tiling) in text for candidate in illegal for text in scored)


def test_a_problem_that_no_tiling_computes() -> None:
    spec = SPECS["rms_norm"]
    subject = kernel_subject(spec.make_problem({"x": (64, 200)}, "float16"), spec, chip("v6e"))
    with pytest.raises(NothingWorks, match="x is float16 and the kernel computes with"):
        tune(subject, FormulaScorer(lambda tiling: 1.0))


# Functions ----------------------------------------------------------------------------------------


def double(x: jax.Array, *, tile: int, wrong: str = "no") -> jax.Array:
    """Twice `x`; wrong in ways that only a run shows."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * {"no": 2.0, "a bit": 2.001, "nan": float("nan")}[wrong]

    block = pl.BlockSpec((tile, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // tile,),
        in_specs=[block],
        out_specs=block,
    )(x)


def test_all_combinations_of_a_function() -> None:
    subject = function_subject(
        double, (X,), {"tile": (8, 16, 32), "wrong": ("no", "nan")}, chip("v5e"), matmul_flops=7
    )
    assert len(subject.candidates) == 6 and subject.name == "double"
    tiling = subject.candidates[0].tiling
    assert (tiling.tile, tiling.wrong) == (8, "no")
    (workload,) = subject.workloads(tiling)
    assert workload.name == "double [tile=8, wrong=no]" and workload.matmul_flops == 7
    assert jax.eval_shape(workload.fn, *workload.avals).shape == X.shape


@pytest.mark.parametrize("limit", [None, 20_000])
def test_a_function_just_below_and_above_the_limit(limit: int | None) -> None:
    on = chip("v5e")
    most = on.vmem_limit_bytes if limit is None else limit
    subject = function_subject(
        double, (X,), {"tile": (8, 16)}, on,
        vmem_bytes=lambda tile: most + (tile == 16), vmem_limit_bytes=limit,
    )  # fmt: skip
    below, above = subject.candidates
    assert below.legal and below.vmem_bytes == most
    assert above.reasons == (f"it needs at least {most + 1} bytes of VMEM and v5e allows {most}",)


def test_reasons_of_a_function() -> None:
    subject = function_subject(
        double, (X,), {"tile": (8, 24)}, chip("v5e"),
        illegal_reasons=lambda tile: [] if 64 % tile == 0 else ["64 rows are no multiple"],
        default={"tile": 8},
    )  # fmt: skip
    assert [c.reasons for c in subject.candidates] == [(), ("64 rows are no multiple",)]
    assert subject.default == subject.candidates[0].tiling


@pytest.mark.parametrize(("sizes", "default"), [({}, None), ({"tile": ()}, None), ({"tile": (8,)}, {"m": 8})])
def test_sizes_that_make_no_sense(sizes: dict[str, Any], default: dict[str, int] | None) -> None:
    with pytest.raises(ValueError, match="sizes|at least one value"):
        function_subject(double, (X,), sizes, chip("v5e"), default=default)


# Right results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [s for s in CATALOG if "norm" in s.name], ids=lambda spec: spec.name)
def test_kernels_give_right_results(spec: Any) -> None:
    subject = subject_of(spec.name)
    assert subject.check is not None
    assert subject.check(subject.default) == ""


def test_products_and_their_gradients_are_right() -> None:
    subject = subject_of("grouped_matmul", phases=("forward",))
    assert subject.check is not None
    assert subject.check(subject.default) == ""


@pytest.mark.parametrize("broken", ["value", "gradient", "nan", "raises"])
def test_a_wrong_kernel_never_wins(broken: str) -> None:
    spec = SPECS["rms_norm"]
    right = spec.fn

    def fn(x: jax.Array, weight: jax.Array, *, tiling: Any, **options: Any) -> jax.Array:
        y = right(x, weight, tiling=tiling, **options)
        if tiling.tile_rows != 16:
            return y
        if broken == "raises":
            raise NotImplementedError("not with 16 rows")
        if broken == "gradient":
            return y + 1e-3 * (x - jax.lax.stop_gradient(x))
        return y.at[3, 5].set(float("nan") if broken == "nan" else 0.0)

    subject = kernel_subject(
        spec.make_problem({"x": (64, 200)}, "float32"),
        dataclasses.replace(spec, fn=fn),
        chip("v6e"),
        phases=("forward", "backward") if broken == "gradient" else ("forward",),
    )

    def seconds(workload: Any) -> Any:
        return score(1.0 if "tile_rows=16]" in workload.name else 2.0)

    scorer = FormulaScorer(lambda tiling: 1.0)
    scorer.score = seconds
    tuned = tune(subject, scorer, strategy="exhaustive", budget=99)
    assert tuned.best is not None and tuned.best.candidate.tiling.tile_rows == 8
    (wrong,) = [outcome for outcome in tuned.outcomes if outcome.status == "wrong"]
    expected = {
        "value": "the output is wrong: element [3, 5] is 0,",
        "gradient": "the gradient of x is wrong",
        "nan": "1 of 12800 elements are NaN",
        "raises": "NotImplementedError: not with 16 rows",
    }
    assert wrong.candidate.tiling.tile_rows == 16 and expected[broken] in wrong.reason
    assert tune(subject, scorer, strategy="exhaustive", budget=99, check=False).best != tuned.best


def test_a_wrong_function_never_wins() -> None:
    sizes = {"tile": (8, 16), "wrong": ("a bit", "nan", "no")}
    subject = function_subject(double, (X,), sizes, chip("v6e"), reference=lambda x: 2 * x)
    scorer = FormulaScorer(lambda tiling: 1.0)
    scorer.score = lambda workload: score(1.0)
    tuned = tune(subject, scorer, strategy="exhaustive", budget=6)
    assert tuned.best is not None and tuned.best.candidate.tiling.wrong == "no"
    assert {o.candidate.tiling.wrong for o in tuned.outcomes if o.status == "wrong"} == {"a bit", "nan"}
    loose = function_subject(double, (X,), sizes, chip("v6e"), reference=lambda x: 2 * x, tolerance=0.01)
    best = tune(loose, scorer, strategy="exhaustive", budget=6).best
    assert best is not None and best.candidate.tiling.wrong == "a bit"


def test_a_large_problem_is_checked_on_an_example() -> None:
    spec = SPECS["rms_norm"]
    small = spec.make_problem({"x": (64, 200)}, "float32")
    assert problem_to_check(small, spec, chip("v6e")) == small
    large = spec.make_problem({"x": (1 << 16, 8192)}, "float32")
    chosen = problem_to_check(large, spec, chip("v6e"))
    assert chosen in [example.problem for example in spec.examples if not example.benchmark]
    assert chosen is not None and chosen.required("x").dtype == "float32"
    none = dataclasses.replace(spec, examples=())
    assert problem_to_check(large, none, chip("v6e")) is None


def test_differences() -> None:
    one = np.ones((2, 3), np.float32)
    assert difference(one, one, 0.0) == ""
    assert difference(one, one.astype(np.float64) * (1 + 1e-9), 0.0) == ""
    assert "element [1, 2] is 2, 1 was expected" in difference(one + np.eye(2, 3, 1) * [[0], [1]], one, 0.1)
    assert "shape is [2, 3]" in difference(one, one[:1], None)
    assert "6 of 6 elements are NaN" in difference(one * np.nan, one, None)
    assert difference(one * np.nan, one * np.nan, None) == ""
    assert difference(one * np.inf, one * np.inf, None) == ""
    assert difference(one * np.inf, one, None)
    assert difference(np.arange(3), np.arange(3), None) == ""
    assert difference(np.arange(3), np.arange(3) + 1, None)
    assert difference(one[:0], one[:0], None) == ""
