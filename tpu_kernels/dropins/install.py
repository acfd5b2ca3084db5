"""`install()`, for the device `tpu` and the whole process; `overrides()`, for any device and a block.

    import torch
    import tpu_kernels

    tpu_kernels.install()                  # on tpu tensors, attention and grouped_mm are ours from here on

    with tpu_kernels.overrides():          # on cpu tensors too, in this thread, inside this block
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)

Importing the package changes nothing: a program's numbers change where it says so.
"""

from __future__ import annotations

import sys
import threading

import torch

from tpu_kernels.dropins.overriding import overrides as overrides
from tpu_kernels.dropins.registry import DROP_INS

_lock = threading.RLock()
_installed = False


def install() -> None:
    """Let our kernels compute torch's attention functions and `F.grouped_mm` on tensors of the device `tpu`.

    These are `F.scaled_dot_product_attention` with all that calls it (`nn.MultiheadAttention`, transformer
    layers, names imported before), `torch.nn.attention.bias`, `torch.nn.attention.varlen`, `flex_attention`
    and `F.grouped_mm`. Hugging Face models can ask for `attn_implementation="tpu_splash"` and
    `experts_implementation="tpu_grouped_matmul"`. What a kernel does not do (float64 attention, nested
    tensors, forward-mode derivatives) stays with torch's own computation, and so does everything inside
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    It holds for all threads of the process, until `uninstall()`. Tensors of other devices are not concerned.
    A second call does nothing. Functions that `torch.compile` has compiled are compiled again at their next
    call (`torch.compiler.reset()`); programs that `torch.export` made keep the attention function as an op,
    which is looked up when they run.

    Raises:
        RuntimeError: there is no device `tpu` in this process.
    """
    global _installed
    with _lock:
        if _installed:
            return
        name = torch._C._get_privateuse1_backend_name()
        if name != "tpu":
            raise RuntimeError(
                f"tpu_kernels.install(): this process has no device 'tpu'; torch's place for a device "
                f"from outside is held by {name!r}. `import bridge` before anything else registers it."
            )
        enabled = []
        try:
            for drop_in in DROP_INS:
                enabled.append(drop_in)
                drop_in.enable()
        except BaseException:
            for drop_in in reversed(enabled):
                drop_in.disable()
            raise
        _installed = True
        _forget_compiled()


def uninstall() -> None:
    """Undo `install()`: torch's own functions are back, as they were. Without `install()` it does nothing."""
    global _installed
    with _lock:
        if not _installed:
            return
        _installed = False
        for drop_in in reversed(DROP_INS):
            drop_in.disable()
        _forget_compiled()


def is_installed() -> bool:
    """Whether `install()` holds."""
    return _installed


def _forget_compiled() -> None:
    """A compiled function does not notice that an op has another kernel now."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
