"""Ops over a mesh: what `checks.py` checks, by ranks that are threads and by ranks that are processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
import torch
import torch.distributed as dist
from jax.sharding import PartitionSpec as P

import bridge
from bridge import get_pallas_mesh, jax_op, ranks
from bridge.ranks import meeting
from bridge.ranks.mesh import mesh_of_ranks

from . import checks

_SCRIPT = Path(__file__).with_name("launch.py")
_SECONDS = 400
_SMALL = ["check_a_shift", "check_both_axes_of_a_mesh", "check_gradients", "check_different_calls"]


_LAST = "check_a_rank_that_does_not_come"


def _of_2(name: str) -> bool:
    """Whether a check makes sense for two ranks."""
    return name != "check_both_axes_of_a_mesh"


@pytest.mark.parametrize("name", checks.CHECKS)
@pytest.mark.parametrize(
    ("size", "device"),
    [
        (4, "cpu"),
        (2, "tpu"),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in ((8, "cpu"), (4, "tpu"))],
    ],
)
def test_threads(name: str, size: int, device: str) -> None:
    ranks.run(lambda: getattr(checks, name)(dist.get_rank(), size, device), size)


@functools.cache
def _processes(size: int, device: str, folder: Path) -> str:
    """What the processes printed; the folder has a file for each check that passed."""
    names = [name for name in checks.CHECKS if _of_2(name)] if size == 2 else list(_SMALL)
    names.append(_LAST)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = os.environ | {"BRIDGE_RANKS_TIMEOUT": "60"}
    process = subprocess.Popen(
        [*launch, str(_SCRIPT), str(folder), device, ",".join(names)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        return process.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes then
        return f"not done after {_SECONDS} seconds\n{process.communicate()[0]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.parametrize(
    ("size", "device", "name"),
    [
        *[(2, "cpu", name) for name in [*checks.CHECKS, _LAST] if _of_2(name)],
        *[(4, "tpu", name) for name in [*_SMALL, _LAST]],
        *[pytest.param(8, "cpu", name, marks=pytest.mark.slow) for name in _SMALL],
    ],
)
def test_processes(size: int, device: str, name: str, folder: Path) -> None:
    own = folder / f"{size}{device}"
    own.mkdir(exist_ok=True)
    output = _processes(size, device, own)
    missing = [rank for rank in range(size) if not (own / f"{name}.{rank}").exists()]
    errors = "\n".join(path.read_text() for path in own.glob("*.failed"))
    assert not missing, f"{name} did not pass on the ranks {missing}:\n{errors}\n{output[-3000:]}"


# Alone ----------------------------------------------------------------------------------------------


def test_a_mesh_of_one_rank_needs_no_process_group() -> None:
    mesh = mesh_of_ranks([0], "x")
    shift = checks.shift_op("ranks_alone::shift", mesh, P("x"))
    x = torch.arange(6.0).requires_grad_()
    y = shift(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(checks.gradient(x), torch.ones(6))


def test_a_mesh_of_several_needs_them() -> None:
    with pytest.raises(RuntimeError, match=r"torchrun, or run the function with bridge\.ranks\.run"):
        get_pallas_mesh("x")
    shift = checks.shift_op("ranks_alone::shift_of_two", mesh_of_ranks([0, 1], "x"), P("x"))
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        shift(torch.ones(4))


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (("x", "y"), None, "need mesh_shape="),
        (("x", "y"), (4,), "a name of its own and a size"),
        (("x", "x"), (2, 2), "a name of its own"),
        ("x", (3,), "must have 4 ranks"),
    ],
)
def test_meshes_that_do_not_fit(names: str, shape: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_of_ranks(range(4), names, shape)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": None, "input_partition_specs": [P()]}, ValueError, "pass mesh="),
        ({"mesh": "x"}, TypeError, "must come from get_pallas_mesh"),
        (
            {"input_partition_specs": [P(), P()]},
            ValueError,
            r"one spec for each tensor argument \(x\), got 2",
        ),
        ({"input_partition_specs": [P("z")]}, ValueError, "of argument 'x' is .*the mesh has the axes x"),
        ({"input_partition_specs": [P("x", "x")]}, ValueError, "an axis can divide one dimension only"),
        ({"input_partition_specs": ["x"]}, TypeError, "must be a PartitionSpec"),
        ({"output_partition_specs": [P(), P()]}, ValueError, r"one spec for each result \(1\), got 2"),
    ],
)
def test_specs_that_do_not_fit(options: dict[str, object], error: type[Exception], message: str) -> None:
    def same(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(error, match=message):
        jax_op("ranks_alone::refused", same, **({"mesh": mesh_of_ranks([0, 1], "x")} | options))  # type: ignore[call-overload]


def test_a_spec_of_more_dimensions_than_the_tensor() -> None:
    shift = checks.shift_op("ranks_alone::shift_rows", mesh_of_ranks([0], "x"), P(None, "x"))
    with pytest.raises(ValueError, match="argument 'x' has 1 dimensions, and its partition spec"):
        shift(torch.ones(4))


def test_every_rank_must_come() -> None:
    """The others are told who did not, by `run` at once."""
    mesh = mesh_of_ranks([0, 1, 2], "x")

    def program() -> None:
        shift = checks.shift_op("ranks_alone::shift_missing", mesh, P("x"))
        if dist.get_rank() != 1:
            shift(torch.ones(4))

    with pytest.raises(ranks.RankTimeout, match=r"rank 0, waiting in .*, for ranks? .*1"):
        ranks.run(program, 3)


def test_ops_made_again_by_a_later_run_are_new() -> None:
    def program(factor: float) -> torch.Tensor:
        mesh = get_pallas_mesh("x")

        @jax_op("ranks_alone::scaled", mesh=mesh, input_partition_specs=P("x"), output_partition_specs=P("x"))
        def scaled(x: jax.Array) -> jax.Array:
            return x * factor

        return scaled(torch.ones(2))

    for factor in (2.0, 3.0):
        for result in ranks.run(program, 2, factor):
            assert torch.equal(result, torch.full((2,), factor))


def test_the_backward_runs_in_the_mode_of_the_forward() -> None:
    modes: list[str] = []

    @jax_op(
        "ranks_alone::square",
        mesh=mesh_of_ranks([0], "x"),
        input_partition_specs=P(),
        output_partition_specs=P(),
    )
    def square(x: jax.Array) -> jax.Array:
        modes.append(bridge.current_mode())
        return x * x

    x = torch.arange(3.0).requires_grad_()
    with bridge.interpret("tpu"):
        y = square(x)
    forward = len(modes)
    y.sum().backward()
    assert set(modes[forward:]) == {"tpu"}


def test_who_is_missing_does_not_depend_on_earlier_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups one after the other have the same name, and another store."""
    stores = [dist.HashStore(), dist.HashStore()]
    group = types.SimpleNamespace(group_name="0")
    arrivals: list[meeting._Arrivals] = []
    for store in stores:
        monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _, store=store: store)
        arrivals = [meeting._Arrivals(dist, group) for _ in range(3)]  # type: ignore[arg-type]
        for rank in (0, 2) if store is stores[1] else (0, 0, 1, 1, 2):
            arrivals[rank].come(rank)
    assert arrivals[0].missing(0, [0, 1, 2]) == [1]
