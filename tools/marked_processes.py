"""Processes found by a mark in their environment: launchers put workers in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_SECONDS = 0.02


def marked(name: str, mark: str) -> list[int]:
    """Return the living processes that have ``name=mark`` in their environment; one that is over has none."""
    wanted, found = f"{name}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def kill_marked(name: str, mark: str, patience: float = 10.0) -> None:
    """Kill every such process until there is none; stopped ones too, and those that others start meanwhile.

    Raises:
        TimeoutError: some are left.
    """
    end, killed = time.monotonic() + patience, set[int]()
    # One that is dying has no environment any more, and is there a moment longer.
    while survivors := {*marked(name, mark), *filter(_lives, killed)}:
        killed |= survivors
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(survivors)} were killed {patience:g} s ago and are still there")
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _lives(pid: int) -> bool:
    try:
        # After the name, which is in brackets and may hold anything, comes the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
