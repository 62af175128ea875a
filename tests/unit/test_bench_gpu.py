"""The GPU benchmark without a GPU: its cases, its table, and what it says where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import gpu, gpu_cases, gpu_steps  # noqa: E402
from benchmarks.gpu import Timed  # noqa: E402
from benchmarks.gpu_steps import buckets  # noqa: E402
from horovod_compress import ops  # noqa: E402
from horovod_compress.exchange.device import Device  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HOST_ONLY = {"crc32c", "crc32c_copy", "instruction_set"}


def test_every_kernel_has_a_case() -> None:
    text = re.sub(r"//.*", "", (ROOT / "csrc" / "kernels.h").read_text())
    names = set(re.findall(r"^\w+ (\w+)\(", text, re.MULTILINE)) - HOST_ONLY
    assert len(names) > 40
    assert names - {case.kernel.removesuffix("_all") for case in gpu_cases.CASES} == set()


def test_names_of_cases_differ() -> None:
    names = [case.name for case in gpu_cases.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda case: case.name)
def test_arguments_are_legal_and_nothing_depends_on_the_run(case: gpu_cases.Case) -> None:
    assert gpu.wrong_elements(case, 3001, device="cpu") == 0


def test_wrong_elements_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in gpu_cases.CASES if case.name == "dense_add")
    right, calls = ops.dense_add, []

    def wrong_the_second_time(into: torch.Tensor, other: torch.Tensor) -> None:
        right(into, other)
        calls.append(1)
        if len(calls) == 2:
            into[3:5] += 1

    monkeypatch.setattr(ops, "dense_add", wrong_the_second_time)
    assert gpu.wrong_elements(case, 100, device="cpu") == 2


def test_the_table_compares_with_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Timed(gpu_cases.COPY, 8000, None, [1e-6] * 3), Timed("dense_add", 12000, 0, [3e-6, 2e-6, 1e-6])]
    records = gpu.report(lines, "a GPU")
    assert [record["fraction_of_copy"] for record in records] == pytest.approx([1.0, 0.75])
    assert records[1]["wrong"] == 0 and records[1]["repeats"] == 3 and records[1]["device"] == "a GPU"
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["dense_add", "2.0", "6.0", "0.75", "0"]
    json.dumps(records)


def test_launches_of_a_step_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Timed(gpu_cases.COPY, 8000, None, [1e-6]), Timed("a step", 8000, 0, [1e-6], (12, 8))]
    records = gpu.report(lines, "a GPU")
    assert (records[1]["launches"], records[1]["memsets"]) == (12, 8) and records[0]["launches"] is None
    assert capsys.readouterr().out.splitlines()[-1] == "a step in 4 buckets: 12 launches, 8 memsets"


def test_a_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "buckets", lambda: buckets(shrink=8)[:2])
    assert gpu.wrong_in_steps(Device()) == 0
    decode, calls = ops.sign_decode_all, []

    def wrong_in_the_end(*given: object, **rule: object) -> None:
        decode(*given, **rule)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 8:  # the last bucket of the second run's second step
            given[3][0].add_(1)  # type: ignore[index]

    monkeypatch.setattr(ops, "sign_decode_all", wrong_in_the_end)
    assert gpu.wrong_in_steps(Device()) > 0


def test_arrays_of_a_case_are_larger_than_the_cache() -> None:
    given = gpu_cases.Arguments((torch.zeros(250), [torch.zeros(250)]), 0, {"residual": torch.zeros(500)})
    assert gpu.turns(given, 0) == 2
    assert gpu.turns(given, 1000) == 2
    assert gpu.turns(given, 10_000) == 10


def test_short_calls_are_timed_together() -> None:
    assert gpu.calls_for(2e-3) == 1 and gpu.calls_for(0.4e-3) == 3
    assert gpu.calls_for(1e-7) == gpu.calls_for(0.0) == gpu.MOST_CALLS


class FakeEvent:
    """Takes the time of a clock that every call moves on by 10 microseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, after: FakeEvent) -> float:
        return 1000 * (after.at - self.at)


def test_the_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def run(index: int) -> None:
        FakeEvent.now += 1e-5
        called.append(index)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    assert gpu.timed([lambda: run(0), lambda: run(1)], 4) == pytest.approx([1e-5] * 4)
    assert len(called) == 2 * gpu.WARM_UP + 4 * 100 and called[-100:].count(0) == 50


@pytest.mark.parametrize("words", [["--count", "0"], ["--repeat", "-1"], ["--check-count", "0"]])
def test_refused_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu.main(words)
    assert stop.value.code == 2 and "must be at least 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "No CUDA device" in shown.err and "make setup CUDA=1" in shown.err
    assert not (tmp_path / "gpu.json").exists()
