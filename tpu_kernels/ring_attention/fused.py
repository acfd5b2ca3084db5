"""A hop as one kernel: splash attention over the keys that are here, while they travel on.

`composed` has the same functions, of kernels without remote copies.
"""

from __future__ import annotations

from tpu_kernels.collectives.shipment import ship
from tpu_kernels.splash_attention.backward import partial_backward
from tpu_kernels.splash_attention.kernel import forward, partial_forward

advance = partial_forward
finish = forward
gradients = partial_backward
move = ship
