"""Files that a rank writes: one for each rank, which a reader sees whole or not at all.

What a rank has said of its failure is checked, as nobody can ask it any more when others read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_line

_log = logging.getLogger("horovod_compress")

#: A frame's header names no more.
MOST_RANKS = 1 << 16
_MOST = 1 << 62  # of steps, buckets and hops


def path_of(path: str | os.PathLike[str], rank: int, what: str, example: str) -> Path:
    """Return a rank's file: its number in place of ``{rank}``, or before the ending.

    Args:
        what: the file is, for an error.
        example: of a path, for an error; a path without an ending is given that of the example.

    Raises:
        ConfigError: this is no path.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f'the path of a {what} should be a file such as "{example}", got {path!r}')
    text = os.fspath(path)
    if "{rank}" in text:
        return Path(text.replace("{rank}", str(rank)))
    whole = Path(text)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix or Path(example).suffix}")


def check_writable(path: Path, what: str) -> None:
    """Refuse a file that could not be written later; its folder is made.

    Raises:
        ConfigError: says why.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        raise ConfigError(f"the {what} cannot be written to {path}: {error}; choose another file") from error


def replace_whole(path: Path, text: str) -> None:
    """Write a file under another name, then rename it.

    Raises:
        OSError: it was not written; what was there before still is.
    """
    temporary = _temporary(path)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """Return the name of an unfinished file, whose ending no collector looks for."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def checked_note(found: Any) -> dict[str, Any]:
    """Return the parts of a rank's note that are as they were written, texts in one line; of anything else nothing."""
    if not isinstance(found, Mapping):
        return {}
    kept: dict[str, Any] = {name: one_line(value) for name, value in found.items() if isinstance(value, str)}
    kept |= {name: value for name, value in found.items() if isinstance(value, bool) or is_count(value)}
    for name in ("place", "finished", *(() if "where" in kept else ("stuck",))):  # it is said where it is stuck
        kept.pop(name, None)
    if _are_counts(found.get("place"), 3):
        kept["place"] = list(found["place"])
    if "finished" in found and (found["finished"] is None or _are_counts(found["finished"], 2)):
        kept["finished"] = found["finished"] and list(found["finished"])
    if isinstance(operands := found.get("operands"), Mapping):
        kept["operands"] = {one_line(str(name)): one_line(str(value)) for name, value in operands.items()}
    return kept


def checked_notes(found: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Return the notes of several ranks, see :func:`checked_note`."""
    return {rank: checked_note(each) for rank, each in found.items()}


def is_count(found: object, below: int = _MOST) -> bool:
    """Return whether this is a whole number from 0."""
    return type(found) is int and 0 <= found < below


def _are_counts(found: Any, count: int) -> bool:
    return isinstance(found, (list, tuple)) and len(found) == count and all(map(is_count, found))
