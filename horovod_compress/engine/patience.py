"""How long a rank waits for the others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from ..errors import MismatchError
from ..options import FLOW_SECONDS
from .agreement.differences import explained, listed
from .agreement.purposes import ExchangeUnderWay, MeetingUnderWay, advice, bits, different_purposes, is_known, purpose
from .context import AWAITED, EXCHANGED, Context, Position, Progress
from .failure import Failure

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
#: Ranks that have waited for this long, each for something else, do so in vain. Longer than one that has come out of a
#: meeting may have to wait for another one that is still in it, see CONFIRMING_SECONDS in fronts/gather.py.
_APART_SECONDS = 10.0

_log = logging.getLogger("horovod_compress")


@dataclass(frozen=True)
class Answer:
    """How far a rank has come, as it tells the others.

    Attributes:
        place: in this compression.
        meetings: of its process, in all compressions.
        rank: its number in the whole job.
        fetched: its main thread waits for a result of this compression.
        beside: what its other compressions exchange.
    """

    place: Position = _NOWHERE
    meetings: tuple[MeetingUnderWay, ...] = ()
    rank: int = 0
    fetched: bool = False
    beside: tuple[ExchangeUnderWay, ...] = ()

    @classmethod
    def of(cls, progress: Progress) -> Answer:
        all_, place = progress.meetings, progress.place()
        return cls(place, all_.under_way(), all_.rank, all_.fetched is progress, all_.exchanged_beside(progress))

    def text(self) -> str:
        meetings, beside = ([astuple(one) for one in each] for each in (self.meetings, self.beside))
        return json.dumps([self.place, meetings, self.rank, self.fetched, beside])

    @classmethod
    def read(cls, text: str) -> Answer:
        """Return what a rank has answered: that it is nowhere, while its reducer is being made."""
        try:
            (step, bucket, come), meetings, rank, fetched, beside = json.loads(text)
            place = int(step), int(bucket), int(come)
            each = (
                MeetingUnderWay(int(number), name, int(ranks), bool(trains))
                for number, name, ranks, trains in meetings
                if is_known(name)
            )
            others = (ExchangeUnderWay(int(step), int(missing), bool(waits)) for step, missing, waits in beside)
            return cls(place, (*each,), max(0, int(rank)), bool(fetched), (*others,))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls()

    def waits_for(self) -> str | None:
        """Return what needs other ranks, in words; None if this one is busy by itself."""
        if self.meetings:
            return self.meetings[0].in_words()
        if self.place[2] == EXCHANGED:
            return f"the exchange of step {self.place[0]}"
        return self.beside[0].in_words() if self.beside else None

    def in_vain(self, other: Answer) -> bool:
        """Return whether this rank and another one, which go on as they are, wait for each other for ever."""
        if not {one.of_all() for one in self.meetings}.isdisjoint(one.of_all() for one in other.meetings):
            return False  # on whichever threads
        if self._fetches_apart(other) or other._fetches_apart(self):
            return True
        mine, theirs = self._keeps(other), other._keeps(self)
        if mine and theirs:
            return True
        meets, exchanges = (self, other) if mine else (other, self)
        if not (mine or theirs) or meets.place[2] == EXCHANGED:  # and its bucket is large, or a third rank is late
            return False
        return exchanges.place[2] == EXCHANGED and exchanges.place[:2] >= meets.place[:2]

    def is_missing_at(self, place: Position) -> bool:
        """Return whether other ranks exchange what this one has no gradients for yet."""
        return self.place < place and self.place[2] == AWAITED

    def _fetches_apart(self, other: Answer) -> bool:
        """Return whether both wait for results of different compressions, each alone in the exchange of its own."""
        alone = self.place[2] == EXCHANGED and other.is_missing_at(self.place)
        return alone and self.fetched and any(each.keeps(self.rank) for each in other.beside)

    def _keeps(self, other: Answer) -> bool:
        """Return whether this rank trains no further before another one has come to a meeting."""
        return any(meeting.trains and meeting.needs(other.rank) for meeting in self.meetings)


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
        self._same: dict[int, tuple[Answer, float]] = {}  # by rank: the last answer, and when it was given first

    def start(self) -> None:
        """Begin; it ends when nothing more will come of this rank."""
        progress = self._context.progress
        self._context.transport.questions.answer(lambda: Answer.of(progress).text())
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
            self._since, self._asked, self._told, self._whole, self._same = since, 0.0, False, None, {}
        if since is None or now - since < every or now - self._asked < every:
            return
        first, self._asked = not self._asked, now
        progress = self._context.progress
        exchanged = progress.meetings.exchanges.get(progress)  # before the next line, as both may change
        mine = Answer.of(progress)
        said = self._context.transport.questions.ask().items()
        answers = {rank: (Answer.read(text), at) for rank, (at, text) in said if at >= since}
        behind = {rank for rank, (answer, _) in answers.items() if answer.place < mine.place}
        peers = set(range(self._context.world)) - {self._context.rank}
        heard = {rank: answers[rank][1] if rank in answers else since for rank in peers}
        if first:
            return  # answers to this question come with the next one
        if exchanged:
            exchanged.missing = bits(one.rank for one, _ in answers.values() if one.is_missing_at(mine.place))
        if told := self._why_in_vain(mine, answers | {self._context.rank: (mine, now)}):
            self._failure.report("a wait for other ranks", MismatchError(told))
            return
        elsewhere = " and ".join(sorted({answers[rank][0].waits_for() or "" for rank in behind} - {""}))
        self._judge(now, since, heard, sorted(behind | peers - answers.keys()), elsewhere)

    def _every(self) -> float:
        """Return how long a wait makes this rank ask, and ask again."""
        return min(self._limit, FLOW_SECONDS) * _SHARE

    def _why_in_vain(self, mine: Answer, answers: Mapping[int, tuple[Answer, float]]) -> str | None:
        """Return what is wrong where this rank and another one wait for each other in vain, as when one saves alone.

        Args:
            answers: of all ranks that have given one, this one included, and when.
        """
        lasting = {}
        for rank, (answer, at) in answers.items():
            same, first = self._same.setdefault(rank, (answer, at))
            if same != answer:
                self._same[rank] = answer, at
            elif at - first >= _APART_SECONDS:
                lasting[rank] = answer
        if self._context.rank not in lasting or not any(map(mine.in_vain, lasting.values())):
            return None
        what: dict[str, list[int]] = {}
        for rank, answer in sorted(lasting.items()):
            if found := answer.waits_for():
                what.setdefault(found, []).append(rank)
        return different_purposes(what, self._context.rank)

    def _judge(self, now: float, since: float, heard: dict[int, float], missing: list[int], elsewhere: str) -> None:
        """Say who is missing, and stop if that has lasted for too long.

        Args:
            heard: when each other rank gave a sign of life, at the earliest the beginning of the wait.
            missing: the ranks that are not known to have come.
            elsewhere: what they wait for themselves, if that is known.
        """
        self._whole = None if missing else (self._whole or now)
        silent = [rank for rank, at in sorted(heard.items()) if now - at >= self._limit]
        if self._two_limits and silent:
            self._failure.give_up(f"rank(s) {listed(silent)} gave no sign of life for {self._limit:g} s")
        elif self._two_limits and missing and now - since >= self._context.options.busy_seconds:
            where = f", in {elsewhere}" if elsewhere else ""
            self._failure.give_up(f"rank(s) {listed(missing)} kept the others waiting for {now - since:.0f} s{where}")
        elif self._two_limits and self._whole and now - self._whole >= self._limit:
            self._failure.give_up(f"the exchange took more than {self._limit:g} s, with every rank in it")
        elif missing and not self._told and self._tells <= now - since < self._context.options.busy_seconds - _SOON:
            self._told = True
            silent = [rank for rank, at in heard.items() if now - at >= self._tells / 2]
            self._tell(now, since, missing, "no sign of life" if silent else elsewhere and f"alive, in {elsewhere}")

    def _tell(self, now: float, since: float, missing: list[int], state: str) -> None:
        """Log who is missing, and their state, if that is known; the first of the ranks that wait does so for all."""
        context = self._context
        if context.rank != min(set(range(context.world)) - set(missing)):
            return
        (step, bucket, _), meets = context.progress.place(), context.progress.meets_for()
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        text = f"rank {context.rank} has been waiting since {began} ({now - since:.0f} s) for rank(s) {listed(missing)}"
        state = state or f"alive, but out of batches, or busy with evaluation or the like{advice(meets)}"
        left = context.options.busy_seconds - (now - since)
        where = f"in {purpose(meets)}" if meets else f"before bucket {bucket} of step {step}"
        text += f", {where}: {state}; this becomes an error in {left:.0f} s; to wait longer, raise timeout="
        _log.warning("%s", explained(text, self._failure.ranks_in_words))
