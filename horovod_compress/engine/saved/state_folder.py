"""A checkpoint folder: one file a rank, and a manifest that says which files belong together.

The manifest is renamed into place last, so a folder holds the whole checkpoint of before or the whole new one, whenever
a save is cut off. Files have names that no other save uses.

Two jobs may save into one folder: one that was started again beside its predecessor, or by mistake. There is no lock:
those of shared file systems may outlive their holders, and a job that hangs would keep out the one that takes its
place. Instead, a job knows the manifest that it left: where it finds another one, it is refused. The first save of a
job takes the folder over; a checkpoint that it neither left nor loaded stays, under another name.

And no save removes what another one may still name, however long that takes. Names begin with a mark of the process
that wrote the file. So a job knows its own: it removes the files of the checkpoint that it replaces, and what saves of
its own have left. What other jobs have left stays, as theirs may be under way; it is spoken of.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ... import __version__, ops
from ...errors import ConfigError, CorruptFrameError, StateError, naming
from ...exchange.wire import WIRE_VERSION
from . import checksums

MANIFEST = "manifest.json"
_FORMAT = 1
_MARKED = r"([0-9a-f]{10})[0-9a-f]{6}"  # a mark, and the number of a name
_NAME = re.compile(rf"rank\d+\.{_MARKED}\.hvc")
_KEPT = re.compile(r"manifest\.step\d+(\.[0-9a-f]{8})?\.json")
_LEFTOVER = re.compile(rf"(?:rank\d+|manifest)\..+\.tmp\.{_MARKED}")
#: A reader beside a job that saves all the time looks again so often.
LOOKS = 5

T = TypeVar("T")

_log = logging.getLogger("horovod_compress")
_told: set[Path] = set()  # kept manifests that cannot be read, and folders with files of others: of each once


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


def write(folder: Path, state: Mapping[str, Any], known: Known | None = None) -> Entry:
    """Write one rank's file; it belongs to no checkpoint before a manifest names it.

    Args:
        known: by this process; without it, the file is of a process of its own.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    name = f"rank{state['rank']}.{(known := known or Known()).marked()}.hvc"
    folder.mkdir(parents=True, exist_ok=True)
    return Entry(name, *_write(folder / name, checksums.parts(state), known))


def fingerprint(found: Manifest | None) -> str:
    """Return what tells a manifest from others, "" for none."""
    return f"{checksums.crc(checksums.canonical(asdict(found))):08x}" if found else ""


class Known:
    """What a process knows of folders: the checkpoint that its job left or loaded in each, by fingerprint.

    Rank 0 looks at it. All ranks have it, as each may be rank 0 when the job goes on with other ranks.
    """

    def __init__(self) -> None:
        self._writers: dict[Path, set[str]] = {}
        self._left: set[Path] = set()
        self._writer, self._process, self._numbers = "", 0, itertools.count()
        self.ours: set[str] = set()  #: the marks of all processes of the job that have saved with this one

    def marked(self) -> str:
        """Return a part of a name that no other save has, with the mark of this process."""
        if self._process != os.getpid():  # forks of one process are several
            self._writer, self._process = secrets.token_hex(5), os.getpid()
        return f"{self._writer}{next(self._numbers) % (1 << 24):06x}"

    def loaded(self, folder: Path, fingerprint: str) -> None:
        """Take note of the checkpoint that was loaded."""
        self._writers[folder.resolve()] = {fingerprint}

    def left(self, folder: Path, fingerprint: str) -> None:
        """Take note of the checkpoint that was saved."""
        self.loaded(folder, fingerprint)
        self._left.add(folder.resolve())

    def wrote(self, folder: Path, entry: Entry) -> None:
        """Take note of a file: rank 0 may name it, and be gone before it can say so."""
        self._writers.setdefault(folder.resolve(), set()).add(entry.name)

    def is_foreign(self, folder: Path, found: Manifest | None) -> bool:
        """Return whether a manifest is none that this job has left or loaded.

        Raises:
            ConfigError: and the job has left one here: another job has taken the folder over.
        """
        marks = self._writers.get(folder.resolve(), set())
        foreign = found is not None and marks.isdisjoint([fingerprint(found), *(entry.name for entry in found.files)])
        if foreign and folder.resolve() in self._left:
            raise _taken(folder, found)
        return foreign


def _taken(folder: Path, found: Manifest | None) -> ConfigError:
    what = f"the checkpoint there, of step {found.step}, is" if found else "the checkpoint there is"
    return ConfigError(
        f"another job saves in {folder}: {what} not the one that this job left; end one of the jobs, or use a separate "
        "folder for each"
    )


def found(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if there is none that can be read."""
    try:
        return manifest(folder)
    except (StateError, CorruptFrameError, OSError):
        return None


def commit(folder: Path, state: Mapping[str, Any], files: Iterable[Entry], known: Known | None = None) -> Manifest:
    """Let these files be the checkpoint, in place of the one before; return its manifest.

    Args:
        state: of any rank.
        known: by this job; without it, this is its first save.

    Raises:
        ConfigError: another job saves there.
        OSError: a file is not there, or the manifest cannot be written; the checkpoint of before is still there.
    """
    known, files = known or Known(), list(files)
    _check_there(folder, files)
    same = {name: state[name] for name in ("step", "method", "config", "seed", "plan")}
    made = Manifest(format=_FORMAT, package=__version__, wire=WIRE_VERSION, world=len(files), files=files, **same)
    before, spare = found(folder), None
    foreign = before if known.is_foreign(folder, before) else None
    try:
        spare = _keep(folder, foreign, known)
        _write(folder / MANIFEST, [memoryview(_text(asdict(made)))], known)
        if (now := found(folder)) != made:  # another job has replaced it at once
            raise _taken(folder, now)
        _check_there(folder, files)
    except OSError:
        if found(folder) == made and before:
            _write(folder / MANIFEST, [memoryview(_text(asdict(before)))], known)
        elif found(folder) == made:
            (folder / MANIFEST).unlink(missing_ok=True)
        if spare and found(folder) == before:  # it is no spare one any more
            spare.unlink(missing_ok=True)
        raise
    known.left(folder, fingerprint(made))
    if foreign:
        name = _kept(folder, foreign).name
        _log.warning(
            "%s holds a checkpoint of step %d that this job has neither loaded nor saved. It stays there as %s, and "
            "load() finds the one that is saved now. If this job should have continued from it, stop the job, rename "
            "%s to %s, and call load() before the first step; otherwise remove it",
            folder, foreign.step, name, name, MANIFEST,
        )  # fmt: skip
    known.ours |= {writer for entry in files for writer in _NAME.findall(entry.name)}
    _tidy(folder, None if foreign else before, known.ours)
    return made


def _check_there(folder: Path, files: Iterable[Entry]) -> None:
    for entry in files:
        if (size := (folder / entry.name).stat().st_size) != entry.bytes:
            raise OSError(f"{folder / entry.name} has {size} bytes, {entry.bytes} were written; is the folder shared?")


def _kept(folder: Path, foreign: Manifest) -> Path:
    return folder / f"manifest.step{foreign.step}.{fingerprint(foreign)}.json"


def _keep(folder: Path, foreign: Manifest | None, known: Known) -> Path | None:
    """Let a checkpoint stay that is not this job's: it may be the one that should have been loaded.

    Returns:
        its manifest, if it was not kept before.
    """
    if foreign is None:
        return None
    path = _kept(folder, foreign)
    with contextlib.suppress(CorruptFrameError, OSError):
        if _read_manifest(path) == foreign:
            return None
    _write(path, [memoryview(_text(asdict(foreign)))], known)
    return path


def discard(folder: Path, entry: Entry) -> None:
    """Remove a file, unless a manifest names it: whoever commits may fail when that is written already."""
    with contextlib.suppress(CorruptFrameError, OSError):  # it cannot be known; a later save tidies up
        named, _ = _named(folder)
        if entry.name not in named:
            (folder / entry.name).unlink()


def _named(folder: Path) -> tuple[set[str], list[Path]]:
    """Return the files that any manifest in a folder names, and the kept manifests that cannot be read.

    Raises:
        CorruptFrameError, OSError: the manifest itself cannot be read.
    """
    named, unreadable = set(), []
    for path in [path for path in folder.iterdir() if path.name == MANIFEST or _KEPT.fullmatch(path.name)]:
        if not path.is_file():
            continue
        try:
            named |= {entry.name for entry in _read_manifest(path).files}
        except (CorruptFrameError, OSError):
            if path.name == MANIFEST:
                raise
            unreadable.append(path)
    return named, unreadable


def manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        StateError: there is none, or it is of another version.
        CorruptFrameError: it is not, byte for byte, what was written.
    """
    try:
        return _read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        raise StateError(f"{folder} contains no saved compression: {MANIFEST} is missing") from None


def _read_manifest(path: Path) -> Manifest:
    data = path.read_bytes()
    try:
        body = json.loads(data)["manifest"]
        read = Manifest(**{**body, "files": [Entry(**entry) for entry in body["files"]]})
        intact = data == _text(asdict(read)) and _is_well_formed(read)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptFrameError(f"{path} is corrupt; load another copy, or an earlier checkpoint")
    return read


def of_one_look(folder: Path, take: Callable[[Manifest], T]) -> T:
    """Return what a call makes of the manifest; where it fails as another save has replaced that meanwhile, look again.

    Raises:
        StateError, CorruptFrameError, OSError: those of :func:`manifest` and of the call.
    """
    looks = LOOKS
    while True:
        read = manifest(folder)
        try:
            return take(read)
        except (CorruptFrameError, OSError):
            looks -= 1
            if not looks or found(folder) in (None, read):
                raise


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
        return checksums.parse(data)
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
    document = {"manifest": body, "crc32c": checksums.crc(checksums.canonical(body))}
    return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"


def _crc(data: bytearray) -> int:
    return ops.crc32c(torch.frombuffer(data, dtype=torch.uint8)) if data else 0


def _write(path: Path, pieces: Iterable[memoryview], known: Known) -> tuple[int, int]:
    """Write a file whole or not at all; return its size and its checksum."""
    temporary = path.with_name(f"{path.name}.tmp.{known.marked()}")
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


def _tidy(folder: Path, before: Manifest | None, ours: set[str]) -> None:
    """Remove the files of the checkpoint that was replaced, and what saves of this job have left, by its marks."""
    replaced = {entry.name for entry in before.files} if before else set()
    with contextlib.suppress(CorruptFrameError, OSError):  # the checkpoint is there by now
        (named, unreadable), strange = _named(folder), []
        for path in sorted(folder.iterdir()):
            whole, torn = _NAME.fullmatch(path.name), _LEFTOVER.fullmatch(path.name)
            if path.name in named or not (found := whole or torn):
                continue
            if path.name in replaced or (found[1] in ours and (torn or not unreadable)):
                path.unlink(missing_ok=True)
            elif found[1] not in ours:
                strange.append(path)
        for path in {path.resolve() for path in unreadable} - _told:
            _told.add(path)
            _log.warning(
                "%s cannot be read, so it is not known which files belong to it: what saves that were cut off left in "
                "the folder stays. If you do not need that checkpoint, remove %s", path, path.name,
            )  # fmt: skip
        if strange and (where := folder.resolve()) not in _told:
            _told.add(where)
            _log.warning(
                "%s holds %d file(s) that belong to no checkpoint, such as %s: another job saves there, or was "
                "ended in a save. If no other job runs, remove them", where, len(strange), strange[0].name,
            )  # fmt: skip
