"""What the tests over torch's operator database (test_opinfo.py) except, one by one, each with its reason.

FAILURES and MIXED_DEVICES are kept true: an op that no longer needs its entry makes a test fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Failure:
    """An op that works on the CPU and not on tpu.

    Attributes:
        reason: why, for people.
        error: a regular expression that the error on tpu matches.
    """

    reason: str
    error: str


_SPARSE = "aten::_to_sparse.*dense .strided. tensors only"

FAILURES: dict[str, Failure] = {
    "sparse.mm.reduce": Failure("Takes a sparse matrix, which the device does not hold.", _SPARSE),
    "sparse.sampled_addmm": Failure("Takes a sparse matrix, which the device does not hold.", _SPARSE),
    "to_sparse": Failure("Gives a sparse tensor, which the device does not hold.", _SPARSE),
}
"""Ops that fail on tpu: at most one in a hundred of those that work on the CPU."""

UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Ops whose elements are whatever was in memory: only size, strides, dtype and device are compared."""

TOLERANCES: dict[tuple[str, torch.dtype], float] = {
    # The CPU has a fused kernel; on tpu, as on other new devices, torch computes it from matrix products.
    ("nn.functional.scaled_dot_product_attention", torch.float32): 1e-4,
    # torch chooses by the name of the device where it rounds to the lower precision.
    ("nn.functional.linear_cross_entropy.chunked", torch.bfloat16): 3e-2,
    ("nn.functional.linear_cross_entropy.chunked", torch.float16): 4e-3,
    ("nn.functional.linear_cross_entropy.chunked_none", torch.bfloat16): 3e-2,
    ("nn.functional.linear_cross_entropy.chunked_none", torch.float16): 4e-3,
}
"""Ops that torch computes in another way than on the CPU: the tolerance, absolute and relative. Strides are
not compared."""

MIXED_DEVICES: dict[str, str] = {
    "_unsafe_masked_index": "An indexing op: index tensors may be on the CPU.",
    "_unsafe_masked_index_put_accumulate": "An indexing op: index tensors may be on the CPU.",
    "as_strided_scatter": "Copies the second tensor into a copy of the first: copies cross devices.",
    "atleast_1d": "Looks at each tensor by itself.",
    "atleast_2d": "Looks at each tensor by itself.",
    "atleast_3d": "Looks at each tensor by itself.",
    "broadcast_tensors": "Views of each tensor by itself.",
    "diagonal_scatter": "Copies the second tensor into a copy of the first: copies cross devices.",
    "expand_as": "Uses the shape of the second tensor only.",
    "index_put": "An indexing op: index tensors may be on the CPU.",
    "nn.functional.ctc_loss": "torch moves targets and lengths to where it wants them.",
    "reshape_as": "Uses the shape of the second tensor only.",
    "resize_as_": "Uses the shape of the second tensor only.",
    "select_scatter": "Copies the second tensor into a copy of the first: copies cross devices.",
    "slice_scatter": "Copies the second tensor into a copy of the first: copies cross devices.",
    "view_as": "Uses the shape of the second tensor only.",
}
"""Ops that take tensors of tpu and CPU together, as they do on cuda."""
