"""How a rank fails: once, for good, and together with all others.

Whatever goes wrong on a rank, on whichever thread, ends in the exchange thread: it leaves a note of what it saw, breaks
all connections, so that the other ranks fail at once, and reads their notes to say which rank is to blame. From then on
every call of the training thread raises that error.

:class:`Failure` is that, and :class:`Patience` ends waits for ranks that give no sign of life.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..errors import DigestError, ExchangeError, HorovodCompressError, PeerError, anew
from ..observe import files
from ..options import FLOW_SECONDS
from .agreement.differences import explained, listed
from .agreement.notes import (
    advice,
    disagreement,
    last_finished,
    note,
    note_of,
    refusal,
    verdict,
    with_words,
    words,
)
from .context import EXCHANGED, Context, Hooks, Position, Worker

#: How long a rank waits for the others' notes. Frozen ones leave none, so an error comes this long after the timeout:
#: within a second. Those that have ended are not waited for. Longer than _FLOOD_SECONDS, after which a rank that is
#: stuck leaves its own.
_NOTES_SECONDS = 0.8
_TELL_SECONDS = 0.5
#: How long a rank in an exchange may take to fail by itself after another one has, before its waits are called off.
_FLOOD_SECONDS = 0.5
#: How much longer :meth:`Failure.call_off` waits for the failure than that takes.
_MORE_SECONDS = 1.0
_STOPPED = "another rank has stopped"


class CalledOff(HorovodCompressError):
    """The exchanges of this rank were called off from outside."""


class Failure:
    """The failure of one rank, if there is one, and its way to the other ranks and threads.

    Args:
        hooks: where somebody is to hear of the failure.
    """

    def __init__(self, context: Context, hooks: Hooks) -> None:
        self._context, self._hooks = context, hooks
        #: What the numbers of ranks mean that this rank's texts have, see :class:`.context.Hooks`.
        self.ranks_in_words = hooks.ranks_in_words
        self._workers: list[Worker] = []
        #: What this rank has failed with; nothing more will come of it then.
        self.error: HorovodCompressError | None = None
        #: Whether another rank has stopped.
        self.flooded = False
        self._note: dict[str, Any] | None = None  # left for the other ranks
        self._seen = False  # whether the training thread has seen the failure
        #: What another thread than the exchange thread failed with, or what the exchange thread was called off for.
        self.broken: HorovodCompressError | None = None
        #: Set once nothing more will come of this rank: it has failed, or is being closed.
        self.over = threading.Event()
        #: Whether the reducer is being closed.
        self.closing = False
        #: How, in words, see :data:`.agreement.notes.CLOSED`.
        self.closed = ""

    # ---- any thread ----

    def failed(self) -> bool:
        """Return whether this rank has failed, for whatever reason; nothing more will come of it then."""
        return self.error is not None

    def has_left_note(self) -> bool:
        """Return whether this rank has left a note for the others."""
        return self._note is not None

    def raise_if_failed(self) -> None:
        """Raise the failure on the training thread."""
        if self.error:
            self._seen = True
            raise anew(self.error) from self.error.__cause__

    def pending(self) -> HorovodCompressError:
        """Return what the exchange thread has to fail with when it waits for gradients, being ``broken`` or flooded."""
        return self.broken or CalledOff(_STOPPED)

    def close(self, how: str) -> bool:
        """Take note that the reducer is being closed; return whether it was not already."""
        with self._context.changed:
            first, self.closing, self.closed = not self.closing, True, self.closed or how
            self.over.set()
            self._context.changed.notify_all()
            return first

    def tell_of_closing(self) -> None:
        """Let the other ranks know that this one is being closed, if that is in the middle of an exchange."""
        if not self.error and self._context.progress.place()[2] == EXCHANGED:
            self._tell(**note_of(_closed_in_exchange(self._context)))

    # ---- other threads than the exchange thread ----

    def worker(
        self,
        name: str,
        work: str,
        within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Worker:
        """Return a thread whose first error is this rank's failure.

        Args:
            work: what it does, in words.
            within: see :class:`.context.Worker`.
        """
        self._workers.append(Worker(name, partial(self.report, work), within))
        return self._workers[-1]

    def workers_alive(self) -> bool:
        """Return whether these threads go on."""
        return all(worker.alive() for worker in self._workers)

    def report(self, work: str, error: BaseException) -> None:
        """Let the exchange thread fail, and with it this rank and the others."""
        if isinstance(error, PeerError):  # of this host: the other ranks' notes say which one is to blame
            verb = "did not answer" if error.late else "is gone"
            self.give_up(f"rank {error.peer} {verb} ({error.detail})", peer=error.peer, late=error.late)
            return
        text = f"rank {self._context.rank}: {type(error).__name__} in {work}: {error}"
        failure = error if isinstance(error, HorovodCompressError) else ExchangeError(text)
        with self._context.changed:
            self.broken = failure
            self._context.changed.notify_all()
        self._tell(**note_of(failure))

    @contextlib.contextmanager
    def of_all(self, work: str) -> Iterator[None]:
        """Report an error of this rank: others would wait for what it does not send."""
        try:
            yield
        except HorovodCompressError as error:
            self.report(work, error)
            raise

    def call_off(self, why: str) -> HorovodCompressError | None:
        """Fail, as nothing more will come of this job, and return the error that says which ranks gave no sign of life.

        All ranks that are alive should come here, or fail by themselves, in about the same second.

        Args:
            why: what this rank has seen, for people.

        Returns:
            None if that could not be found out in time, or this reducer is being closed.
        """
        self.give_up(why)
        with self._context.changed:
            self._context.changed.wait_for(self.failed, _NOTES_SECONDS + _MORE_SECONDS)
            self._seen = self.error is not None
            return self.error and anew(self.error)

    def hear(self) -> None:
        """Fail with another rank, even where this one has nothing to exchange; and pass it on."""
        with self._context.changed:
            self.flooded = True
            self._context.changed.notify_all()
            self._context.changed.wait_for(self.failed, _FLOOD_SECONDS)
        self.give_up(_STOPPED, stuck=True)

    def give_up(self, why: str, **more: Any) -> None:
        """Let the exchange thread fail, whatever it waits for, unless it does already.

        Args:
            why: as for :meth:`call_off`.
            more: for the note, see :func:`.agreement.notes.note`.
        """
        with self._context.changed:
            if self.closing or self.error or self.broken or self._note:
                return
            self.broken = CalledOff(why)
            self._context.changed.notify_all()
        self._tell(ended=why, **more)

    # ---- the exchange thread ----

    def end(self, error: BaseException) -> None:
        """Let the error that ended the exchange thread be the failure of this rank."""
        if isinstance(error, CalledOff):
            self._fail(self._abort(f"{error}, after {self._context.recorder.last()}", ended=str(error)))
        elif isinstance(error, PeerError):
            self._end_without(error)
        elif isinstance(error, DigestError):
            self._fail(self._abort(f"{error}, in {self._context.recorder.last()}", differs=error.peer))
        elif isinstance(error, HorovodCompressError):
            self._stop(error)
        else:  # anything else would leave the training thread waiting
            text = f"{type(error).__name__} during {self._context.recorder.last()}: {error}"
            self._stop(ExchangeError(f"rank {self._context.rank}: {text}"))

    def _end_without(self, error: PeerError) -> None:
        """Fail as a peer was lost, or as this rank has itself broken its connections."""
        if isinstance(self.broken, CalledOff):
            self.end(self.broken)
        elif self.broken:
            self._stop(self.broken)
        elif self.closing:
            self._stop(_closed_in_exchange(self._context))
        else:  # the other ranks fail too, and their notes say which rank is to blame
            verb = f"did not answer within {self._context.options.longest_seconds:g} s" if error.late else "is gone"
            what = f"rank {error.peer} {verb} during {self._context.recorder.last()} ({error.detail})"
            self._fail(self._abort(what, peer=error.peer, late=error.late))

    def _stop(self, failure: HorovodCompressError) -> None:
        """Fail for a reason of this rank's own, and let the other ranks know it."""
        self._tell(**note_of(failure))
        self._fail(failure)

    def _abort(self, what: str, **reason: Any) -> HorovodCompressError:
        """Leave a note and break all connections; return the error, with what the other ranks' notes say."""
        context, mine = self._context, self._tell(**reason)
        found = files.checked_notes(context.transport.notes(_NOTES_SECONDS))
        notes = {**with_words(found, words(context.transport)), context.rank: files.checked_note(mine)}
        return (
            refusal(notes)
            or disagreement(notes)
            or ExchangeError(
                f"rank {context.rank}: {what}. {verdict(notes, context.world)} {last_finished(notes, context.world)} "
                f"{advice(notes)}"
            )
        )

    def _tell(self, **reason: Any) -> dict[str, Any]:
        """Leave a note, if there is none yet, and break all connections; return the note."""
        context, progress = self._context, self._context.progress
        with context.changed:
            first = self._note is None
            self._note = self._note or note(
                context.recorder.last(),
                progress.place(),
                progress.finished,
                operands=dict(context.operands.shown),
                of_step=context.operands.step,
                **reason,
            )
        if first:
            context.transport.abort(self._note)
        return self._note

    def _fail(self, failure: HorovodCompressError) -> None:
        context = self._context
        if not failure.of_job:
            failure.args = (explained(str(failure), self.ranks_in_words),)
        for worker in self._workers:
            worker.leave_out()
        more = {"world": context.world, "host": socket.gethostname(), "note": self._note}
        more |= {"left": words(context.transport), "run": self._hooks.run}
        context.recorder.dump(context.rank, str(failure), self._hooks.records, **more)
        failure.__cause__ = None
        with context.changed:
            self.error = failure
            self.over.set()
            context.changed.notify_all()
        # The training thread has to see it, and may come to wait in Horovod only later: look again and again.
        look = time.monotonic() + _TELL_SECONDS
        while not (self._seen or self.closing):
            time.sleep(_TELL_SECONDS / 50)
            if time.monotonic() > look and not (self._seen or self.closing):
                self._hooks.on_unseen(str(failure))
                look = time.monotonic() + _TELL_SECONDS


def _closed_in_exchange(context: Context) -> ExchangeError:
    return ExchangeError(f"rank {context.rank} closed its compression during {context.recorder.last()}")


# ---- how long a rank waits for the others --------------------------------------------------------

_LOOK_SECONDS = 1.0
#: A wait of this share of the limit makes a rank ask, and ask again.
_SHARE = 1 / 6
#: Word is given of a wait as long as this.
_WARN_SECONDS = FLOW_SECONDS
_NOWHERE: Position = (-1, 0, 0)
#: Seconds without a look say that this process was stopped, as a whole job is that a scheduler suspends.
_BREAK_SECONDS = 10.0
#: Word that comes no sooner before the error says nothing new.
_SOON = 1.0

_log = logging.getLogger("horovod_compress")


class Patience:
    """Watches over the waits of one rank, on a separate thread; answers those of the others.

    A wait may be long for a rank that is busy, and not so long for one that gives no sign of life. A rank may keep the
    others waiting for minutes before it comes to an exchange: it evaluates, or writes a checkpoint. Nothing moves on
    its connections then, as if it were frozen. So ranks that wait ask the others how far they have come. The answer is
    given by a thread that has nothing else to do, so a process gives none only if it is stopped, or gone, or code in
    it keeps the interpreter's lock.
    """

    def __init__(self, context: Context, failure: Failure) -> None:
        self._context, self._failure = context, failure
        self._limit, self._tells = context.options.flow_seconds, _WARN_SECONDS
        self._two_limits = context.options.timeout is None  # else the transport's own deadline is all there is
        self._since: float | None = None  # of the wait that is watched
        self._asked, self._told = 0.0, False
        self._looked = self._awake = time.monotonic()  # when this thread ran last, and since when without a break
        self._whole: float | None = None  # since when no rank is missing

    def start(self) -> None:
        """Begin; it ends when nothing more will come of this rank."""
        progress = self._context.progress
        self._context.transport.questions.answer(lambda: json.dumps(progress.place()))
        threading.Thread(target=self._run, name="hvc-patience", daemon=True).start()

    def _run(self) -> None:
        every = min(_LOOK_SECONDS, self._every())
        while not self._failure.over.wait(every):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        since, every = self._context.progress.waits_since(), self._every()
        if now - self._looked > _BREAK_SECONDS:
            self._awake = now  # the others were stopped too, perhaps: nobody is judged by that
        self._looked, since = now, since and max(since, self._awake)
        if since != self._since:
            self._since, self._asked, self._told, self._whole = since, 0.0, False, None
        if since is None or now - since < every or now - self._asked < every:
            return
        first, self._asked = not self._asked, now
        mine = self._context.progress.place()
        answers = {rank: found for rank, found in self._context.transport.questions.ask().items() if found[0] >= since}
        behind = {rank: place for rank, (_, text) in answers.items() if (place := _place(text)) < mine}
        peers = set(range(self._context.world)) - {self._context.rank}
        heard = {rank: answers[rank][0] if rank in answers else since for rank in peers}
        if first:
            return  # answers to this question come with the next one
        self._judge(now, since, heard, sorted(behind.keys() | peers - answers.keys()))

    def _every(self) -> float:
        """Return how long a wait makes this rank ask, and ask again."""
        return min(self._limit, FLOW_SECONDS) * _SHARE

    def _judge(self, now: float, since: float, heard: dict[int, float], missing: list[int]) -> None:
        """Say who is missing, and stop if that has lasted for too long.

        Args:
            heard: when each other rank gave a sign of life, at the earliest the beginning of the wait.
            missing: the ranks that are not known to have come.
        """
        self._whole = None if missing else (self._whole or now)
        silent = [rank for rank, at in sorted(heard.items()) if now - at >= self._limit]
        if self._two_limits and silent:
            self._failure.give_up(f"rank(s) {listed(silent)} gave no sign of life for {self._limit:g} s")
        elif self._two_limits and missing and now - since >= self._context.options.busy_seconds:
            self._failure.give_up(f"rank(s) {listed(missing)} kept the others waiting for {now - since:.0f} s")
        elif self._two_limits and self._whole and now - self._whole >= self._limit:
            self._failure.give_up(f"the exchange took more than {self._limit:g} s, with every rank in it")
        elif missing and not self._told and self._tells <= now - since < self._context.options.busy_seconds - _SOON:
            self._told = True
            self._tell(now, since, missing, [rank for rank, at in heard.items() if now - at >= self._tells / 2])

    def _tell(self, now: float, since: float, missing: list[int], silent: list[int]) -> None:
        """Log who is missing; the first of the ranks that wait does so for all."""
        context = self._context
        if context.rank != min(set(range(context.world)) - set(missing)):
            return
        step, bucket, _ = context.progress.place()
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        text = f"rank {context.rank} has been waiting since {began} ({now - since:.0f} s) for rank(s) {listed(missing)}"
        state = "no sign of life" if silent else "alive, but out of batches, or busy with evaluation or the like"
        left = context.options.busy_seconds - (now - since)
        text += f", before bucket {bucket} of step {step}: {state}; this becomes an error in {left:.0f} s; "
        text += "to wait longer, raise timeout="
        _log.warning("%s", explained(text, self._failure.ranks_in_words))


def _place(text: str) -> Position:
    """Return how far a rank has come by its answer: nowhere while its reducer is being made."""
    try:
        step, bucket, come = map(int, json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return _NOWHERE
    return step, bucket, come
