"""What kernels say they can do compiles for TPUs: some of it here, all of it with --slow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import pytest

from tpu_kernels import _features
from tpu_kernels._features import CHIPS, Feature, refusal
from tpu_kernels.grouped_matmul import features as grouped_matmul
from tpu_kernels.splash_attention import features as splash_attention

FEATURES: dict[str, Sequence[Feature]] = {
    "splash_attention": splash_attention.features(),
    "grouped_matmul": grouped_matmul.features(),
}
QUICK = (
    ("splash_attention", "causal and segments"),
    ("splash_attention", "bias [B, 1, 1, S]"),
    ("splash_attention", "one query"),
    ("grouped_matmul", "SwiGLU, one array, transposed"),
    ("grouped_matmul", "int8 both, blocks of 128"),
)
ALL = [
    pytest.param(kernel, feature.name, id=f"{kernel}-{feature.name}")
    for kernel, features in FEATURES.items()
    for feature in features
]

every_kernel = pytest.mark.parametrize("kernel", FEATURES)


def named(kernel: str, name: str) -> Feature:
    (found,) = (feature for feature in FEATURES[kernel] if feature.name == name)
    return found


@every_kernel
def test_the_page_has_every_feature(kernel: str) -> None:
    path = Path(__file__).parents[2] / "docs" / f"{kernel}_features.md"
    rows = [line.split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[1] for row in rows] == [feature.name for feature in FEATURES[kernel]], (
        f"run: python -m tpu_kernels.{kernel}.features --markdown > docs/{kernel}_features.md"
    )


@every_kernel
def test_names_are_unique(kernel: str) -> None:
    names = [feature.name for feature in FEATURES[kernel]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("kernel", "name"), QUICK)
def test_some_features_compile(kernel: str, name: str) -> None:
    assert refusal(named(kernel, name), jnp.bfloat16, "tpu7x", gradient=True) is None


def test_the_table_says_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {("forward", "v5e"): None, ("gradient", "v5e"): "too large", ("forward", "v6e"): None}

    def told(feature: Feature, dtype: object, chip: str, *, gradient: bool) -> str | None:
        del feature, dtype
        return said.get(("gradient" if gradient else "forward", chip))

    monkeypatch.setattr(_features, "refusal", told)
    table = _features.markdown(FEATURES["grouped_matmul"][:1], [jnp.float32], ["v5e", "v6e"]).splitlines()
    assert table[0] == "| | | float32, v5e | float32, v6e |"
    assert table[2] == "| products | rows of each group times its matrix | gradient: too large | yes |"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("kernel", "name"), ALL)
def test_every_feature_compiles(kernel: str, name: str, dtype: type, chip: str) -> None:
    for gradient in (False, True):
        assert refusal(named(kernel, name), dtype, chip, gradient=gradient) is None
