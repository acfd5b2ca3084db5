"""Pool of compiler processes: kept warm, one job each at a time, replaced when they end or take too long."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from bridge.aot import worker as worker_file
from bridge.aot.errors import CompilerCrashed, CompilerMissing, CompileTimeout

START_TIMEOUT = 120.0
"""Seconds a worker has to import JAX and load libtpu; 2 are usual."""
JOBS_PER_WORKER = 500
"""After so many jobs a worker is replaced: the compiler keeps a little memory of each."""
STDERR_TAIL = 4000
"""Characters of a worker's stderr that an error holds."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the chip is only compiled for
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the metadata server of a TPU VM
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",  # any: the topology decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: several compilers run at once
    "TPU_LOG_DIR": "disabled",
}
"""What libtpu reads when a worker loads it."""

DUMP_FLAGS = (
    "--xla_jf_dump_to={directory}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|pre-delay",
)
"""Flags of libtpu that make it write the schedule of each kernel. They hold for a whole process."""


@dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        module: MLIR bytecode, as lowered for TPU.
        topology: libtpu's name of the topology, such as `v5e:2x2`.
        chip_config: libtpu's name of the configuration of its chips.
        mesh: shape of the device mesh; () is one device.
        options: compiler options by name.
        shardy: whether the module was lowered for the Shardy partitioner.
        dumps: folder that gets the dump files, or None.
    """

    module: bytes
    topology: str
    chip_config: str
    mesh: tuple[int, ...]
    options: Mapping[str, Any]
    shardy: bool
    dumps: Path | None


_CLOSED = "this pool of compilers was closed"


class Pool:
    """Worker processes that compile, at most `size` at a time. Any thread may call `run`.

    Workers start when they are first needed and stay. A process that dumps can do without, but not the other
    way round; then an idle one makes way. All files are in `directory`, which `close` deletes.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = _default_size() if size is None else size
        if self.size < 1:
            raise ValueError(f"a pool must have at least one worker, got size={size}")
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._idle: collections.deque[_Worker] = collections.deque()
        self._busy: set[_Worker] = set()
        self._starting = 0
        self._closed = False
        self._numbers = itertools.count()
        self.directory = Path(tempfile.mkdtemp(prefix="bridge-aot-"))

    def run(self, job: Job, timeout: float) -> dict[str, Any]:
        """The worker's answer to a job, and `versions`; it has `error` if the compiler refused.

        Raises:
            CompilerMissing: no worker can load libtpu.
            CompileTimeout: no answer within `timeout` seconds, not counting the wait for a free worker.
            CompilerCrashed: the worker ended.
        """
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this pool of compilers belongs to the process that was forked; make a new one"
            )
        worker = self._acquire(_Kind.now(job.dumps is not None))
        try:
            answer = worker.call(job.__dict__ | {"dumps": job.dumps and str(job.dumps)}, timeout)
            return answer | {"versions": worker.versions}
        except BaseException:  # also KeyboardInterrupt: the worker is still at it
            worker.end()
            raise
        finally:
            self._release(worker)

    def versions(self) -> dict[str, str]:
        """Versions of jax, jaxlib and libtpu as a worker sees them, and the compiler's own (`platform`)."""
        worker = self._acquire(_Kind.now(dumps=False))
        self._release(worker)
        return worker.versions

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def folder(self) -> Path:
        """A new, empty folder for the dump files of one job."""
        return Path(tempfile.mkdtemp(prefix="dumps-", dir=self.directory))

    def close(self) -> None:
        """End all workers and delete all files, also the dump folders handed out. Running calls fail."""
        if os.getpid() != self._owner:
            return  # a forked child: workers and files are the parent's
        with self._changed:
            self._closed = True
            idle, busy = list(self._idle), list(self._busy)
            self._idle.clear()
            self._changed.notify_all()
        for worker in idle:
            worker.end()
        for worker in busy:  # the thread that waits for its answer sees the end, and cleans up
            worker.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _acquire(self, kind: _Kind) -> _Worker:
        worker, outdated = self._claim(kind)
        if outdated is not None:
            outdated.end()
        if worker is not None:
            return worker
        try:
            worker = _Worker(kind, self.directory / f"worker-{next(self._numbers)}")
        except BaseException:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._starting -= 1
            self._busy.add(worker)
        if self._closed:
            self._release(worker)
            raise RuntimeError(_CLOSED)
        return worker

    def _claim(self, kind: _Kind) -> tuple[_Worker | None, _Worker | None]:
        """An idle worker; or None, and the right to start one in place of the second."""
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError(_CLOSED)
                fitting = [worker for worker in self._idle if worker.kind.serves(kind) and worker.usable()]
                if fitting:
                    worker = min(fitting, key=lambda worker: worker.kind.dumps)
                    self._idle.remove(worker)
                    self._busy.add(worker)
                    return worker, None
                if len(self._idle) + len(self._busy) + self._starting < self.size:
                    self._starting += 1
                    return None, None
                if self._idle:
                    self._starting += 1
                    ended = [worker for worker in self._idle if not worker.usable()]
                    outdated = (ended or self._idle)[0]
                    self._idle.remove(outdated)
                    return None, outdated
                self._changed.wait()

    def _release(self, worker: _Worker) -> None:
        with self._changed:
            self._busy.discard(worker)
            keep = worker.usable() and not self._closed
            if keep:
                self._idle.append(worker)
            self._changed.notify()
        if not keep:
            worker.end()


@dataclass(frozen=True)
class _Kind:
    """What a process can't change once it has loaded libtpu: whether it dumps, the user's flags, its file."""

    dumps: bool
    flags: str
    library: str

    def serves(self, wanted: _Kind) -> bool:
        """Whether it can do jobs of the kind `wanted`: to dump unasked costs less than a new process."""
        same = (self.flags, self.library) == (wanted.flags, wanted.library)
        return same and (self.dumps or not wanted.dumps)

    @classmethod
    def now(cls, dumps: bool) -> _Kind:
        return cls(dumps, os.environ.get("LIBTPU_INIT_ARGS", ""), os.environ.get("TPU_LIBRARY_PATH", ""))


class _Worker:
    """One process, and the way to it. Used by one thread at a time."""

    def __init__(self, kind: _Kind, directory: Path) -> None:
        self.kind = kind
        self._directory = directory
        self._jobs = 0
        dumps = directory / "dumps"
        dumps.mkdir(parents=True)
        flags = [kind.flags] + [f.format(directory=dumps) for f in DUMP_FLAGS if kind.dumps]
        self._stderr = directory / "stderr"
        self._connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(directory)]
        with theirs, self._stderr.open("ab") as stderr:  # appends, also after `call` emptied it
            self._process = subprocess.Popen(
                # -P: this folder is no place to import from
                [sys.executable, "-P", worker_file.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
                    "LIBTPU_INIT_ARGS": " ".join(filter(None, flags)),
                },
            )
        _alive.add(self)
        try:
            self.versions = self._started()
        except BaseException:
            self.end()
            raise

    def _started(self) -> dict[str, str]:
        answer = self._receive(START_TIMEOUT, "to start")
        if "error" in answer:
            raise CompilerMissing(
                "the TPU compiler (libtpu) can't be used",
                advice="Run `tpu-autotune doctor`, which says what is missing",
                details=answer["error"],
            )
        return answer

    def usable(self) -> bool:
        """Whether it can take a job."""
        return self._jobs < JOBS_PER_WORKER and not self._connection.closed and self._process.poll() is None

    def call(self, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to one job. After an exception, only `end` may be called."""
        self._jobs += 1
        self._stderr.write_bytes(b"")  # what it wrote before is not about this job
        try:
            self._connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._crashed() from None
        return self._receive(timeout, "to compile")

    def _receive(self, timeout: float, purpose: str) -> dict[str, Any]:
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._crashed() from None
        raise CompileTimeout(
            f"the TPU compiler took more than {timeout:g} s {purpose}, and was ended",
            advice="Give it more time (timeout=) or smaller blocks: its time grows with a grid step's work",
            details=self._tail(),
        )

    def _crashed(self) -> CompilerCrashed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        killed = " Signal 9 comes from outside, most often because memory ran out." if code == -9 else ""
        return CompilerCrashed(
            f"the process of the TPU compiler ended ({how})",
            advice=f"Its last words are in .details; the next call starts a new one.{killed}",
            details=self._tail(),
        )

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._stderr.read_text(errors="replace")[-STDERR_TAIL:].strip()
        return ""

    def end(self) -> None:
        """End the process, wait for it, delete its files. Harmless the second time."""
        _alive.discard(self)
        self.kill()
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the process and no more: for a thread other than the one that uses it."""
        self._process.kill()

    def forget(self) -> None:
        """In a forked child: let go of the connection, so that it closes when the parent closes it."""
        self._connection.close()


def _default_size() -> int:
    """BRIDGE_COMPILE_WORKERS, else the number of cores this process may use."""
    text = os.environ.get("BRIDGE_COMPILE_WORKERS", "")
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"BRIDGE_COMPILE_WORKERS must be a number of processes, at least 1, got {text!r}")
    return int(text)


# The pool of this process -------------------------------------------------------------------------

_alive: set[_Worker] = set()
_shared: Pool | None = None
_sharing = threading.Lock()


def shared() -> Pool:
    """The pool of this process. It is made when first asked for, and closed when the process exits."""
    global _shared
    with _sharing:
        if _shared is None or _shared.closed:
            _shared = Pool()
            atexit.register(_shared.close)
        return _shared


def _after_fork() -> None:
    global _shared, _sharing
    _shared, _sharing = None, threading.Lock()
    for worker in _alive:
        worker.forget()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
