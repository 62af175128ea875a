"""The GPU benchmark without a GPU: its cases, its table, and what it says where there is none."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from benchmarks import gpu, gpu_cases, gpu_steps  # noqa: E402
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


@pytest.mark.parametrize(("number", "name"), [(0, "sign_decode_all"), (1, "values_decode_all")])
def test_a_step_is_compared(monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    monkeypatch.setattr(gpu_steps, "buckets", lambda: buckets(shrink=8)[:2])
    steps = gpu_steps.STEPS[number]
    assert gpu.wrong_in_steps(steps, Device()) == 0
    decode, calls = getattr(ops, name), []

    def wrong_in_the_end(*given: object, **rule: object) -> object:
        found = decode(*given, **rule)
        calls.append(1)
        if len(calls) == 8:  # the last bucket of the second run's second step
            given[3][0].add_(1)  # type: ignore[index]
        return found

    monkeypatch.setattr(ops, name, wrong_in_the_end)
    assert gpu.wrong_in_steps(steps, Device()) > 0


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


class FakeProfile:
    """A profile whose trace holds what a list says, for each run."""

    found: ClassVar[list[list[str]]] = []

    def __init__(self, activities: list[object]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)

    def __enter__(self) -> FakeProfile:
        return self

    def __exit__(self, *_: object) -> None:
        self.kinds = FakeProfile.found.pop(0)

    def export_chrome_trace(self, path: str) -> None:
        events = [{"ph": "M"}, *({"cat": kind, "name": "Memset (Device)"} for kind in self.kinds)]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def test_what_a_call_starts_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kind in the second trace; none is an error, no figure."""
    monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[int] = []
    FakeProfile.found = [[], ["kernel", "gpu_memset", "cuda_runtime", "kernel", "gpu_memcpy", "kernel"]]
    assert gpu.started_by(lambda: calls.append(1)) == (3, 1) and len(calls) == 2
    FakeProfile.found = [["kernel"], ["gpu_memset", "cuda_runtime"]]
    with pytest.raises(RuntimeError, match=r"saw no kernel.*gpu_memset"):
        gpu.started_by(lambda: None)


def test_a_trace_of_torch_names_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it has the operations of the CPU."""
    real, cpu = torch.profiler.profile, [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: real(activities=cpu))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert gpu.profiled(lambda: torch.ones(3) + 1)["cpu_op"] >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "No CUDA device" in shown.err and "make setup CUDA=1" in shown.err
    assert not (tmp_path / "gpu.json").exists()
