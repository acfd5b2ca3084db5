"""What `import torch` brings: the `tpu` device, with `torch.tpu` and `torch.tpu.pallas`.

torch calls `autoload` through the entry point group "torch.backends" at the end of its own import,
so nothing here imports JAX, torch's compiler, or anything else that costs time.
"""

from __future__ import annotations

import logging

from bridge import device, precedence


def autoload() -> None:
    """Entry point: register the simulated device and `torch.tpu.pallas`.

    Does nothing where another backend serves the process: `torch_tpu` with "tpu", or a backend that
    has taken torch's one out-of-tree device. `import torch` must work there; `device.register()` says
    what is in the way.
    """
    try:
        device.register()
    except device.DeviceTakenError as error:
        # A machine without a TPU, and torch_tpu was found first: the user expects a device and has none.
        level = logging.WARNING if precedence.torch_tpu_loaded() else logging.DEBUG
        logging.getLogger(__name__).log(level, "%s", error)
