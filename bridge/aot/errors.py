"""Why a function does not compile for a chip."""

from __future__ import annotations

from typing import Any


class CompileError(RuntimeError):
    """A function did not compile for a chip. `str()` has one sentence on each of what, where and what to do.

    Attributes:
        what: what is wrong, in plain words.
        chip: name of the chip; "" if it does not matter.
        kernel: name of the Pallas kernel; "" if unknown.
        where: "file:line" of the operation in the kernel, or of its `pallas_call`; "" if unknown.
        advice: what to do; "" if there is nothing to say.
        details: the text of JAX or of the compiler, as it came.
    """

    def __init__(
        self,
        what: str,
        *,
        chip: str = "",
        kernel: str = "",
        where: str = "",
        advice: str = "",
        details: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.chip = chip
        self.kernel = kernel
        self.where = where
        self.advice = advice
        self.details = details

    def __str__(self) -> str:
        place = f" (kernel {self.kernel!r})" if self.kernel else ""
        place += f" at {self.where}" if self.where else ""
        head = f"{self.chip}: {self.what}" if self.chip else self.what
        return f"{head}{place}." + (f" {self.advice}" if self.advice else "")

    def __reduce__(self) -> Any:  # the keyword arguments would be lost on the way to another process
        return _restore, (type(self), self.what, self.__dict__)


class CompilerMissing(CompileError):
    """The TPU compiler (the package libtpu) is not installed, or can't be used."""


class KernelRefused(CompileError):
    """JAX or the TPU compiler refuses the function: it asks for what the chip, or Pallas, can't do."""


class MemoryExceeded(KernelRefused):
    """The function needs more of a memory than there is.

    Attributes:
        space: `vmem`, `smem` or `hbm`.
        needed: bytes needed, as far as the compiler says: in all, or for the one allocation that failed.
        limit: bytes there are.
    """

    def __init__(
        self, what: str, *, space: str = "", needed: int = 0, limit: int = 0, **keywords: str
    ) -> None:
        super().__init__(what, **keywords)
        self.space = space
        self.needed = needed
        self.limit = limit


class VmemExceeded(MemoryExceeded):
    """A kernel needs more vector memory (VMEM) than it may use."""


class CompileTimeout(CompileError):
    """The compiler took longer than the given time. Its process was ended."""


class CompilerCrashed(CompileError):
    """The process of the compiler ended. `details` has the end of what it wrote to stderr."""


def _restore(kind: type[CompileError], what: str, state: dict[str, Any]) -> CompileError:
    error = kind(what)
    error.__dict__.update(state)
    return error
