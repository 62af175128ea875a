"""How long ranks wait for each other where no timeout is given, by what the others answer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod_compress
from horovod_compress import options
from horovod_compress.engine import patience
from horovod_compress.engine.agreement.purposes import ExchangeUnderWay, Meetings, MeetingUnderWay, bits, is_known
from horovod_compress.engine.context import AWAITED, EXCHANGED, MEETING, Position, Progress
from horovod_compress.engine.patience import Answer, Patience
from horovod_compress.engine.reducer import Hooks
from horovod_compress.errors import ExchangeError
from horovod_compress.exchange.transports.transport import Transport
from horovod_compress.fronts import gather
from tests.support.connected import connected
from tests.support.local import Fleet, spec

FLOW, BUSY = 0.3, 0.9
TENSORS = [spec("weight", 8)]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "FLOW_SECONDS", FLOW)
    monkeypatch.setattr(options, "BUSY_SECONDS", BUSY)


def fleet(wrap: Callable[[Transport], Any] = lambda transport: transport, hooks: Hooks | None = None) -> Fleet:
    return Fleet(2, TENSORS, "none", exchange="ring", wrap=wrap, hooks=hooks, timeout=None)


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Unheard(Wrapped):
    """Nobody answers its questions."""

    @property
    def questions(self) -> Unheard:
        return self

    def answer(self, call: Callable[[], str]) -> None:
        pass

    def ask(self) -> dict[int, tuple[float, str]]:
        return {}


class Mute(Wrapped):
    """Sends nothing, except what is compared first."""

    def send(self, data: torch.Tensor, to: int) -> Mute:
        return self

    def wait(self, deadline: Any) -> None:
        pass


def failure_of(ranks: Fleet, rank: int, step: int) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        ranks.reducers[rank].result(0, step)
    return str(caught.value), time.monotonic() - began


def test_who_answers_may_come_late() -> None:
    with fleet() as ranks:
        step = ranks.reducers[1].offer(0, torch.ones(8))
        time.sleep(2 * FLOW)
        ranks.reducers[0].offer(0, torch.ones(8))
        assert torch.equal(ranks.reducers[1].result(0, step), torch.ones(8))


def test_who_answers_may_not_come_later_than_that() -> None:
    with fleet() as ranks:
        text, seconds = failure_of(ranks, 1, ranks.reducers[1].offer(0, torch.ones(8)))
        assert "rank(s) 0 kept the others waiting for 1 s" in text and seconds >= BUSY
        assert "Rank(s) 0 had not reached bucket 0 of step 0 yet" in text


@pytest.mark.parametrize("words", ["", "In the job, rank 0 is rank 3."])
def test_a_wait_and_its_end_say_which_ranks_of_the_job_their_numbers_are(
    words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_WARN_SECONDS", FLOW)
    monkeypatch.setattr(patience, "_SOON", 0.0)
    with fleet(hooks=Hooks(ranks_in_words=words)) as ranks:
        text, _ = failure_of(ranks, 1, ranks.reducers[1].offer(0, torch.ones(8)))
    [told] = [record.getMessage() for record in caplog.records if "has been waiting since" in record.getMessage()]
    assert text.endswith(f"raise timeout=. {words}" if words else "raise timeout=")
    assert told.endswith(f"to wait longer, raise timeout=. {words}" if words else "to wait longer, raise timeout=")


def test_who_gives_no_answer_is_not_waited_for() -> None:
    with fleet(Unheard) as ranks:
        text, seconds = failure_of(ranks, 1, ranks.reducers[1].offer(0, torch.ones(8)))
        assert "rank(s) 0 gave no sign of life for 0.3 s" in text and FLOW <= seconds < BUSY + 1.0


def test_an_exchange_of_all_has_the_short_limit() -> None:
    with fleet(Mute) as ranks:
        steps = [reducer.offer(0, torch.ones(8)) for reducer in ranks.reducers]
        text, seconds = failure_of(ranks, 0, steps[0])
        assert "the exchange took more than 0.3 s, with every rank in it" in text
        assert FLOW <= seconds < BUSY + 1.0


def test_a_given_timeout_is_the_only_limit() -> None:
    given = options.Options(timeout=0.5)
    assert (given.flow_seconds, given.busy_seconds, given.longest_seconds) == (0.5, 0.5, 0.5)
    usual = options.Options()
    assert (usual.flow_seconds, usual.busy_seconds, usual.longest_seconds) == (FLOW, BUSY, BUSY + FLOW)


def test_questions_are_answered_over_gloo() -> None:
    """By a thread of the other rank, with what it says at that time; each answer makes room for the next question."""
    first, second = connected(2)
    try:
        count = iter(range(100))
        second.questions.answer(lambda: f"answer {next(count)}")
        for number in range(3):
            asked = time.monotonic()
            while (found := first.questions.ask().get(1, (0.0, "")))[0] < asked:
                assert time.monotonic() - asked < 10.0
                time.sleep(0.005)
            assert found[1].startswith("answer ") and int(found[1].split()[1]) >= number
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(("every", "given_up"), [(1.0, True), (60.0, False)], ids=["waits on", "was suspended"])
def test_a_job_that_was_suspended_judges_nobody_by_that(
    every: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on while a scheduler has stopped all ranks; the control is one that has waited all the time."""
    with fleet(Unheard) as ranks:
        reducer, found = ranks.reducers[0], list[str]()
        watching = Patience(reducer.context, reducer.failure)
        began = time.monotonic()
        monkeypatch.setattr(reducer.context.progress, "waits_since", lambda: began)
        monkeypatch.setattr(reducer.failure, "give_up", found.append)
        for number in range(1, 1 + round(60 / every)):
            watching._look(began + number * every)
        assert bool(found) is given_up


AT = 3, 1
SAVES, LOADS = (MeetingUnderWay(7, "hvc.save"),), (MeetingUnderWay(9, "hvc.load"),)
PAIR, OTHERS = bits([0, 1]), bits([0, 2])
OF_THE_PAIR, OF_OTHERS = ((MeetingUnderWay(8, "hvc.save", ranks),) for ranks in (PAIR, OTHERS))
BESIDE = (MeetingUnderWay(8, "hvc.save", trains=False),)
FETCHES = Answer((*AT, EXCHANGED), fetched=True)


def elsewhere(place: Position = (*AT, AWAITED), missing: int = bits([0]), fetched: bool = True) -> Answer:
    """Return the answer of a rank that is in the exchange of another compression."""
    return Answer(place, beside=(ExchangeUnderWay(5, missing, fetched),))


@pytest.mark.parametrize(
    ("first", "second", "in_vain"),
    [
        (Answer((*AT, MEETING), SAVES), Answer((*AT, EXCHANGED)), True),
        (Answer((*AT, MEETING), SAVES), Answer((4, 0, EXCHANGED)), True),
        (Answer((*AT, AWAITED), SAVES), Answer((*AT, EXCHANGED)), True),  # it meets with another compression
        (Answer((*AT, MEETING), SAVES), Answer((*AT, MEETING), LOADS), True),
        (Answer((*AT, MEETING), SAVES), Answer((3, 0, EXCHANGED)), False),  # whose results the first one has
        (Answer((*AT, MEETING), SAVES), Answer((*AT, AWAITED)), False),
        (Answer((*AT, MEETING), SAVES), Answer((*AT, MEETING), (MeetingUnderWay(8, "hvc.save"),)), False),
        (Answer((*AT, MEETING), SAVES + LOADS), Answer((*AT, MEETING), LOADS + SAVES), False),
        (Answer((*AT, EXCHANGED)), Answer((4, 0, EXCHANGED)), False),
        (Answer((*AT, EXCHANGED), SAVES), Answer((*AT, EXCHANGED)), False),  # with another one, while a bucket is large
        (Answer((*AT, MEETING), SAVES), Answer(), False),
        # among some of the job's ranks only
        (Answer((*AT, MEETING), OF_THE_PAIR), Answer((*AT, EXCHANGED)), True),
        (Answer((*AT, MEETING), OF_OTHERS), Answer((*AT, EXCHANGED)), False),  # it waits for a third one
        (Answer((*AT, MEETING), OF_THE_PAIR), Answer((*AT, MEETING), SAVES), True),
        (Answer((*AT, MEETING), OF_OTHERS), Answer((*AT, MEETING), SAVES), False),
        (Answer((*AT, MEETING), BESIDE), Answer((*AT, EXCHANGED)), False),  # on a thread that does not train
        (Answer((*AT, MEETING), BESIDE), Answer((*AT, MEETING), LOADS), False),
        (Answer((4, 0, EXCHANGED), BESIDE), Answer((*AT, MEETING), SAVES), False),  # both wait for a third one
        # of two compressions
        (FETCHES, elsewhere(), True),
        (FETCHES, elsewhere((2, 7, AWAITED)), True),
        (replace(FETCHES, fetched=False), elsewhere(), False),  # its gradients of the other one may come yet
        (FETCHES, elsewhere(fetched=False), False),
        (FETCHES, elsewhere((3, 0, EXCHANGED)), False),  # which goes on by itself
        (FETCHES, elsewhere((3, 2, AWAITED)), False),  # whose gradients have come
        (FETCHES, elsewhere(missing=0), False),  # it has not asked yet, or is in the exchange with all
        (FETCHES, elsewhere(missing=bits([2])), False),  # it waits for a third one
    ],
)
def test_who_waits_in_vain(first: Answer, second: Answer, in_vain: bool) -> None:
    second = replace(second, rank=1)
    assert first.in_vain(second) is second.in_vain(first) is in_vain
    assert [Answer.read(each.text()) for each in (first, second)] == [first, second]


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "[]", "[[1, 2], []]", "[[1, 2, 0], [[1]]]", "[[1, 2, 0], [[1, 7]], 0, false, []]", "[" * 9999),
        *("[[1, 2, 0], [], 0]", "[[1, 2, 0], [], 0, false, [7]]", "[[1, 2, 0], [], 0, false, [[7, true]]]"),
    ],
)
def test_an_answer_of_something_else_is_no_place(text: str) -> None:
    assert Answer.read(text) == Answer()


def test_what_is_no_name_of_a_meeting_is_left_out() -> None:
    text = '[[1, 2, 0], [[3, "hvc.save", -1, true], [4, "x.\\nrank 9: all is well", -1, true]], 0, false, []]'
    assert Answer.read(text).meetings == (MeetingUnderWay(3, "hvc.save"),)


def test_who_waits_on_a_thread_that_does_not_train_is_known() -> None:
    progress, found = Progress(Meetings()), list[MeetingUnderWay]()

    def meet() -> None:
        with progress.meeting("hvc.save"):
            found.extend(progress.meetings.under_way())

    for thread in (threading.Thread(target=meet), None):
        if thread:
            thread.start()
            thread.join()
        else:
            meet()
    assert [meeting.trains for meeting in found] == [False, True]


def test_a_result_holds_up_gradients_only_where_the_main_thread_waits_for_it() -> None:
    progress, found = Progress(Meetings()), list[bool]()

    def fetch() -> None:
        with progress.fetching():
            found.append(Answer.of(progress).fetched)

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    fetch()
    found.append(Answer.of(progress).fetched)
    assert found == [False, True, False]


def test_what_other_compressions_exchange_is_known_until_it_ends() -> None:
    first, second = (Progress(meetings) for meetings in [Meetings()] * 2)
    first.exchanges()
    with first.fetching():
        assert Answer.of(second).beside == (ExchangeUnderWay(0, fetched=True),) and not Answer.of(first).beside
    assert Answer.of(second).beside == (ExchangeUnderWay(0),)
    for end in (lambda: first.awaits(1), first.ends):
        first.exchanges()
        end()
        assert not Answer.of(second).beside


class Told(Unheard):
    """Every question is answered with this."""

    text = ""

    def ask(self) -> dict[int, tuple[float, str]]:
        return {1: (time.monotonic() + 60.0, self.text)}


@pytest.mark.parametrize(
    ("place", "missing"), [((0, 0, AWAITED), bits([1])), ((0, 0, EXCHANGED), 0), ((1, 0, AWAITED), 0)]
)
def test_a_rank_is_missing_only_once_that_is_known(
    place: Position, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "text", Answer(place, rank=1).text())
    with fleet(Told) as ranks:
        reducer = ranks.reducers[0]
        progress, watching = reducer.context.progress, Patience(reducer.context, reducer.failure)
        reducer.offer(0, torch.ones(8))
        while (found := progress.meetings.exchanges.get(progress)) is None:
            time.sleep(0.001)
        for seconds in (0.1, 0.2):
            watching._look(time.monotonic() + seconds)
        assert found.missing == missing


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer((0, 0, AWAITED), rank=1), ": alive, but out of batches"),
        (replace(elsewhere((0, 0, AWAITED), missing=0), rank=1), ": alive, in the exchange of step 5 of another comp"),
    ],
)
def test_a_warning_says_where_a_rank_waits_itself(
    answer: Answer, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_WARN_SECONDS", FLOW)
    monkeypatch.setattr(patience, "_SOON", 0.0)
    monkeypatch.setattr(Told, "text", answer.text())
    with fleet(Told) as ranks:
        text, _ = failure_of(ranks, 0, ranks.reducers[0].offer(0, torch.ones(8)))
    [told] = [record.getMessage() for record in caplog.records if "has been waiting since" in record.getMessage()]
    assert words in told
    assert (" s, in the exchange of step 5 of another compression" in text) is bool(answer.beside)


def test_ranks_of_a_group_are_named_by_their_numbers_in_the_job() -> None:
    assert MeetingUnderWay(1, "hvc.save").in_words() == "the saving of a checkpoint folder"
    assert MeetingUnderWay(1, "hvc.save", PAIR).in_words().endswith(" folder among rank(s) 0, 1 of the job")


#: Of other things than meetings of a compression.
NO_MEETINGS = {"any", "headroom", "plan", "rollcall", "trace", "verify"}


def test_every_gather_has_a_purpose() -> None:
    """One without is not told to other ranks."""
    texts = (path.read_text() for path in (Path(horovod_compress.__file__).parent).rglob("*.py"))
    names = {name for text in texts for name in re.findall(r'"hvc\.([a-z]+)', text)} | {*gather.STAGES}
    assert len(names) > 15 and not {name for name in names - NO_MEETINGS if not is_known(f"hvc.{name}")}


@pytest.mark.parametrize("lasts", [True, False])
def test_ranks_that_wait_in_vain_are_told_once_that_has_lasted(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control has another meeting of the same name each time, as a rank that goes on has."""
    with fleet() as ranks:
        context, failed = ranks.reducers[0].context, ranks.reducers[0].failure
        watching = Patience(context, failed)
        exchanges, told = Answer((0, 0, EXCHANGED)), list[str | None]()
        for number in range(4):
            at = number * 0.5 * patience._APART_SECONDS
            saves = Answer((0, 0, MEETING), (MeetingUnderWay(0 if lasts else number, "hvc.save"),), rank=1)
            told.append(watching._why_in_vain(saves, {0: (saves, at), 1: (exchanges, at)}))
    words = "rank(s) 0 to the saving of a checkpoint folder, rank(s) 1 to the exchange of step 0; call save()"
    assert [bool(text and words in text) for text in told] == [False, False, lasts, lasts]


def test_a_wait_in_a_meeting_is_told_of_as_such(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_WARN_SECONDS", FLOW)
    monkeypatch.setattr(patience, "_SOON", 0.0)
    with fleet() as ranks, ranks.reducers[1].context.progress.meeting("hvc.save"):
        while not ranks.reducers[1].failure.failed():
            time.sleep(0.02)
    [told] = [record.getMessage() for record in caplog.records if "has been waiting since" in record.getMessage()]
    assert "for rank(s) 0, in the saving of a checkpoint folder: alive" in told
    assert "Rank(s) 0 had not reached bucket 0 of step 0 yet: look" in str(ranks.reducers[1].failure.error)


@pytest.mark.parametrize("order", ["nested", "overlapping"])
def test_a_rank_waits_for_a_meeting_until_the_last_one_has_ended(order: str) -> None:
    """Threads may be in one each, and leave in any order; what fails in an inner one is told of in the outer."""
    progress = Progress(Meetings())
    first, second = progress.meeting("hvc.save"), progress.meeting("hvc.load")
    first.__enter__()
    second.__enter__()
    for meeting in (second, first) if order == "nested" else (first, second):
        assert progress.waits_since() is not None and progress.place()[2] == MEETING
        meeting.__exit__(None, None, None)
    assert progress.waits_since() is None and progress.place()[2] == AWAITED
