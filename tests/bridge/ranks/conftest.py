"""Whatever ranks did, all is as before afterwards."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def _state() -> dict[str, Any]:
    """All that a run changes and must put back, besides random numbers."""
    future: Any = torch._C.Future
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHINDUCTOR"))},
        "world": (
            type(c10d._world),
            c10d._world.default_pg,
            len(c10d._world.pg_map),
            c10d._world.group_count,
        ),
        "waits": (dist.Work.wait, dist.Work.is_completed, future.wait, future.done),
        "patched": (c10d._new_process_group_helper, torch.compile),
        "kernels": [
            name
            for name in torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect")
            if name.startswith("c10d::")
        ],
        "hooks": (
            sys.excepthook,
            threading.excepthook,
            torch._C._distributed_c10d.get_debug_level(),
            c10d._default_pg_init_method,
        ),
        "compile": getattr(dynamo, "set_eval_frame_isolate_recompiles_id", None) if dynamo else None,
        "initialized": dist.is_initialized(),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("rank ")],
    }


@pytest.fixture(autouse=True)
def _all_is_put_back() -> Iterator[None]:
    before = _state()
    if before["compile"] is None:
        before.pop("compile")
    yield
    after = _state()
    for name, value in before.items():
        assert after[name] == value, name
