"""Timelines of real jobs: a file of each rank, and what is hidden behind backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.timelines import check, end, read, rows, spans

pytestmark = [pytest.mark.alone, pytest.mark.slow]

RUNS = ["layerwise True", "layerwise False", "single True", "single False"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("timelines")
    asked = {"HVC_TRACE": str(folder / "asked.json"), "HVC_TRACE_STEPS": "0:1"}
    return run_ranks(2, "trace.py", timeout=100, arguments={"folder": str(folder)}, env=asked).values()


@pytest.mark.parametrize("run", RUNS)
def test_every_rank_writes_a_file_with_a_row_for_each_bucket(found, run: str) -> None:
    buckets = 4 if run.startswith("layerwise") else 1
    for rank, report in enumerate(found):
        assert report[run]["path"].endswith(f".rank{rank}.json") and report[run]["buckets"] == buckets
        events = read(Path(report[run]["path"]))
        check(events)
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {rank}: marsit"]
        tensors = "1 tensor, 360.0 kB" if buckets == 4 else "4 tensors, 1.4 MB"
        assert rows(events)[4:] == [f"bucket {index} ({tensors})" for index in range(buckets)]
        assert [e["args"]["step"] for e in spans(events, "steps", "step")] == [2, 3, 4, 5]
        if run.endswith("True"):  # without attach() it may be Horovod's tokens that are waited for
            assert spans(events, "wait")


@pytest.mark.parametrize("run", RUNS)
def test_a_bucket_is_hidden_behind_the_backward_pass_of_those_before_it(found, run: str) -> None:
    for report in found:
        overlap, seconds = report[run]["overlap"], report[run]["overlap_seconds"]
        assert seconds["busy"] > 0
        # The single bucket is the control: it cannot begin before the last gradient is there.
        assert overlap > 0.0 if run.startswith("layerwise") else overlap == 0.0
        events = read(Path(report[run]["path"]))
        for step, backward in zip(spans(events, "steps", "step"), spans(events, "backward"), strict=True):
            first = min(e["ts"] for e in spans(events, "bucket", "encode") if e["args"]["step"] == step["args"]["step"])
            assert (first < end(backward)) == (step["args"]["overlap"] > 0) == run.startswith("layerwise")


def test_the_environment_gives_a_file_too_and_before_the_first_step(found) -> None:
    for rank, report in enumerate(found):
        events = read(Path(report[RUNS[0]]["path"]).parent / f"asked.rank{rank}.json")
        check(events)
        assert [e["args"]["step"] for e in spans(events, "steps", "step")] == [0]


def test_a_trace_changes_no_bit(found) -> None:
    assert len({report[run]["digest"] for report in found for run in (RUNS[0], RUNS[1], "untraced")}) == 1


def test_a_path_that_cannot_be_written_is_refused(found) -> None:
    assert all("cannot be written to /proc/nowhere/t.rank" in report["refused"] for report in found)
