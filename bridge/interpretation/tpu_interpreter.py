"""JAX's TPU interpreter, set up for a simulated chip: tile padding, random numbers, recovery after an error.

Private names of that interpreter live in this module and nowhere else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch
from jax._src.pallas.mosaic import primitives as mosaic_primitives
from jax._src.pallas.mosaic import tpu_info
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu

from bridge.interpretation import analysis, simulated_chip

_CHIP_VERSIONS = {
    "v5e": tpu_info.ChipVersion.TPU_V5E,
    "v5p": tpu_info.ChipVersion.TPU_V5P,
    "v6e": tpu_info.ChipVersion.TPU_V6E,
    "tpu7x": tpu_info.ChipVersion.TPU_7X,
}


def params_for(eqn: core.JaxprEqn) -> pltpu.InterpretParams:
    """How the TPU interpreter runs one kernel.

    Memory starts as NaN. A read or write beyond an array raises, except within the padding that a TPU's
    tiled layout has there (NaN when read, dropped when written), which ragged pipelines rely on.
    """
    _set_up()
    bounds = "logical" if analysis.has_wide_elements(eqn) else "padded"
    return pltpu.InterpretParams(
        uninitialized_memory="nan", out_of_bounds_reads="raise", buffer_bounds=bounds
    )


def reset() -> None:
    """See `interpretation.reset_interpreter`."""
    dispatch.runtime_tokens.clear()
    pltpu.reset_tpu_interpret_mode_state()


@functools.cache
def _set_up() -> None:
    """Once per process: JAX's interpreter asks the CPU for its tiling, and by itself draws only zeros."""
    tpu_info.registry.setdefault("cpu", _simulated_tpu_info)
    register = interpret_pallas_call.register_tpu_interpret_impl
    register(mosaic_primitives.prng_seed_p)(_prng_seed)
    register(mosaic_primitives.prng_random_bits_p)(_prng_random_bits)


def _simulated_tpu_info() -> Any:
    return pltpu.get_tpu_info_for_chip(_CHIP_VERSIONS[simulated_chip()], 1)


class _Generator:
    """The random number generator of the simulated core. Its bits are good, but not those a TPU draws."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._bits = np.random.Generator(np.random.Philox(0))
        self.has_drawn = False

    def seed(self, *seeds: Any) -> None:
        words = [int(seed) & 0xFFFFFFFF for seed in seeds]
        self._bits = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        self.has_drawn = True
        return self._bits.integers(-(2**31), 2**31, shape, dtype=np.int32)


_generator = _Generator()


def reset_random_bits() -> None:
    """Have the next program draw what it would draw in a new process."""
    _generator.reset()


def has_drawn_random_bits() -> bool:
    """Whether a kernel has, since the last `reset_random_bits`."""
    return _generator.has_drawn


def _prng_seed(*seeds: jax.Array) -> list[jax.Array]:
    io_callback(_generator.seed, None, *seeds, ordered=True)
    return []


def _prng_random_bits(*, shape: tuple[int, ...]) -> jax.Array:
    result = jax.ShapeDtypeStruct(shape, np.dtype(np.int32))
    return io_callback(functools.partial(_generator.draw, shape), result, ordered=True)
