"""What `hvd-compress verify` makes of the ranks' findings: the table, and what counts as a failure."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.cli import common, verify
from horovod_compress.cli.command import main
from horovod_compress.fronts import selftest
from horovod_compress.fronts.local_ranks import End
from horovod_compress.fronts.ranks import PATIENCE
from horovod_compress.fronts.torch_dist import ranks as torch_ranks

TEXT = "rank 0: rank 1 is gone. No sign of life from rank(s) 2: look at their output."


def row(name: str, ok: bool = True, seconds: float = 1.0) -> dict[str, Any]:
    return {"check": name, "ok": ok, "seconds": seconds, "detail": "" if ok else "it is not so"}


def ends(*delays: float | None, text: str = TEXT, at: float | None = 10.0) -> list[End]:
    """Return survivors, None for one that has left nothing, and then the victim."""
    found = [End(rank, 0, {"error": d and {"text": text, "at": 10.0 + d}}, "") for rank, d in enumerate(delays)]
    return [*found, End(len(delays), -9, {} if at is None else {"fault": at}, "its output")]


def test_a_check_holds_if_it_does_on_every_rank() -> None:
    rows = verify.merged([[row("a"), row("b"), row("c")], [row("a", seconds=3.0), row("b", ok=False)]], ["", ""])
    assert [(found["check"], found["ok"], found["seconds"]) for found in rows] == [("a", True, 3.0), ("b", False, 1.0)]


def test_a_rank_that_found_nothing_has_failed() -> None:
    (found,) = verify.merged([[row("a")], None], ["", "Segmentation fault"])
    assert not found["ok"] and "rank(s) 1" in found["detail"] and "Segmentation fault" in found["detail"]


def test_a_rank_that_does_not_come_to_the_end_has_failed() -> None:
    whole, hung, crashed = End(0, 0, {}, ""), End(1, None, {}, ""), End(2, -11, {}, "Segmentation fault")
    assert verify.unfinished([whole], [row("a")]) == []
    assert verify.unfinished([whole, hung, crashed], [row("a", ok=False)]) == []  # that says enough
    (found,) = verify.unfinished([whole, crashed, hung], [row("a")])
    assert not found["ok"] and found["detail"] == "rank 2 ended with -11: Segmentation fault"
    (found,) = verify.unfinished([crashed, End(0, 0, {"checks": [row("a"), row("b", ok=False)]}, "")], [row("a")])
    assert found["check"] == "b"
    (found,) = verify.unfinished([whole, hung], [row("a")])
    assert found["detail"].startswith("rank 1 did not end")


def test_a_death_is_to_be_noticed_in_time_and_by_name() -> None:
    problem, detail = verify.judged("kill", ends(1.0, 1.5), 3)
    assert problem == "" and "at most 1.5 s" in detail


@pytest.mark.parametrize(
    ("how", "found", "said"),
    [
        ("kill", ends(1.0, 30.0), "after 1.0 to 30.0 s"),
        ("freeze", ends(0.1, 6.0), "after 0.1 to 6.0 s"),
        ("kill", ends(1.0, None), "rank 1 did not fail"),
        ("kill", ends(1.0, 1.0, text="Horovod has been shut down"), "does not name rank 2"),
        ("kill", ends(1.0, 1.0, at=None), "rank 2 did not reach its planted fault: its output"),
    ],
)
def test_what_is_wrong_is_said(how: str, found: list[End], said: str) -> None:
    problem, _ = verify.judged(how, found, 3)
    assert said in problem


@pytest.mark.parametrize("ok", [True, False])
def test_status_and_document(ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(world: int, what: Any, seconds: float, victims: Any = (), look: Any = None) -> list[End]:
        if what["how"] == "checks":
            return [End(rank, 0, {"checks": [row("same bits: none"), row("drift", ok)]}, "") for rank in range(3)]
        return ends(6.0, 6.0)

    monkeypatch.setattr(torch_ranks, "run_local", run)
    for name in ("HOROVOD_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["verify", "--np", "3", "--launcher", "torchrun", "--json"]) == (0 if ok else 1)
    found = json.loads(capsys.readouterr().out)
    assert found["launcher"] == "torchrun"
    assert found["ok"] is ok and [check["check"] for check in found["checks"]][-2:] == ["kill", "freeze"]
    assert main(["verify", "--np", "3", "--launcher", "torchrun"]) == (0 if ok else 1)
    text = capsys.readouterr().out
    assert ("all checks passed" in text) is ok and ("FAILED" in text) is not ok
    assert [line.split()[0] for line in text.splitlines()][:6] == ["3", "check", "same", "drift", "kill", "freeze"]


def test_a_row_is_printed_when_its_check_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def run(world: int, what: Any, seconds: float, victims: Any = (), look: Any = None) -> list[End]:
        rows = [row("same bits: none"), row("drift")]
        if what["how"] != "checks":
            return ends(6.0, 6.0)
        for left in ([], [{}, {}, {}], [{"checks": rows}, {"checks": rows[:1]}, {"checks": rows}]):
            look(left or [{}] * 3)
            shown.append(capsys.readouterr().out)
        return [End(rank, 0, {"checks": rows}, "") for rank in range(3)]

    monkeypatch.setattr(torch_ranks, "run_local", run)
    for name in ("HOROVOD_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["verify", "--np", "3", "--launcher", "torchrun"]) == 0
    assert "check" in shown[0] and not shown[1] and shown[2].split() == ["same", "bits:", "none", "ok", "1.0"]
    assert capsys.readouterr().out.split()[:2] == ["drift", "ok"]


@pytest.mark.parametrize(("words", "said"), [(["--np", "1"], "--np should be"), (["--np", "65"], "--np should be")])
def test_wrong_arguments_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_horovod_has_no_front_for_divided_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "started_by", lambda: "")
    assert main(["verify", "--launcher", "horovodrun", "--front", "fsdp"]) == 2
    assert "give --launcher torchrun, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "launcher", "plant", "said"),
    [
        (["HOROVOD_RANK"], None, "freeze", "run it without horovodrun"),
        (["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], None, "freeze", "run it without torchrun"),
        (["HOROVOD_RANK"], "torchrun", None, "run it without horovodrun"),
    ],
)
def test_what_is_not_for_ranks_of_a_launcher(
    variables: list[str],
    launcher: str | None,
    plant: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in variables:
        monkeypatch.setenv(name, "0")
    assert verify.run(argparse.Namespace(np=4, plant=plant, json=False, launcher=launcher, front=None)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("plant", "method", "hurried"),
    [("", "marsit", False), ("freeze", "marsit", True), ("freeze", "topk", False), ("", "topk", False)],
)
def test_only_a_planted_fault_is_waited_for_briefly(
    plant: str, method: str, hurried: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def job(ranks: Any, method: str, seconds: float, **options: Any) -> None:
        given.append(seconds)
        raise selftest.CheckFailed

    monkeypatch.setattr(selftest, "_Trained", job)
    ranks: Any = SimpleNamespace(rank=rank, size=2)
    ranks.undivided = lambda: ranks
    with pytest.raises(selftest.CheckFailed):
        selftest.Checks(ranks, plant).same_bits(method)
    assert (given[0] < PATIENCE) is hurried


@pytest.mark.parametrize("launcher", ["horovodrun", "torchrun"])
def test_one_rank_is_refused(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "started_by", lambda: launcher)
    monkeypatch.setattr(common, "ranks_of", lambda launcher, front: SimpleNamespace(rank=0, size=1))
    assert main(["verify", "--launcher", launcher]) == 2
    said = capsys.readouterr().err
    assert "one rank has no one to exchange with" in said and f"  {launcher} " in said
