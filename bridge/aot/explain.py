"""What JAX and the TPU compiler say when they refuse a function, put into plain words.

`rules` has the patterns of messages and what they mean. A message that no rule knows is given as it came.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.aot.errors import CompileError, CompilerMissing, KernelRefused, MemoryExceeded, VmemExceeded
from bridge.aot.rules import COMPILER_RULES, LOWERING_RULES, in_plain_words
from bridge.chips import Chip


def explain_compiler(text: str, chip: Chip, kernels: Sequence[tuple[str, str]] = ()) -> CompileError:
    """The error for a refusal of the compiler on `chip`.

    Args:
        text: of its exception.
        kernels: name and "file:line" of each kernel in the program, for refusals that do not say where.
    """
    if re.search(r"Failed to (parse|deserialize) the Mosaic module", text):
        versions = re.search(r"expected <= (\d+) but got (\d+)", text)
        numbers = f" (it knows version {versions[1]}, and JAX writes {versions[2]})" if versions else ""
        return CompilerMissing(
            f"libtpu is too old for this JAX: it can't read its kernels{numbers}",
            advice="Install one that fits: pip install -U libtpu, or pip install 'jax[tpu]'",
            details=text,
        )
    exceeded = [error for rule in _MEMORY_RULES if (error := rule(text, chip)) is not None]
    error = exceeded[0] if exceeded else _refused(text, chip)
    if error.kernel or getattr(error, "space", "") in ("vmem", "smem"):  # it is about a kernel
        # The compiler calls a kernel without a name after its function, so the only one there is is meant.
        meant = kernels if len(kernels) == 1 else [k for k in kernels if k[0] in error.kernel]
        if len(meant) == 1:
            error.kernel, error.where = meant[0][0], error.where or meant[0][1]
    return error


def _refused(text: str, chip: Chip) -> CompileError:
    found = re.search(r"HLO name `([^`]+)`: (?:E\d+: \w+: )?(.*?)(?:\n|$)", text)
    kernel, message = (found[1], found[2]) if found else ("", _first_line(text))
    wide = re.search(r"X\{64\|128\} element types.*?%([\w.\-]+) = (\w+)\[", text, re.S)
    if wide:
        kernel, message = wide[1], f"{wide[2]} operand"
    what, advice = in_plain_words(message + "\n" + text, COMPILER_RULES)
    return KernelRefused(
        what or f"the compiler refuses it: {message.rstrip('. ')}",
        chip=chip.name,
        kernel=_kernel_name(kernel),
        where=_location(text),
        advice=advice,
        details=text,
    )


def explain_lowering(error: Exception, chip: Chip, *, where: str = "", kernel: str = "") -> CompileError:
    """The error for a refusal of JAX while it lowers a function for `chip`.

    Args:
        where, kernel: the place of the operation, if the caller knows it better than the traceback.
    """
    text = f"{type(error).__name__}: {error}"
    what, advice = in_plain_words(text, LOWERING_RULES)
    block = re.search(r"Block spec for (\S+) in pallas_call (\S+) at (\S+) has", text)
    captured = re.search(r"in the pallas_call (\S+) at (\S+) captures", text)
    where = user_frame(error) or where
    if block:
        kernel, where = block[2], block[3]
    elif captured:
        kernel = captured[1]
    return KernelRefused(
        what or f"JAX can't lower it for a TPU: {_first_line(_bare(str(error))).rstrip('. ')}",
        chip=chip.name,
        kernel=kernel,
        where=where,
        advice=advice,
        details=text,
    )


def known_refusal(error: Exception) -> bool:
    """Whether a rule knows this error of JAX. While tracing, others are the user's own Python errors."""
    return bool(in_plain_words(f"{type(error).__name__}: {error}", LOWERING_RULES)[0])


# Memory -------------------------------------------------------------------------------------------


def _scoped_vmem(text: str, chip: Chip) -> CompileError | None:
    """A kernel's blocks, scratch and temporaries against the limit it runs under."""
    found = re.search(r"Scoped allocation with size (\S+) and limit (\S+) exceeded scoped vmem limit", text)
    if not found:
        return None
    name = re.search(r"on stack for %([\w.\-]+) =", text)
    return _exceeded("vmem", _bytes(found[1]), _bytes(found[2]), name[1] if name else "", text, chip)


def _allocation(text: str, chip: Chip) -> CompileError | None:
    """One allocation that is larger than the memory it is in."""
    found = re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)", text)
    if not found:
        return None
    space = re.search(r"space=(\w+)", text)
    name = re.search(r"\] :: ([\w.\-]+)", text)
    tag = re.search(r"tag = '([^'.]+)", text)
    return _exceeded(
        space[1] if space else "memory",
        int(found[1]),
        int(found[2]),
        name[1] if name else "",
        text,
        chip,
        of=f" for one allocation ({tag[1].strip()})" if tag else "",
    )


def _used(text: str, chip: Chip) -> CompileError | None:
    """A whole memory that is too small for what the program keeps in it."""
    found = re.search(r"memory space (\w+)\. Used (\S+) of (\S+) \w+", text)
    if found:
        return _exceeded(found[1], _bytes(found[2]), _bytes(found[3]), "", text, chip)
    found = re.search(r"Ran out of memory on HBM.*?\((\S+)\) exceeds available HBM \((\S+)\)", text, re.S)
    return _exceeded("hbm", _bytes(found[1]), _bytes(found[2]), "", text, chip) if found else None


_MEMORY_RULES: tuple[Callable[[str, Chip], CompileError | None], ...] = (_scoped_vmem, _allocation, _used)


def _exceeded(
    space: str, needed: int, limit: int, kernel: str, text: str, chip: Chip, of: str = ""
) -> CompileError:
    kind = VmemExceeded if space == "vmem" else MemoryExceeded
    own_limit = space == "vmem" and limit < chip.vmem_bytes * 0.9  # XLA keeps a little of it all for itself
    there_is = "a kernel may use" if own_limit else "there are"
    advice = {"vmem": _vmem_advice(needed, limit, chip), "smem": _SMEM_ADVICE, "hbm": _HBM_ADVICE}
    return kind(
        f"it needs {_mebibytes(needed)} of {space.upper()}{of}, and {there_is} {_mebibytes(limit)}",
        space=space,
        needed=needed,
        limit=limit,
        chip=chip.name,
        kernel=_kernel_name(kernel),
        advice=advice.get(space, ""),
        details=text,
    )


def _vmem_advice(needed: int, limit: int, chip: Chip) -> str:
    smaller = "Use smaller blocks or less scratch (blocks are held twice while the next ones are fetched)"
    if limit < needed < chip.vmem_bytes:
        return (
            f"{smaller}; or allow the kernel more: pltpu.CompilerParams(vmem_limit_bytes={needed}). "
            f"{chip.name} has {_mebibytes(chip.vmem_bytes)} for each core"
        )
    return f"{smaller}. {chip.name} has {_mebibytes(chip.vmem_bytes)} for each core"


_SMEM_ADVICE = (
    "SMEM holds scalars: pass fewer as scalar prefetch, or keep the array in HBM (memory_space=pl.ANY) and "
    "copy parts of it to an SMEM scratch. An int32 takes 4 bytes, and 2-D arrays are padded"
)
_HBM_ADVICE = "Use smaller arrays, donate inputs, or spread the arrays over a mesh of chips"


def _bytes(text: str) -> int:
    """`15.75G`, `64.0K`, `128.00M.` or `512` in bytes."""
    found = re.match(r"([\d.]+?)\.?([KMGT]?)i?B?\.?$", text.strip(",;"))
    if not found:
        return 0
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


# Words --------------------------------------------------------------------------------------------


def _bare(text: str) -> str:
    """Without the phrase that JAX puts before what a verifier says."""
    return re.sub(r"^Pallas encountered an internal.*?Error details: ", "", text, flags=re.S)


def _first_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line]
    return lines[0][:300] if lines else "no reason given"


def _kernel_name(name: str) -> str:
    """The name of a kernel from that of its instruction: XLA adds a number."""
    return re.sub(r"\.\d+$", "", name)


# Places -------------------------------------------------------------------------------------------

_HERE = str(Path(__file__).parent)
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))


def is_user_file(name: str) -> bool:
    """Whether a file is not of JAX, Python, another installed package or this one."""
    jax = sys.modules.get("jax")
    inside = [*_LIBRARIES, _HERE, str(Path(jax.__file__).parent.parent) if jax and jax.__file__ else _HERE]
    return not name.startswith("<") and not any(Path(name).is_relative_to(library) for library in inside)


def _location(text: str) -> str:
    """The user's innermost line in the compiler's `at location: loc(...)`, else in its Python stack."""
    located = re.search(r"at location: loc\((.*)", text)
    if located:
        places = re.findall(r'"([^"]+)":(\d+):\d+', located[1])
    else:
        places = re.findall(r"^\s+(/\S+?):(\d+)(?::\d+)? \[", text, re.M)
    mine = [place for place in places if is_user_file(place[0])] or places
    return f"{mine[0][0]}:{mine[0][1]}" if mine else ""


def user_frame(error: BaseException) -> str:
    """The user's innermost line in the traceback of an error, and of those it came from.

    JAX lowers long after it traced; it gives the stack of the tracing as the cause of the error.
    """
    seen: BaseException | None = error
    while seen is not None:
        frames = [f for f in traceback.extract_tb(seen.__traceback__) if is_user_file(f.filename)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
        seen = seen.__cause__ or seen.__context__
    return ""
