"""How a rank fails: once, for good, and together with all others.

Whatever goes wrong on a rank, on whichever thread, ends in the exchange thread: it leaves a note of what it saw, breaks
all connections, so that the other ranks fail at once, and reads their notes to say which rank is to blame. From then on
every call of the training thread raises that error.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..errors import DigestError, ExchangeError, HorovodCompressError, PeerError, anew
from ..observe import files
from .agreement.differences import explained
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
from .context import EXCHANGED, Context, Hooks, Worker

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
            if self.broken:  # and this may follow from that
                return
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
                meets=progress.meets_for() or "",
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
