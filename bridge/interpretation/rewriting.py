"""Sets every Pallas kernel of a jaxpr to be interpreted: the work of `interpretation.interpret_kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax.experimental.pallas import tpu as pltpu

from bridge.interpretation import (
    Interpreted,
    InvalidKernel,
    KernelNotInterpretable,
    KernelRun,
    analysis,
    tpu_interpreter,
)
from bridge.interpretation.ref_usage import subjaxprs
from bridge.interpretation.walk import Walk


def rewrite(jaxpr: core.ClosedJaxpr, mode: str) -> Interpreted:
    """See `interpretation.interpret_kernels`."""
    rewriter = _Rewriter(mode)
    new = rewriter.value(jaxpr)
    return Interpreted(new, tuple(rewriter.kernels))


class _Rewriter(Walk):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.kernels: list[KernelRun] = []

    def eqn(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if analysis.is_kernel(eqn):
            return self.kernel(eqn)
        new = self.nested(eqn)
        if new is eqn:
            return eqn
        nested = set().union(*(jaxpr.effects for jaxpr in subjaxprs(new.params)))
        new = new.replace(effects=eqn.effects | (nested & analysis.interpreter_effects()))
        platforms = new.params.get("branches_platforms")
        if platforms is not None:  # jax.lax.platform_dependent: as on a TPU, not as on this CPU
            index = core.Literal(np.int32(_branch_for_tpu(platforms)), eqn.invars[0].aval)
            params = {**new.params, "branches_platforms": None}
            return new.replace(invars=[index, *eqn.invars[1:]], params=params)
        return new

    def kernel(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        name = analysis.kernel_name(eqn)
        own = eqn.params["interpret"]
        if analysis.is_never_launched(eqn):
            self.kernels.append(
                KernelRun(name, "fast", "It is not launched: the grid or every output is empty.")
            )
            return _without_launch(eqn)
        verdict = analysis.examine(eqn)
        if verdict.fault is not None:
            raise InvalidKernel(f"the Pallas kernel {name!r} can't work on a TPU. {verdict.fault}")
        not_fast, not_tpu = verdict.not_fast, verdict.not_tpu
        if not_tpu is not None and not_fast is not None:
            raise KernelNotInterpretable(
                f"the Pallas kernel {name!r} can't be run without a TPU. Not by plain interpretation: "
                f"{not_fast} Not in JAX's TPU interpreter: {not_tpu}"
            )
        if isinstance(own, pltpu.InterpretParams):
            return self._in_tpu_interpreter(eqn, name, own, "The kernel itself asks for the TPU interpreter.")
        if not_fast is not None:
            return self._in_tpu_interpreter(eqn, name, None, not_fast)
        if self.mode == "tpu" and not_tpu is None:
            return self._in_tpu_interpreter(eqn, name, None, 'The mode is "tpu".')
        reason = "Plain interpretation gives what a TPU gives."
        if not_tpu is not None and self.mode == "tpu":
            reason = f"The TPU interpreter can't run it: {not_tpu}"
        self.kernels.append(KernelRun(name, "fast", reason))
        return eqn.replace(params={**eqn.params, "interpret": True})

    def _in_tpu_interpreter(
        self, eqn: core.JaxprEqn, name: str, own: pltpu.InterpretParams | None, reason: str
    ) -> core.JaxprEqn:
        self.kernels.append(KernelRun(name, "tpu", reason))
        params = {**eqn.params, "interpret": own or tpu_interpreter.params_for(eqn)}
        params["compiler_params"] = _with_supported_semantics(params["compiler_params"])
        effects = eqn.effects | analysis.interpreter_effects()
        return eqn.replace(params=params, effects=effects)


def _branch_for_tpu(platforms: Sequence[tuple[str, ...] | None]) -> int:
    """The branch `platform_dependent` takes on a TPU; None stands for the default one."""
    named = [index for index, names in enumerate(platforms) if names is not None and "tpu" in names]
    return named[0] if named else list(platforms).index(None)


def _with_supported_semantics(compiler_params: Any) -> Any:
    """The TPU interpreter shuffles parallel grid dimensions and refuses those that don't come first."""
    semantics = getattr(compiler_params, "dimension_semantics", None)
    if semantics is None:
        return compiler_params
    parallel = [getattr(item, "name", item) in ("parallel", "PARALLEL") for item in semantics]
    if parallel == sorted(parallel, reverse=True):
        return compiler_params
    return dataclasses.replace(compiler_params, dimension_semantics=None)


def _without_launch(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """The outputs of a kernel that never runs: the aliased input, else uninitialised memory."""
    skipped = eqn.params["grid_mapping"].num_dynamic_grid_bounds
    sources = {output: skipped + operand for operand, output in eqn.params["input_output_aliases"]}

    def outputs(*operands: jax.Array) -> list[jax.Array]:
        return [
            operands[sources[i]] if i in sources else jax.numpy.asarray(analysis.uninitialized(aval))
            for i, aval in enumerate(eqn.params["out_avals"])
        ]

    jaxpr = jax.make_jaxpr(outputs)(*(var.aval for var in eqn.invars))
    return eqn.replace(primitive=core.closed_call_p, params={"call_jaxpr": jaxpr}, effects=core.no_effects)
