"""Horovod's jobs: the ranks of a process set, and the job that a command runs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

from ...engine.agreement.place import Place
from ...errors import ConfigError
from ...exchange.transports import gloo
from .calls import allgather_object
from .ending import Run


class HorovodJob:
    """The ranks of a process set, in the run of Horovod in which this was made.

    Args:
        process_set: one that Horovod knows.

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, process_set: Any) -> None:
        _check_process_set(process_set)
        self.process_set = process_set
        self.run = Run()

    @property
    def rank(self) -> int:
        return int(self.process_set.rank())

    @property
    def size(self) -> int:
        return int(self.process_set.size())

    @property
    def number(self) -> int:
        return int(hvd.rank())

    def running(self) -> bool:
        return bool(hvd.is_initialized())

    def included(self) -> bool:
        return bool(self.process_set.included())

    def forked(self) -> bool:
        return self.run.forked()

    def check(self) -> None:
        if self.run.forked():
            raise ConfigError(
                "this process is a fork of a rank: its compression has no threads here, and the connections are the "
                "rank's; exchange gradients in the rank itself"
            )
        if self.run.replaced():
            raise ConfigError(
                f"rank {hvd.rank()}: Horovod was shut down and started again, with other ranks perhaps, and this "
                f"compression belongs to the ranks before. Elastic jobs are not supported yet: create model, "
                f"compression and optimizer again after each reset, or restart the job from a checkpoint"
            )

    def place(self) -> Place:
        return Place(gloo.own_address(one_host=hvd.local_size() == hvd.size()))

    def gather(
        self,
        value: Any,
        name: str,
        seconds: float,
        *,
        by_name: bool = False,
        under: str | None = None,
        failed: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        return allgather_object(value, name, self.process_set, seconds, by_name=by_name, under=under, failed=failed)


def _check_process_set(given: object) -> None:
    """Refuse what is no process set that Horovod knows."""
    known = isinstance(given, hvd.ProcessSet) and given.process_set_id is not None
    if not known and given is not hvd.global_process_set:
        raise ConfigError(
            "process_set should be hvd.global_process_set, or what hvd.add_process_set([0, 1]) returned on every rank; "
            f"got {given if isinstance(given, hvd.ProcessSet) else repr(given)}"
        )


def begin() -> tuple[int, int]:
    """Start Horovod, for a command: one rank where ``horovodrun`` did not start it.

    Returns:
        This rank, and how many there are.
    """
    hvd.init()
    return hvd.rank(), hvd.size()
