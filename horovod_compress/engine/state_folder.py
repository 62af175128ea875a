"""A checkpoint folder: one file a rank, and a manifest that says which files belong together.

The manifest is renamed into place last, so a folder holds the whole checkpoint of before or the whole new one, whenever
a save is cut off. Files have names that no other save uses; what no manifest names is removed after the next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, ops
from ..errors import CorruptFrameError, StateError, naming
from ..exchange.wire import WIRE_VERSION
from . import sealed, state_file

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"rank\d+\.[0-9a-f]{16}\.hvc")
_LEFTOVER = re.compile(rf"({_NAME.pattern}|manifest\.json)\.tmp\.[0-9a-f]{{16}}")


@dataclass(frozen=True)
class Entry:
    """One rank's file."""

    name: str
    bytes: int
    crc32c: int


@dataclass(frozen=True)
class Manifest:
    """What belongs together.

    Attributes:
        files: in rank order.
    """

    format: int
    package: str
    wire: int
    step: int
    world: int
    method: str
    config: dict[str, Any]
    seed: int
    plan: str
    files: list[Entry]


def write(folder: Path, state: Mapping[str, Any]) -> Entry:
    """Write one rank's file; it belongs to no checkpoint before a manifest names it.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    name = f"rank{state['rank']}.{secrets.token_hex(8)}.hvc"
    folder.mkdir(parents=True, exist_ok=True)
    size, crc = _write(folder / name, state_file.parts(state))
    return Entry(name, size, crc)


def commit(folder: Path, state: Mapping[str, Any], files: Iterable[Entry]) -> None:
    """Let these files be the checkpoint, in place of the one before.

    Args:
        state: of any rank.

    Raises:
        OSError: a file is not there, or the manifest cannot be written; the checkpoint of before is still there.
    """
    files = list(files)
    for entry in files:
        if (size := (folder / entry.name).stat().st_size) != entry.bytes:
            raise OSError(f"{folder / entry.name} has {size} bytes, {entry.bytes} were written; is the folder shared?")
    same = {name: state[name] for name in ("step", "world", "method", "config", "seed", "plan")}
    made = Manifest(format=_FORMAT, package=__version__, wire=WIRE_VERSION, files=files, **same)
    _write(folder / MANIFEST, [memoryview(_text(asdict(made)))])
    _tidy(folder, {entry.name for entry in made.files})


def discard(folder: Path, entry: Entry) -> None:
    """Remove a file, unless the manifest names it: whoever commits may fail when that is written already."""
    try:
        named = {found.name for found in manifest(folder).files}
    except (StateError, IsADirectoryError):
        named = set()
    except (CorruptFrameError, OSError):
        return  # it cannot be known; the next save tidies up
    with contextlib.suppress(OSError):
        if entry.name not in named:
            (folder / entry.name).unlink()


def manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        StateError: there is none, or it is of another version.
        CorruptFrameError: it is not, byte for byte, what was written.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise StateError(f"{folder} contains no saved compression: {MANIFEST} is missing") from None
    try:
        body = json.loads(data)["manifest"]
        found = Manifest(**{**body, "files": [Entry(**entry) for entry in body["files"]]})
        intact = data == _text(asdict(found)) and _is_well_formed(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptFrameError(f"{folder / MANIFEST} is corrupt; load another copy, or an earlier checkpoint")
    return found


def read(folder: Path, entry: Entry) -> dict[str, Any]:
    """Return the state in one rank's file.

    Raises:
        CorruptFrameError: it is gone, or not, byte for byte, what was written.
    """
    path = folder / entry.name
    try:
        data = bytearray(path.stat().st_size)
        with path.open("rb") as file:
            del data[file.readinto(data) :]
    except FileNotFoundError:
        raise CorruptFrameError(f"{path}, which the manifest lists, is missing; load another copy") from None
    if (len(data), _crc(data)) != (entry.bytes, entry.crc32c):
        raise CorruptFrameError(
            f"{path} is corrupt: it should have {entry.bytes} bytes with the checksum {entry.crc32c:08x}, it has "
            f"{len(data)} with {_crc(data):08x}; load another copy, or an earlier checkpoint"
        )
    try:
        return state_file.parse(data)
    except CorruptFrameError as error:
        raise CorruptFrameError(f"{path}: {error}") from None


def _is_well_formed(found: Manifest) -> bool:
    numbers = [found.format, found.wire, found.step, found.world, found.seed]
    numbers += [number for entry in found.files for number in (entry.bytes, entry.crc32c)]
    return (
        all(type(number) is int for number in numbers)
        and found.format == _FORMAT
        and len(found.files) == found.world > 0
        and all(isinstance(entry.name, str) and _NAME.fullmatch(entry.name) for entry in found.files)
    )


def _text(body: Mapping[str, Any]) -> bytes:
    document = {"manifest": body, "crc32c": sealed.crc(sealed.canonical(body))}
    return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"


def _crc(data: bytearray) -> int:
    return ops.crc32c(torch.frombuffer(data, dtype=torch.uint8)) if data else 0


def _write(path: Path, pieces: Iterable[memoryview]) -> tuple[int, int]:
    """Write a file whole or not at all; return its size and its checksum."""
    temporary = path.with_name(f"{path.name}.tmp.{secrets.token_hex(8)}")
    size = crc = 0
    try:
        with naming(path), temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                size += piece.nbytes
                if piece.nbytes:
                    crc = ops.crc32c(torch.frombuffer(bytearray(piece), dtype=torch.uint8), crc)
            file.flush()
            os.fsync(file.fileno())
            temporary.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync(path.parent)
    return size, crc


def _sync(folder: Path) -> None:
    """Let names in a folder outlive a loss of power, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _tidy(folder: Path, named: set[str]) -> None:
    """Remove files of earlier saves, and what was left of one that was cut off."""
    with contextlib.suppress(OSError):  # the checkpoint is there by now
        for path in list(folder.iterdir()):
            earlier = bool(_NAME.fullmatch(path.name)) and path.name not in named
            if earlier or _LEFTOVER.fullmatch(path.name):
                path.unlink()
