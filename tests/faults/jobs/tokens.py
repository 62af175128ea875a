"""Hand over tokens to Horovod, one after the other, while another rank shuts it down."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_compress._horovod import end_all_waits, owner_of_token
from tests.support.rank import arguments, report

_TOKENS = 20_000  # for 6 s at least, of which half a second is needed
_PAUSE = 0.0003  # seconds between two tokens
_AFTER = 0.5  # seconds to go on handing over after the first error: Horovod's thread may still be dropping tensors


def main() -> None:
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(0.5)
        end_all_waits()
    else:
        report(handed_over(arguments()["owned"]))
    os._exit(0)


def handed_over(owned: bool) -> dict[str, object]:
    """Return how many tokens were tried, and whether Horovod ended.

    This thread keeps Python's lock throughout: where it is let go, Horovod's thread may take it and drop all tokens
    meanwhile. So it neither sleeps nor makes tensors on its way, and it does not average: for that Horovod asks its
    library for a property of its build, with the lock let go.
    """
    owners = [owner_of_token() for _ in range(_TOKENS)]
    tokens = [owner.grad if owned else torch.empty(1) for owner in owners]
    until, ended = float("inf"), False
    for number, token in enumerate(tokens):
        try:
            hvd.allreduce_async_(token, name=f"token.{number}", op=hvd.Sum)
        except HorovodInternalError:
            until, ended = until if ended else time.perf_counter() + _AFTER, True
        pause = time.perf_counter() + _PAUSE
        while time.perf_counter() < pause:
            pass
        if pause > until:
            break
    return {"ended": ended, "count": number}


if __name__ == "__main__":
    main()
