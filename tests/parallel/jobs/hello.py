"""The smallest job: proves the helper that starts jobs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd

from tests.support import rank


class Held:
    """In a ring of references, so that only Python's collector frees it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        os.write(1, b"taken apart\n")


held = Held()
hvd.init()
rank.say_pid()
given = rank.arguments()
rank.mark("started")
if given.get("hang"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
sleeping = "yields.so" in Path("/proc/self/maps").read_text()
rank.report({"rank": hvd.rank(), "size": hvd.size(), "given": given, "pid": os.getpid(), "sleeping yields": sleeping})
if given.get("status") and hvd.rank() == 1:
    sys.exit(given["status"])
