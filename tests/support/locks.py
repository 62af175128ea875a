"""POSIX locks of files, which belong to a process: it loses them as soon as it closes any descriptor of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_TRY = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit()
    print("free")
"""


def is_free(path: Path) -> bool:
    """Return whether another process could lock a file."""
    command = [sys.executable, "-S", "-c", _TRY, path]
    tried = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60.0)
    return tried.stdout.strip() == "free"
