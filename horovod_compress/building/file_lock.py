"""A lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def _print(text: str) -> None:
    print(text, flush=True)


@contextmanager
def file_lock(
    path: Path,
    purpose: str,
    say: Callable[[str], None] = _print,
    pause: Callable[[], None] = lambda: time.sleep(0.1),
) -> Iterator[None]:
    """Holds `path` locked; says so once when another process makes us wait.

    Args:
        pause: called again and again while we wait; an exception of it ends the wait. A thread that waits inside the
            kernel could not be interrupted.

    The kernel drops an flock when its holder dies, so there are no stale locks; the empty file stays, because
    removing it would let two processes lock two different files of the same name. Commands that are run meanwhile
    inherit the lock: should we be killed, the next one waits until they have ended as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.set_inheritable(file.fileno(), True)
        if not _is_locked(file):
            say(f"waiting for another process that is {purpose} ...")
            while not _is_locked(file):
                pause()
        try:
            yield
        finally:  # a command of the other lane may have inherited it, and go on for long
            fcntl.flock(file, fcntl.LOCK_UN)


def _is_locked(file: IO[str]) -> bool:
    """Tries to lock it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
