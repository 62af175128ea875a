"""Horovod's jobs: the ranks of a process set."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

from ...engine.agreement.handshake import Place
from ...engine.agreement.notes import ADVICE
from ...engine.job import Gathering
from ...errors import ConfigError, ExchangeError
from ...exchange.transports import gloo
from ..common.meetings import why_not_all
from .ending import Run
from .gathering import NotAll, gather
from .rollcall import RollCall

_WITH_JOIN = "is not supported with Join"  # in Horovod's refusal of a gather


class HorovodJob:
    """The ranks of a process set, in the run of Horovod in which this was made.

    Args:
        process_set: one that Horovod knows.

    Raises:
        ConfigError: it is none, or Horovod has not been initialized.
    """

    def __init__(self, process_set: Any) -> None:
        _check_process_set(process_set)
        if not hvd.is_initialized():
            raise ConfigError(
                "Horovod has not been initialized: call hvd.init() before the compression is created, and start the "
                "job with horovodrun"
            )
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
                "this process is a fork of a rank: its compression has no threads here, and its connections belong to "
                "the rank; exchange gradients in the rank itself"
            )
        if self.run.replaced():
            raise ConfigError(
                f"rank {hvd.rank()}: Horovod was shut down and started again, perhaps with other ranks, and this "
                "compression belongs to the previous ones. Elastic jobs are not supported yet: create model, "
                "compression and optimizer again after each reset, or restart the job from a checkpoint"
            )

    def place(self) -> Place:
        return Place(gloo.own_address(one_host=hvd.local_size() == hvd.size()))

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        # Word that this rank is there: an error can then name the ranks that are not. It takes messages of its own.
        roll = RollCall(asked.name, self.process_set) if asked.by_name else None
        try:
            values = gather(value, asked.under or asked.name, self.process_set, asked.seconds, asked.failed)
        except HorovodInternalError as error:
            if _WITH_JOIN in str(error):
                raise ConfigError(
                    f"a rank has called hvd.join() while rank {hvd.rank()} begins a step; {ADVICE}"
                ) from None
            raise ExchangeError(_why_not_all(asked.name, error, roll)) from None
        if roll:
            roll.held()
        return values


def _why_not_all(name: str, error: Exception, roll: RollCall | None) -> str:
    """Return what is known of a gather that did not take place; what Horovod says of it, which is little, last."""
    late = isinstance(error, NotAll)
    said = " ".join(str(error).split()).rstrip(".")
    absent = roll.absent() if roll else []
    ended = "" if late else f". Horovod has ended, and says: {said}"
    return why_not_all(name, hvd.rank(), f"{said} s" if late else None, absent) + ended


def _check_process_set(given: object) -> None:
    """Refuse what is no process set that Horovod knows."""
    known = isinstance(given, hvd.ProcessSet) and given.process_set_id is not None
    if not known and given is not hvd.global_process_set:
        raise ConfigError(
            "process_set should be hvd.global_process_set, or what hvd.add_process_set([0, 1]) returned on every rank; "
            f"got {given if isinstance(given, hvd.ProcessSet) else repr(given)}"
        )
