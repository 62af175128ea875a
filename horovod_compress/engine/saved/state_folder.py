"""A checkpoint folder: one file a rank, and a manifest that says which files belong together.

The manifest is renamed into place last, so a folder holds the whole checkpoint of before or the whole new one, whenever
a save is cut off. Files have names that no other save uses.

Two jobs may save into one folder: one that was started again beside its predecessor, or by mistake. There is no lock:
those of shared file systems may outlive their holders, and a job that hangs would keep out the one that takes its
place. Instead, a job knows the manifest that it left: where it finds another one, it is refused. The first save of a
job takes the folder over; a checkpoint that it neither left nor loaded stays, under another name. And no save removes
what another one may still name: only the files of the checkpoint that it replaces, and what has been lying about for
long before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ... import __version__, ops
from ...errors import ConfigError, CorruptFrameError, StateError, naming
from ...exchange.wire import WIRE_VERSION
from . import checksums, manifests
from .manifests import NAME, Entry, Manifest, RankGroup

MANIFEST = "manifest.json"
_KEPT = re.compile(r"manifest\.step\d+(\.[0-9a-f]{8})?\.json")
_LEFTOVER = re.compile(rf"({NAME.pattern}|{_KEPT.pattern}|manifest\.json)\.tmp\.[0-9a-f]{{16}}")
#: What nobody names, and is so much older than a save, is of one that was cut off: no rank of a save waits so long for
#: the others, also with a ``timeout`` of hours.
_LONG_SECONDS = 86400.0
#: A reader beside a job that saves all the time looks again so often.
LOOKS = 5

T = TypeVar("T")

_log = logging.getLogger("horovod_compress")
_unreadable: set[Path] = set()  # kept manifests that were spoken of


def write(folder: Path, state: Mapping[str, Any]) -> Entry:
    """Write one rank's file; it belongs to no checkpoint before a manifest names it.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    name = f"rank{state['rank']}.{secrets.token_hex(8)}.hvc"
    folder.mkdir(parents=True, exist_ok=True)
    size, crc = _write(folder / name, checksums.parts(state))
    return Entry(name, size, crc)


class Known:
    """What a process knows of folders: the checkpoint that its job left or loaded in each, by fingerprint.

    Rank 0 looks at it. All ranks have it, as each may be rank 0 when the job goes on with other ranks.
    """

    def __init__(self) -> None:
        self._marks: dict[Path, set[str]] = {}
        self._left: set[Path] = set()

    def loaded(self, folder: Path, fingerprint: str) -> None:
        """Take note of the checkpoint that was loaded."""
        self._marks[folder.resolve()] = {fingerprint}

    def left(self, folder: Path, fingerprint: str) -> None:
        """Take note of the checkpoint that was saved."""
        self.loaded(folder, fingerprint)
        self._left.add(folder.resolve())

    def wrote(self, folder: Path, entry: Entry) -> None:
        """Take note of a file: rank 0 may name it, and be gone before it can say so."""
        self._marks.setdefault(folder.resolve(), set()).add(entry.name)

    def is_foreign(self, folder: Path, found: Manifest | None) -> bool:
        """Return whether a manifest is none that this job has left or loaded.

        Raises:
            ConfigError: and the job has left one here: another job has taken the folder over.
        """
        marks = self._marks.get(folder.resolve(), set())
        foreign = found is not None and marks.isdisjoint([found.fingerprint(), *(entry.name for entry in found.files)])
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


def commit(
    folder: Path,
    state: Mapping[str, Any],
    files: Iterable[Entry],
    known: Known | None = None,
    group: RankGroup | None = None,
) -> Manifest:
    """Let these files be the checkpoint, in place of the one before; return its manifest.

    Args:
        state: of any rank.
        known: by this job; without it, this is its first save.
        group: whose it is.

    Raises:
        ConfigError: another job saves there, or other ranks of this one do.
        OSError: a file is not there, or the manifest cannot be written; the checkpoint of before is still there.
    """
    known, made = known or Known(), manifests.made(state, list(files), group, __version__, WIRE_VERSION)
    _check_there(folder, made.files)
    try:
        return _commit(folder, made, known)
    except FileExistsError:  # another save has been the first one here
        return _commit(folder, made, known)


def _commit(folder: Path, made: Manifest, known: Known) -> Manifest:
    is_first = not os.path.lexists(folder / MANIFEST)  # before another look: what comes in between is seen there
    before, spare = found(folder), None
    foreign = before if known.is_foreign(folder, before) else None
    if foreign and (told := not_of(folder, foreign, made.group)):
        raise ConfigError(f"{told}; use a separate folder for each group of ranks, or remove what is there")
    try:
        spare = _keep(folder, foreign)
        _write(folder / MANIFEST, [memoryview(made.text())], create=is_first)
        if (now := found(folder)) != made:  # another job has replaced it at once
            raise _taken(folder, now)
        _check_there(folder, made.files)
    except OSError:
        if found(folder) == made and before:
            _write(folder / MANIFEST, [memoryview(before.text())])
        elif found(folder) == made:
            (folder / MANIFEST).unlink(missing_ok=True)
        if spare and found(folder) == before:  # it is no spare one any more
            spare.unlink(missing_ok=True)
        raise
    known.left(folder, made.fingerprint())
    if foreign:
        name = _kept(folder, foreign).name
        _log.warning(
            "%s holds a checkpoint of step %d that this job has neither loaded nor saved. It stays there as %s, and "
            "load() finds the one that is saved now. If this job should have continued from it, stop the job, rename "
            "%s to %s, and call load() before the first step; otherwise remove it",
            folder, foreign.step, name, name, MANIFEST,
        )  # fmt: skip
    _tidy(folder, made, None if foreign else before)
    return made


def not_of(folder: Path, found: Manifest, group: RankGroup | None) -> str | None:
    """Return in words that a checkpoint is of other ranks of this job than these; None where it need not be."""
    if not (group and found.group and group.is_apart(found.group)):
        return None
    theirs, ours = (", ".join(map(str, one.ranks)) for one in (found.group, group))
    return f"the checkpoint in {folder} is of rank(s) {theirs}, and this compression is of rank(s) {ours}"


def _check_there(folder: Path, files: Iterable[Entry]) -> None:
    for entry in files:
        path = folder / entry.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise OSError(
                f"No such file: {path}, which a rank has written; give every rank the same folder, which all hosts see"
            ) from None
        if size != entry.bytes:
            raise OSError(f"{path} has {size} bytes, {entry.bytes} were written; is the folder shared?")


def _kept(folder: Path, foreign: Manifest) -> Path:
    return folder / f"manifest.step{foreign.step}.{foreign.fingerprint()}.json"


def _keep(folder: Path, foreign: Manifest | None) -> Path | None:
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
    _write(path, [memoryview(foreign.text())])
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
    try:
        return manifests.parse(path.read_bytes())
    except CorruptFrameError:
        raise CorruptFrameError(f"{path} is corrupt; load another copy, or an earlier checkpoint") from None


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


def _crc(data: bytearray) -> int:
    return ops.crc32c(torch.frombuffer(data, dtype=torch.uint8)) if data else 0


def _write(path: Path, pieces: Iterable[memoryview], *, create: bool = False) -> tuple[int, int]:
    """Write a file whole or not at all; return its size and its checksum.

    Args:
        create: refuse to replace one, where the file system can.

    Raises:
        FileExistsError: there is one.
    """
    temporary = path.with_name(f"{path.name}.tmp.{secrets.token_hex(8)}")
    size = crc = 0
    try:
        with naming(path), temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                size += piece.nbytes
                if piece.nbytes:
                    own = bytearray(piece) if piece.readonly else piece  # torch warns of memory that is read only
                    crc = ops.crc32c(torch.frombuffer(own, dtype=torch.uint8), crc)
            file.flush()
            os.fsync(file.fileno())
            _create(temporary, path) if create else temporary.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync(path.parent)
    return size, crc


def _create(temporary: Path, path: Path) -> None:
    """Give a file its name unless there is such a file; its other name is for the caller to remove."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # such as "not supported": without links, two that are the first at once replace each other
        temporary.rename(path)


def _sync(folder: Path) -> None:
    """Let names in a folder outlive a loss of power, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _tidy(folder: Path, made: Manifest, before: Manifest | None) -> None:
    """Remove the files of the checkpoint that was replaced, and what has been left of saves that were cut off.

    Younger files may be of another job, which is about to name them.
    """
    replaced = {entry.name for entry in before.files} if before else set()
    with contextlib.suppress(CorruptFrameError, OSError):  # the checkpoint is there by now
        (named, unreadable), now = _named(folder), (folder / MANIFEST).stat().st_mtime
        for path in list(folder.iterdir()):
            ours = bool(NAME.fullmatch(path.name)) and path.name not in named
            leftover = (ours and not unreadable) or _LEFTOVER.fullmatch(path.name)
            if (ours and path.name in replaced) or (leftover and path.stat().st_mtime < now - _LONG_SECONDS):
                path.unlink(missing_ok=True)
        for path in {path.resolve() for path in unreadable} - _unreadable:
            _unreadable.add(path)
            _log.warning(
                "%s cannot be read, so it is not known which files belong to it: what saves that were cut off left in "
                "the folder stays. If you do not need that checkpoint, remove %s", path, path.name,
            )  # fmt: skip
