"""A lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, purpose: str) -> Iterator[None]:
    """Holds `path` locked; says so once when another process makes us wait.

    The kernel drops an flock when its holder dies, so there are no stale locks; the empty file stays, because
    removing it would let two processes lock two different files of the same name. Commands that are run meanwhile
    inherit the lock: should we be killed, the next one waits until they have ended as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another make setup that is {purpose} ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
