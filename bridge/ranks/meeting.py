"""One call of a distributed op: the ranks meet, one of them computes for all, and each gets its results.

1. Every rank tells what it calls. If they differ, all raise; one that does not come is named after a while.
2. The first rank of the mesh gathers the others' inputs.
3. It runs the program for all (`simulation`), and tells whether that worked; if not, all raise.
4. It hands out the results.

The ranks may be processes (torchrun) or threads (`bridge.ranks.run`): only torch.distributed is used.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bridge.dtypes import FLOAT4_PACKED
from bridge.program import Program
from bridge.ranks.mesh import group_of, ranks_of
from bridge.ranks.simulation import simulate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_VARIABLE = "BRIDGE_RANKS_TIMEOUT"
_DIGEST = 32


_note: contextvars.ContextVar[str] = contextvars.ContextVar("bridge_ranks_note", default="")


@contextlib.contextmanager
def agreeing_on(note: str) -> Iterator[None]:
    """In this context, calls of ops over a mesh are the same only if all ranks have the same note.

    For functions around such ops that would give wrong numbers where ranks do other things with the results.
    """
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


class RanksDisagree(RuntimeError):
    """The ranks of a mesh do not make the same call."""


class RankFailed(RuntimeError):
    """Another rank could not do its part of a call; the message says which, and why."""


class RankMissing(TimeoutError):
    """A rank did not come to a call in time."""


def execute(
    program: Program, tensors: Sequence[torch.Tensor], place: torch.device, wide: bool
) -> list[torch.Tensor]:
    """Run a program of an op over a mesh, together with the mesh's other ranks.

    Args:
        tensors: this rank's.
        place: where they are, and the results go.
        wide: whether JAX must keep 64 bits.

    Raises:
        RanksDisagree: another rank calls another op, or with other shapes, dtypes or settings.
        RankFailed: the program failed, or a rank did.
        RankMissing: a rank did not come within BRIDGE_RANKS_TIMEOUT seconds (default 300).
    """
    sharding = program.definition.sharding
    assert sharding is not None
    ranks = ranks_of(sharding.mesh)
    host = [_readable(tensor) for tensor in tensors]
    if len(ranks) == 1:
        outs = simulate(program, [host], wide)[0]
    else:
        outs = _Meeting(program, group_of(ranks), ranks).hold(host, wide)
    return [out.to(place) for out in outs]


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the CPU's memory, row by row."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is FLOAT4_PACKED:
        raise TypeError("a distributed op takes no float4 tensors; convert them")
    return tensor.resolve_conj().resolve_neg().contiguous()


class _Meeting:
    """One call of a program by the ranks of a mesh."""

    def __init__(self, program: Program, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._program = program
        self._group = group
        self._ranks = ranks  # by position
        self._members = dist.get_process_group_ranks(group)  # by rank in the group
        self._me = dist.get_rank()
        self._leader = ranks[0]
        # "tpu_dist" serves tensors of the tpu alone
        known = {str(device) for device in getattr(group, "_device_types", ())}
        self._device = torch.device("tpu" if known and "cpu" not in known else "cpu")

    def hold(self, tensors: list[torch.Tensor], wide: bool) -> list[torch.Tensor]:
        """This rank's results."""
        self._agree(tensors, wide)
        given = self._gather(_bytes_of(tensors))
        failure = ""
        results: list[list[torch.Tensor]] = []
        if given is not None:
            inputs = [_tensors_from(given[rank], tensors) for rank in self._ranks]
            error: Exception | None = None
            try:
                results = simulate(self._program, inputs, wide)
            except Exception as caught:
                error = caught
                failure = f"{type(caught).__name__}: {caught}"
            described = (
                [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in results[0]] if results else []
            )
            self._tell(json.dumps([failure, described]))
            if error is not None:
                raise error
        else:
            failure, described = json.loads(self._tell(None))
            if failure:
                raise RankFailed(
                    f"{self._program.definition.name} failed for all ranks, on rank {self._leader}, which "
                    f"ran it: {failure}"
                )
        like = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in described]
        parts = {rank: _bytes_of(out) for rank, out in zip(self._ranks, results, strict=False)}
        return _tensors_from(self._scatter(parts, like), like)

    # -- the steps ------------------------------------------------------------------------------------

    def _agree(self, tensors: Sequence[torch.Tensor], wide: bool) -> None:
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        call = json.dumps([self._program.name, shapes, wide, self._ranks, _note.get()])
        mine = torch.frombuffer(bytearray(hashlib.sha256(call.encode()).digest()), dtype=torch.uint8)
        found = torch.empty(len(self._ranks) * _DIGEST, dtype=torch.uint8, device=self._device)
        # renamed by torch, which warns of the old name
        gather = getattr(self._dist, "all_gather_single", None) or self._dist.all_gather_into_tensor
        self._wait(gather(found, mine.to(self._device), group=self._group, async_op=True))
        digests = found.cpu().reshape(-1, _DIGEST)
        if bool((digests == digests[0]).all()):
            return
        calls: list[Any] = [None] * len(self._ranks)
        self._dist.all_gather_object(calls, call, group=self._group)
        told = {rank: _described(call) for rank, call in zip(self._members, calls, strict=True)}
        raise RanksDisagree(
            "the ranks of a mesh must make the same calls of its ops, in the same order, and one does not: "
            + "; ".join(f"rank {rank} called {text}" for rank, text in sorted(told.items()))
        )

    def _gather(self, data: torch.Tensor) -> dict[int, torch.Tensor] | None:
        """On the leader, the data of each rank."""
        data = data.to(self._device)
        if self._me != self._leader:
            self._dist.gather(data, dst=self._leader, group=self._group)
            return None
        found = [torch.empty_like(data) for _ in self._members]
        self._dist.gather(data, found, dst=self._leader, group=self._group)
        return {rank: part.cpu() for rank, part in zip(self._members, found, strict=True)}

    def _tell(self, text: str | None) -> str:
        """Send a text from the leader to the others."""
        size = torch.tensor([len((text or "").encode())], device=self._device)
        self._dist.broadcast(size, src=self._leader, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if text is not None:
            data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        data = data.to(self._device)
        self._dist.broadcast(data, src=self._leader, group=self._group)
        return bytes(data.cpu().tolist()).decode()

    def _scatter(self, parts: dict[int, torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
        mine = torch.empty(
            sum(t.numel() * t.element_size() for t in like), dtype=torch.uint8, device=self._device
        )
        given = [parts[rank].to(self._device) for rank in self._members] if parts else None
        self._dist.scatter(mine, given, src=self._leader, group=self._group)
        return mine.cpu()

    def _wait(self, work: Any) -> None:
        """Wait until all ranks have come."""
        seconds = float(os.environ.get(_VARIABLE) or 300)
        arrivals = _Arrivals(self._dist, self._group)
        arrivals.come(self._me)
        try:
            work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = arrivals.missing(self._me, self._members)
            if not missing:
                raise
            raise RankMissing(
                f"{self._program.definition.name}: rank {', '.join(map(str, missing))} did not come to the "
                f"call within {seconds:g} s, in which rank {self._me} waited. Every rank of the mesh must "
                f"call the op; {_VARIABLE} sets how long they wait"
            ) from error


class _Arrivals:
    """How many calls each rank of a group has come to, in the group's store."""

    def __init__(self, dist: Any, group: ProcessGroup) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)  # private: the only way to it
        self._name = group.group_name

    def come(self, rank: int) -> None:
        """This rank has come to one more."""
        self._store.add(self._key(rank), 1)

    def missing(self, me: int, ranks: Sequence[int]) -> list[int]:
        """The ranks that have come to fewer calls than this one."""
        mine = self._count(me)
        return [rank for rank in ranks if self._count(rank) < mine]

    def _count(self, rank: int) -> int:
        key = self._key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key(self, rank: int) -> str:
        return f"bridge_ranks/{self._name}/{rank}"


def _described(call: str) -> str:
    name, shapes, wide, ranks, note = json.loads(call)
    tensors = ", ".join(f"{dtype}{shape}" for dtype, shape in shapes)
    ending = f"{' with 64 bits' if wide else ''} on the mesh of ranks {ranks}"
    return f"{name}({tensors}){ending}{note and f' for {note}'}"


# Tensors as bytes -----------------------------------------------------------------------------------


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors, one behind the other."""
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _tensors_from(data: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes from their bytes."""
    found, begin = [], 0
    for t in like:
        size = t.numel() * t.element_size()
        # A copy: a dtype of more bytes may not begin anywhere. And no view: autograd lets nobody write to a
        # result that is one.
        own = torch.empty(t.shape, dtype=t.dtype)
        if size:
            own.view(-1).view(torch.uint8).copy_(data[begin : begin + size])
        found.append(own)
        begin += size
    return found
