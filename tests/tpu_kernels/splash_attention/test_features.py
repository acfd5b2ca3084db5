"""What splash attention says it can do compiles for TPUs: some of it here, all of it with --slow."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from tpu_kernels.splash_attention.features import CHIPS, Feature, features, refusal

FEATURES = {feature.name: feature for feature in features()}
QUICK = ("causal and segments", "bias [B, 1, 1, S]", "one query")


def test_the_page_has_every_feature() -> None:
    path = Path(__file__).parents[3] / "docs" / "splash_attention_features.md"
    rows = [line.split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[1] for row in rows] == list(FEATURES), (
        "run: python -m tpu_kernels.splash_attention.features --markdown > docs/splash_attention_features.md"
    )


def test_names_are_unique() -> None:
    assert len(FEATURES) == len(features())


@pytest.mark.parametrize("name", QUICK)
def test_some_features_compile(name: str) -> None:
    assert refusal(FEATURES[name], jnp.bfloat16, "tpu7x", gradient=True) is None


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES.keys())
def test_every_feature_compiles(feature: Feature, dtype: type, chip: str) -> None:
    for gradient in (False, True):
        assert refusal(feature, dtype, chip, gradient=gradient) is None
