"""Programs whose kernels are checked while they run in JAX's TPU interpreter.

`with_checks` marks the kernels of a program, and `checking` puts the checked classes into the interpreter's
place, for as long as a run of the program takes. Tracing such a program happens in there, too.

Like `interpreter_watch`, this knows private names of the interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu

from bridge.interpretation import analysis, interpreter_watch, tpu_interpreter
from bridge.interpretation.observer import Observer, place
from bridge.interpretation.ref_usage import subjaxprs
from bridge.interpretation.shadows import Given
from bridge.interpretation.signs import Kernel
from bridge.interpretation.walk import Walk

try:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call, shared_memory
    from jax._src.pallas.mosaic.interpret import utils as interpret_utils

    from bridge.interpretation import checked_memory

    _KNOWN = (
        interpret_pallas_call.DMA,
        interpret_utils.get_uninitialized_array,
        interpret_utils.pad_to_block_dimension,
        interpret_pallas_call._get_randomized_grid_coordinates,
        interpret_pallas_call._get_parallel_dim_semantics,
        interpret_pallas_call._initialize_shared_memory,
        interpret_pallas_call._clear_shared_memory,
        interpret_pallas_call._validate,
        interpret_pallas_call._update_clocks_for_device_barrier,
        shared_memory.SharedMemory.swap_buffer_content,
        shared_memory.Semaphore.enqueue_task,
    )
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"bridge.sanitize looks into JAX's TPU interpreter, and that of jax {jax.__version__} is not the one "
        f"it knows ({error}); use jax 0.10.2, or a bridge that is made for this version."
    ) from error


class _SeedOfTheRun(int):
    """Stands for the seed of the run: the grid's order is drawn when the program runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedParams(pltpu.InterpretParams):
    """How a checked kernel is interpreted, and what is known of it."""

    kernel: Kernel = Kernel("a kernel", "")

    def get_vector_clock_size(self, num_devices: int) -> int:
        """Places in clocks: for each core, and for copies."""
        return num_devices * self.num_cores_per_device + checked_memory.COMPONENTS_OF_COPIES


def with_checks(jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A program from `interpret_kernels(..., "tpu")`, with its kernels checked."""
    return _Checks().value(jaxpr)


def kernels_of(jaxpr: core.ClosedJaxpr) -> tuple[tuple[str, str], ...]:
    """Name and line of each checked kernel of a program."""
    found = []
    pending = [jaxpr.jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            params = eqn.params.get("interpret") if analysis.is_kernel(eqn) else None
            if isinstance(params, CheckedParams):
                found.append((params.kernel.name, params.kernel.line))
            else:
                pending.extend(subjaxprs(eqn.params))
    return tuple(dict.fromkeys(found))


class _Checks(Walk):
    def eqn(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if not analysis.is_kernel(eqn):
            return self.nested(eqn)
        own = eqn.params["interpret"]
        if not isinstance(own, pltpu.InterpretParams):
            return eqn
        bounds = tpu_interpreter.params_for(eqn).buffer_bounds
        checked = CheckedParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
            buffer_bounds=bounds,
            random_seed=_SeedOfTheRun(),
            num_cores_or_threads=own.num_cores_or_threads,
            allow_hbm_allocation_in_run_scoped=own.allow_hbm_allocation_in_run_scoped,
            kernel=_described(eqn),
        )
        return eqn.replace(params={**eqn.params, "interpret": checked})


def _described(eqn: core.JaxprEqn) -> Kernel:
    params = eqn.params["compiler_params"]
    number = getattr(params, "collective_id", None)
    meets = getattr(params, "allow_collective_id_without_custom_barrier", False)
    alone = getattr(params, "skip_device_barrier", False)
    semaphores, buffers = _names(eqn)
    return Kernel(
        name=analysis.kernel_name(eqn),
        line=place(eqn.source_info),
        semaphores=semaphores,
        buffers=buffers,
        makes_own_barrier=alone or (number is not None and not meets),
        collective_id=number,
    )


def _names(eqn: core.JaxprEqn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a kernel's semaphores and buffers, as the interpreter allocates them."""
    mapping = eqn.params.get("grid_mapping")
    if mapping is None:  # of a kernel over a core mesh, little is known before it is interpreted
        return (), ()
    jaxpr = eqn.params["jaxpr"]
    names = getattr(jaxpr.debug_info, "arg_names", None)
    if not names or len(names) != len(jaxpr.invars):
        return (), ()
    spaces = [str(getattr(var.aval, "memory_space", "")) for var in jaxpr.invars]
    first = mapping.num_index_operands
    inputs = names[first : first + mapping.num_inputs]
    aliased = {output for _, output in eqn.params.get("input_output_aliases", ())}
    outputs = names[first + mapping.num_inputs :][: mapping.num_outputs]
    buffers = [*inputs, *(name for i, name in enumerate(outputs) if i not in aliased), *names[:first]]
    semaphores: list[str] = []
    for name, var, space in list(zip(names, jaxpr.invars, spaces, strict=True))[first:]:
        if "semaphore" in space:
            shape = getattr(var.aval, "shape", ())
            semaphores.extend(f"{name}{list(i) if i else ''}" for i in np.ndindex(*shape))
        elif space not in ("any", "hbm"):
            buffers.append(name)
    return tuple(semaphores), tuple(map(str, buffers))


# In the interpreter's place -------------------------------------------------------------------------


@contextlib.contextmanager
def checking(observer: Observer) -> Iterator[None]:
    """Within this context, the interpreter uses checked classes, for marked kernels.

    The caller holds `interpreter_lock(..., observer)`.
    """
    tpu_interpreter.reset_random_bits()
    module: Any = interpret_pallas_call
    before = (
        module.DMA,
        module.interpret_utils,
        module._get_randomized_grid_coordinates,
        module.source_info_util,
    )
    module.DMA = checked_memory.CheckedCopy
    module.interpret_utils = _Utilities(before[1])
    module._get_randomized_grid_coordinates = _grid_coordinates(before[2])
    module.source_info_util = _SourceLines(before[3])
    interpreter_watch.use_marks(_marks.of)
    try:
        yield
    finally:
        interpreter_watch.use_marks(None)
        _marks.clear()
        (
            module.DMA,
            module.interpret_utils,
            module._get_randomized_grid_coordinates,
            module.source_info_util,
        ) = before


class _Marks(threading.local):
    """What the arrays hold that a traced program gives to new buffers; of the kernel that is being traced."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, Given]] = {}

    def clear(self) -> None:
        """Forget all arrays."""
        self._given.clear()

    def set(self, array: Any, given: Given) -> Any:
        """Remember it for an array."""
        self._given[id(array)] = array, given
        return array

    def get(self, array: Any) -> Given | None:
        """What is known of an array."""
        found = self._given.get(id(array))
        return found[1] if found is not None and found[0] is array else None

    def of(self, args: Sequence[Any]) -> Given | None:
        """What is known of the last of a callback's arguments."""
        return self.get(args[-1]) if args else None


_marks = _Marks()


class _Utilities:
    """The interpreter's module `utils`, as it sees it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_uninitialized_array(self, shape: Any, dtype: Any, *args: Any) -> Any:
        """An array that stands for memory that nobody has written."""
        array = self._module.get_uninitialized_array(shape, dtype, *args)
        return _marks.set(array, Given(tuple(shape), written=False))

    def pad_to_block_dimension(self, value: Any, *args: Any) -> Any:
        """An array with padding, so that blocks divide it."""
        known = _marks.get(value) or Given(tuple(value.shape), written=True)
        return _marks.set(self._module.pad_to_block_dimension(value, *args), known)


class _SourceLines:
    """JAX's module `source_info_util`, as the interpreter sees it.

    An operation of `emit_pipeline` does not know the line that it comes from; what is around it does.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def user_context(self, traceback: Any, **options: Any) -> Any:
        """A context in which operations are traced as coming from a line."""
        if self._module.user_frame(traceback) is None:
            traceback = self._module.current().traceback
        return self._module.user_context(traceback, **options)


def _grid_coordinates(usual: Any) -> Any:
    def coordinates(grid: Any, mosaic_params: Any, random_seed: Any) -> Any:
        if not isinstance(random_seed, _SeedOfTheRun):
            return usual(grid, mosaic_params, random_seed)
        parallel = interpret_pallas_call._get_parallel_dim_semantics(mosaic_params, len(grid))
        return tuple(
            _order(index, int(size)) if is_parallel else jnp.array((), jnp.int32)
            for index, (size, is_parallel) in enumerate(zip(grid, parallel, strict=True))
        )

    return coordinates


def _order(index: int, size: int) -> jax.Array:
    """The order of steps along a parallel dimension of the grid, drawn when the program runs."""

    def draw() -> np.ndarray:
        run = interpreter_watch.current_run()
        if run is None or not run.seed:
            return np.arange(size, dtype=np.int32)
        if run.seed == 1:
            return np.arange(size, dtype=np.int32)[::-1].copy()
        return np.random.default_rng((run.seed, index)).permutation(size).astype(np.int32)

    if size < 2:
        return jnp.arange(size, dtype=jnp.int32)
    return io_callback(draw, jax.ShapeDtypeStruct((size,), np.dtype(np.int32)))
