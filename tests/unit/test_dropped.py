"""What was dropped without being closed is closed on a thread of its own, and the end of a process waits for that."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from horovod_compress.fronts.ending import Closing, await_dropped

SOON = 20.0


class Owner:
    """Stands for a compression."""


def dropped() -> tuple[threading.Event, threading.Event]:
    """Drop something; return what lets it be closed, and what is set then."""
    go, closed, owner = threading.Event(), threading.Event(), Owner()
    job: Any = SimpleNamespace(forked=lambda: False)
    closing = Closing(owner, job)
    closing.add(lambda: (go.wait(SOON), closed.set()))
    del owner
    return go, closed


def test_the_end_waits_for_what_is_being_closed() -> None:
    go, closed = dropped()
    end = threading.Thread(target=await_dropped, args=(SOON,))
    end.start()
    end.join(0.2)
    assert end.is_alive() and not closed.is_set()
    go.set()
    end.join(SOON)
    assert not end.is_alive() and closed.is_set()


def test_it_does_not_wait_for_ever() -> None:
    go, closed = dropped()
    await_dropped(0.05)
    assert not closed.is_set()
    go.set()
    await_dropped(SOON)
    assert closed.is_set()


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    go, _ = dropped()
    child = os.fork()
    if not child:
        began = time.monotonic()
        await_dropped(SOON)
        os._exit(int(time.monotonic() - began > SOON / 2))
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    await_dropped(SOON)
