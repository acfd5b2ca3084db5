"""One process of several that run `checks.py`; started by torchrun: `launch.py FOLDER DEVICE NAMES`."""

from __future__ import annotations

import datetime
import sys
import traceback
import warnings
from pathlib import Path

import checks
import torch
import torch.distributed as dist


def main() -> None:
    """Run checks, and leave a file for each that passed, or its error."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    folder, device, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        try:
            getattr(checks, name)(rank, size, device)
            (folder / f"{name}.{rank}").touch()
        except Exception:
            (folder / f"{name}.{rank}.failed").write_text(traceback.format_exc())
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
