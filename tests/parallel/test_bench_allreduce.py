"""The all-reduce benchmark with real ranks: every contestant is right, and those that are not are found out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from benchmarks.allreduce import METHODS, full_name, words
from benchmarks.outcomes import records_in
from tests.support.jobs import run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ELEMENTS = 3000  # so that what norms are measured by, 544 bytes now and then, is less than what fp16 sends
PEERS = """
class Lazy:
    def __init__(self, name, check):
        self.name, self.check = name, check
    def wrap(self, model, optimizer):
        return model, optimizer
def adapters():
    return [Lazy("lazy and exact", "float32"), Lazy("lazy and compressed", "identical")]
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the records of one job, by contestant."""
    peers = tmp_path_factory.mktemp("peers") / "lazy.py"
    peers.write_text(PEERS)
    argv = ["--elements", str(ELEMENTS), "--repeat", "2", "--warm-up", "1", "--peer", str(peers)]
    for method in words(METHODS):
        argv += ["--method", full_name(method)]
    job = run_ranks(2, "bench_allreduce.py", arguments={"argv": argv}, must_succeed=False, timeout=100)
    assert [report and report["status"] for report in job.reports] == [1, 1], job.tail()  # two are wrong
    return {record["name"]: record for record in records_in(job.lines())}


def test_all_contestants_are_right_but_the_lazy_ones(told: dict[str, dict[str, Any]]) -> None:
    assert set(told) == {*map(full_name, words(METHODS)), "lazy and exact", "lazy and compressed"}
    wrong = {name: record["wrong"] for name, record in told.items() if record["wrong"]}
    assert set(wrong) == {"lazy and exact", "lazy and compressed"}
    # Every element is off the mean, and the ranks differ.
    assert wrong == {"lazy and exact": ELEMENTS + 1, "lazy and compressed": 1}


def test_times_and_bytes_are_told(told: dict[str, dict[str, Any]]) -> None:
    for name, record in told.items():
        assert record["ranks"] == 2 and record["elements"] == ELEMENTS and len(record["seconds"]) == 2
        assert all(0 < seconds < 10 for seconds in record["seconds"]), name
    assert told["horovod fp32"]["bytes_sent"] == 4 * ELEMENTS and told["horovod fp32"]["bytes_computed"]
    assert told["ddp fp16"]["bytes_sent"] == 2 * ELEMENTS
    assert told["headroom"]["bytes_sent"] == 0 and told["lazy and exact"]["bytes_sent"] is None
    ours = [told[full_name(name)] for name in ("none ring", "none fold", "fp16 ring", "marsit ring", "marsit fold")]
    # The exchange by itself is timed by itself: nothing says that it is quicker than a turn on busy cores.
    assert all(0 < record["median_exchange_seconds"] < 10 for record in ours)
    none, _, half, marsit, _ = (record["bytes_sent"] for record in ours)
    assert none > 4 * ELEMENTS > half > marsit > ELEMENTS / 8  # headers are counted too
