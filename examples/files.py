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


def give_to_caller(folder: Path, within: Path) -> None:
    """Under sudo, let a folder below `within` belong to whoever called sudo: else their next run could not write there.

    So do the folders between the two, which may be new. A folder elsewhere may hold other people's files: it stays.
    """
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if os.geteuid() != 0 or not (user and group and folder.is_dir()) or within not in folder.resolve().parents:
        return
    between = [parent for parent in folder.resolve().parents if within in parent.parents]
    for path in (folder, *folder.rglob("*"), *between):
        os.chown(path, int(user), int(group), follow_symlinks=False)
