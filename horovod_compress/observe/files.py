"""Files that a rank writes while it trains: one for each rank, which a reader sees whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..errors import ConfigError


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
