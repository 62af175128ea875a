"""Hand over tokens to Horovod, one after the other, while another rank shuts it down."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_compress.fronts.horovod.private import end_all_waits, owner_of_token
from tests.support.rank import arguments, report

_TOKENS = 5_000  # for 1.5 s at least, of which a second is needed
_PAUSE = 0.0003  # seconds between two tokens
_AFTER = 0.5  # seconds to go on handing over after the first error: Horovod's thread may still be dropping tokens
_NEVER = 1000.0  # seconds


def main() -> None:
    owners = [owner_of_token() for _ in range(_TOKENS)]
    owned = arguments()["owned"]
    tokens = [owner.grad if owned else torch.empty(1) for owner in owners]
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(0.5)
        end_all_waits()
    else:
        report(handed_over(tokens))
    os._exit(0)


def handed_over(tokens: Sequence[torch.Tensor]) -> dict[str, object]:
    """Return how many tokens Horovod took, and whether it ended.

    This thread keeps Python's lock throughout: where it is let go, Horovod's thread may take it and drop all tokens
    meanwhile. So it neither sleeps nor makes tensors on its way, and it does not average: for that Horovod asks its
    library for a property of its build, with the lock let go.
    """
    sys.setswitchinterval(_NEVER)
    count, until = 0, math.inf
    for number, token in enumerate(tokens):
        try:
            hvd.allreduce_async_(token, name=f"token.{number}", op=hvd.Sum)
            count += 1
        except HorovodInternalError:
            until = min(until, time.perf_counter() + _AFTER)
        resume = time.perf_counter() + _PAUSE
        while time.perf_counter() < resume:
            pass
        if resume > until:
            break
    return {"ended": until < math.inf, "count": count}


if __name__ == "__main__":
    main()
