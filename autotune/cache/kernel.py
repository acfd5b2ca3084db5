"""What the cache must know of a kernel: the names in its key, and how its tilings are read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.cache.source import digest
from autotune.problem import Problem
from bridge.chips import Chip

if TYPE_CHECKING:
    from autotune.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel whose tilings are cached. One object for each kernel: two are never equal.

    Attributes:
        name: its name, as in its problems.
        tiling_type: frozen dataclass of the tile sizes; its fields are bools, numbers, strings or None.
        modules: names of the modules that make the kernel; of a package, all modules in it. When their code
            changes, what was tuned before holds no longer. Empty: the package of `tiling_type`, or its module
            where that lies in no package.
        illegal_reasons: `illegal_reasons(problem, tiling, chip)`: why the kernel cannot run so; empty if it
            can. None: every tiling that its type accepts can.
        bucket: `bucket(problem)`: the problem that stands for all those which want the same tiling. None:
            every problem is tuned by itself.
    """

    name: str
    tiling_type: type
    modules: tuple[str, ...] = ()
    illegal_reasons: Callable[[Problem, Any, Chip], tuple[str, ...]] | None = None
    bucket: Callable[[Problem], Problem] | None = None

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.tiling_type):
            raise TypeError(f"{self.name}: tiling_type must be a dataclass, got {self.tiling_type!r}")

    @classmethod
    def of(cls, spec: KernelSpec) -> Kernel:
        """The one of a `KernelSpec`, each time the same object.

        A spec that names none gets one with the defaults. Legal is what its space says is legal; what the
        space does not have is not.
        """
        if spec.cached_as is not None:
            return spec.cached_as
        made = _made.get(id(spec))
        if made is None or made[0] is not spec:

            def illegal_reasons(problem: Problem, tiling: Any, on: Chip) -> tuple[str, ...]:
                for candidate in spec.space(problem, on):
                    if candidate.tiling == tiling:
                        return candidate.reasons
                return ("the kernel's space does not have it",)

            made = (spec, cls(spec.name, spec.tiling_type, illegal_reasons=illegal_reasons))
            _made[id(spec)] = made
        return made[1]

    @property
    def package(self) -> str:
        """Name of the top-level package, where shipped tilings lie."""
        return self.tiling_type.__module__.partition(".")[0]

    def source_digest(self) -> str:
        """Digest of the kernel's code; `unreadable` where there is no source. See `autotune.cache.source`."""
        module = self.tiling_type.__module__
        return digest(self.modules or (module.rpartition(".")[0] or module,))

    def make_tiling(self, fields: dict[str, Any]) -> Any:
        """The tiling with these fields. Raises `TypeError` or `ValueError` if there is no such tiling."""
        return self.tiling_type(**fields)


_made: dict[int, tuple[KernelSpec, Kernel]] = {}
"""By the spec's id; the spec is kept, so that no other object gets its id."""
