"""``compression.save(folder)`` and ``load(folder)``: all ranks, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import errors
from ...engine import sealed, state_folder
from ...engine.redistribute import redistributed
from ...engine.state_folder import Entry
from ...errors import ConfigError, HorovodCompressError, MismatchError, StateError

WAYS = ("refuse", "reset", "redistribute")
#: What another rank's error is raised as here.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HorovodCompressError)
}

#: Returns every rank's value.
Share = Callable[[Any], list[Any]]


def save(folder: str | os.PathLike[str], state: Callable[[], Mapping[str, Any]], rank: int, share: Share) -> None:
    """Write this rank's state beside those of the others.

    Raises:
        ConfigError: some rank could not; the checkpoint of before is still there.
        ExchangeError: some rank has failed, or did not come.
    """
    path, entry, problem, mine = Path(folder), None, None, {}
    try:
        mine = dict(state())
        entry = state_folder.write(path, mine)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        problem = _said(error)
    # What was shown may be seen by ranks that come later than this one waits: the file stays then, for the next save
    # to remove.
    found = share([problem, entry and asdict(entry), mine.get("step")])
    with _discarding(path, entry):
        steps = sorted({step for told, _, step in found if not told})
        if len(steps) > 1:
            found[0][0] = [
                "MismatchError",
                f"the ranks are at different steps, {steps}; call save() after the same one",
            ]
        _raise([told for told, *_ in found])
        problem = None
        if rank == 0:
            problem = _commit(path, mine, [Entry(**written) for _, written, _ in found])
    problems = share(problem)  # where a rank is gone now, the manifest may name this rank's file: it stays
    with _discarding(path, entry):
        _raise(problems[:1])


@contextlib.contextmanager
def _discarding(folder: Path, entry: Entry | None) -> Iterator[None]:
    """Remove this rank's file again if its checkpoint does not come about."""
    try:
        yield
    except HorovodCompressError:
        if entry:
            state_folder.discard(folder, entry)
        raise


def _commit(folder: Path, state: Mapping[str, Any], files: list[Entry]) -> list[str] | None:
    try:
        state_folder.commit(folder, state, files)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        return _said(error)
    return None


def load(
    folder: str | os.PathLike[str],
    residuals: str,
    place: tuple[int, int],
    owned: set[str],
    check: Callable[[Mapping[str, Any], str], None],
    share: Share,
) -> tuple[dict[str, Any], str]:
    """Return this rank's state once every rank has found its own good, and how to take it: "restore" or "reset".

    Args:
        place: this rank, and the number of ranks.
        owned: see :func:`~horovod_compress.engine.redistribute.redistributed`.
        check: refuses a state that could not be taken; changes nothing.

    Raises:
        ConfigError, StateError, CorruptFrameError: some rank could not; no rank has changed anything.
    """
    state: dict[str, Any] = {}
    way, problem, seen = "restore", None, ""
    try:
        state, way, seen = _read(Path(folder), residuals, place, owned)
        check(state, way)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        problem = _said(error)
    found = share([problem, seen])
    _raise([told for told, _ in found])
    if len({other for _, other in found}) > 1:
        raise MismatchError(
            f"the ranks have found different checkpoints in {folder}; save() and load() need a folder that all ranks "
            "share"
        )
    return state, way


def _read(folder: Path, residuals: str, place: tuple[int, int], owned: set[str]) -> tuple[dict[str, Any], str, str]:
    if residuals not in WAYS:
        raise ConfigError(f"residuals should be one of {', '.join(WAYS)}, got {residuals!r}")
    rank, world = place
    manifest = state_folder.manifest(folder)
    seen = f"{sealed.crc(sealed.canonical(asdict(manifest))):08x}"
    if residuals == "reset":
        return state_folder.read(folder, manifest.files[rank % manifest.world]), "reset", seen
    if world == manifest.world:
        return state_folder.read(folder, manifest.files[rank]), "restore", seen
    if residuals == "refuse":
        raise StateError(
            f"the checkpoint in {folder} is of {manifest.world} ranks, but this job has {world}; pass "
            'residuals="redistribute" to divide the unsent residual among them, or "reset" to begin with empty '
            "residuals"
        )
    states = (state_folder.read(folder, entry) for entry in manifest.files)  # one at a time: a model may be large
    return redistributed(states, rank, world, owned), "restore", seen


def _said(error: Exception) -> list[str]:
    if isinstance(error, HorovodCompressError):
        return [type(error).__name__, str(error)]
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return ["ConfigError", f"{what}; nothing was changed"]


def _raise(problems: list[list[str] | None]) -> None:
    """Raise what the first rank with a problem has found; every rank comes to the same end."""
    for rank, problem in enumerate(problems):
        if problem:
            kind, text = problem
            raise _KINDS.get(kind, ConfigError)(f"rank {rank}: {text.removeprefix(f'rank {rank}: ')}")
