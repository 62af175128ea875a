"""Write files so that a reader never meets half of one, and its owner can replace it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def give_to_caller(folder: Path) -> None:
    """Under sudo, let a folder belong to whoever called sudo: else their next run could not write there."""
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if os.geteuid() == 0 and user and group and folder.is_dir():
        for path in (folder, *folder.rglob("*")):
            os.chown(path, int(user), int(group), follow_symlinks=False)
