"""torch.distributed's jobs: the ranks of a process group."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...engine.agreement.handshake import LOOPBACK, Place, host_name
from ...engine.job import Gathering
from ...errors import ConfigError, ExchangeError
from ...exchange.transports import gloo
from ..common.meetings import why_not_all
from ..common.packing import pack, unpack
from .meeting import Meetings, NotAll

#: Network interfaces by the name of the variable that names them: ours first, then that of torch.
_INTERFACES = (gloo.INTERFACE, "GLOO_SOCKET_IFNAME")

#: The meetings of each process group that was used, for as long as it lives.
_meetings: weakref.WeakKeyDictionary[Any, Meetings] = weakref.WeakKeyDictionary()
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
            raise ConfigError(
                "this process is a fork of a rank: its compression has no threads here, and its connections belong to "
                "the rank; exchange gradients in the rank itself"
            )
        if dist.is_initialized() and self.group not in c10d._world.pg_map:
            raise ConfigError(
                f"rank {self._number}: torch.distributed was shut down and initialized again, perhaps with other "
                "ranks, and this compression belongs to the previous ones; create model, compression and optimizer "
                "again"
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
        try:
            parts = self._meetings().gather(asked.under or asked.name, pack(value), asked.seconds, asked.failed)
        except NotAll as error:
            ranks = dist.get_process_group_ranks(self.group)
            absent = [ranks[rank] for rank in error.absent] if error.late else []
            said = "" if error.late else f". {error}"
            text = why_not_all(asked.name, self._number, str(error) if error.late else None, absent)
            raise ExchangeError(text + said) from None
        return unpack(b"".join(parts), self.size)

    def _meetings(self) -> Meetings:
        with _making:
            if self.group not in _meetings:
                store = c10d._get_process_group_store(self.group)
                _meetings[self.group] = Meetings(store, f"hvc/{self.group.group_name}", self.rank, self.size)
            return _meetings[self.group]
