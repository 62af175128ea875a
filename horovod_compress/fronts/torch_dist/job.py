"""torch.distributed's jobs: the ranks of a process group, which show each other plain data through its store."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...engine.agreement.handshake import LOOPBACK, Place, host_name
from ...engine.job import Gathering
from ...engine.saved.manifests import RankGroup
from ...errors import ConfigError, ExchangeError, NonFiniteError, in_job
from ...exchange.transports import addresses
from ..gather import FORKED, why_not_all
from .store_gathers import FailedGather, Gathers

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

    def agree(self, mine: NonFiniteError | None, seconds: float) -> NonFiniteError | None:
        return mine

    @property
    def number(self) -> int:
        return self._number

    def group_of_all(self) -> RankGroup | None:
        return group_of(dist.get_process_group_ranks(self.group))

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
        if any(os.environ.get(variable) for variable in addresses.INTERFACES):
            return Place(addresses.own_address(False, addresses.INTERFACES))
        try:
            return Place(addresses.own_address(False, addresses.INTERFACES), host_name())
        except ConfigError as error:  # of no account if all ranks are on this host
            return Place(None, host_name(), str(error))

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        return gather_among(dist.get_process_group_ranks(self.group), self.group, value, asked)

    def gather_all(self, value: Any, asked: Gathering) -> list[Any]:
        return self.gather(value, asked)


def group_of(ranks: Sequence[int]) -> RankGroup | None:
    """Return these ranks, by their numbers in the job, as a group; None where they are all."""
    total = dist.get_world_size()
    return None if len(ranks) == total else RankGroup(sorted(ranks), total)


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
        raise in_job(ExchangeError(text + said)) from None


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
