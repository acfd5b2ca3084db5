"""`torch.tpu.eager_mode`: what the modes of torch_tpu mean on the simulated device."""

from __future__ import annotations

import logging
import threading

import jax
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import bridge
from bridge.device import execution

EagerMode = torch.tpu.EagerMode
DEBUG = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


def _rows_from(x: jax.Array, start: jax.Array) -> jax.Array:
    """Eight rows of x (n, 128), from row start[0] on."""

    def kernel(start_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(start_ref[0], 8), :]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
    )(start, x)


rows_from = bridge.jax_op("test_execution::rows_from", _rows_from)


def _call(start: int) -> torch.Tensor:
    x = torch.arange(16 * 128, dtype=torch.float32, device="tpu").reshape(16, 128)
    return rows_from(x, torch.tensor([start], dtype=torch.int32, device="tpu"))


def test_ops_run_as_they_are_called_from_the_start() -> None:
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_modes_have_the_names_of_torch_tpu() -> None:
    assert [mode.name for mode in EagerMode] == [
        "DEFER_AND_FUSE",
        "DEFER_NEVER",
        "DEFER_NEVER_AND_LAUNCH_BLOCKING",
    ]


def test_debugging_finds_an_access_out_of_bounds_that_passes_otherwise() -> None:
    assert _call(12)[0, 0] == 8 * 128  # clamped: the last eight rows
    with torch.tpu.set_eager_mode(DEBUG):
        assert _call(8)[0, 0] == 8 * 128
        with pytest.raises(RuntimeError, match="Out-of-bounds read"):
            _call(12)
    assert _call(12)[0, 0] == 8 * 128


@pytest.mark.parametrize("mode", list(EagerMode))
def test_results_do_not_depend_on_the_mode(mode: torch.tpu.EagerMode) -> None:
    with torch.tpu.set_eager_mode(mode):
        x = torch.ones(3, device="tpu").mul(2).add_(1)
        assert x.tolist() == [3, 3, 3] and _call(3)[0, 0] == 3 * 128


def test_setting_the_mode_holds_for_the_process() -> None:
    seen = []
    torch.tpu.eager_mode = DEBUG
    try:
        thread = threading.Thread(target=lambda: seen.append((torch.tpu.eager_mode, bridge.current_mode())))
        thread.start()
        thread.join()
    finally:
        torch.tpu.eager_mode = EagerMode.DEFER_NEVER
    assert seen == [(DEBUG, "tpu")]
    assert bridge.current_mode() == "fast"


def test_a_context_holds_for_its_thread_and_ends() -> None:
    seen = []
    with torch.tpu.set_eager_mode(DEBUG):
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.eager_mode))
        thread.start()
        thread.join()
        with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
            assert bridge.current_mode() == "fast"
        assert bridge.current_mode() == "tpu"
        torch.tpu.eager_mode = EagerMode.DEFER_NEVER  # of this context
        assert bridge.current_mode() == "fast"
    assert seen == [EagerMode.DEFER_NEVER] and torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_an_interpret_context_wins_over_the_mode() -> None:
    with bridge.interpret("fast"), torch.tpu.set_eager_mode(DEBUG):
        assert bridge.current_mode() == "fast"


def test_what_is_no_mode_is_refused() -> None:
    for wrong in ("debug", None, 2):
        with pytest.raises(TypeError, match="expected one of torch.tpu.EagerMode.DEFER_AND_FUSE"):
            torch.tpu.eager_mode = wrong
        with pytest.raises(TypeError, match="got"), torch.tpu.set_eager_mode(wrong):
            pass
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_settings_that_do_nothing_say_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_said", set())
    with caplog.at_level(logging.INFO, "bridge.device"):
        for _ in range(2):
            with torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE):
                pass
            torch.tpu.allow_excess_precision = True
    assert torch.tpu.allow_excess_precision is True
    torch.tpu.allow_excess_precision = False
    assert [r.message.partition(" does nothing")[0] for r in caplog.records] == [
        "torch.tpu.EagerMode.DEFER_AND_FUSE",
        "torch.tpu.allow_excess_precision",
    ]
