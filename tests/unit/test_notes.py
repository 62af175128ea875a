"""What the notes of failed ranks say: who stopped first, who is silent, who is behind, and how far each has come."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_compress.cli.command import main
from horovod_compress.engine.agreement.notes import (
    CLOSED,
    advice,
    first,
    last_finished,
    leave_word,
    note,
    verdict,
    why_closed,
    why_ended,
    with_words,
    words,
)
from horovod_compress.engine.context import AWAITED, EXCHANGED, MEETING
from horovod_compress.errors import ExchangeError, MismatchError, anew, in_job
from horovod_compress.exchange.transports.local import Hub, LocalTransport
from tests.support.local import Fleet, spec

WORLD = 4
AT = (2, 1, EXCHANGED)


def _waits(peer: int, place: tuple[int, int, int] = AT) -> dict[str, Any]:
    return note("hop 1", place, (2, 0), peer=peer, late=True)


def test_a_rank_without_a_note_is_to_blame() -> None:
    notes = {0: _waits(3), 1: _waits(0), 3: _waits(2)}
    assert verdict(notes, WORLD) == "No sign of life from rank(s) 2: look at their output."
    assert first(notes, WORLD) == [2]


def test_a_rank_with_a_reason_of_its_own_comes_before_those_that_are_late_to_tell() -> None:
    notes = {0: _waits(1), 1: note("decode", AT, None, why="out of memory")}
    assert verdict(notes, WORLD) == "Rank 1 stopped first: out of memory."


def test_a_rank_at_its_end_is_a_matter_of_numbers_of_steps() -> None:
    notes = {0: _waits(1), 1: note("hop 1", AT, None, why=f"rank 1: {why_ended()}")}
    assert verdict(notes, WORLD).startswith("Rank 1 stopped first: came to the end of its program")
    assert advice(notes).startswith("If it has had fewer batches, or skipped some, give every rank the same number")
    closed = {0: _waits(1), 1: note("hop 1", AT, None, why=why_closed(CLOSED))}
    assert verdict(closed, WORLD) == "Rank 1 stopped first: closed its compression."
    assert advice(closed) == advice(notes)
    early = {0: note("hop 1", AT, None, peer=1, late=True), 1: {"why": why_ended()}}
    assert advice(early) == f"If it has trained without this compression, use it on every rank; i{advice(notes)[1:]}"
    late = {1: {"why": why_ended()}}  # it is not known what any rank has finished
    assert advice(late) == advice(notes)
    for other in ({0: _waits(1)}, {1: note("decode", AT, None, why="out of memory")}):
        assert advice(other) == "Restart the job from a checkpoint; if a rank is only slow, raise timeout="


def test_a_reason_may_have_the_rank_s_number_in_the_job() -> None:
    """Where only some ranks of it exchange, these have other numbers."""
    notes = {0: _waits(1), 1: note("decode", AT, None, why="rank 3: an error has ended a backward pass")}
    assert verdict(notes, WORLD) == "Rank 1 stopped first: an error has ended a backward pass."


def test_an_error_that_is_raised_once_more_says_the_same() -> None:
    error = in_job(MismatchError("ranks differ", "parameter a"))
    again = anew(error)
    assert again is not error and f"{again}" == "ranks differ" and again.about == "parameter a" and again.of_job
    assert not anew(ExchangeError("late")).of_job  # the control


@pytest.mark.parametrize("behind", [(2, 1, AWAITED), (2, 1, MEETING), (2, 0, EXCHANGED), (1, 1, EXCHANGED)])
def test_a_rank_that_lives_and_is_behind_is_to_blame(behind: tuple[int, int, int]) -> None:
    notes = {rank: _waits(2) for rank in (0, 1, 3)} | {2: note("offer", behind, None, ended="another has stopped")}
    step, bucket, _ = behind
    assert verdict(notes, WORLD).startswith(f"Rank(s) 2 had not reached bucket {bucket} of step {step} yet")
    assert first(notes, WORLD) == [2]


def test_a_rank_that_is_behind_in_a_meeting_is_said_to_be_there() -> None:
    saves = note("offer", (2, 1, MEETING), None, ended="another has stopped", meets="hvc.save")
    notes = {rank: _waits(2) for rank in (0, 1, 3)} | {2: saves}
    told = "Rank(s) 2 had not reached bucket 1 of step 2 yet, and waited in the saving of a checkpoint folder: look at"
    assert verdict(notes, WORLD).startswith(told)


def test_a_rank_that_neither_goes_on_nor_fails_is_to_blame() -> None:
    notes = {rank: _waits(2) for rank in (0, 1, 3)} | {2: note("hop 1", AT, None, ended="another stopped", stuck=True)}
    assert verdict(notes, WORLD).startswith("Rank(s) 2 neither continued nor failed with the others in hop 1")
    assert first(notes, WORLD) == [2]


def test_a_rank_that_had_left_before_it_heard_of_a_failure_is_to_blame() -> None:
    """Not one that had a reason of its own by then, or found out itself."""
    at, word = (2, 0, 1), {"why": "ended because of RuntimeError: first"}
    for reason, counts in (({"ended": "e"}, word), ({"why": "own"}, None), ({"peer": 0}, None)):
        transport = LocalTransport(Hub(2), 0)
        leave_word(transport, word["why"])
        mine = note("a", at, None, **reason)
        assert with_words({0: mine}, words(transport)) == {0: counts or mine}
    assert with_words({0: mine}, words(LocalTransport(Hub(2), 0))) == {0: mine}


def test_the_first_rank_that_leaves_is_to_blame() -> None:
    """The others leave as it did: Horovod ends on all ranks, and has each raise an error of its own."""
    transports = Hub(3).transports()
    leave_word(transports[2], "ended because of RuntimeError: first")
    leave_word(transports[0], "ended because of HorovodInternalError: Horovod has been shut down")
    assert first(with_words({}, words(transports[1])), 3) == [2]


def test_nobody_is_blamed_where_all_are_alike() -> None:
    notes = {rank: _waits((rank - 1) % WORLD) for rank in range(WORLD)}
    assert verdict(notes, WORLD).startswith("Every rank has stopped: rank 0 waited for rank 3, ")
    assert first(notes, WORLD) == []


def test_ranks_without_a_note_are_silent() -> None:
    assert verdict({1: _waits(0)}, WORLD).startswith("No sign of life from rank(s) 0, 2, 3")
    assert verdict({0: _waits(1)}, WORLD).startswith("No sign of life from rank(s) 1, 2, 3")


def test_how_far_each_rank_has_come() -> None:
    notes = {0: _waits(3), 1: note("encode", (0, 0, EXCHANGED), None, peer=0), 3: _waits(2)}
    told = "Last finished: ranks 0, 3 bucket 0 of step 2; rank 1 nothing yet; rank 2 not known."
    assert last_finished(notes, WORLD) == told


def _fail(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let rank 2 offer nothing in the third step; return the errors of those that have failed a second later."""
    if folder:
        monkeypatch.setenv("HVC_DUMP_DIR", str(folder))
    with Fleet(WORLD, [spec("weight", 8)], "none", timeout=0.5) as fleet:
        for _ in range(2):
            fleet.step([{"weight": torch.ones(8)} for _ in range(WORLD)])
        for rank in (0, 1, 3):
            fleet.reducers[rank].offer(0, torch.ones(8))
        until = time.monotonic() + 10.0
        # The last note is waited for in vain for a second.
        while sum(reducer.failure.failed() for reducer in fleet.reducers) < WORLD and time.monotonic() < until:
            time.sleep(0.01)
            if not folder and all(fleet.reducers[rank].failure.failed() for rank in (0, 1, 3)):
                break
        failed = [reducer for reducer in fleet.reducers if reducer.failure.failed()]
        return [_error(reducer) for reducer in failed]


def _error(reducer: Any) -> str:
    with pytest.raises(ExchangeError) as caught:
        reducer.offer(0, torch.ones(8))
    return str(caught.value)


def test_a_failure_reaches_a_rank_that_exchanges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _fail(tmp_path, monkeypatch)
    assert len(found) == WORLD
    for text in found:
        assert "Rank(s) 2 had not reached bucket 0 of step 2 yet" in text, text
        assert "Last finished: ranks 0, 1, 2, 3 bucket 0 of step 1" in text, text


def test_without_passing_it_on_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the rank with nothing to exchange learns nothing, and leaves no note."""
    monkeypatch.setattr(LocalTransport, "on_abort", lambda self, call: None)
    found = _fail(None, monkeypatch)
    assert len(found) == WORLD - 1
    assert all("No sign of life from rank(s) 2" in text for text in found)


def test_inspect_says_who_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail(tmp_path, monkeypatch)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Rank(s) 2 had not reached bucket 0 of step 2 yet" in text and "bucket 0 of step 1" in text
    (tmp_path / "rank1.json").unlink()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first"], found["without_record"], found["world"]) == ([1], [1], WORLD)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2, 3]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"rank": 0}', '{"rank": "x", "time": 0, "failure": "", "events": []}', "\x00", '{"events": 3}'],
)
def test_inspect_says_what_is_no_record(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.json").write_text(content)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "rank0.json is not a flight record" in capsys.readouterr().err


@pytest.mark.parametrize("odd", [3, [], {"place": 1}, {"place": [1, 2, "x"]}, {"place": [1, 2, 0], "finished": "no"}])
def test_inspect_does_without_notes(odd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"rank": 0, "time": 1.0, "failure": "all is lost", "events": [], "note": odd}
    (tmp_path / "rank0.json").write_text(json.dumps(record))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "all is lost" in capsys.readouterr().out


def test_inspect_refuses_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (str(tmp_path / "none"), ""):  # as of a variable that is not set
        assert main(["inspect", given]) == 2
        assert "is not a folder" in capsys.readouterr().err
