"""Random calls against float64: results and all gradients, within bounds derived from rounding (`oracle.py`).

The normal run has a sample of small ones, and the slow tests have more of them. `test_large` takes 100 larger
ones; for others, and to run many in pieces, `SPLASH_FUZZ=1000:1500` names the first seed and the one behind
the last.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from . import fuzz, oracle

IMPLEMENTATIONS = ("reference", "pallas")
SAMPLE = range(40)
QUICK = {
    "reference": (0, 6, 8, 9, 11, 14, 16, 18, 19, 20, 22, 23, 24, 25, 28, 29, 32, 35, 36, 37),
    "pallas": (6, 12, 14, 15, 19, 23, 24, 29, 32, 36),
}
"""Quick seeds that together have everything the whole sample has: the others are slow tests."""

every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def limits(impl: str, size: fuzz.Limits) -> fuzz.Limits:
    return replace(size, dtypes=fuzz.REFERENCE_DTYPES) if impl == "reference" else size


@pytest.mark.parametrize(
    ("seed", "impl"),
    [
        pytest.param(seed, impl, marks=() if seed in QUICK[impl] else pytest.mark.slow)
        for seed in SAMPLE
        for impl in IMPLEMENTATIONS
    ],
)
def test_small(seed: int, impl: str) -> None:
    case = fuzz.make_case(seed, limits(impl, fuzz.SMALL))
    oracle.check(case, oracle.run(case, impl=impl), impl)


@pytest.mark.slow
@every_implementation
def test_large(impl: str) -> None:
    first, last = map(int, os.environ.get("SPLASH_FUZZ", "0:100").split(":"))
    failures = []
    for seed in range(first, last):
        case = fuzz.make_case(seed, limits(impl, fuzz.LARGE))
        try:
            oracle.check(case, oracle.run(case, impl=impl), impl)
        except Exception as error:  # all seeds are tried, whatever goes wrong with one
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not failures, "\n\n".join(failures)


# The sample has what it is meant to have, and the check can fail. ---------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_quick_sample_has_everything(impl: str) -> None:
    size = limits(impl, fuzz.SMALL)
    cases = [fuzz.make_case(seed, size) for seed in QUICK[impl]]
    given = {name for case in cases for name in (*case.tensors, *case.options)}
    assert given >= {"bias", "alibi_slopes", "sinks", "table", "weights", "soft_cap", "dropout_p", "scale"}
    assert given >= {"q_segment_ids", "kv_segment_ids"}
    assert {case.tensors["query"].dtype for case in cases} == set(size.dtypes)
    descriptions = " ".join(repr(case.mask) for case in cases)
    for name in ("causal", "sliding_window", "chunked", "prefix_lm", "lengths", "key_padding", "segments"):
        assert name in descriptions
    assert all(sign in descriptions for sign in "&|^~")


@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_one_wrong_key_is_found(impl: str) -> None:
    """A mask that is wrong for one of 100 keys, the one that counts most, exceeds the tolerance."""
    q, k, v, g = torch.randn(4, 1, 1, 100, 64).bfloat16()
    visible = torch.ones(100, 100, dtype=torch.bool)
    case = oracle.Case({"query": q, "key": k, "value": v}, g, visible=visible)
    results = oracle.run(case, impl="reference")
    oracle.check(case, results, impl)
    wrong = visible.clone()
    wrong[50, (q @ k.mT)[0, 0, 50].argmax()] = False
    with pytest.raises(AssertionError, match="^o, element"):
        oracle.check(replace(case, visible=wrong), results, impl)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_gradient_off_by_a_percent_is_found(name: str) -> None:
    q, k, v, g = torch.randn(4, 1, 1, 100, 64).bfloat16()
    case = oracle.Case({"query": q, "key": k, "value": v}, g)
    results = oracle.run(case, impl="reference")
    oracle.check(case, results, "reference")
    largest = results[name].abs().flatten().argmax()
    results[name].flatten()[largest] *= 1.01
    with pytest.raises(AssertionError, match=f"^{name}, element"):
        oracle.check(case, results, "reference")


@pytest.mark.parametrize("changed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_wrong_gradients_in_bfloat16_are_found(changed: bool) -> None:
    """Where nothing but a scale makes the scores, and with a bias and sinks."""
    heads = 2 if changed else 1
    q, k, v, g = torch.randn(4, 1, heads, 100, 64).bfloat16()
    more = {"bias": torch.randn(1, heads, 100, 100).bfloat16(), "sinks": torch.randn(heads).bfloat16()}
    tensors = {"query": q, "key": k, "value": v, **(more if changed else {})}
    # Of one sign: the gradient of a sink, a sum over all queries, is then as large as its terms.
    case = oracle.Case(tensors, g, g_lse=torch.rand(1, heads, 100))
    results = oracle.run(case, impl="pallas")
    oracle.check(case, results, "pallas")
    for name in ("o", *tensors):
        for factor in (0.0, 0.97, 1.03):
            wrong = {**results, name: (results[name].double() * factor).to(results[name].dtype)}
            with pytest.raises(AssertionError, match=f"^{name}, "):
                oracle.check(case, wrong, "pallas")


def test_the_bound_holds_beside_a_sink_that_takes_nearly_all() -> None:
    """There what a gradient is the difference of is a thousand times as large: seeds 711 and 2132."""
    torch.manual_seed(1)
    q, k, v, g = torch.randn(4, 1, 2, 24, 8).bfloat16()
    v[:, :, 0] *= 2.0**-10
    tensors = {"bias": torch.randn(1, 2, 24, 24), "sinks": torch.full((2,), 8.0).bfloat16()}
    case = oracle.Case({"query": q, "key": k, "value": v, **tensors}, g)
    oracle.check(case, oracle.run(case, impl="pallas"), "pallas")


def test_bounds_are_close_to_what_happens() -> None:
    """The output's bound is some roundings of each sum it is made of, of 200 and of 64 terms."""
    q, k, v, g = torch.randn(4, 1, 2, 200, 64)
    case = oracle.Case({"query": q, "key": k, "value": v}, g)
    allowed = oracle.tolerances(case, "reference")["o"]
    assert np.mean(allowed) <= 8 * (200 + 64) * 2**-24 * float(v.abs().mean())
