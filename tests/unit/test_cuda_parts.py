"""The parts of the check of machines with a GPU, where there is none: limits, continuing, verdicts and the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cuda_check
from cuda_parts import catalogue, machine, process, report
from cuda_parts.part import Part, chosen
from cuda_parts.process import ROOT
from cuda_parts.result import NOT_RUN, RIGHT, WRONG, Result, Results
from cuda_parts.schedule import Schedule
from cuda_parts.verdict import verdict
from tests.share import share

KEY = "these sources"


def part(name: str, script: str = "true", **options: Any) -> Part:
    return Part(name, f"about {name}", ("sh", "-c", script), **{"expected": 0.1, "limit": 30.0} | options)


def run(folder: Path, parts: Sequence[Part], key: str = KEY, limit: float = 60.0, at_once: int = 1) -> list[str]:
    """Run parts that are not right; return the lines that were printed."""
    results, lines = Results(folder / "parts", key), []
    schedule = Schedule(results, limit, at_once, lines.append, lambda: None)
    schedule.run([part for part in parts if not results.is_right(part.name)])
    return lines


def result(folder: Path, name: str, key: str = KEY) -> Result:
    found = Results(folder / "parts", key).current(name)
    assert found
    return found


# ---- continuing and limits ----------------------------------------------------------------------


def test_a_second_call_runs_what_is_not_right(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    parts = [part("good", f"echo good >> {calls}"), part("bad", f"echo bad >> {calls}; echo a fault; exit 3")]
    run(tmp_path, parts)
    run(tmp_path, parts)
    assert calls.read_text().split() == ["good", "bad", "bad"]
    assert result(tmp_path, "good").result == RIGHT
    bad = result(tmp_path, "bad")
    assert (bad.result, bad.reason, bad.output) == (WRONG, "exit status 3: a fault", "a fault")
    run(tmp_path, parts, key="other sources")
    assert calls.read_text().split()[3:] == ["good", "bad"]


def test_the_limit_is_of_the_whole_call(tmp_path: Path) -> None:
    began = time.monotonic() - 50.0
    schedule = Schedule(Results(tmp_path / "parts", KEY), 60.0, 1, lambda line: None, lambda: None, began)
    schedule.run([part("long", "exit 1", expected=25.0)])
    assert "10 s of this call were left" in result(tmp_path, "long").reason


def test_no_part_is_started_that_does_not_fit(tmp_path: Path) -> None:
    lines = run(tmp_path, [part("long", "exit 1", expected=25.0), part("short")], limit=5.0)
    long = result(tmp_path, "long")
    assert long.result == NOT_RUN and "it may need 25 s, and 5 s of this call were left" in long.reason
    assert result(tmp_path, "short").result == RIGHT  # it is not in the way of what fits
    assert any("long: not run" in line for line in lines)


def test_what_was_found_stays_where_there_is_no_time_for_it(tmp_path: Path) -> None:
    run(tmp_path, [part("bad", "exit 1")])
    run(tmp_path, [part("bad", "exit 0", expected=25.0)], limit=1.0)
    assert result(tmp_path, "bad").result == WRONG


def test_what_a_part_took_is_what_it_needs(tmp_path: Path) -> None:
    slow = part("slow", "sleep 20")
    run(tmp_path, [part("first", "sleep 0.6"), slow], limit=2.0)
    found = result(tmp_path, "slow")
    assert found.result == NOT_RUN and "this call's time was up after 1 s of it" in found.reason
    assert found.expected and found.expected > 1.0
    lines = run(tmp_path, [part("second", "sleep 1"), slow], limit=2.0)
    assert not any("slow started" in line for line in lines)


def test_a_part_that_a_whole_call_was_too_short_for_is_wrong(tmp_path: Path) -> None:
    """However long it took before, it is started where it has nearly a whole call, and then it has overrun."""
    Results(tmp_path / "parts", KEY).write(Result("slow", NOT_RUN, expected=25.0))
    run(tmp_path, [part("slow", "sleep 20")], limit=1.0)
    found = result(tmp_path, "slow")
    assert (found.result, found.reason) == (WRONG, "not done after 1 s, and ended; --limit gives it longer")


def test_a_part_that_failed_early_needs_what_we_believe(tmp_path: Path) -> None:
    run(tmp_path, [part("bad", "exit 1")])
    lines = run(tmp_path, [part("bad", "exit 0", expected=25.0)], limit=5.0)
    assert "it may need 25 s, and 5 s of this call were left; --limit gives it longer" in lines[-1]


def test_a_part_that_overruns_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    run(tmp_path, [part("endless", f"setsid sleep 300 & echo $! > {pid}; sleep 300", limit=1.0), part("next")])
    assert time.monotonic() - began < 25.0
    found = result(tmp_path, "endless")
    assert found.result == WRONG and found.reason.startswith("not done after 1 s")
    assert not _alive(int(pid.read_text()))
    assert result(tmp_path, "next").result == RIGHT


def test_children_that_outlive_a_part_are_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run(tmp_path, [part("short", f"setsid sleep 300 > /dev/null & echo $! > {pid}")])
    assert result(tmp_path, "short").result == RIGHT and not _alive(int(pid.read_text()))


def test_an_error_in_the_check_ends_what_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def say(line: str) -> None:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    schedule = Schedule(Results(tmp_path / "parts", KEY), 60.0, 1, say, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        schedule.run([part("endless", f"echo $$ > {pid}; sleep 300")])
    assert not _alive(int(pid.read_text()))
    found = result(tmp_path, "endless")
    assert found.result == NOT_RUN and "the call was ended after" in found.reason


def test_a_process_that_cannot_be_ended_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kill_marked(name: str, mark: str, patience: float) -> None:
        real(name, mark, patience)
        raise TimeoutError("processes [7] are still there")

    real = process.kill_marked
    monkeypatch.setattr(process, "kill_marked", kill_marked)
    run(tmp_path, [part("stuck"), part("endless", "exec sleep 300", limit=0.5), part("next")])
    stuck = result(tmp_path, "stuck")
    assert (stuck.result, stuck.reason) == (RIGHT, "processes [7] are still there")
    assert result(tmp_path, "endless").reason.endswith("gives it longer; processes [7] are still there")
    assert result(tmp_path, "next").result == RIGHT


def test_each_process_is_ended_whatever_the_others_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = []

    def end(self: process.Process) -> str:
        ended.append(self)
        real(self)
        raise KeyboardInterrupt  # a second one, while the first is dealt with

    def say(line: str) -> None:
        if "second" in line:
            raise KeyboardInterrupt

    real = process.Process.end
    monkeypatch.setattr(process.Process, "end", end)
    schedule = Schedule(Results(tmp_path / "parts", KEY), 60.0, 2, say, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        schedule.run([part("first", "sleep 300"), part("second", "sleep 300")])
    assert len(ended) == 2 and result(tmp_path, "first").result == NOT_RUN


def test_what_a_killed_check_leaves_behind_is_ended(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    left = [process.Process(("sleep", "300"), {}, tmp_path / folder.name, 300.0, folder) for folder in (here, there)]
    assert process.end_left_over(here) == ""
    assert [one.status() for one in left] == [-signal.SIGKILL, None]
    assert left[1].end() == ""


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_parts_run_side_by_side_but_for_those_that_measure(tmp_path: Path) -> None:
    """The first two wait for each other; the one that is alone finds nothing that is still busy."""
    meet = f"touch {tmp_path}/$0; while [ ! -e {tmp_path}/$1 ]; do sleep 0.05; done; sleep 0.3; rm {tmp_path}/busy.$0"
    pair = [
        replace(part(name), command=("sh", "-c", f"touch {tmp_path}/busy.{name}; {meet}", name, other))
        for name, other in (("a", "b"), ("b", "a"))
    ]
    alone = part("alone", f"! ls {tmp_path}/busy.*", alone=True)
    run(tmp_path, [*pair, alone, part("last")], at_once=3)
    assert [result(tmp_path, name).result for name in ("a", "b", "alone", "last")] == [RIGHT] * 4


def test_figures_are_kept(tmp_path: Path) -> None:
    leave = (
        """echo '{"lost": 3}' > $HVC_CHECK_FIGURES/x.json; echo '{"name": "copy"}' > $HVC_CHECK_FIGURES/lines.jsonl"""
    )
    run(tmp_path, [part("figures", leave)])
    assert result(tmp_path, "figures").figures == {"lost": 3, "lines": [{"name": "copy"}]}


def test_figures_that_were_not_written_to_the_end_are_left_out(tmp_path: Path) -> None:
    half = "cd $HVC_CHECK_FIGURES; echo '{\"lost\": 3}' > x.json; printf '{\"a' | tee y.json > z.jsonl"
    run(tmp_path, [part("figures", half), part("next")])
    assert result(tmp_path, "figures").figures == {"lost": 3} and result(tmp_path, "next").result == RIGHT


# ---- verdicts -----------------------------------------------------------------------------------

TESTS = replace(part("tests"), command=(sys.executable, "-m", "pytest"))
UNSUPPORTED = (NOT_RUN, "memcheck: Device not supported. See x")
SKIPPED = "s [100%]\nSKIPPED [1] tests/parallel/test_device.py:36: one GPU\nSKIPPED [2] tests/a.py:1: one GPU\n"


@pytest.mark.parametrize(
    ("of", "status", "output", "expected"),
    [
        (TESTS, 0, "..\n2 passed in 0.1s\n", (RIGHT, "")),
        (TESTS, 0, "..\n2 passed in 0.1s\n========= ERROR SUMMARY: 0 errors\n", (RIGHT, "")),
        (TESTS, 0, SKIPPED + "3 skipped in 0.1s\n", (NOT_RUN, "one GPU")),
        (TESTS, 5, "SKIPPED [1] tests/b.py:9: needs Horovod\n1 skipped in 0.1s\n", (NOT_RUN, "needs Horovod")),
        (TESTS, 5, "no tests ran in 0.1s\n", (NOT_RUN, "no test was found")),
        (TESTS, 1, "FAILED tests/a.py::b - x\n1 failed, 2 passed\n", (WRONG, "exit status 1: tests/a.py::b - x")),
        (TESTS, 9, "2 passed\n== ERROR SUMMARY: 4 errors\n", (WRONG, "exit status 9: ERROR SUMMARY: 4 errors")),
        (TESTS, 4, "usage error\n", (WRONG, "exit status 4: usage error")),
        (replace(TESTS, name="memcheck.1"), 9, "== Error: Device not supported. See x\n", UNSUPPORTED),
        (part("benchmark"), 2, "no CUDA device\n", (NOT_RUN, "no CUDA device")),
        (part("benchmark"), 1, "", (WRONG, "exit status 1: no output")),
    ],
)
def test_verdicts(of: Part, status: int, output: str, expected: tuple[str, str]) -> None:
    assert verdict(of, status, output) == expected


def test_what_cannot_be_run_says_why(tmp_path: Path) -> None:
    sanitizers = [part for part in catalogue.parts(tmp_path) if part.group in catalogue.SANITIZERS]
    assert len(sanitizers) == 4 * catalogue.SHARES
    run(tmp_path, sanitizers[:1])
    found = result(tmp_path, "memcheck.1")
    assert found.result == NOT_RUN and "compute-sanitizer was not found" in found.reason


def test_parts_without_horovod_say_so(tmp_path: Path) -> None:
    parts = catalogue.parts(tmp_path, program="/opt/compute-sanitizer", horovod=False)
    without = [part for part in parts if part.missing]
    assert len(without) == len(catalogue.JOBS) + 1 and all(part.name.endswith(".horovod") for part in without)
    run(tmp_path, without[:1], limit=1.0)
    assert result(tmp_path, without[0].name).reason == "needs Horovod"


# ---- the catalogue ------------------------------------------------------------------------------


def test_parts_have_names_and_run_files_that_are_there(tmp_path: Path) -> None:
    parts = catalogue.parts(tmp_path, program="/opt/compute-sanitizer")
    assert len({part.name for part in parts}) == len(parts) and not any(part.missing for part in parts)
    assert {
        path for part in parts for path in part.command if path.startswith("tests/") and not (ROOT / path).exists()
    } == set()
    named = {part.name: part for part in parts}
    racecheck = named["racecheck.2"]
    assert named["memcheck.1"].command[3:5] == ("--report-api-errors", "no")
    assert racecheck.command[:3] == ("/opt/compute-sanitizer", "--tool", "racecheck")
    assert racecheck.environment == {"HVC_TEST_LENGTHS": "short", "HVC_TEST_SHARE": "2/5"}
    assert "HVC_TEST_LENGTHS" not in named["tests.kernels.1"].environment
    assert named["benchmark"].alone and not named["jobs.torch"].alone


def test_parts_are_chosen_by_name_or_group(tmp_path: Path) -> None:
    parts = catalogue.parts(tmp_path)
    assert [part.name for part in chosen(parts, ["payloads", "memcheck.3"])] == [
        "payloads.torch", "payloads.horovod", "memcheck.3"
    ]  # fmt: skip
    assert chosen(parts, []) == parts
    with pytest.raises(ValueError, match=r"there is no part 'memchek': take one of tests, jobs, payloads"):
        chosen(parts, ["memchek"])


COLLECT = """
import sys, pytest, tests.gpu
tests.gpu._has_gpu = lambda: True
sys.exit(pytest.main([*sys.argv[1:], "--collect-only"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_finds_its_tests(tmp_path: Path) -> None:
    """As on a machine with a GPU; shares of the kernel tests make up the whole."""
    pytest.importorskip("horovod.torch")
    found: dict[str, list[str]] = {}
    for one in catalogue.parts(tmp_path):
        if "pytest" in one.command and one.group not in catalogue.SANITIZERS:
            words = one.command[one.command.index("pytest") + 1 :]
            done = subprocess.run(
                [sys.executable, "-c", COLLECT, *words],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **one.environment},
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            found[one.name] = [line for line in done.stdout.splitlines() if "::" in line]
            assert found[one.name], one.name
    shares = [set(names) for name, names in found.items() if name.startswith("tests.kernels.")]
    assert len(set.union(*shares)) == sum(map(len, shares)) > 100
    assert any("example" in name for name in found["training.horovod"])
    assert len(found["jobs.torch"]) == len(found["jobs.horovod"]) == 16


@pytest.mark.parametrize("text", ["2", "0/3", "4/3", "a/b", "1/"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    assert share("2/5") == (2, 5)
    with pytest.raises(pytest.UsageError, match="HVC_TEST_SHARE should be a share such as 2/5"):
        share(text)


# ---- the key, the report and the exit status ----------------------------------------------------

FACTS = {"GPU": "A GPU", "torch": "9.9", "driver": "1.2"}


def test_results_hold_for_sources_gpu_and_torch(tmp_path: Path) -> None:
    source = tmp_path / "csrc" / "cuda" / "a.cu"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    keys = [machine.key(FACTS, tmp_path), machine.key(FACTS | {"GPU": "B"}, tmp_path)]
    keys.append(machine.key(FACTS | {"torch": "9"}, tmp_path))
    (source.parent / "made.so").write_text("a library")
    assert machine.key(FACTS | {"driver": "7"}, tmp_path) == keys[0]
    source.write_text("two")
    keys.append(machine.key(FACTS, tmp_path))
    (tmp_path / "setup.py").write_text("flags")
    keys.append(machine.key(FACTS, tmp_path))
    assert len(set(keys)) == 5


def ended(*kinds: str) -> list[Result]:
    return [Result(f"part.{number}", kind, "a|reason" if kind != RIGHT else "") for number, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ((RIGHT, RIGHT), 0),
        ((RIGHT, WRONG, NOT_RUN), 1),
        ((WRONG, NOT_RUN), 1),
        ((NOT_RUN, NOT_RUN), 2),
        ((RIGHT, NOT_RUN), 3),
    ],
)
def test_exit_status(kinds: tuple[str, ...], status: int) -> None:
    assert report.status(ended(*kinds)) == status


def test_the_report_shows_parts_and_figures(tmp_path: Path) -> None:
    records = [
        {"bench": "gpu", "about": "the run"},
        {"name": "copy", "median_seconds": 1e-4, "bytes_per_second": 2e12, "fraction_of_copy": 1.0, "wrong": None},
    ]
    curve = {"cpu": [[0, 4.5], [20, 3.25]], "gpu": [[0, 4.5], [20, 3.2501]]}
    figures = {"curve marsit torch": curve, "lines": records, "waits": {"calls": 1.5}, "differing": []}
    right, wrong, missing = ended(RIGHT, WRONG, NOT_RUN)
    found = [replace(right, figures=figures, seconds=12.3), replace(wrong, output="the end", command="run me"), missing]
    report.write(tmp_path, FACTS, KEY, [part(one.part) for one in found], found)
    text = (tmp_path / "report.md").read_text()
    for line in (
        "1 right, 1 wrong, 1 not run. Sources and machine: `these sources`.",
        "| driver | 1.2 |",
        "| `part.0` | right | 12 | about part.0 |  |",
        "| `part.2` | not run |  | about part.2 | a\\|reason |",
        "marsit torch, held-out loss:",
        "| 20 | 3.2500 | 3.2501 |",
        "| copy | 100.0 | 2000.0 | 1.00 |  |",
        "- waits: calls 1.5",
        "- differing: none",
        "## Output of part.1",
        "the end",
    ):
        assert line in text.splitlines(), line
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["machine"] == FACTS and [one["result"] for one in document["parts"]] == [RIGHT, WRONG, NOT_RUN]


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[Part], *words: str, **facts: Any) -> int:
    monkeypatch.setattr(machine, "facts", lambda: FACTS | facts)
    monkeypatch.setattr(machine, "key", lambda facts: KEY)
    monkeypatch.setattr(catalogue, "parts", lambda *given: parts)
    monkeypatch.setattr(cuda_check.signal, "signal", lambda *given: None)
    return cuda_check.main(["--folder", str(folder), *words])


def test_a_call_continues_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = tmp_path / "mended"
    parts = [part("good"), part("bad", f"test -e {mended}"), part("never", missing="no such machine")]
    assert call(monkeypatch, tmp_path, parts) == 1
    assert "3 parts to run, 0 are right already" in capsys.readouterr().out
    mended.touch()
    assert call(monkeypatch, tmp_path, parts) == 3
    assert "2 parts to run, 1 are right already" in capsys.readouterr().out
    assert "2 right, 0 wrong, 1 not run" in (tmp_path / "report.md").read_text()
    assert call(monkeypatch, tmp_path, parts, "--only", "good", "--again") == 0
    assert "1 parts to run" in capsys.readouterr().out
    assert call(monkeypatch, tmp_path, parts, "--only", "never") == 2
    assert call(monkeypatch, tmp_path, parts, "--list") == 0
    assert "good               right        about good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"GPU": None}, "No CUDA device is visible"),
        ({"no kernels": "ImportError: no _cuda"}, "Our kernels do not run here: ImportError: no _cuda"),
        ({"problem": "torch did not answer"}, "torch did not answer"),
    ],
)
def test_a_machine_that_cannot_be_checked(
    facts: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, tmp_path, [part("good")], **facts) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "parts").exists()


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--only", "memchek"], "there is no part"), (["--limit", "0"], "should be above zero")):
        with pytest.raises(SystemExit):
            cuda_check.arguments(words)
        assert said in capsys.readouterr().err
