"""Ranks of torch.distributed that run a distributed kernel together, where no TPU is.

`run` calls a function on N ranks, threads of this process; under torchrun each process is one. A mesh from
`get_pallas_mesh` and `jax_op(mesh=)` make an op of a kernel that talks to other chips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.lazy import lazy_names

if TYPE_CHECKING:
    from bridge.ranks.meeting import RankFailed as RankFailed
    from bridge.ranks.meeting import RankMissing as RankMissing
    from bridge.ranks.meeting import RanksDisagree as RanksDisagree
    from bridge.ranks.mesh import get_pallas_mesh as get_pallas_mesh
    from bridge.ranks.threads import RankError as RankError
    from bridge.ranks.threads import RankTimeout as RankTimeout
    from bridge.ranks.threads import blocking as blocking
    from bridge.ranks.threads import current_rank as current_rank
    from bridge.ranks.threads import run as run

_HOMES = {
    "RankError": "threads",
    "RankFailed": "meeting",
    "RankMissing": "meeting",
    "RankTimeout": "threads",
    "RanksDisagree": "meeting",
    "blocking": "threads",
    "current_rank": "threads",
    "get_pallas_mesh": "mesh",
    "run": "threads",
}

__all__ = [
    "RankError",
    "RankFailed",
    "RankMissing",
    "RankTimeout",
    "RanksDisagree",
    "blocking",
    "current_rank",
    "get_pallas_mesh",
    "run",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
