"""The store of ranks that are threads."""

from __future__ import annotations

import datetime
import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bridge.ranks.baton import Baton, Wait
from bridge.ranks.thread_rank import current


class RankStore(c10d.Store):
    """The store by which groups are made, in memory: waiting hands on the baton."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._data: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._data[key] = _as_bytes(value)
        self._baton.poke()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._data[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._data.get(key, b"0")) + value
            self._data[key] = str(total).encode()
        self._baton.poke()
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        with self._lock:
            found = self._data.get(key, b"")
            if found == expected:
                self._data[key] = found = desired
            elif key not in self._data:
                found = expected
        self._baton.poke()
        return found

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._data.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self._data for key in keys)

    def num_keys(self) -> int:
        return len(self._data)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        rank = current()
        if rank is not None:
            wait = Wait(lambda: self.check(keys), f"a wait for the store's {keys}", deadline=deadline)
            found = rank.baton.wait(rank.index, wait)
        else:
            while not (found := self.check(keys)) and (deadline is None or time.monotonic() < deadline):
                time.sleep(0.001)
        if not found:
            raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {keys}")

    # The names by which C++ calls them.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
