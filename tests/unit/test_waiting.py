"""Gradients on a device that wait for the last one of their bucket."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.global_qsgd import Standard
from horovod_compress.codecs.marsit import Marsit
from horovod_compress.codecs.powersgd import PowerSgd
from horovod_compress.codecs.work import Work
from horovod_compress.errors import ExchangeError, MismatchError
from horovod_compress.exchange import ring
from horovod_compress.exchange.device import Deadline, Device
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket
from tests.battery.kept import kept, same
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.turns import BucketState, Turn, put, turn_of

TENSORS = [spec("a", 30, 70), spec("b", 5), spec("empty", 0), spec("c", 901), spec("e")]
KEY = Key(1, 0, 0, 0)


class Streams(Device):
    """A device that notes what follows on what; every thread has a stream."""

    is_accelerator = True

    def __init__(self) -> None:
        super().__init__()
        self.followed: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self.kept += tensors

    def record_in(self, events: dict[int, Any]) -> None:
        name = threading.current_thread().name
        events[hash(name)] = f"event of {name}"

    def note_stream(self, streams: dict[int, Any]) -> None:
        name = threading.current_thread().name
        streams[hash(name)] = f"event of {name}"

    def follow(self, streams: dict[int, Any]) -> None:
        self.followed.extend(streams.values())

    def wait_events(self, *events: Any) -> None:
        self.followed.extend(events)


def _offer(turn: Turn, position: int) -> None:
    put(turn, position, torch.ones(turn.state.bucket.tensors[position].shape))


def test_a_bucket_that_cannot_be_taken_in_is_an_error_for_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("out of memory")

    with everything_on_accelerator(), Fleet(2, TENSORS, "marsit", full_precision_every=0) as fleet:
        monkeypatch.setattr(Marsit, "submit", refuse)
        reducer, grads = fleet.reducers[0], random_grads(2, TENSORS)[0]
        *first, last = reducer.plan.names()
        steps = [reducer.offer(reducer.plan.names().index(name), grads[name]) for name in first]
        with pytest.raises(RuntimeError, match="out of memory"):
            reducer.offer(len(first), grads[last])
        with pytest.raises(ExchangeError, match="bucket 0 could not be processed: out of memory; restart"):
            reducer.result(0, steps[0])


def test_no_old_steps_are_sent_for_tensors_that_are_not_there() -> None:
    with everything_on_accelerator(), Fleet(2, TENSORS, "marsit", full_precision_every=0, step_size="tensor") as fleet:
        state = fleet.reducers[0].buckets[0]
        fleet.step(random_grads(2, TENSORS))
        work = state.round(1).work
        work.grads[:] = [None if t.name == "a" else torch.ones(t.count) for t in state.bucket.tensors]
        work.regions["steps"].fill_(3.0)
        state.round(1).encode(KEY)
        a = [t.name for t in state.bucket.tensors].index("a")
        assert not work.regions["steps"][work.memo["steps"][a]].any() and work.regions["steps"].any()


def test_the_launch_follows_on_every_stream_that_gradients_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Streams()
    turn = turn_of(BucketState(Bucket(0, tuple(TENSORS)), Marsit(0), 0, 1, lambda *_: ring, where), KEY)
    followed: list[Any] = []
    together = Marsit.submit

    def watched(codec: Marsit, work: Work, positions: list[int], key: Key) -> Any:
        followed.extend(where.followed)
        assert list(positions) == list(range(len(TENSORS)))
        return together(codec, work, positions, key)

    monkeypatch.setattr(Marsit, "submit", watched)
    for name, positions in (("first", (4, 1)), ("second", (0, 2))):
        thread = threading.Thread(target=lambda mine=positions: [_offer(turn, p) for p in mine], name=name)
        thread.start()
        thread.join()
    _offer(turn, 3)
    assert turn.waits and not turn.full and not followed
    turn.count_waiting(turn.submit_waiting())
    assert turn.full and not turn.waits
    assert {"event of first", "event of second", "event of MainThread"} <= set(followed)


def test_memory_is_marked_only_where_results_are_not_fetched() -> None:
    """What is fetched is held until then; a copy of what has gaps is ours alone, and is copied back."""
    where, tensors = Streams(), (spec("a", 3, 4), spec("b", 5), spec("c", 2, 3))
    state = BucketState(Bucket(0, tensors), Marsit(0), 0, 1, lambda *_: ring, where)
    turn = turn_of(state, KEY)
    grads = [torch.ones(3, 4), torch.ones(5), torch.arange(1.0, 7.0).view(3, 2).t()]
    for position, grad in enumerate(grads):
        put(turn, position, grad)
    assert not where.kept
    turn.count_waiting(turn.submit_waiting())
    assert where.kept.pop() is grads[2] and where.kept.pop().is_contiguous() and not where.kept
    turn.decode(turn.round.whole())
    turn.write_back()
    assert turn.take(0) is grads[0] and turn.take(2) is grads[2] and bool(grads[2].eq(1.5 * 3.5).all())
    assert not where.kept
    turn_of(state, KEY)
    assert len(where.kept) == 1 and where.kept[0] is grads[1]


@pytest.mark.parametrize(
    ("codec", "device", "zero"),
    [(Marsit(0), Device(), False), (Marsit(0), Streams(), True), (PowerSgd(), Streams(), False)],
)
def test_others_do_not_wait(codec: Codec, device: Device, zero: bool) -> None:
    """On the CPU, where a count is wanted at once, and with methods that take tensors one by one."""
    turn = turn_of(BucketState(Bucket(0, tuple(TENSORS)), codec, 0, 1, lambda *_: ring, device), KEY, zero=zero)
    for position in range(len(TENSORS)):
        _offer(turn, position)
    assert turn.full and not turn.waits


def _run(options: dict[str, Any], sparse: str | None = None, threads: int = 0) -> tuple[list, Any]:
    """Return results and what is kept after some steps with tensors in any order, perhaps from several threads."""
    shuffled, results = random.Random(3), []
    with Fleet(2, TENSORS, "marsit", full_precision_every=3, **options) as fleet:
        for number in range(4):
            copies = random_grads(2, TENSORS, seed=number)
            names = [tensor.name for tensor in TENSORS if tensor.name != sparse]
            order = shuffled.sample(names, len(names))
            for reducer, mine in zip(fleet.reducers, copies, strict=True):
                if threads:
                    with ThreadPoolExecutor(threads) as pool:
                        list(pool.map(lambda name, r=reducer, m=mine: r.offer(fleet._index[name], m[name]), order))
                else:
                    for name in order:
                        reducer.offer(fleet._index[name], mine[name])
                if sparse:
                    reducer.skip(fleet._index[sparse])
            results.append([{n: r.result(fleet._index[n], number) for n in names} for r in fleet.reducers])
            assert all_same(results[-1])
        for reducer in fleet.reducers:
            assert reducer.wait_idle(5.0)
        return results, kept(fleet)


@pytest.mark.parametrize("schedule", ["single", "layerwise", "size:2KB"])
@pytest.mark.parametrize(("sparse", "threads"), [(None, 0), ("c", 0), (None, 4)])
def test_order_and_threads_change_nothing(schedule: str, sparse: str | None, threads: int) -> None:
    """Whoever comes last, a gradient that Horovod reduces itself among them, brings the bucket on its way."""
    results, left = _run({"schedule": schedule}, sparse)
    with everything_on_accelerator():
        waited, left_there = _run({"schedule": schedule}, sparse, threads)
    assert all(same(a, b) for a, b in zip(results, waited, strict=True)) and same(left, left_there)


@pytest.mark.parametrize("nonfinite", ["zero", "raise", "propagate"])
def test_values_that_are_not_finite_are_found_in_their_tensor(nonfinite: str) -> None:
    grads = random_grads(2, TENSORS)
    grads[1]["c"].view(-1)[7] = float("nan")
    with everything_on_accelerator(), Fleet(2, TENSORS, "marsit", full_precision_every=0, nonfinite=nonfinite) as fleet:
        step = fleet.offer(grads)
        if nonfinite == "raise":
            with pytest.raises(Exception, match=r"not finite.*on this rank in c;"):
                fleet.reducers[1].result(fleet._index["a"], step)
            return
        found = [r.result(fleet._index["c"], step) for r in fleet.reducers]
        assert all(bool(result.isnan().all()) == (nonfinite == "propagate") for result in found)
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [1, 1]


@pytest.mark.parametrize("norm", [1, 2, 4])
def test_powers_that_float64_cannot_hold_are_found_in_their_tensor(norm: int) -> None:
    tensors = [spec(name, 300, dtype=torch.float64) for name in "abc"]
    found = []
    for where in (Device(), Streams()):
        state = BucketState(Bucket(0, tuple(tensors)), Standard(8, norm, 256), 0, 1, lambda *_: ring, where)
        turn = turn_of(state, KEY)
        for position, size in enumerate((1.0, 1.7e308, 1e300)):
            put(turn, position, torch.full((300,), size, dtype=torch.float64))
        if turn.waits:
            turn.count_waiting(turn.submit_waiting())
        turn.take_over(Deadline(10.0))
        found.append((turn.nonfinite.bad.count, turn.nonfinite.names))
    assert found[0] == found[1] == ((1, ["b"]) if norm == 1 else (2, ["b", "c"]))


def test_a_step_that_ends_while_others_are_asked_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have loaded a state after that step, as this one is about to."""
    monkeypatch.setattr("horovod_compress.engine.reducer._LOOK_SECONDS", 0.01)
    for ends_before in (False, True):
        with Fleet(2, TENSORS, "none") as fleet:
            fleet.step(random_grads(2, TENSORS))
            reducer, grads = fleet.reducers[0], random_grads(2, TENSORS)
            told = {"sparse": dict[int, str]()}
            monkeypatch.setattr(
                type(reducer.context.transport), "said", lambda self, topic: told.get(topic, {1: "2 2"})
            )
            step = {reducer.offer(fleet._index[name], grads[0][name]) for name in grads[0]}.pop()
            if ends_before:  # the control: this rank is in that very step, and has loaded nothing
                reducer.context.progress.done += 1

            def waits(number: int, reducer: Any = reducer, fleet: Fleet = fleet, other: Any = grads[1]) -> None:
                for name in other:
                    fleet.reducers[1].offer(fleet._index[name], other[name])
                end = time.monotonic() + 5.0
                while reducer.context.progress.done < 2 and time.monotonic() < end:
                    time.sleep(0.001)

            monkeypatch.setattr(reducer._uneven, "waits", waits)
            if ends_before:
                with pytest.raises(MismatchError, match="rank 1 loaded a state"):
                    reducer.settle(step)
            else:
                reducer.settle(step)


def test_what_is_missing_is_read_between_two_changes() -> None:
    with Fleet(2, TENSORS, "none") as fleet:
        reducer = fleet.reducers[0]
        reducer.offer(fleet._index["a"], random_grads(2, TENSORS)[0]["a"])
        found: list[list[str]] = []
        reads = threading.Thread(target=lambda: found.append(reducer.missing(0)))
        with reducer.context.changed:
            reads.start()
            reads.join(0.2)
            assert not found
        reads.join(5.0)
        assert found and set(found[0]) == {tensor.name for tensor in TENSORS if tensor.name != "a"}
