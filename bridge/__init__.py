"""bridge: JAX and Pallas functions as torch ops, and a simulated `tpu` device where no TPU is.

Importing this package imports neither JAX nor a device; its names are loaded when first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bridge import precedence
from bridge.lazy import lazy_names

if TYPE_CHECKING:
    from bridge.arrays import copy_reason as copy_reason
    from bridge.arrays import to_jax as to_jax
    from bridge.arrays import to_torch as to_torch
    from bridge.counters import Stats as Stats
    from bridge.counters import reset_stats as reset_stats
    from bridge.counters import stats as stats
    from bridge.interpretation import current_mode as current_mode
    from bridge.interpretation import interpret as interpret
    from bridge.op import JaxOp as JaxOp
    from bridge.op import jax_op as jax_op
    from bridge.precision import emulate_precision as emulate_precision
    from bridge.program import NotDifferentiable as NotDifferentiable
    from bridge.ranks.mesh import get_pallas_mesh as get_pallas_mesh
    from bridge.sanitizer.findings import Finding as Finding
    from bridge.sanitizer.report import SanitizerError as SanitizerError
    from bridge.sanitizer.report import SanitizerReport as SanitizerReport
    from bridge.sanitizer.report import sanitize as sanitize

if "torch" not in sys.modules:
    precedence.watch()  # so that `import torch` loads the simulated device where there is no TPU

_HOMES = {
    "Finding": "sanitizer.findings",
    "JaxOp": "op",
    "NotDifferentiable": "program",
    "SanitizerError": "sanitizer.report",
    "SanitizerReport": "sanitizer.report",
    "Stats": "counters",
    "copy_reason": "arrays",
    "current_mode": "interpretation",
    "emulate_precision": "precision",
    "get_pallas_mesh": "ranks.mesh",
    "interpret": "interpretation",
    "jax_op": "op",
    "reset_stats": "counters",
    "sanitize": "sanitizer.report",
    "stats": "counters",
    "to_jax": "arrays",
    "to_torch": "arrays",
}

__all__ = [
    "Finding",
    "JaxOp",
    "NotDifferentiable",
    "SanitizerError",
    "SanitizerReport",
    "Stats",
    "copy_reason",
    "current_mode",
    "emulate_precision",
    "get_pallas_mesh",
    "interpret",
    "jax_op",
    "reset_stats",
    "sanitize",
    "stats",
    "to_jax",
    "to_torch",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
