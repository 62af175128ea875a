"""How long ranks wait for each other where no timeout is given, by what the others answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from horovod_compress import options
from horovod_compress.engine import failure
from horovod_compress.engine.context import AWAITED, MEETING, Progress
from horovod_compress.engine.failure import Patience
from horovod_compress.engine.reducer import Hooks
from horovod_compress.errors import ExchangeError
from horovod_compress.exchange.transports.transport import Transport
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
    monkeypatch.setattr(failure, "_WARN_SECONDS", FLOW)
    monkeypatch.setattr(failure, "_SOON", 0.0)
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
        patience = Patience(reducer.context, reducer.failure)
        began = time.monotonic()
        monkeypatch.setattr(reducer.context.progress, "waits_since", lambda: began)
        monkeypatch.setattr(reducer.failure, "give_up", found.append)
        for number in range(1, 1 + round(60 / every)):
            patience._look(began + number * every)
        assert bool(found) is given_up


@pytest.mark.parametrize("order", ["nested", "overlapping"])
def test_a_rank_waits_for_a_meeting_until_the_last_one_has_ended(order: str) -> None:
    """Threads may be in one each, and leave in any order; what fails in an inner one is told of in the outer."""
    progress = Progress()
    first, second = progress.meeting(), progress.meeting()
    first.__enter__()
    second.__enter__()
    for meeting in (second, first) if order == "nested" else (first, second):
        assert progress.waits_since() is not None and progress.place()[2] == MEETING
        meeting.__exit__(None, None, None)
    assert progress.waits_since() is None and progress.place()[2] == AWAITED
