"""Counters of real jobs, published under both fronts: complete files, scalars, and one line in the log."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.exposition import parse
from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("front", ["torch", "horovod"])
def test_a_job_publishes_what_it_counts(front: str) -> None:
    reports = run_ranks(2, "reports.py", timeout=200.0, front=front).reports
    for rank, report in enumerate(reports):
        check_file(rank, report["gradients"], "gradients", steps=100)
        if front == "horovod":  # exchanges are the steps of update mode: one for each two of the optimizer
            check_file(rank, report["updates"], "updates", steps=20)
    first, second = (report["gradients"] for report in reports)
    assert [step for step, _ in first["scalars"]["hvc/overlap"]] == [50, 100] and second["scalars"] == {}
    assert all(3.0 < value < 4.0 for _, value in first["scalars"]["hvc/times_fewer_bytes"])
    (line,) = first["lines"]
    said = (
        r"rank 0: global_qsgd, the first 100 steps: 3\.\d times fewer bytes than a float32 ring; no step was exact, "
        r".*; \d+ % of the exchange"
    )
    assert re.match(said, line) and second["lines"] == []
    check_short([report["short"] for report in reports])


def check_short(reports: list[dict[str, Any]]) -> None:
    """The line comes before the end; what print() shows afterwards is what came."""
    (line,) = reports[0]["lines"]
    assert re.match(r"rank 0: marsit, the first 39 steps: \d\.\d times .*, \d\.\d expected at step 40; ", line)
    for stats, shown in ((report["stats"], report["shown"]) for report in reports):
        # With 4 steps at the start, and one whenever half as many again have passed: 5, 8, 12, 18, 27.
        assert stats["exact_steps"] == 9 and stats["steps"] == 40
        assert stats["bytes_dense"] / stats["bytes_sent"] == pytest.approx(stats["times_fewer_bytes"], rel=1e-6)
        ratio = f"step 40; {stats['times_fewer_bytes']:.1f} times fewer bytes than a float32 ring; "
        assert re.match(r"<Compression marsit levels=2 schedule='layerwise' .*total_steps=40", shown) and ratio in shown


def check_file(rank: int, report: dict[str, Any], name: str, steps: int) -> None:
    ((file, text),) = report["files"].items()
    assert file == f"{name}.rank{rank}.prom"
    found, stats = parse(text), report["stats"]
    assert found["hvc_steps_total"].only() == steps
    assert 0 < found["hvc_sent_bytes_total"].only() <= stats["bytes_sent"]
    assert 0 < found["hvc_exchange_seconds_total"].only() <= stats["overlap_seconds"]["busy"]
    (labels,) = found["hvc_steps_total"].series
    assert dict(labels) == {"rank": str(rank), "method": "global_qsgd", "job_name": name}
