"""How long a rank waits for the others: long for one that is busy, and not so long for one that gives no sign of life.

A rank may keep the others waiting for minutes before it comes to an exchange: it evaluates, or writes a checkpoint.
Nothing moves on its connections then, as if it were frozen. So ranks that wait ask the others how far they have come.
The answer is given by a thread that has nothing else to do, so a process gives none only if it is stopped, or gone, or
code in it keeps the interpreter's lock.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from ..options import FLOW_SECONDS
from .agreement.notes import Place
from .agreement.ranks import listed
from .context import Context
from .failure import Failure

_LOOK_SECONDS = 1.0
#: A wait of this share of the limit makes a rank ask, and ask again.
_SHARE = 1 / 6
#: Word is given of a wait as long as this.
_TELL_SECONDS = FLOW_SECONDS
_NOWHERE: Place = (-1, 0, 0)
#: Seconds without a look say that this process was stopped, as a whole job is that a scheduler suspends.
_BREAK_SECONDS = 10.0
#: Word that comes no sooner before the error says nothing new.
_SOON = 1.0

_log = logging.getLogger("horovod_compress")


class Patience:
    """Watches over the waits of one rank, on a thread of its own; answers those of the others."""

    def __init__(self, context: Context, failure: Failure) -> None:
        self._context, self._failure = context, failure
        self._limit, self._tells = context.options.flow_seconds, _TELL_SECONDS
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
        state = "no sign of life" if silent else "alive, and busy with something else, such as evaluation"
        left = context.options.busy_seconds - (now - since)
        _log.warning(
            "%s, before bucket %d of step %d: %s; this becomes an error in %.0f s (timeout=)",
            text, bucket, step, state, left,
        )  # fmt: skip


def _place(text: str) -> Place:
    """Return how far a rank has come by its answer: nowhere while its reducer is being made."""
    try:
        step, bucket, come = map(int, json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return _NOWHERE
    return step, bucket, come
