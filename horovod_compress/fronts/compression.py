"""What a compression is under every front: its members, start, end, and what users call; a copy of one is none."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..codecs.base import Codec
from ..codecs.masked import Masked
from ..engine import names
from ..engine.agreement import notes
from ..engine.job import Job
from ..engine.methods import Methods
from ..engine.names import listed
from ..engine.reducer import Hooks
from ..errors import ConfigError
from ..observe import trace as recording
from ..observe.metrics import Stats
from ..observe.trace import Trace
from ..options import FOR_UPDATES, plain
from ..schedule.plan import Plan
from .copies import copied
from .ending import Closing, keep_open, left_open
from .reports import Counters
from .saving import Saved
from .session import Session, before_each_step, look_for_steps, meetings, weakly
from .startup import Wrap, as_at_first, as_it_is, before_handshake, start
from .update_options import TAKEN

Scaler = TypeVar("Scaler")

_log = logging.getLogger("horovod_compress")


class _Listed(type):
    """A class of which ``dir()`` shows what is public, as a prompt that completes names does."""

    def __dir__(cls) -> list[str]:
        return _public(super().__dir__())


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_") and name != "exchange")  # which a hook calls


class BaseCompression(metaclass=_Listed):
    """A compression, without what depends on the framework.

    It is made of a session, the started engine with its steps, and what saves and what reports that.
    """

    #: None on a rank that takes no part, and until all have started.
    _session: Session | None = None
    _saved: Saved
    _counters: Counters
    _closing: Closing
    _told_reduced = False  # that it is in no copy
    # ---- what a front says of itself ----
    _how_to_use: str
    _what_copies_lack: str
    _ranks_in_words: str

    def __init__(
        self,
        method: str | Codec | Masked | Methods = "",
        named_parameters: Any = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        job: Job | None = None,
        wrap: Wrap = as_it_is,
        **others: Any,
    ) -> None:
        if job is None or others:
            raise ConfigError(
                "Compression is not called directly: write hvc.Compression.marsit(model.named_parameters()), or "
                "another method, or hvc.Compression.create(method, model.named_parameters())"
            )
        self.method = str(getattr(method, "name", method))
        self._job = job
        if job.included():
            self._start(method, named_parameters, options, wrap)

    def _start(self, method: Any, named: Any, options: Mapping[str, Any], wrap: Wrap) -> None:
        """Meet the other ranks; from then on there is a session."""
        with before_handshake(self._job):
            given, method, options, said = names.in_arguments(listed(named), method, options)
        self._made_of, self._number = (method, given, options, wrap), next(meetings)
        self._connect()
        if said and self._job.rank == 0:
            _log.info("%s", said)

    def _connect(self) -> None:
        """Connect the ranks of the job, and begin with nothing kept; again after a reset of an elastic job."""
        (method, given, options, wrap), job = self._made_of, self._job
        first = self._session is None
        again = contextlib.nullcontext() if first else as_at_first(given, self._here().reducer.plan.names())
        with torch.inference_mode(False), again:  # else what is allocated here could not be written in a step
            self._connect_with(method, given, options, wrap, job)

    def _connect_with(self, method: Any, given: Any, options: Mapping[str, Any], wrap: Wrap, job: Job) -> None:
        methods, reducer, name = start(method, given, options, job, self._hooks(job), wrap)
        self._closing = Closing(self, job)
        self._closing.add(reducer.close, partial(reducer.close, notes.DROPPED))
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)  # else the connections and threads of the reducer would stay
            session = Session(job, methods, reducer, given, name)
            self._saved, self._counters = Saved(session), Counters(session, self.method)
            self._begin(session)
            self._closing.add(look_for_steps(session.steps.parameters, weakly(self._why_unused)))
            self._closing.add(before_each_step(weakly(session.steps.note_step)))
            recording.follow(reducer, job.number, self.method)
            undo.pop_all()
        self._session = session
        keep_open(self)

    def __dir__(self) -> list[str]:
        return _public(super().__dir__())

    def __reduce__(self) -> Any:
        if not self._told_reduced:  # a model is copied or saved with its hook, an optimizer with its compression
            self._told_reduced = True
            _log.warning(
                "a compression is not saved or copied with its model or optimizer: save compression.state_dict(), or "
                "compression.save(folder)"
            )
        return copied, (self._what_copies_lack,)

    def __repr__(self) -> str:
        words = self._counters.in_words() if self._session else f"{self.method}: not on this rank"
        return f"<{type(self).__name__} {words}>"

    # ---- what depends on the framework ----

    def _hooks(self, job: Job) -> Hooks:
        """Return what the reducer asks of the front."""
        raise NotImplementedError

    def _begin(self, session: Session) -> None:
        """Begin what the front has beside the session; no gradient has been offered yet."""
        raise NotImplementedError

    def _is_attached(self) -> bool:
        """Return whether this rank does without what others would have to wait for; called once, before a gradient."""
        raise NotImplementedError

    def _renumber(self, session: Session) -> None:
        """Take note that the parameters have other numbers now, where that matters."""

    # ---- update mode ----

    def _for_updates(self, replicate: object) -> Session | None:
        """Return the session for :func:`DistributedUpdateOptimizer`; None on a rank that takes no part.

        Args:
            replicate: what joins ranks that have the same part of a model, where they have parts.

        Raises:
            ConfigError: it is given where each rank has the whole.
        """
        if replicate is not None:
            raise ConfigError(
                "replicate= is for a model that fully_shard() divides, and a compression of horovod_compress.fsdp; "
                "leave it out"
            )
        return self._joined()

    def _check_update_step(self) -> None:
        """Refuse a step in update mode that is none of the program's."""

    # ---- a step ----

    def _joined(self) -> Session | None:
        """Return the session of this rank, None where it takes no part."""
        return self._session

    def _current(self) -> Session:
        """Return the session among the ranks that are there now, which change in an elastic job."""
        return self._here()

    def _here(self) -> Session:
        """Return the session of this rank.

        Raises:
            ConfigError: it takes no part.
        """
        if self._session is None:
            raise ConfigError(
                f"rank {self._job.number} is not in this compression's {self._ranks_in_words}, or the start failed"
            )
        return self._session

    def _begin_step(self) -> Session:
        """Begin a step where nothing is under way."""
        session = self._here()
        if session.exchanges == "updates" or self.method in FOR_UPDATES:
            raise ConfigError(TAKEN if session.exchanges == "updates" else FOR_UPDATES[self.method])
        if session.begin_step(self._is_attached, self._counters.reports.look):
            self._renumber(session)
        return session

    def _why_unused(self, tells: bool) -> str | None:
        """Return how to use this, if training goes on without it, until somebody is told."""
        session = self._session
        if session is None or not session.unused:
            return None
        session.unused = not tells
        if session.is_over() or session.reducer.rank:
            return None
        return f"{self.method} has compressed nothing: it was created, but never given to {self._how_to_use}"

    # ---- what users call ----

    def follow(self, scaler: Scaler) -> Scaler:
        """Rescale residuals whenever a gradient scaler changes its scale; return the scaler.

            scaler = compression.follow(torch.amp.GradScaler())

        Gradients arrive multiplied by the scale, so residuals contain it too. Without this, unsent residual would
        count too much or too little after a change of the scale. States of both may be loaded in any order, before or
        after this. Save the scaler by its ``state_dict()``.

        Raises:
            ConfigError: in update mode, where nothing is scaled; or this compression already follows a scaler; or this
            is none.
        """
        session = self._joined()
        if session and (session.exchanges == "updates" or session.steps.scale.scaler is not None):
            raise ConfigError(
                "follow() takes the gradient scaler of one optimizer, once; in update mode nothing is scaled, so "
                "leave it out"
            )
        if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale")):
            raise ConfigError(f"follow() takes a gradient scaler such as torch.amp.GradScaler(), got {scaler!r:.200}")
        if session:
            session.steps.scale.follow(scaler)
        return scaler

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and residuals; every rank saves its own, between two steps."""
        self._current()
        return self._saved.state()

    def load_state_dict(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Restore a state, completely or not at all; call it on every rank, between the same two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals, for example after a change of the number
                of ranks.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or belongs to another method, rank, number of ranks, model or plan.
            CorruptFrameError: its checksums show that it has changed since it was saved.
        """
        session = self._current()
        self._saved.load(state, residuals)
        self._renumber(session)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks in a folder that they share; call it on every rank, between two steps.

        The folder holds one file per rank and a manifest, and switches from the previous checkpoint to the new one
        atomically: a save that is interrupted, or finds the disk full, leaves the previous one in place.

        If the folder holds a checkpoint that this job has neither saved nor loaded, rank 0 warns, and that one
        stays there under another name.

        Raises:
            ConfigError: some rank could not write its part, and says why; every rank raises it. Or another job has
                saved there since this one did, or another compression of this process saves there.
            ExchangeError: not every rank came in time; the next call of all takes place.
        """
        self._current()
        self._saved.save_folder(folder)

    def load(self, folder: str | os.PathLike[str], residuals: str = "refuse") -> None:
        """Restore what :meth:`save` left in a folder; call it on every rank, between the same two steps.

        Either every rank restores its part, or none changes anything; only a rank that is frozen for seconds, right
        after all have found their parts good, may be alone.

        Args:
            residuals: if the number of ranks has changed since saving, "refuse" raises an error, "redistribute" divides
                the unsent residual among the ranks, and "reset" begins with empty residuals, whatever the number.

        Raises:
            ConfigError: a step is under way on some rank.
            StateError: the checkpoint is missing, or belongs to another method, model, schedule or number of ranks.
            CorruptFrameError: a file is not, byte for byte, what was written.
            ExchangeError: not every rank came in time; the next call of all takes place.
        """
        session = self._current()
        self._saved.load_folder(folder, residuals)
        self._renumber(session)

    def stats(self) -> Stats:
        """Return this rank's counters, a dictionary; :class:`~horovod_compress.observe.metrics.Stats` has its keys.

        steps, exact_steps            finished steps, and those in which nothing was compressed
        bytes_sent                    bytes handed to the transport, headers included
        bytes_exact, bytes_compressed the parts of it that were gradients as plain numbers, and compressed ones
        bytes_dense                   bytes that a float32 ring would have sent
        times_fewer_bytes             the ratio of bytes_dense and bytes_sent
        seconds                       by phase
        residual_norm                 the norm of what waits
        norm_ratio                    what compressed gradients are handed back times, to have the exact mean's norm
        gradient_norm                 that norm, as last measured; 0 before that
        residual_lost                 the norm of what was lost with ranks of an elastic job that failed
        nonfinite                     NaN and infinite values offered by all ranks together, however treated
        verified                      steps whose results were compared across ranks
        buckets, plain_buckets        how many there are, and how many of them the schedule leaves uncompressed
        collectives                   those of the last step
        tuned                         no search for buckets is in progress
        method                        its name
        overlap, overlap_seconds      the share of the exchange time that backward hides, 0 to 1, and its seconds
        """
        self._here()
        return self._counters.stats()

    def publish(
        self,
        *,
        tensorboard: Any = None,
        prometheus: str | os.PathLike[str] | None = None,
        every: int = 100,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Report the counters of this rank at regular intervals, to TensorBoard, to Prometheus, or to both.

            compression.publish(tensorboard=SummaryWriter("runs/first") if rank == 0 else None)
            compression.publish(prometheus="/var/lib/node_exporter/train.prom", labels={"job_name": "first"})

        docs/monitoring.md has the names of all values. A report that cannot be written causes a warning, and training
        continues.

        Args:
            tensorboard: a ``SummaryWriter``, or an object with its ``add_scalar``; None on ranks that have none.
            prometheus: a file that ends in ``.prom``, in the folder of the node exporter's textfile collector; each
                rank writes its own, ``train.rank3.prom``. Each compression needs its own file name.
            every: steps from one report to the next.
            labels: to add to every value for Prometheus, besides ``rank`` and ``method``. A host that runs several
                jobs or models needs one that distinguishes them.

        Raises:
            ConfigError: one of these cannot work; then nothing is reported.
        """
        if self._joined():
            self._counters.publish(tensorboard, prometheus, every, labels)

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self._here().reducer.plan

    def close(self) -> None:
        """Stop the exchange thread and close the connections; safe to call twice. In a fork it does nothing."""
        if self._session:
            self._warn_of_rest(self._session)
            try:
                self._closing.close()
                self._counters.end()
            finally:
                if not self._job.forked():
                    self._session.steps.leave()
        left_open.discard(self)

    def _leave_word(self, why: str) -> None:
        if not self._job.forked():
            self._here().reducer.leave_word(why)

    def _warn_of_rest(self, session: Session) -> None:
        """Say what the end of a training that went well loses; once, on rank 0."""
        ended = self not in left_open or self._job.forked() or session.failure.failed() or session.reducer.rank
        if not ended and session.updating is not None and (text := session.updating._updates.unfinished()):
            _log.warning("%s", text)


def begin_trace(path: str | os.PathLike[str], rank: int, steps: int | range | None, events: int) -> Trace:
    """Record a timeline of all compressions of this process, also of those created later."""
    found = recording.begin(path, rank, plain(steps), events)
    for compression in list(left_open):
        found.follow(compression._here().reducer, compression.method)
    return found
