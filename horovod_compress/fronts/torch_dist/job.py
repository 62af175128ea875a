"""torch.distributed's jobs: the ranks of a process group, and how these show each other plain data in bounded time.

Every process group has a store, by which its ranks found each other, whatever its backend. A gather writes one value a
rank under names that no other gather has, reads those of the others, and says that it has. The calls into the store
are made by a thread: its host may be frozen, and a call then does not come back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...engine.agreement.handshake import LOOPBACK, Place, host_name
from ...engine.job import Gathering
from ...errors import ConfigError, CorruptFrameError, ExchangeError, NonFiniteError
from ...exchange.device import Deadline
from ...exchange.transports import gloo
from ..gather import FORKED, confirmed, pack, pause, unpack, why_not_all

#: Network interfaces by the name of the variable that names them: ours first, then that of torch.
_INTERFACES = (gloo.INTERFACE, "GLOO_SOCKET_IFNAME")

#: The gathers of each process group that was used, for as long as it lives, by the ranks of the job that take part.
_gathers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Gathers]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


class TorchJob:
    """The ranks of a process group, in the run of torch.distributed in which this was made.

    Args:
        process_group: None for all ranks.

    Raises:
        ConfigError: torch.distributed was not initialized, or this is no process group.
    """

    def __init__(self, process_group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "the ranks do not know each other yet: call torch.distributed.init_process_group() before the "
                "compression is created, and start the job with torchrun"
            )
        self.group: Any = dist.group.WORLD if process_group is None else process_group
        if self.group is not dist.GroupMember.NON_GROUP_MEMBER and self.group not in c10d._world.pg_map:
            raise ConfigError(
                "process_group should be None, or what torch.distributed.new_group([0, 1]) returned on every rank; got "
                f"{process_group!r}"
            )
        self._process = os.getpid()
        self._number = dist.get_rank()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def row(self) -> TorchJob | None:
        return None

    def agree(self, mine: NonFiniteError | None) -> NonFiniteError | None:
        return mine

    @property
    def number(self) -> int:
        return self._number

    def running(self) -> bool:
        return dist.is_initialized()

    def included(self) -> bool:
        return self.group is not dist.GroupMember.NON_GROUP_MEMBER

    def forked(self) -> bool:
        return os.getpid() != self._process

    def check(self) -> None:
        if self.forked():
            raise ConfigError(FORKED)
        if self.group not in c10d._world.pg_map:
            raise ConfigError(
                f"rank {self._number}: torch.distributed was shut down, and this compression belongs to the ranks that "
                "there were; create model, compression and optimizer again when it is initialized again"
            )

    def place(self) -> Place:
        if self.size == 1:
            return Place(LOOPBACK)
        if any(os.environ.get(variable) for variable in _INTERFACES):
            return Place(gloo.own_address(False, _INTERFACES))
        try:
            return Place(gloo.own_address(False, _INTERFACES), host_name())
        except ConfigError as error:  # of no account if all ranks are on this host
            return Place(None, host_name(), str(error))

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        return gather_among(dist.get_process_group_ranks(self.group), self.group, value, asked)

    def gather_all(self, value: Any, asked: Gathering) -> list[Any]:
        return self.gather(value, asked)


def gather_among(ranks: Sequence[int], group: Any, value: Any, asked: Gathering) -> list[Any]:
    """Return the plain data of some ranks, in their order.

    Args:
        ranks: by their numbers in the whole job.
        group: a process group that has all of them.

    Raises:
        ExchangeError: not every rank came in time.
    """
    number, name = dist.get_rank(), asked.under or asked.name
    try:
        return _gathers_of(tuple(ranks), group).gather(name, value, asked.seconds, asked.failed)
    except FailedGather as error:
        absent = [ranks[rank] for rank in error.absent] if error.late else []
        said = "" if error.late else f". {error}"
        text = why_not_all(asked.name, number, str(error) if error.late else None, absent)
        raise ExchangeError(text + said) from None


def _gathers_of(ranks: tuple[int, ...], group: Any) -> Gathers:
    with _making:
        known = _gathers.setdefault(group, {})
        if ranks not in known:
            all_of_it = ranks == tuple(dist.get_process_group_ranks(group))
            some = hashlib.sha256(f"{ranks}".encode()).hexdigest()[:16]
            prefix = f"hvc/{group.group_name}" + ("" if all_of_it else f"/{some}")
            store = c10d._get_process_group_store(group)
            known[ranks] = Gathers(store, prefix, ranks.index(dist.get_rank()), len(ranks))
        return known[ranks]


_POLL_SECONDS = 0.002
_SLOW_SECONDS = 0.02  # at most, between looks at a rank that does not come
_GRACE_SECONDS = 1.0  # for the store to say who is missing
_PARTING_SECONDS = 2.0  # for other ranks to read what was shown


class FailedGather(Exception):
    """Some rank did not come to a gather in time, or it is known that one will not.

    Attributes:
        late: the time has passed.
        absent: the ranks that have not come, as far as is known.
    """

    def __init__(self, detail: str, late: bool, absent: list[int]) -> None:
        super().__init__(detail)
        self.late, self.absent = late, absent


class Gathers:
    """The gathers of one process group, in the order in which each name occurs; threads may share it.

    Args:
        store: of the group.
        prefix: of the keys, which no other group has.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        # A connection of our own, where the store can have several: a call that hangs blocks no one else's.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()
        self.store, self.rank, self.size = store, rank, size
        self._prefix, self._run, self._asking = f"{prefix}/{size}", 0, threading.Lock()
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._numbers: dict[str, int] = {}
        #: Gathers that were given up and may still take place: what was shown cannot be taken back.
        self._given_up: set[str] = set()

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
        with self._lock:
            turn = self._turns.setdefault(name, threading.Lock())
        if not turn.acquire(timeout=max(0.0, deadline.left())):
            raise FailedGather(f"{seconds:g} s", True, [])
        try:
            if name in self._given_up:
                self._try(name, None, deadline, failed)
                self._given_up.remove(name)
            return confirmed(value, lambda shown, within: self._show(name, shown, within, failed), deadline)
        finally:
            turn.release()

    def _show(self, name: str, value: list[Any], deadline: Deadline, failed: Callable[[], bool]) -> list[Any]:
        has_seen, _ = value
        self._numbers[name] = self._numbers.get(name, 0) + 1
        self._given_up.add(name)
        found = self._try(name, pack(value), deadline, failed, comes_again=not has_seen)
        self._given_up.remove(name)
        try:
            return unpack(b"".join(found), self.size)
        except CorruptFrameError:
            if not has_seen:  # this rank does not come again, and others may not have read
                with contextlib.suppress(FailedGather):
                    self._try(name, None, deadline, failed)
            raise

    def _try(
        self,
        name: str,
        mine: bytes | None,
        deadline: Deadline,
        failed: Callable[[], bool],
        comes_again: bool = False,
    ) -> list[bytes]:
        asked = _StoreCalls(self, name, self._numbers[name], mine, comes_again)
        while not asked.done.wait(_POLL_SECONDS):
            late, has_failed = deadline.passed(), failed()
            if asked.found:
                if has_failed or asked.parting.passed():
                    asked.leaves = True
                    break
            elif late or has_failed:
                asked.given_up = True
                asked.done.wait(_GRACE_SECONDS if late else 0.0)
                if not asked.found:  # nor in this last look
                    raise FailedGather(
                        f"{deadline.seconds:g} s" if late else "another rank has stopped", late, asked.absent
                    )
        if asked.error:
            raise FailedGather(f"the store of torch.distributed does not answer: {asked.error}", False, [])
        return asked.found

    def key(self, name: str) -> str:
        """Return what all keys of a name begin with; asks the store the first time.

        A store may outlive the group, and serve the next one of the same name, with other processes. So runs are
        counted in the store, by each rank of a group of this size.
        """
        with self._asking:
            if not self._run:
                self._run = int(self.store.add(f"{self._prefix}/run/{self.rank}", 1))
        return f"{self._prefix}/{self._run}/{name}"


class _StoreCalls:
    """One gather's calls into the store, on a thread.

    A rank leaves when all have read, or have not for a while: its process may host the store, and end right after.

    Args:
        comes_again: it does not leave, but comes to the next gather at once.
    """

    def __init__(self, group: Gathers, name: str, number: int, mine: bytes | None, comes_again: bool) -> None:
        self._group, self._of, self._number, self._mine, self._comes_again = group, name, number, mine, comes_again
        self._store, self._rank = group.store, group.rank
        self._key, self._began = "", time.monotonic()
        self.found: list[bytes] = []
        self.parting = Deadline(_PARTING_SECONDS)
        self.absent: list[int] = []
        self.error: Exception | None = None
        self.given_up = self.leaves = False
        self.done = threading.Event()
        threading.Thread(target=self._run, name="hvc-meet", daemon=True).start()

    def _run(self) -> None:
        try:
            self._key = self._group.key(self._of)
            self._ask()
            if self.found:
                with contextlib.suppress(Exception):  # the host may have gone: this rank has all it needs
                    self._part()
        except Exception as error:  # noqa: BLE001  whoever waits is told
            self.error = error
        self.done.set()

    def _ask(self) -> None:
        if self._mine is not None:
            self._store.set(self._name(self._rank), self._mine)
        every = [self._name(rank) for rank in range(self._group.size)]
        missing = [*every]
        while missing and not self.given_up:
            # One at a time while ranks are awaited: the host of the store looks up all names of a call.
            if not self._store.check(missing[:1]):
                pause(self._began, _SLOW_SECONDS)
            elif self._store.check(missing):
                missing = []
            else:
                while missing and self._store.check(missing[:1]):
                    missing.pop(0)
        self.absent = [every.index(name) for name in missing if not self._store.check([name])]
        if not self.absent:
            found = [bytes(shown) for shown in self._get(every)]
            self.parting = Deadline(_PARTING_SECONDS)
            self.found = found

    def _get(self, names: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return self._store.multi_get(names)
        return [self._store.get(name) for name in names]

    def _part(self) -> None:
        """Say that this rank has read, and wait for the others to say so."""
        # What this rank left in the gather before, every rank has read: all have come to this one.
        with contextlib.suppress(RuntimeError):  # not every store can remove it
            self._store.delete_key(self._name(self._rank, -1))
            self._store.delete_key(self._read(self._rank, -1))
        self._store.set(self._read(self._rank), b"")
        others = [self._read(rank) for rank in range(self._group.size)]
        began = time.monotonic()
        while not (self._comes_again or self.leaves or self.parting.passed() or self._store.check(others)):
            pause(began, _POLL_SECONDS)

    def _name(self, rank: int, before: int = 0) -> str:
        return f"{self._key}/{self._number + before}/{rank}"

    def _read(self, rank: int, before: int = 0) -> str:
        return f"{self._key}/{self._number + before}/read/{rank}"
