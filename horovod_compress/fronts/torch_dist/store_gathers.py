"""Gathers of torch.distributed's ranks, through the store of their process group.

Every process group has a store, by which its ranks found each other, whatever its backend. A gather writes one value a
rank under names that no other gather has, reads those of the others, and says that it has. The calls into the store
are made by a thread: its host may be frozen, and a call then does not come back.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import CorruptFrameError
from ...exchange.device import Deadline
from ..gather import CONFIRMING_SECONDS, confirmed, pack, pause, unpack

_POLL_SECONDS = 0.002
_SLOW_SECONDS = 0.02  # at most, between looks at a rank that does not come
_GRACE_SECONDS = 1.0  # for the store to say who is missing
_PARTING_SECONDS = CONFIRMING_SECONDS  # for others to read what was shown, even if they are frozen for a while
_TOKEN = 16  # letters


class FailedGather(Exception):
    """Some rank did not come to a gather in time, or it is known that one will not.

    Attributes:
        late: the time has passed.
        absent: the ranks that have not come, as far as is known.
    """

    def __init__(self, detail: str, late: bool, absent: list[int]) -> None:
        super().__init__(detail)
        self.late, self.absent = late, absent


@dataclass
class _Showing:
    """What this rank shows in a gather, and cannot take back.

    Attributes:
        number: of the gather, counted from 1 under its name.
        over: it has taken place.
    """

    number: int = 0
    mine: bytes = b""
    over: bool = True


class Gathers:
    """The gathers of one process group, in the order in which each name occurs; threads may share it.

    Args:
        store: of the group.
        prefix: of the keys, which no other group has.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self.rank, self.size, self.run = rank, size, ""
        self._given, self._prefix, self._token = store, f"{prefix}/{size}", secrets.token_hex(_TOKEN // 2).encode()
        self._store: _Store | None = None
        self._here = [f"{self._prefix}/here/{rank}" for rank in range(size)]
        self._meeting = threading.Lock()
        #: By name. Callers take turns, and so do the threads with their calls, which may outlast them.
        self._turns: dict[str, threading.Lock] = {}
        self._calls: dict[str, threading.Lock] = {}
        self._shown: defaultdict[str, _Showing] = defaultdict(_Showing)

    def gather(self, name: str, value: Any, seconds: float, failed: Callable[[], bool]) -> list[Any]:
        """Return every rank's value, in rank order.

        Threads that gather under one name take turns, and the first of this rank meets the first of every other one.

        Args:
            value: plain data; tuples become lists.

        Raises:
            FailedGather: some rank did not come in time.
            CorruptFrameError: what came is not what ranks send.
        """
        deadline = Deadline(seconds)
        turn = self._turns.setdefault(name, threading.Lock())
        if not turn.acquire(timeout=max(0.0, deadline.left())):
            raise FailedGather(f"{seconds:g} s", True, [])
        try:
            if not (last := self._shown[name]).over:
                self._try(name, last, deadline, failed)
                last.over = True
            return confirmed(value, lambda shown, within: self._show(name, shown, within, failed), deadline)
        finally:
            turn.release()

    def _show(self, name: str, value: list[Any], deadline: Deadline, failed: Callable[[], bool]) -> list[Any]:
        has_seen, _ = value
        # One assignment, so that nothing is out of step wherever an interrupt comes.
        shown = self._shown[name] = _Showing(self._shown[name].number + 1, pack(value), over=False)
        found = self._try(name, shown, deadline, failed, comes_again=not has_seen)
        shown.over = True
        try:
            return unpack(b"".join(found), self.size)
        except CorruptFrameError:
            if not has_seen:  # this rank does not come again, and others may not have read
                with contextlib.suppress(FailedGather):
                    self._try(name, shown, deadline, failed)
            raise

    def _try(
        self, name: str, shown: _Showing, deadline: Deadline, failed: Callable[[], bool], comes_again: bool = False
    ) -> list[bytes]:
        asked = _StoreCalls(self, name, shown, comes_again)
        try:
            asked.begin()
            while not asked.done.wait(_POLL_SECONDS):
                late, has_failed = deadline.passed(), failed()
                if asked.found:
                    if has_failed or asked.parting.passed():
                        break
                elif late or has_failed:
                    asked.given_up = True
                    asked.done.wait(_GRACE_SECONDS if late else 0.0)
                    if not asked.found:  # nor in this last look
                        raise FailedGather(
                            f"{deadline.seconds:g} s" if late else "another rank has stopped", late, [*asked.absent]
                        )
        finally:
            asked.given_up = asked.leaves = True  # after an interrupt, too
        if asked.error:
            raise FailedGather(f"the store of torch.distributed does not answer: {asked.error}", False, [])
        return asked.found

    def store(self, enough: Callable[[], bool], absent: list[int]) -> _Store | None:
        """Return the store once all ranks of the group are known to be there, None if it is enough before.

        A store may outlive the group, and have what other processes left there. So each rank shows a token, drawn by
        lot, and a digest of all tokens that it sees: where all digests are equal, each has seen those that are there
        now. The digest is the run, which is in all names.

        Args:
            absent: gets the ranks that have not come.
        """
        with _held(self._meeting, enough) as mine:
            if not mine:
                if self._store:  # another thread is there, which looks at the end of its own limit
                    absent.extend(map(self._here.index, self._store.absent(self._here)))
                return None
            # Connects, which may take as long as any call.
            self._store = store = self._store or _Store(self._given)
            if not self.run:
                self._meet(store, enough, absent)
            return store if self.run else None

    def _meet(self, store: _Store, enough: Callable[[], bool], absent: list[int]) -> None:
        here, mine, began = self._here, b"", time.monotonic()
        store.set(here[self.rank], self._token)
        if missing := store.missing(here, enough, _SLOW_SECONDS):
            absent.extend(map(here.index, store.absent(missing)))
        while not absent:
            last, shown = enough(), store.get(here)
            seen = hashlib.sha256(b"".join(one[:_TOKEN] for one in shown)).hexdigest()[:_TOKEN].encode()
            if seen != mine:
                mine = seen
                store.set(here[self.rank], self._token + mine)
            elif not (others := [rank for rank, one in enumerate(shown) if one[_TOKEN:] != mine]):
                self.run = mine.decode()
                return
            elif last:
                absent.extend(others)
            else:
                pause(began, _SLOW_SECONDS * max(1.0, self.size / 16))  # as many ranks read as many words

    def calling(self, name: str, enough: Callable[[], bool]) -> contextlib.AbstractContextManager[bool]:
        """Wait for the calls into the store that an earlier gather of a name has left: they may be of keys that go."""
        return _held(self._calls.setdefault(name, threading.Lock()), enough)

    def key(self, name: str) -> str:
        """Return what all keys of a name begin with."""
        return f"{self._prefix}/{self.run}/{name}"


@contextlib.contextmanager
def _held(lock: threading.Lock, enough: Callable[[], bool]) -> Iterator[bool]:
    """Hold a lock, unless it is enough before that."""
    while not (mine := lock.acquire(timeout=_SLOW_SECONDS)) and not enough():
        pass
    try:
        yield mine
    finally:
        if mine:
            lock.release()


class _Store:
    """The store of a group, by a connection of our own where it can have several: a call that hangs blocks no other."""

    def __init__(self, store: Any) -> None:
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()
        self._store = store

    def set(self, name: str, value: bytes) -> None:
        self._store.set(name, value)

    def delete(self, *names: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can remove them
            for name in names:
                self._store.delete_key(name)

    def get(self, names: list[str]) -> list[bytes]:
        """Return what is there under names that are."""
        several = self._store.has_extended_api()
        return [bytes(one) for one in (self._store.multi_get(names) if several else map(self._store.get, names))]

    def missing(self, names: list[str], enough: Callable[[], bool], most: float) -> list[str]:
        """Wait until all names are there, or it is enough; return those that were not yet seen then.

        While it waits it asks for one name, since the host of the store looks up all names of a call.

        Args:
            most: seconds between two looks.
        """
        missing, some, began = [*names], len(names), time.monotonic()
        while missing and not enough():
            if self._store.check(missing[:some]):
                del missing[:some]
                some *= 2
            elif some > 1:
                some = min(some, len(missing)) // 4 or 1
            else:
                pause(began, most)
        return missing

    def absent(self, names: list[str]) -> Iterator[str]:
        """Return those of the names that are not there."""
        if self._store.check(names):
            return
        if len(names) == 1:
            yield names[0]
            return
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            yield from self.absent(half)


class _StoreCalls:
    """One gather's calls into the store, on a thread.

    A rank leaves when all have read, or have not for a while: its process may host the store, and end right after.

    Args:
        comes_again: it does not leave, but comes to the next gather at once.
    """

    def __init__(self, group: Gathers, name: str, shown: _Showing, comes_again: bool) -> None:
        self._group, self._of, self._shown, self._comes_again = group, name, shown, comes_again
        self.found: list[bytes] = []
        self.parting = Deadline(_PARTING_SECONDS)
        self.absent: list[int] = []
        self.error: Exception | None = None
        self.given_up = self.leaves = False
        self.done = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._run, name="hvc-meet", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._group.calling(self._of, self._is_given_up) as mine:
                if mine and (store := self._group.store(self._is_given_up, self.absent)):
                    self._ask(store)
                    if self.found:
                        with contextlib.suppress(Exception):  # the host may have gone: this rank has all it needs
                            self._part(store)
        except Exception as error:  # noqa: BLE001  whoever waits is told
            self.error = error
        self.done.set()

    def _is_given_up(self) -> bool:
        return self.given_up

    def _ask(self, store: _Store) -> None:
        every = self._names()
        store.set(every[self._group.rank], self._shown.mine)
        if missing := store.missing(every, self._is_given_up, _SLOW_SECONDS):
            self.absent.extend(map(every.index, store.absent(missing)))
        if not self.absent:
            found = store.get(every)
            self.parting = Deadline(_PARTING_SECONDS)
            self.found = found

    def _part(self, store: _Store) -> None:
        """Say that this rank has read, and wait for the others to say so."""
        rank, have_read = self._group.rank, self._names("/read")
        # What this rank left in the gather before, every rank has read: all have come to this one.
        store.delete(self._name(rank, before=1), self._name(rank, "/read", before=1))
        store.set(have_read[rank], b"")
        if not self._comes_again:
            store.missing(have_read, lambda: self.leaves or self.parting.passed(), _POLL_SECONDS)

    def _name(self, rank: int, of: str = "", before: int = 0) -> str:
        return f"{self._group.key(self._of)}/{self._shown.number - before}{of}/{rank}"

    def _names(self, of: str = "") -> list[str]:
        return [self._name(rank, of) for rank in range(self._group.size)]
