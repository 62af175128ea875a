"""Reports of a running compression: when they come, what is in them, and that none of them can stop a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from horovod_compress.errors import ConfigError
from horovod_compress.observe.metrics import Metrics, Overlap, Window, between
from horovod_compress.observe.reports import (
    LINE_AFTER,
    Metric,
    PrometheusFile,
    Reports,
    TensorBoard,
    check_every,
    text_of,
)
from horovod_compress.observe.verdict import Pace
from tests.support.exposition import Malformed, parse
from tests.support.local import Fleet, spec

LOGGER = "horovod_compress"


class Job:
    """The counters of a job whose steps take no time, and its reports."""

    def __init__(self, line: bool = False, total_steps: int | None = None, tells: bool = True) -> None:
        self.metrics, self.asked = Metrics(), 0
        more: dict[str, Any] = {
            "line": line,
            "tells": tells,
            "pace": Pace(self.metrics, Overlap()),
            "total_steps": total_steps,
            "verdict": lambda: "worth it",
        }
        self.reports = Reports(
            self.metrics, self.counters, self.stats, lambda: self.metrics.steps + 1000, "rank 0: marsit", **more
        )

    def counters(self) -> dict[str, Any]:
        busy = float(self.metrics.steps)
        return self.metrics.document() | {"overlap_seconds": {"busy": busy, "hidden": busy / 4}}

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        return self.counters() | {"residual_norm": 2.5, "buckets": 3, "plain_buckets": 1}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.reports.look()
            self.metrics.sent(9, exact=self.metrics.steps == 0)
            self.metrics.end_step()
            self.metrics.bytes_sent += 1
            self.metrics.bytes_dense += 75
            self.metrics.seconds["encode"] += 0.5
        self.reports.look()


class Kept:
    """A destination that keeps what it gets."""

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, Any], Window]] = []

    def write(self, step: int, stats: Any, window: Window) -> None:
        self.found.append((step, stats, window))


# ---- when ----


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 3, 4, 5, 6, 7]), (3, [3, 6]), (7, [7]), (8, [])])
def test_reports_come_every_so_many_steps(every: int, steps: list[int]) -> None:
    job, kept = Job(), Kept()
    job.reports.add(kept, every)
    job.run(7)
    assert [stats["steps"] for _, stats, _ in kept.found] == steps
    assert [step for step, _, _ in kept.found] == [1000 + step for step in steps]
    assert job.asked == len(steps)


def test_a_window_is_the_steps_since_the_last_report_without_the_first_step() -> None:
    job, kept = Job(), Kept()
    job.reports.add(kept, 4)
    job.run(8)
    first, second = (window for _, _, window in kept.found)
    assert (first.steps, second.steps) == (3, 4)
    assert second.times_fewer_bytes == 7.5 and second.overlap == 0.25 and second.phases["encode"] == 2.0
    assert 0 < second.seconds_per_step < 1


def test_a_report_that_begins_late_covers_only_what_follows() -> None:
    job, kept = Job(), Kept()
    job.run(50)
    job.reports.add(kept, 4)
    job.run(4)
    ((_, stats, window),) = kept.found
    assert stats["steps"] == 54 and window.steps == 3 and window.bytes_sent == 30


def test_without_destinations_nothing_is_read() -> None:
    job = Job()
    job.run(500)
    assert job.asked == 0


def test_windows_of_nothing_have_no_division_by_zero() -> None:
    nothing = Window(0, 0.0, 0, 0, 0.0, 0.0)
    assert (nothing.times_fewer_bytes, nothing.overlap, nothing.seconds_per_step) == (0.0, 0.0, 0.0)


# ---- the line ----


@pytest.mark.parametrize(("line", "count"), [(True, 1), (False, 0)])
def test_the_log_has_one_line_after_the_first_steps(line: bool, count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    job = Job(line)
    job.run(LINE_AFTER - 1)
    assert not caplog.messages
    job.run(200)
    assert len(caplog.messages) == count and not job.asked  # which would take a pass over the residuals
    if line:
        said = f"rank 0: marsit, the first {LINE_AFTER} steps: worth it; 25 % of the exchange hidden behind the "
        assert caplog.messages[0].startswith(said) and caplog.messages[0].endswith(" s a step")


@pytest.mark.parametrize(("total", "after"), [(1000, LINE_AFTER), (60, 59)])
def test_a_short_training_has_its_line_before_the_end(total: int, after: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    job = Job(line=True, total_steps=total)
    job.run(after - 1)
    assert not caplog.messages
    job.run(1)
    assert f"the first {after} steps" in caplog.messages[0]


def test_the_line_comes_once_whichever_ranks_go_on_after_resets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    alone = Job()  # with one rank there is no line
    alone.run(LINE_AFTER + 5)
    told = _of_other_ranks(alone, Job(line=True))
    told.run(5)
    assert len(caplog.messages) == 1, "it comes as soon as there is something to tell"
    _of_other_ranks(told, Job(line=True)).run(LINE_AFTER + 5)
    _of_other_ranks(_of_other_ranks(told, Job()), Job(line=True)).run(LINE_AFTER + 5)
    other = Job(line=True, tells=False)
    other.run(LINE_AFTER + 5)
    _of_other_ranks(other, Job(line=True)).run(LINE_AFTER + 5)  # it is rank 0 now
    assert len(caplog.messages) == 1


def _of_other_ranks(before: Job, job: Job) -> Job:
    """Return a job whose counters go on from those of another one."""
    job.metrics.go_on(before.metrics)
    job.reports.follow(before.reports)
    return job


def test_of_updates_no_share_is_said_to_be_hidden(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    job = Job(line=True)
    job.reports.updates = True
    job.run(200)
    (said,) = caplog.messages
    assert f"the first {LINE_AFTER} exchanges: 7.5 times fewer bytes" in said and "hidden" not in said


# ---- TensorBoard ----


class Writer:
    """Takes scalars as a SummaryWriter does; may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.error = error

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if self.error:
            raise self.error
        self.scalars.setdefault(tag, []).append((step, value))


def test_scalars_have_the_number_of_the_step() -> None:
    job, writer = Job(), Writer()
    job.reports.add(TensorBoard(writer), 2)
    job.run(4)
    assert writer.scalars["hvc/times_fewer_bytes"] == [(1002, 7.5), (1004, 7.5)]
    assert writer.scalars["hvc/seconds/encode"] == [(1002, 0.5), (1004, 0.5)]
    assert {"hvc/overlap", "hvc/seconds_per_step", "hvc/residual_norm", "hvc/nonfinite"} < set(writer.scalars)


def test_a_summary_writer_of_torch_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    job = Job()
    with SummaryWriter(str(tmp_path)) as writer:
        job.reports.add(TensorBoard(writer), 2)
        job.run(4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("hvc/overlap")] == [(1002, 0.25), (1004, 0.25)]


# ---- Prometheus ----


def test_the_file_is_in_prometheus_format_and_complete(tmp_path: Path) -> None:
    job = Job()
    job.reports.add(PrometheusFile(tmp_path / "train.prom", 3, "marsit", {"job_name": 'a "b"\\c\n'}), 2)
    job.run(4)
    (path,) = tmp_path.iterdir()  # no temporary file is left
    assert path.name == "train.rank3.prom"
    found = parse(path.read_text())
    assert {name: found[name].only() for name in found if name != "hvc_phase_seconds_total"} == {
        "hvc_steps_total": 4,
        "hvc_exact_steps_total": 1,
        "hvc_sent_bytes_total": 40,
        "hvc_exact_bytes_total": 9,
        "hvc_compressed_bytes_total": 27,
        "hvc_dense_bytes_total": 300,
        "hvc_exchange_seconds_total": 4,
        "hvc_hidden_seconds_total": 1,
        "hvc_nonfinite_values_total": 0,
        "hvc_verified_steps_total": 0,
        "hvc_step_seconds": pytest.approx(found["hvc_step_seconds"].only()),
        "hvc_residual_norm": 2.5,
        "hvc_buckets": 3,
        "hvc_plain_buckets": 1,
    }
    (labels,) = found["hvc_steps_total"].series
    assert dict(labels) == {"rank": "3", "method": "marsit", "job_name": 'a "b"\\c\n'}
    phases = {dict(labels)["phase"]: value for labels, value in found["hvc_phase_seconds_total"].series.items()}
    assert phases["encode"] == 2.0 and set(phases) == set(job.metrics.seconds)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # another user, the node exporter, reads it


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300, 3, 0.1])
def test_any_number_can_be_written(value: float) -> None:
    found = parse(text_of(iter([Metric("hvc_some", "gauge", "Some.", {(): value})]), {"rank": "0"}))["hvc_some"].only()
    assert found == value or (found != found and value != value)


GOOD = '# HELP a_total Help.\n# TYPE a_total counter\na_total{rank="0"} 1\n'


def test_the_reader_reads_what_is_right() -> None:
    assert parse(GOOD)["a_total"].only() == 1.0


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-1],
        GOOD + GOOD,
        GOOD + 'a_total{rank="0"} 2\n',
        GOOD + "b 1\n",
        GOOD.replace("counter", "number"),
        GOOD.replace("counter", "gauge"),
        GOOD.replace("a_total", "a"),
        GOOD.replace("a_total", "a-total"),
        GOOD.replace(" 1\n", " one\n"),
        GOOD.replace(" 1\n", " inf\n"),
        GOOD.replace(" 1\n", " 1 2 3\n"),
        GOOD.replace('rank="0"', "rank=0"),
        GOOD.replace('rank="0"', 'rank="0",'),
        GOOD.replace('rank="0"', 'rank="0",rank="1"'),
        GOOD.replace('rank="0"', 'rank="a"b"'),
        GOOD.replace('rank="0"', r'rank="\d"'),
        "# TYPE a_total counter\n# HELP a_total Help.\na_total 1\n",
        "# HELP a_total Help.\n# TYPE a_total counter\n",
    ],
)
def test_the_reader_refuses_what_prometheus_would(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)


# ---- what goes wrong ----


def test_a_report_that_fails_is_told_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    job, kept = Job(), Kept()
    job.reports.add(TensorBoard(Writer(OSError("No space left on device"))), 1)
    job.reports.add(kept, 1)
    job.run(5)
    assert len(kept.found) == 4
    assert caplog.messages == [
        "rank 0: marsit: a report was not written, and training goes on: No space left on device"
    ]


@pytest.mark.parametrize("reads", ["counters", "stats"])
def test_counters_that_cannot_be_read_end_nothing(reads: str, caplog: pytest.LogCaptureFixture) -> None:
    job, kept, asked = Job(line=True), Kept(), []
    read = getattr(job.reports, f"_{reads}")

    def fails() -> Any:
        asked.append(job.metrics.steps)
        raise RuntimeError("out of memory")

    setattr(job.reports, f"_{reads}", fails)
    job.reports.add(kept, 10)
    job.run(30)
    assert not kept.found and len(asked) < 10  # not in every step
    assert set(caplog.messages) == {"rank 0: marsit: a report was not written, and training goes on: out of memory"}
    setattr(job.reports, f"_{reads}", read)
    job.run(30)
    assert kept.found


def test_a_file_stays_whole_when_its_successor_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.reports.add(PrometheusFile(tmp_path / "train.prom", 0, "marsit"), 1)
    job.run(2)
    before = (tmp_path / "train.rank0.prom").read_text()

    def full(path: Path, text: str) -> int:
        with path.open("w") as stream:
            stream.write(text[:10])
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        job.run(1)
    assert [path.name for path in tmp_path.iterdir()] == ["train.rank0.prom"]
    assert (tmp_path / "train.rank0.prom").read_text() == before and "No space left" in caplog.text
    job.run(1)
    assert parse((tmp_path / "train.rank0.prom").read_text())["hvc_steps_total"].only() == 4


@pytest.mark.parametrize(
    ("path", "labels", "said"),
    [
        ("train.txt", {}, "ends in .prom"),
        ("", {}, 'should be a file such as "train.prom"'),
        ("file/train.prom", {}, "cannot be written"),
        ("train.prom", {"rank": "0"}, "a label should"),
        ("train.prom", {"job-name": "0"}, "a label should"),
        ("train.prom", {"__name": "0"}, "a label should"),
        ("train.prom", "job_name", "labels should be names with values"),
        ("train.prom", [("job_name", "first")], "labels should be names with values"),
    ],
)
def test_what_cannot_work_is_refused_at_once(path: str, labels: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=said):
        PrometheusFile(str(tmp_path / path) if path else "", 0, "marsit", labels)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(ConfigError, match="every should be"):
        check_every(every)


def test_what_is_no_writer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensorboard should be a SummaryWriter"):
        TensorBoard("runs/first")


# ---- real counters ----


def test_the_bytes_are_those_of_the_exchange() -> None:
    with Fleet(2, [spec("weight", 100, 1000)], "global_qsgd", verify_every=0) as fleet:
        reducer, readings = fleet.reducers[0], []
        for _ in range(3):
            fleet.step([{"weight": torch.ones(100, 1000)}] * 2)
            readings.append(reducer.metrics.document() | reducer.context.overlap.document())
    window = between(readings[0], readings[2], 1.0)
    assert window.steps == 2 and window.bytes_dense == 2 * 400_000
    assert 3.5 < window.times_fewer_bytes < 4.0 and window.busy > 0


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> Any:
    import horovod_compress.ddp as hvc

    return hvc.Compression.topk(torch.nn.Linear(3, 2).named_parameters())


@pytest.mark.usefixtures("group")
def test_a_file_has_one_writer(tmp_path: Path) -> None:
    first, second, path = made(), made(), tmp_path / "train.prom"
    first.publish(prometheus=path)
    for compression in (first, second):
        with pytest.raises(ConfigError, match="already in use by a compression of this process"):
            compression.publish(prometheus=tmp_path / "." / "train.prom")
    second.publish(prometheus=tmp_path / "second.prom")
    first.close()
    second.publish(prometheus=path)
    second.close()


@pytest.mark.usefixtures("group")
def test_a_compression_that_has_failed_leaves_its_file(tmp_path: Path) -> None:
    first, path = made(), tmp_path / "train.prom"
    first.publish(prometheus=path)
    first._here().reducer.failure.failed = lambda: True
    second = made()
    second.publish(prometheus=path)
    del first._here().reducer.failure.failed
    for compression in (first, second):
        compression.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrong", [{"tensorboard": "runs/first"}, {"labels": "first"}, {"every": 0}])
def test_publishing_is_all_or_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    compression, right = made(), {"prometheus": tmp_path / "train.prom", "tensorboard": Writer()}
    with pytest.raises(ConfigError):
        compression.publish(**right | wrong)
    assert not compression._counters.reports._series
    compression.publish(**right)
    assert len(compression._counters.reports._series) == 2
    compression.close()


@pytest.mark.usefixtures("group")
def test_a_rank_that_writes_nothing_refuses_what_others_do() -> None:
    compression = made()
    with pytest.raises(ConfigError, match="every should be"):
        compression.publish(every=0)
    compression.close()


def test_a_compression_reports_between_its_steps(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_compress.ddp as hvc

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, folder = torch.nn.Linear(3, 2), tmp_path / "metrics"
        compression = hvc.Compression.topk(model.named_parameters())
        compression.publish(prometheus=folder / "train.prom", every=2)
        called = compression.register(DistributedDataParallel(model))
        seen = []
        for _ in range(5):
            called(torch.ones(1, 3)).sum().backward()
            seen.append(sorted(path.name for path in folder.iterdir()))
        assert seen == [[], [], *3 * [["train.rank0.prom"]]]
        found = parse((folder / "train.rank0.prom").read_text())
        assert found["hvc_steps_total"].only() == 4 and found["hvc_residual_norm"].only() > 0
        compression.close()
    finally:
        dist.destroy_process_group()
