"""Timelines: what is recorded, that it is well formed, and that nothing of it reaches the training."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from horovod_compress import timeline
from horovod_compress.errors import ConfigError, ExchangeError
from horovod_compress.observe import files, trace, trace_events
from horovod_compress.observe.metrics import Overlap, covered
from horovod_compress.schedule.plan import Plan
from tests.support.local import Fleet, random_grads, spec
from tests.support.timelines import check, end, read, rows, spans
from tests.support.turns import decode_in_parts

TENSORS = [spec("c", 300, 200), spec("b", 777), spec("a", 3)]


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trace, "_asked", False)
    yield
    if trace._current:
        trace._current.close()


def record(
    folder: Path, fleet: Fleet, number: int, between: Callable[[int], None] = lambda step: None, events: int = 10_000
) -> list[trace_events.TraceEvent]:
    """Run steps of a fleet and return the events of rank 0."""
    with trace.begin(folder / "t.json", 0, None, events) as found:
        found.follow(fleet.reducers[0], "test")
        for step in range(number):
            fleet.step(random_grads(fleet.world, TENSORS, seed=step))
            between(step)
    return read(found.path)


REDUCED = [(method, 3, exchange) for method in ("marsit", "global_qsgd", "none") for exchange in ("ring", "fold")]


@pytest.mark.parametrize(
    ("method", "world", "exchange"), [("marsit", 1, "auto"), ("topk", 2, "auto"), ("powersgd", 2, "auto"), *REDUCED]
)
def test_every_bucket_has_a_row_and_its_spans_are_well_formed(
    tmp_path: Path, method: str, world: int, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_in_parts(monkeypatch, 500)  # two of them are decoded while the exchange goes on
    options = {"schedule": "layerwise", "verify_every": 2, "exchange": exchange}
    with Fleet(world, TENSORS, method, **options) as fleet:
        events = record(tmp_path, fleet, 4)
        names = fleet.plan.names()
    check(events)
    sizes = {"a": "12 B", "b": "3.1 kB", "c": "240.0 kB"}
    shown = [f"bucket {index} (1 tensor, {sizes[name]})" for index, name in enumerate(names)]
    assert rows(events)[4:] == shown
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0: test"]
    assert [e["name"] for e in spans(events, "steps", "step")] == [f"step {step}" for step in range(4)]
    assert [e["name"] for e in spans(events, "backward")] == [f"step {step}" for step in range(4)]
    assert len(spans(events, "steps", "verify")) == (2 if world > 1 else 0)
    assert len([e for e in events if e["ph"] == "C"]) == 4
    for index, name in enumerate(names):
        found = spans(events, f"bucket {index} ")
        assert [e["name"] for e in found if e["cat"] == "offer"] == [name] * 4
        assert [e["name"] for e in found if e["cat"] == "exchange" and e["name"] == "exchange"] == ["exchange"] * 4
        assert len([e for e in found if e["cat"] == "decode"]) == 4
        assert {e["args"]["step"] for e in spans(events, "decode") if e["name"] == f"bucket {index}"} == set(range(4))
        preludes = [e for e in found if e["name"].startswith("prelude 0")]
        assert len(preludes) == (4 if fleet.reducers[0].buckets[index].round(0).preludes else 0)


@pytest.mark.parametrize(("exchange", "last"), [("ring", 3), ("fold", 1)])
def test_hops_fill_an_exchange(tmp_path: Path, exchange: str, last: int) -> None:
    with Fleet(3, TENSORS, "marsit", exchange=exchange) as fleet:
        events = record(tmp_path, fleet, 2)
    whole = [e for e in spans(events, "bucket 0", "exchange") if e["name"] == "exchange"]
    hops = spans(events, "bucket 0", "hop")
    names = ["until the first hop", *(f"hop {hop}" for hop in range(last + 1))]
    assert [e["name"] for e in hops] == names * 2
    assert [hops[0]["ts"], end(hops[len(names) - 1])] == [whole[0]["ts"], end(whole[0])]
    assert all(end(a) == b["ts"] for a, b in pairwise(hops[: len(names)]))


def test_the_norms_of_a_step_are_exchanged_in_the_row_of_steps(tmp_path: Path) -> None:
    """They are of all buckets together, and measured in some steps only."""
    with Fleet(2, TENSORS, "marsit", schedule="layerwise") as fleet:
        for reducer in fleet.reducers:
            reducer.norms.follow(fleet.plan.names())
        with trace.begin(tmp_path / "t.json", 0, None, 10_000) as found:
            found.follow(fleet.reducers[0], "test")
            for step in range(3):
                for reducer in fleet.reducers:
                    reducer.norms.begin(reducer.next_step())
                fleet.step(random_grads(2, TENSORS, seed=step))
    check(read(found.path))
    assert spans(read(found.path), "steps", "exchange")[0]["name"] == "exchange of norms"


def test_a_trace_changes_no_result_and_leaves_nothing_behind(tmp_path: Path) -> None:
    results = []
    for traced in (False, True):
        with Fleet(2, TENSORS, "marsit") as fleet:
            if traced:
                record(tmp_path, fleet, 1)
            else:
                fleet.step(random_grads(2, TENSORS, seed=0))
            assert fleet.reducers[0].metrics.trace is None
            results.append(fleet.step(random_grads(2, TENSORS, seed=7))[0])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert [path.name for path in tmp_path.iterdir()] == ["t.rank0.json"]


def test_without_a_trace_nothing_is_recorded(tmp_path: Path) -> None:
    with Fleet(2, TENSORS) as fleet, trace.begin(tmp_path / "t.json", 0, None, 100) as found:
        fleet.step(random_grads(2, TENSORS))
    assert read(found.path) == []


@pytest.mark.parametrize(("steps", "shown"), [(3, [2, 3, 4]), (range(4, 6), [4, 5]), (range(50, 60), [])])
def test_the_file_is_there_when_the_steps_are_over(tmp_path: Path, steps: int | range, shown: list[int]) -> None:
    with Fleet(2, TENSORS) as fleet:
        for number in range(2):
            fleet.step(random_grads(2, TENSORS, seed=number))
        found = trace.begin(tmp_path / "t.json", 0, steps, 10_000)
        found.follow(fleet.reducers[0])
        for number in range(6):
            fleet.step(random_grads(2, TENSORS, seed=number))
        if shown:
            assert found._written.wait(10) and fleet.reducers[0].metrics.trace is None
            again = trace.begin(tmp_path / "again.json", 0, None, 10_000)  # the next one may begin
            again.close()
        assert found.path.exists() == bool(shown)
        found.close()
    events = read(found.path)
    check(events)
    assert [e["args"]["step"] for e in spans(events, "steps", "step")] == shown
    assert {e["args"]["step"] for e in spans(events, "wait")} <= set(shown)


def run(fleet: Fleet, steps: int) -> None:
    for number in range(steps):
        fleet.step(random_grads(fleet.world, TENSORS, seed=number))
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)


def ends(close: Callable[[], None]) -> bool:
    """Return whether this ends in time."""
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(5.0)
    return not thread.is_alive()


def test_where_no_thread_can_be_started_the_last_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Fleet(1, TENSORS) as fleet:
        found = trace.begin(tmp_path / "t.json", 0, 1, 10_000)
        found.follow(fleet.reducers[0])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            run(fleet, 2)
        assert ends(found.close)
    assert [e["args"]["step"] for e in spans(read(found.path), "steps", "step")] == [0]


def test_the_end_waits_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = threading.Event()
    monkeypatch.setattr(trace, "replace_whole", lambda path, text: written.wait(10.0))
    monkeypatch.setattr(trace, "_WRITE_SECONDS", 0.01)
    with Fleet(1, TENSORS) as fleet:
        found = trace.begin(tmp_path / "t.json", 0, 1, 10_000)
        found.follow(fleet.reducers[0])
        run(fleet, 2)
        assert ends(found.close)
    written.set()
    assert f"{found.path} is still being written" in caplog.text and found._written.wait(10.0)


def test_a_compression_that_was_closed_is_not_waited_for(tmp_path: Path) -> None:
    with Fleet(1, TENSORS) as first, Fleet(1, TENSORS) as second:
        found = trace.begin(tmp_path / "t.json", 0, 3, 10_000)
        for fleet in (first, second):
            found.follow(fleet.reducers[0])
        run(first, 2)
        first.reducers[0].close()
        assert not found._ending  # others may be created that are to be recorded, as in an elastic job
        run(second, 4)
        assert found._ending and found._written.wait(10.0)
    steps = [(e["pid"], e["args"]["step"]) for e in spans(read(found.path), "steps", "step")]
    assert len(steps) == 2 + 3 and len({process for process, _ in steps}) == 2


def test_a_trace_that_begins_in_the_middle_of_a_step_begins_with_the_next(tmp_path: Path) -> None:
    with Fleet(2, TENSORS) as fleet, trace.begin(tmp_path / "t.json", 0, None, 10_000) as found:
        grads = random_grads(2, TENSORS)
        index = fleet._index["c"]
        fleet.reducers[0].offer(index, grads[0].pop("c"))
        found.follow(fleet.reducers[0])
        fleet.reducers[1].offer(index, grads[1].pop("c"))
        step = fleet.offer(grads)
        for reducer in fleet.reducers:
            reducer.settle(step)
        fleet.step(random_grads(2, TENSORS))
    events = read(found.path)
    check(events)
    assert {e["args"]["step"] for e in spans(events)} == {1}


def test_the_number_of_events_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Fleet(2, TENSORS) as fleet, caplog.at_level(logging.WARNING, "horovod_compress"):
        events = record(tmp_path, fleet, 20, events=30)
        assert fleet.reducers[0].metrics.trace is None
    check(events)
    assert 20 < len(spans(events)) <= 60 and re.search(r"full after 30 events, in step [23]; give steps=", caplog.text)
    assert len(caplog.records) == 1


def test_other_buckets_get_other_rows_and_the_same_ones_their_own_again(tmp_path: Path) -> None:
    plans = [Plan.of([(TENSORS[:count], 1), (TENSORS[count:], 1)]) for count in (1, 2, 1)]

    def replan(step: int) -> None:
        for reducer in fleet.reducers:
            reducer.replan(plans[step % 3])
        fleet._index = {name: place for place, name in enumerate(plans[step % 3].names())}

    with Fleet(2, TENSORS, "topk") as fleet:
        events = record(tmp_path, fleet, 4, replan)
    check(events)
    assert sorted(rows(events)[4:]) == sorted([
        "bucket 0 (3 tensors, 243.1 kB)", "bucket 0 (1 tensor, 240.0 kB)", "bucket 1 (2 tensors, 3.1 kB)",
        "bucket 0 (2 tensors, 243.1 kB)", "bucket 1 (1 tensor, 12 B)",
    ])  # fmt: skip
    assert [e["args"]["step"] for e in spans(events, "bucket 0 (1", "encode")] == [1, 3]


def test_a_failed_exchange_is_shown(tmp_path: Path) -> None:
    with trace.begin(tmp_path / "t.json", 0, None, 1000) as found, Fleet(2, TENSORS, timeout=0.3) as fleet:
        found.follow(fleet.reducers[0])
        fleet.step(random_grads(2, TENSORS))
        mine = random_grads(2, TENSORS)[0]
        step, *_ = [fleet.reducers[0].offer(fleet._index[name], grad) for name, grad in mine.items()]
        with pytest.raises(ExchangeError):
            fleet.reducers[0].result(0, step)
    events = read(found.path)
    check(events)
    last = spans(events, "bucket 0", "exchange")[-1]
    assert last["args"]["step"] == 1 and last["dur"] > 250_000
    assert [e["name"] for e in spans(events, "backward")] == ["step 0", "step 1"]


# ---- files ----


def test_paths() -> None:
    shown = {"f.json": "f.rank3.json", "a/f": "a/f.rank3.json", "f.{rank}.json": "f.3.json", "r{rank}/f": "r3/f"}
    assert {text: str(files.path_of(text, 3, "timeline", "trace.json")) for text in shown} == shown


def test_what_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*file/t.rank0.json: .*choose another"):
        trace.begin(tmp_path / "file" / "t.json", 0, None, 10)
    (tmp_path / "t.rank0.json").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        trace.begin(tmp_path / "t.json", 0, None, 10)
    for steps in (0, -1, range(5, 5), range(0, 10, 2), "3"):
        with pytest.raises(ConfigError, match="steps should be"):
            trace.begin(tmp_path / "other.json", 0, steps, 10)  # type: ignore[arg-type]
    with trace.begin(tmp_path / "new" / "t.json", 0, None, 10):
        with pytest.raises(ConfigError, match=r"being recorded to .*new.t.rank0.json; close"):
            trace.begin(tmp_path / "other.json", 0, None, 10)


def test_a_file_that_cannot_be_written_in_the_end_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = trace.begin(tmp_path / "t.json", 0, None, 10)
    found.path.mkdir()
    found.close()
    found.close()
    assert "the timeline was not written to" in caplog.text


def test_the_environment_asks_for_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HVC_TRACE", str(tmp_path / "t.json"))
    monkeypatch.setenv("HVC_TRACE_STEPS", "1:3")
    with Fleet(1, TENSORS) as fleet:
        trace.follow(fleet.reducers[0], 5, "test")
        for number in range(4):
            fleet.step(random_grads(1, TENSORS, seed=number))
        found = trace._current
        assert found is None  # all steps are there, and no other trace begins
        trace.follow(fleet.reducers[0], 5, "test")
        assert fleet.reducers[0].metrics.trace is None
        for _ in range(1000):
            if (tmp_path / "t.rank5.json").exists():
                break
            time.sleep(0.01)
    events = read(tmp_path / "t.rank5.json")
    assert [e["args"]["step"] for e in spans(events, "steps", "step")] == [1, 2]
    monkeypatch.setattr(trace, "_asked", False)
    monkeypatch.setenv("HVC_TRACE_STEPS", "some")
    with Fleet(1, TENSORS) as fleet:
        trace.follow(fleet.reducers[0], 0, "test")  # does not raise
    assert "HVC_TRACE_STEPS should be a number" in caplog.text


def test_a_merge_replaces_nothing_but_what_was_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of the file to write is easily forgotten, and then it is that of the first timeline."""
    trace, merged, odd = tmp_path / "trace.rank0.json", tmp_path / "all.json", tmp_path / "odd.json"
    timed = tmp_path / "timed.json"
    trace.write_text('{"traceEvents": [{"name": "step", "ts": 1}]}')
    odd.write_text("{}")
    timed.write_text('{"traceEvents": [{"args": null}, {"args": {"start_time_since_epoch_in_micros": "soon"}}]}')
    endless, long = tmp_path / "endless.json", tmp_path / "long.json"
    endless.write_text('{"traceEvents": [{"ts": NaN}]}')
    long.write_text('[{"ts": 0.5, "args": {"start_time_since_epoch_in_micros": ' + 400 * "9" + "}}]")
    for given, said in (
        ([trace, trace], f"{trace} is there already, and no merged timeline"),
        ([odd, trace], f"{odd} is there already"),
        ([merged, tmp_path / "none.json"], "none.json: No such file"),
        ([merged, odd], f"{odd} is no timeline"),
        ([merged, timed], f"{timed} is no timeline"),
        ([merged, endless], f"{endless} is no timeline"),
        ([merged, long], f"{long} is no timeline"),
        (["a\0b", trace], "null byte"),
        ([tmp_path, trace], "is there already"),
        ([tmp_path / "none" / "all.json", trace], "No such file"),
    ):
        assert timeline.main([*map(str, given)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not merged.exists() and "step" in trace.read_text()
    for _ in range(2):
        assert timeline.main([str(merged), str(trace)]) == 0
    assert "step" in merged.read_text()


def test_what_was_merged_can_be_merged_again(tmp_path: Path) -> None:
    """Horovod's start was added once, to its own events."""
    horovod, ours, merged = (tmp_path / name for name in ("horovod.json", "trace.rank0.json", "all.json"))
    horovod.write_text('[{"ts": 1, "args": {"start_time_since_epoch_in_micros": 1000}}, {"ts": 2},')
    ours.write_text('{"traceEvents": [{"ts": 1005}]}')
    for given in ([merged, horovod], [merged, merged, ours], [merged, merged]):
        assert timeline.main([*map(str, given)]) == 0
    assert [event["ts"] for event in read(merged)] == [1001, 1002, 1005]


def test_timelines_are_laid_on_one_clock(tmp_path: Path) -> None:
    with Fleet(2, TENSORS) as fleet:
        ours = record(tmp_path, fleet, 1)
    began = spans(ours, "steps")[0]["ts"]
    horovod = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": began - 500}},
        {"ph": "B", "name": "ALLREDUCE", "ts": 510, "pid": 1},
        {"ph": "E", "ts": 520, "pid": 1, "args": {"shape": "[1]"}},
    ]
    (tmp_path / "h.json").write_text("[\n" + ",\n".join(json.dumps(event) for event in horovod) + ",\n")
    (tmp_path / "closed.json").write_text(json.dumps(horovod))
    arguments = [str(tmp_path / name) for name in ("all.json", "h.json", "t.rank0.json", "closed.json")]
    assert timeline.main(arguments) == 0 and timeline.main(arguments[:1]) == 2
    merged = read(tmp_path / "all.json")
    assert [e["ts"] for e in merged if e.get("name") == "ALLREDUCE"] == [began + 10] * 2
    assert merged[3 : 3 + len(ours)] == ours
    assert {e["pid"] for e in horovod}.isdisjoint(e["pid"] for e in ours)


# ---- overlap ----


def test_covered_time() -> None:
    assert covered([]) == 0.0 and covered([(1, 2), (4, 6)]) == 3.0
    assert covered([(0, 3), (1, 5), (2, 6), (10, 11)]) == 7.0
    assert covered([(0, 3), (1, 5), (7, 9)], 4) == 4.0 and covered([(3, 4)], 1) == 0.0


def test_overlap_is_what_lies_before_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("horovod_compress.observe.metrics.time.perf_counter", lambda: clock[0])
    overlap = Overlap()
    assert overlap.document() == {"overlap": 0.0, "overlap_seconds": {"busy": 0.0, "hidden": 0.0}}
    for clock[0] in (1.0, 2.0, 10.0):
        overlap.offered(0)
    clock[0] = 99.0
    overlap.offered(1)  # of the next step already
    overlap.delivered(2.0, 7.0)
    overlap.delivered(6.0, 14.0)
    assert overlap.finish(0) == (12.0, 8.0)
    overlap.delivered(99.0, 103.0)
    assert overlap.finish(1).share == 0.0
    overlap.delivered(110.0, 111.0)  # skipped tensors only
    assert overlap.finish(2) == (1.0, 0.0)
    assert overlap.document() == {"overlap": 8 / 17, "overlap_seconds": {"busy": 17.0, "hidden": 8.0}}


@pytest.mark.parametrize("schedule", ["single", "layerwise"])
def test_a_single_bucket_hides_nothing(tmp_path: Path, schedule: str) -> None:
    with Fleet(2, TENSORS, "marsit", schedule=schedule) as fleet:
        with trace.begin(tmp_path / "t.json", 0, None, 10_000) as found:
            found.follow(fleet.reducers[0])
            for number in range(3):
                grads = random_grads(2, TENSORS, seed=number)
                for place, name in enumerate(fleet.plan.names()):
                    steps = [r.offer(place, mine[name]) for r, mine in zip(fleet.reducers, grads, strict=True)]
                    time.sleep(0.01)  # a long backward pass
                for reducer in fleet.reducers:
                    reducer.settle(steps[0])
        counted = [reducer.context.overlap.document() for reducer in fleet.reducers]
    for document in counted:
        share, seconds = document["overlap"], document["overlap_seconds"]
        assert seconds["busy"] > 0 and share == pytest.approx(seconds["hidden"] / seconds["busy"])
        assert share == 0.0 if schedule == "single" else share > 0.0
    shown = [e["args"] for e in spans(read(found.path), "steps", "step")]
    assert sum(args["hidden_ms"] for args in shown) == pytest.approx(1e3 * counted[0]["overlap_seconds"]["hidden"])
