"""Devices of JAX's CPU backend that stand for the TPUs of several ranks, in a client of their own.

JAX's own CPU backend has one device, unless a program asks for more before it starts. A further client is
made here instead, at any time and for any number, and with enough threads: the TPU interpreter holds one for
each device while it waits for another's, and copying an operand of 100 KiB or more needs one besides. With
the threads of two cores, kernels over several devices never end.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import jax

from bridge.arrays import cpu_device

_VARIABLE = "PJRT_NPROC"
_making = threading.Lock()


def simulated_devices(count: int) -> tuple[Any, ...]:
    """`count` devices that run one program together: the same ones every time."""
    first = cpu_device()  # JAX is set up
    if count == 1:
        return (first,)
    with _making:
        return tuple(_client(count).devices())


@functools.cache
def _client(count: int) -> Any:
    try:
        # Private: the public way must come before JAX starts.
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        make = xla_client.make_cpu_client
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"this jax ({jax.__version__}) has no jax._src.lib.xla_client.make_cpu_client, by which ranks "
            f"are simulated; use jax >= 0.10.2"
        ) from error
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(2 * count + 2)
    try:
        return make(asynchronous=False, num_devices=count)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
