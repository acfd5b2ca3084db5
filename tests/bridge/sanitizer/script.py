"""A script for `python -m bridge.sanitize`: `script.py RANKS FAULT` (or by torchrun), `script.py STATUS`."""

from __future__ import annotations

import os
import sys

import planted
import torch
import torch.distributed as dist

from bridge import ranks

if __name__ == "__main__":
    print("the script has", sys.argv[1:])
    if len(sys.argv) == 2:
        planted.copied_in("before")(torch.ones(8, 128))
        sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
    size, fault = int(sys.argv[1]), sys.argv[2]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        planted.sent_right(fault)
        dist.destroy_process_group()
    elif size > 1:
        ranks.run(planted.sent_right, size, fault)
    else:
        planted.shifted_rows(planted.read_beyond, int(fault))(torch.ones(16, 128))
