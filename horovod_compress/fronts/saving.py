"""What is saved and loaded of a compression: one rank's state, or that of all ranks in a folder, or of none."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..engine.kept import norm_of
from ..engine.optimizer.step_hooks import in_a_step
from ..engine.saved import checkpoint, state_folder
from ..engine.saved.manifests import Entry, Manifest, RankGroup
from ..engine.saved.redistribute import redistributed
from ..engine.saved.state_folder import Known
from ..errors import ConfigError, HorovodCompressError, MismatchError, StateError
from .session import Session

_log = logging.getLogger("horovod_compress")

WAYS = ("refuse", "reset", "redistribute")
#: What another rank's error is raised as here.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HorovodCompressError)
}


@dataclass(frozen=True)
class Saver:
    """One of the ranks that save together.

    Attributes:
        rank, world: among those that exchange.
        shard, shards: of what it has a part of, where these ranks have one of several.
        of_job: its number in the whole job, as people know it; None for that of its file.
        group: the ranks of all parts, where these are not the whole job.
    """

    rank: int
    world: int
    shard: int = 0
    shards: int = 1
    of_job: int | None = None
    group: RankGroup | None = None

    @property
    def number(self) -> int:
        """Return the number of this rank's file."""
        return self.rank * self.shards + self.shard

    @property
    def count(self) -> int:
        """Return the number of all files."""
        return self.world * self.shards


#: Returns every rank's value.
Gather = Callable[[Any], list[Any]]
#: Returns what a rank of another number of ranks gets of all states: by these, its number, and how many there are now.
Deal = Callable[[Iterable[Mapping[str, Any]], int, int], dict[str, Any]]


def save(
    folder: str | os.PathLike[str],
    state: Callable[[], Mapping[str, Any]],
    saver: Saver,
    gather: Gather,
    known: Known | None = None,
) -> None:
    """Write this rank's state beside those of the others.

    Args:
        saver: this rank.
        known: by this process, of its job's folders; None for nothing.

    Raises:
        ConfigError: some rank could not, or another job saves there; the checkpoint of before is still there.
        ExchangeError: some rank has failed, or did not come.
    """
    path, entry, problem, mine, known = Path(), None, None, {}, known or Known()
    try:
        path = _path(folder)
        if saver.number == 0:
            known.is_foreign(path, state_folder.found(path))
        mine = dict(state())
        entry = state_folder.write(path, mine)
        known.wrote(path, entry)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        problem = _said(error, saver)
    # Where this rank waits in vain, another one may just have gone on with what it has shown, so the file stays, for a
    # save that takes place a day later to remove.
    found = gather([problem, entry and asdict(entry), mine.get("step")])
    with _discarding(path, entry):
        steps = sorted({step for told, _, step in found if not told})
        _raise([told for told, *_ in found])
        if len(steps) > 1:
            raise MismatchError(f"the ranks are at different steps, {steps}; call save() after the same one")
        problem, made = None, ""
        if saver.number == 0:
            try:
                files = [Entry(**written) for _, written, _ in found]
                made = state_folder.commit(path, mine, files, known, saver.group).fingerprint()
            except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
                problem = _said(error, saver)
    told = gather([problem, made])  # where a rank is gone now, the manifest may name this rank's file: it stays
    problem, made = told[0]
    with _discarding(path, entry):
        _raise([problem])
    known.left(path, made)  # also where this is not rank 0: it may be next time


@contextlib.contextmanager
def _discarding(folder: Path, entry: Entry | None) -> Iterator[None]:
    """Remove this rank's file again if its checkpoint does not come about."""
    try:
        yield
    except HorovodCompressError:
        if entry:
            state_folder.discard(folder, entry)
        raise


def load(
    folder: str | os.PathLike[str],
    residuals: str,
    saver: Saver,
    deal: Deal,
    check: Callable[[Mapping[str, Any], str], None],
    gather: Gather,
    known: Known | None = None,
) -> tuple[dict[str, Any], str]:
    """Return this rank's state once every rank has found its own good, and how to take it: "restore" or "reset".

    Where a job saves into the folder meanwhile, ranks may find different checkpoints: all look again.

    Args:
        saver: this rank.
        deal: :func:`~horovod_compress.engine.saved.redistribute.redistributed`, with what it has to know of the method.
        check: refuses a state that could not be taken; changes nothing.
        known: by this process, of its job's folders.

    Raises:
        ConfigError, StateError, CorruptFrameError: some rank could not; no rank has changed anything.
    """
    path = Path()
    for _ in range(state_folder.LOOKS):
        state, way, problem, seen = {}, "restore", None, None  # type: tuple[dict[str, Any], str, Any, Manifest | None]
        try:
            if residuals not in WAYS:
                raise ConfigError(f"residuals should be one of {', '.join(WAYS)}, got {residuals!r}")
            path = _path(folder)
            read = partial(_read, path, residuals=residuals, saver=saver, deal=deal)
            state, way, seen = state_folder.of_one_look(path, read)
            check(state, way)
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
            problem = _said(error, saver)
        found = gather([problem, seen and seen.fingerprint()])
        different = len({other for _, other in found if other}) > 1
        if not different:
            break
    _raise([told for told, _ in found])
    if different:
        raise MismatchError(
            f"the ranks have found different checkpoints in {folder}; save() and load() need a folder that all ranks "
            "share"
        )
    if known and seen:
        known.loaded(path, seen.fingerprint())
    if seen and way == "restore" and seen.world != saver.count and saver.rank == 0:
        tell_dealt(seen.world // saver.shards, saver.world, state)
    return state, way


def _path(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ConfigError(f'the folder of a checkpoint should be a path such as "checkpoint", got {folder!r}')
    return Path(folder)


def tell_dealt(before: int, now: int, state: Mapping[str, Any]) -> None:
    """Say that residuals, if any, were dealt out to another number of ranks, of which one has this state."""
    if kept := [*state["state"].get("residual", {}).values(), *state.get("waiting", {}).values()]:
        _log.info(
            "the residuals of %d rank(s) were dealt out to %d, so that together they count as before; the norm of "
            "each one's is %.3g", before, now, norm_of(kept),
        )  # fmt: skip


def _read(
    folder: Path, manifest: Manifest, residuals: str, saver: Saver, deal: Deal
) -> tuple[dict[str, Any], str, Manifest]:
    if told := state_folder.not_of(folder, manifest, saver.group):
        raise StateError(f"{told}; load() the folder that these have saved in")
    mine = manifest.files[saver.shard :: saver.shards]  # of the ranks that had what this one has
    if residuals == "reset" and mine:
        return state_folder.read(folder, mine[saver.rank % len(mine)]), "reset", manifest
    if saver.count == manifest.world:
        return state_folder.read(folder, manifest.files[saver.number]), "restore", manifest
    states = _of_shard(folder, mine or manifest.files, saver)  # one at a time: a model may be large
    if residuals == "refuse":
        next(states)  # of another number of shards, it can be divided among no number of ranks
        raise StateError(
            f"the checkpoint in {folder} is of {manifest.world} ranks, but this job has {saver.count}; pass "
            'residuals="redistribute" to divide the unsent residual among them, or "reset" to begin with empty '
            "residuals"
        )
    return deal(states, saver.rank, saver.world), "restore", manifest


def _of_shard(folder: Path, entries: Iterable[Entry], saver: Saver) -> Iterator[dict[str, Any]]:
    """Yield states, which have to be of this rank's shard."""
    for entry in entries:
        state = state_folder.read(folder, entry)
        checkpoint.check_shard({"shard": [saver.shard, saver.shards]}, state)
        yield state


def _said(error: Exception, saver: Saver) -> list[str]:
    """Return what other ranks are to raise for an error of this one: its kind, and its text."""
    whose = f"rank {saver.number if saver.of_job is None else saver.of_job}: "
    if isinstance(error, HorovodCompressError):
        return [type(error).__name__, whose + str(error).removeprefix(whose)]
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return ["ConfigError", f"{whose}{what}; nothing was changed"]


def _raise(problems: list[list[str] | None]) -> None:
    """Raise what the first rank with a problem has found; every rank comes to the same end."""
    if problem := next(filter(None, problems), None):
        kind, text = problem
        raise _KINDS.get(kind, ConfigError)(text)


class Saved:
    """The state of one compression, as it is saved and loaded: one rank's, or that of all ranks in a folder."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def state(self) -> dict[str, Any]:
        """Return this rank's state.

        Raises:
            ConfigError: a step is under way.
        """
        self.settle()
        return self.copied()

    def of_last_step(self) -> dict[str, Any]:
        """Return this rank's state after a step whose results have come, also where others have failed since."""
        return self.copied() if self._session.reducer.idle() else self.state()

    def settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            ConfigError: a step is.
        """
        self._check_between_steps()
        checkpoint.between_steps(self._session.reducer, "saved")

    def copied(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Any]:
        """Return this rank's state, where :meth:`settle` has found nothing under way since the last step.

        Args:
            copy: of what is kept, which the next step changes.
        """
        session = self._session
        more = session.steps.state(copy) | {"exchanged": session.exchanges} | self._shown()
        return checkpoint.copied(session.reducer, session.methods, more, copy)

    def _shown(self) -> dict[str, Any]:
        """Return what is saved of the parts that ranks have."""
        row = self._session.job.row
        return {"shard": [row.rank, row.size]} if row and row.size > 1 else {}

    def _saver(self) -> Saver:
        session, reducer = self._session, self._session.reducer
        row, number = session.job.row, session.job.number
        row_of = (row.rank, row.size) if row else (0, 1)
        return Saver(reducer.rank, reducer.world, *row_of, number, session.job.group_of_all())

    @torch.inference_mode(False)
    def load(self, state: Mapping[str, Any], residuals: str) -> None:
        """Restore a state, completely or not at all.

        Raises:
            ConfigError, StateError, CorruptFrameError: see :meth:`~.compression.BaseCompression.load_state_dict`.
        """
        self._check(state, residuals)
        self._take(state, residuals)

    def save_folder(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks, see :meth:`~.compression.BaseCompression.save`."""
        session = self._session
        session.job.check()

        def state() -> dict[str, Any]:
            path = Path(folder).resolve()
            other = _savers.get(path)
            is_there = (path / state_folder.MANIFEST).exists()
            if other and is_there and not other.is_over() and other.steps.index.keys().isdisjoint(session.steps.index):
                raise ConfigError(
                    f"{path} holds the checkpoint of another compression of this process, which saving here would "
                    "remove; use a separate folder for each, or close() the other one first"
                )
            self.settle()
            return self.copied(lambda kept: kept)  # it is written before anything changes it

        stages = iter(("hvc.save.files", "hvc.save.manifest"))
        save(folder, state, self._saver(), lambda value: session.gather_all(value, next(stages), by_name=True), _known)
        _savers[Path(folder).resolve()] = session

    @torch.inference_mode(False)
    def load_folder(self, folder: str | os.PathLike[str], residuals: str) -> None:
        """Restore this rank's part, once every rank has found its own good."""
        session, methods = self._session, self._session.methods
        session.job.check()
        deal = partial(redistributed, owned=methods.folded(), coded=methods.coded())
        state, how = load(
            folder, residuals, self._saver(), deal, self._check,
            lambda value: session.gather_all(value, "hvc.load", by_name=True), _known,
        )  # fmt: skip
        self._take(state, how)

    def _check(self, state: Mapping[str, Any], residuals: str) -> None:
        """Refuse a state that could not be loaded; nothing is changed."""
        session = self._session
        self._check_between_steps()
        checkpoint.check_shard(self._shown(), state)
        session.steps.check(state, residuals)
        if residuals == "restore":
            checkpoint.check_exchanged(session.exchanges, state)

    def _take(self, state: Mapping[str, Any], residuals: str) -> None:
        session = self._session
        session.steps.load(state, residuals, begun=session.compared)

    def _check_between_steps(self) -> None:
        updating = self._session.updating
        within = in_a_step() or (updating is not None and updating._stepping)
        if updating is not None and not within:
            updating._updates.settle()
        if within or self._session.under_way:
            raise ConfigError(
                f"rank {self._session.job.number}: a step is under way; the compression state can be saved and loaded "
                "between steps only: after the optimizer's step(), or synchronize(), has returned, so not in its "
                "closure or hooks, nor in the handler of a signal, which may set a flag for the training loop"
            )


#: Of folders. The next compression of this process, after elastic training has begun again, is of the same job.
_known = Known()
_savers: weakref.WeakValueDictionary[Path, Session] = weakref.WeakValueDictionary()  # by their folders
