"""The entry point of the stand-in: registers "tpu" where there is a TPU."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


def load() -> None:
    if os.environ.get("STUB_TPU") != "1":
        return
    from bridge.device import ops

    module = ModuleType("torch.tpu", "The device module of the stand-in for torch_tpu.")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: os.environ.get("STUB_TPU_NAME", "TPU v6e"),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    module.__dict__.update(functions)
    _setup_privateuseone_for_python_backend("tpu", backend_module=module)
    ops.register_ops()  # its own kernels: the device it stands for computes, here they do
