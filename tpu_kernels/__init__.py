"""TPU kernels for PyTorch, written in JAX Pallas. They run on `tpu` and `cpu` tensors, with or without a TPU.

    import tpu_kernels

    y = tpu_kernels.rms_norm(x, (4096,), weight)
    tpu_kernels.replace_modules(model)      # torch.nn norms of a model become ours

`tpu_kernels.catalog` lists all kernels.
"""

import bridge as _bridge  # noqa: F401  before torch: it settles which package serves the device "tpu"
from tpu_kernels import nn as nn
from tpu_kernels.layer_norm.api import layer_norm as layer_norm
from tpu_kernels.nn import replace_modules as replace_modules
from tpu_kernels.rms_norm.api import rms_norm as rms_norm
