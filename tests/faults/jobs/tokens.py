"""Hand over tokens to Horovod, one after the other, while another rank shuts it down."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_compress._horovod import end_all_waits, owner_of_token
from tests.support.rank import arguments, report

_SECONDS = 10.0


def main() -> None:
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(0.5)
        end_all_waits()
    else:
        report(handed_over(arguments()["owned"]))
    os._exit(0)


def handed_over(owned: bool) -> dict[str, object]:
    """Return how many tokens went over before the error."""
    waiting: list[torch.Tensor | None] = []
    until = time.monotonic() + _SECONDS
    owners = []
    try:
        while time.monotonic() < until:
            owners.append(owner_of_token())
            waiting.append(owners[-1].grad if owned else torch.empty(1))
            hvd.allreduce_async_(waiting[-1], name=f"token.{len(waiting)}")
            time.sleep(0.0003)
    except HorovodInternalError:
        return {"ended": True, "count": len(waiting)}
    return {"ended": False, "count": len(waiting)}


if __name__ == "__main__":
    main()
