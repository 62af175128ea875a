"""Small values of all ranks through the store of a process group, within a bound of time.

Every process group has a store, by which its ranks found each other, whatever its backend. A gather writes one value a
rank under names that no other gather has, and reads those of the others. The calls into the store are made by a thread:
its host may be frozen, and a call then does not come back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ...exchange.deadline import Deadline

_POLL_SECONDS = 0.002
_SLOW_SECONDS = 0.02  # between looks at a rank that does not come for long
_PATIENT_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # for the store to say who is missing


class NotAll(Exception):
    """Some rank did not come to a gather in time, or it is known that one will not.

    Attributes:
        late: the time has passed.
        absent: the ranks that have not come, as far as is known.
    """

    def __init__(self, detail: str, late: bool, absent: list[int]) -> None:
        super().__init__(detail)
        self.late, self.absent = late, absent


class Meetings:
    """The gathers of one process group, in the order in which each name occurs.

    Args:
        store: of the group.
        prefix: of the keys, which no other group has.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self._store, self._prefix, self._rank, self._size = _own(store), prefix, rank, size
        self._numbers: dict[str, int] = {}
        #: Gathers that were given up and may still take place: what was shown cannot be taken back.
        self._given_up: set[str] = set()

    def gather(self, name: str, mine: bytes, seconds: float, failed: Callable[[], bool]) -> list[bytes]:
        """Return what every rank shows, in rank order.

        Raises:
            NotAll: some rank did not come in time.
        """
        deadline = Deadline(seconds)
        if name in self._given_up:
            self._meet(name, None, deadline, failed)
            self._given_up.remove(name)
        self._numbers[name] = self._numbers.get(name, 0) + 1
        self._given_up.add(name)
        found = self._meet(name, mine, deadline, failed)
        self._given_up.remove(name)
        return found

    def _meet(self, name: str, mine: bytes | None, deadline: Deadline, failed: Callable[[], bool]) -> list[bytes]:
        key = f"{self._prefix}/{name}"
        asked = _Asked(self._store, key, self._numbers[name], mine, self._rank, self._size)
        while not asked.done.wait(_POLL_SECONDS):
            late = deadline.passed()
            if late or failed():
                asked.given_up = True
                asked.done.wait(_GRACE_SECONDS if late else 0.0)
                raise NotAll(f"{deadline.seconds:g} s" if late else "another rank has stopped", late, asked.absent)
        if asked.error:
            raise NotAll(f"the store of torch.distributed does not answer: {asked.error}", False, [])
        return asked.found


class _Asked:
    """One gather's calls into the store, on a thread."""

    def __init__(self, store: Any, key: str, number: int, mine: bytes | None, rank: int, size: int) -> None:
        self._store, self._key, self._number, self._mine = store, key, number, mine
        self._rank, self._missing = rank, list(range(size))
        self.found: list[bytes] = []
        self.absent: list[int] = []
        self.error: Exception | None = None
        self.given_up, self.done = False, threading.Event()
        threading.Thread(target=self._run, name="hvc-meet", daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001  whoever waits is told
            self.error = error
        self.done.set()

    def _ask(self) -> None:
        size, began = len(self._missing), time.monotonic()
        if self._mine is not None:
            self._store.set(self._name(self._rank), self._mine)
        while self._missing and not self.given_up:
            if self._is_there(self._missing[0]):
                self._missing.pop(0)
            else:
                time.sleep(_POLL_SECONDS if time.monotonic() - began < _PATIENT_SECONDS else _SLOW_SECONDS)
        self.absent = [rank for rank in self._missing if not self._is_there(rank)]
        if not self.absent:
            self.found = [bytes(self._store.get(self._name(rank))) for rank in range(size)]
            self._forget()

    def _is_there(self, rank: int) -> bool:
        return bool(self._store.check([self._name(rank)]))

    def _forget(self) -> None:
        """Remove what this rank showed in the gather before, which every rank has read: all have come to this one."""
        with contextlib.suppress(RuntimeError):  # not every store can
            self._store.delete_key(self._name(self._rank, -1))

    def _name(self, rank: int, before: int = 0) -> str:
        return f"{self._key}/{self._number + before}/{rank}"


def _own(store: Any) -> Any:
    """Return a connection of our own to a store, where it can have several: a call that hangs blocks no one else's."""
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        return store.clone()
    return store
