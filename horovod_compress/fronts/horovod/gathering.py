"""Plain data of all ranks through Horovod's all-gather, within a bound of time.

What is left of a gather that was given up is not taken for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ...exchange.device import Deadline
from ..common.packing import pack, unpack

_POLL_SECONDS = 0.002
#: Gathers that were given up and may still take place, by name: Horovod knows no way to take one back.
_given_up: dict[str, int] = {}


class NotAll(HorovodInternalError):  # type: ignore[misc]
    """Some rank did not come to a gather in so many seconds."""


class CalledOff(HorovodInternalError):  # type: ignore[misc]
    """It is known that not every rank will come."""


def gather(value: Any, name: str, process_set: Any, seconds: float, failed: Callable[[], bool]) -> list[Any]:
    """Return every rank's value, in rank order; tuples have become lists.

    Args:
        value: plain data.
        failed: returns whether it is known that not every rank will come.

    Raises:
        NotAll: some rank did not come in time.
        HorovodInternalError: Horovod has ended.
        CorruptFrameError: what came is not what ranks send.
    """
    key, deadline = f"{name} {process_set.process_set_id}", Deadline(seconds)
    if key in _given_up:
        before = _given_up.pop(key)
        try:
            _wait(before, deadline, failed)
        except (NotAll, CalledOff):
            _given_up[key] = before
            raise
        except (ValueError, HorovodInternalError):  # a handle of an earlier run of Horovod, or one that failed
            pass
    data = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    handle = hvd.allgather_async(data, name=name, process_set=process_set)
    try:
        return unpack(_wait(handle, deadline, failed).numpy().tobytes(), process_set.size())
    except (NotAll, CalledOff):
        _given_up[key] = handle
        raise


def _wait(handle: int, deadline: Deadline, failed: Callable[[], bool]) -> torch.Tensor:
    while not hvd.poll(handle):
        if deadline.passed():
            raise NotAll(f"{deadline.seconds:g}")
        if failed():
            raise CalledOff("another rank has stopped")
        time.sleep(_POLL_SECONDS)
    return hvd.synchronize(handle)
