"""Devices of buckets: where plans put them, what is counted there, and what a device that stands still leads to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.dense import Dense
from horovod_compress.codecs.marsit import Marsit
from horovod_compress.engine.agreement import handshake
from horovod_compress.engine.methods import parse
from horovod_compress.engine.reducer import Reducer, time_exchange
from horovod_compress.errors import ConfigError, ExchangeError
from horovod_compress.exchange import device
from horovod_compress.exchange.device import Deadline
from horovod_compress.ops import legality
from horovod_compress.options import Options
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import Plan, TensorSpec
from horovod_compress.schedule.trial import Watch
from tests.battery.kept import kept, same
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.local import Fleet, random_grads, spec
from tests.support.turns import NonFinite

TENSORS = [spec("a", 70, 33), spec("b", 5)]


def on(name: str, where: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, (4, 4), dtype, where)


def test_buckets_are_of_one_device() -> None:
    tensors = [on("a", "cpu"), on("b", "cuda:1"), on("c", "cuda:1"), on("d", "cuda:1", "float16"), on("e", "cpu")]
    plan = make_plan("single", tensors, 0)
    assert [(b.device, [t.name for t in b.tensors]) for b in plan.buckets] == [
        ("cuda:1", ["b", "c"]), ("cuda:1", ["d"]), ("cpu", ["a", "e"])
    ]  # fmt: skip


def test_plans_say_nothing_of_devices() -> None:
    """One made for the CPU is saved, compared and resumed as it always was, and serves a GPU too."""
    here, there = ([on("a", where), on("b", where)] for where in ("cpu", "cuda:0"))
    plan, gpu = make_plan("single", here, 0), make_plan("single", there, 0)
    assert plan.document() == gpu.document() and plan.fingerprint() == gpu.fingerprint() == "75f75883f206394c"
    assert "cuda" not in str(gpu.document())
    placed = make_plan(Plan.from_document(plan.document()), there, 0)
    assert [bucket.device for bucket in placed.buckets] == ["cuda:0"]
    assert plan.placed(here) is plan


def test_a_bucket_of_two_devices_is_refused() -> None:
    plan = make_plan("single", [on("a", "cpu"), on("b", "cpu")], 0)
    with pytest.raises(ConfigError, match=r"bucket 0 .* one device, it holds .'cpu', 'cuda:0'."):
        make_plan(plan, [on("a", "cpu"), on("b", "cuda:0")], 0)


def test_two_gpus_of_one_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match="one GPU, these are on cpu, cuda:0, cuda:1"):
        device.check(["cuda:1", "cpu", "cuda:0"])
    assert device.check(["cuda:0", "cpu", "cuda:0"]) == ["cpu", "cuda:0"]


def test_ranks_compare_the_kind_of_device() -> None:
    methods, _ = parse("marsit", {})

    def shown(where: str) -> str:
        return handshake.fields(methods, Options(), [on("a", where)], "gloo", 2)["parameter 0"]

    assert shown("cuda:0") == shown("cuda:3") == "a [4, 4] float32 on cuda"
    assert shown("cpu") == "a [4, 4] float32"


def test_a_gradient_elsewhere_is_refused() -> None:
    with Fleet(1, TENSORS, "none") as fleet:
        with pytest.raises(ConfigError, match="gradient of a is on meta, its parameter was on cpu"):
            fleet.reducers[0].offer(0, torch.zeros(70, 33, device="meta"))


def _tensor_counts(kind: Any) -> Callable[..., Tensor]:
    submit = kind.submit

    def counted(self: Any, *arguments: Any) -> Tensor:
        return torch.as_tensor(submit(self, *arguments))

    return counted


@pytest.mark.parametrize("accelerator", [False, True])
def test_counts_may_be_tensors(accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody waits for a count before the bucket is full; then all are read at once."""

    def steps() -> tuple[list[Any], Any, list[int], list[list[str]]]:
        with Fleet(2, TENSORS, "marsit", full_precision_every=0, nonfinite="propagate") as fleet:
            results, names = [], []
            for number in range(3):
                grads = random_grads(2, TENSORS, seed=number)
                if number == 1:
                    grads[1]["b"][2] = float("nan")
                results.append(fleet.step(grads))
                if number == 1:
                    names = [list(reducer._turns[0].nonfinite.names) for reducer in fleet.reducers]
            return results, kept(fleet), [r.metrics.nonfinite for r in fleet.reducers], names

    numbers = steps()
    for kind in (Marsit, Dense):
        monkeypatch.setattr(kind, "submit", _tensor_counts(kind))
    if accelerator:
        with everything_on_accelerator():
            tensors = steps()
    else:
        tensors = steps()
    assert all(same(a, b) for a, b in zip(numbers[0], tensors[0], strict=True)) and same(numbers[1], tensors[1])
    assert numbers[2:] == tensors[2:] == ([1, 1], [[], ["b"]])


class Frozen(FakeAccelerator):
    """A device whose copies never end."""

    def wait(self, event: int, deadline: Deadline) -> None:
        while not deadline.passed():
            threading.Event().wait(0.01)
        raise ExchangeError(f"the device did not finish within {deadline.seconds:g} s")


def test_a_device_that_stands_still_fails_every_rank() -> None:
    with everything_on_accelerator([FakeAccelerator(), Frozen()].pop):
        with Fleet(2, TENSORS, "marsit", timeout=0.5) as fleet:
            step = fleet.offer(random_grads(2, TENSORS))
            for reducer in fleet.reducers:
                with pytest.raises(ExchangeError, match=r"did not finish within 0.5 s|rank 0 (is gone|did not answer)"):
                    reducer.result(0, step)


def test_a_device_rests_before_its_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_alive: list[Any] = []
    monkeypatch.setattr("horovod_compress.engine.reducer._UNRESTED", kept_alive)
    wheres = [FakeAccelerator(), FakeAccelerator()]
    with everything_on_accelerator(list(wheres).pop):
        with Fleet(2, TENSORS, "marsit") as fleet:
            fleet.step(random_grads(2, TENSORS))
            late = [torch.zeros(3) for _ in wheres]
            for where, into in zip(wheres, late, strict=True):
                where.copy(into, torch.ones(3))
    assert all(torch.equal(into, torch.ones(3)) for into in late) and not kept_alive


def test_a_device_that_does_not_rest_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_alive: list[Any] = []
    monkeypatch.setattr("horovod_compress.engine.reducer._UNRESTED", kept_alive)
    with everything_on_accelerator(Frozen):
        fleet = Fleet(1, TENSORS, "marsit")
        with fleet:
            pass
        buckets = fleet.reducers[0].buckets
        fleet.reducers[0].close()
    assert [held for held, _ in kept_alive] == [buckets]
    with Fleet(2, TENSORS, "marsit") as fleet:
        pass
    assert len(kept_alive) == 1


@pytest.mark.parametrize("method", ["none", "marsit", "onebit_adam", "topk"])
def test_a_timed_exchange_is_over_before_the_next_step(method: str) -> None:
    def steps() -> tuple[list[Any], Any, list[Reducer]]:
        with Fleet(2, TENSORS, method) as fleet, ThreadPoolExecutor(2) as pool:
            results = []
            for number in range(3):
                results.append(fleet.step(random_grads(2, TENSORS, seed=number)))
                assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
                assert all(seconds > 0 for seconds in pool.map(lambda r: time_exchange(r, 0), fleet.reducers))
                for where in (where for r in fleet.reducers for where in r.context.devices.values()):
                    assert not isinstance(where, FakeAccelerator) or where._done == len(where._queued)
            return results, kept(fleet), fleet.reducers

    plain, left, _ = steps()
    with everything_on_accelerator():
        staged, left_there, reducers = steps()
    assert all(same(a, b) for a, b in zip(plain, staged, strict=True)) and same(left, left_there)
    assert all(r.buckets[0].decoded == r.context.devices["cpu"].record_event() for r in reducers)


def test_counts_are_fetched_to_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Giving(FakeAccelerator):
        given = 0

        def host_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
            self.given += 1
            return super().host_zeros(count, dtype)

    monkeypatch.setattr(Marsit, "submit", _tensor_counts(Marsit))
    with everything_on_accelerator(Giving):
        with Fleet(2, TENSORS, "marsit", full_precision_every=0, nonfinite="propagate") as fleet:
            fleet.step(random_grads(2, TENSORS, seed=0))
            wheres = [r.context.devices["cpu"] for r in fleet.reducers]
            before = [where.given for where in wheres]  # type: ignore[attr-defined]
            for number, bad in ((1, ["b"]), (2, [])):
                grads = random_grads(2, TENSORS, seed=number)
                if bad:
                    grads[1]["b"][2] = float("nan")
                fleet.step(grads)
                assert fleet.reducers[1]._turns[0].nonfinite.names == bad
            assert [where.given for where in wheres] == before  # type: ignore[attr-defined]


def test_the_same_buckets_in_other_plans_keep_their_state() -> None:
    """Replanning copies what is kept between devices' arrays too."""
    tensors = [spec("a", 70, 33), spec("b", 5), spec("c", 4000)]
    plans = [make_plan(schedule, tensors, 0) for schedule in ("single", "layerwise")]

    def steps() -> tuple[list[Any], Any]:
        with Fleet(2, tensors, "onebit_adam", schedule="single") as fleet:
            results = [fleet.step(random_grads(2, tensors, seed=0))]
            for reducer in fleet.reducers:
                reducer.replan(plans[1])
            results.append(fleet.step(random_grads(2, tensors, seed=1)))
            return results, kept(fleet)

    plain, left = steps()
    with everything_on_accelerator():
        staged, left_there = steps()
    assert all(same(a, b) for a, b in zip(plain, staged, strict=True)) and same(left, left_there)


# ---- the rules of streams, with a stand-in for torch.cuda ----------------------------------------


class Stream:
    """Keeps what it was told, in order."""

    def __init__(self, name: str) -> None:
        self.name, self.told = name, []  # type: ignore[var-annotated]
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        self.told.append(("after", event.at))


class Event:
    """Where its stream was."""

    looks = 0

    def record(self, stream: Stream) -> None:
        stream.told.append("event")
        self.at = (stream.name, len(stream.told))

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 3


class FakeCuda:
    """The few parts of torch.cuda that devices use."""

    Event = Event

    def __init__(self) -> None:
        self.made: list[Stream] = []
        self.current = [Stream("training")]
        self.devices: list[Any] = []

    def Stream(self, where: torch.device) -> Stream:
        self.made.append(Stream(f"own {len(self.made)}"))
        return self.made[-1]

    def current_stream(self, where: torch.device) -> Stream:
        return self.current[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    @contextlib.contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        self.devices.append(where)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    for name in ("Event", "Stream", "current_stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(legality, "_RAW_STREAM", None)  # torch's own, where there is a GPU
    return made


def test_each_thread_has_a_stream_and_a_device(cuda: FakeCuda) -> None:
    where = device.of("cuda:1")
    assert where.is_accelerator and where.where == torch.device("cuda", 1)
    seen = []
    for context in (where.exchanging, where.decoding, where.moving):
        with context():
            seen.append(where.stream())
    assert len(set(seen)) == 3 == len(cuda.made) and where.stream() == cuda.current[0].cuda_stream
    assert cuda.devices == [torch.device("cuda", 1)] * 3


def test_one_mark_for_each_stream_that_offers(cuda: FakeCuda) -> None:
    where, events = device.of("cuda:0"), {}  # type: ignore[var-annotated]
    other = Stream("other")
    for stream in (cuda.current[0], other, cuda.current[0]):
        with cuda.stream(stream):
            where.record_in(events)
    assert len(events) == 2
    with where.exchanging():
        where.wait_events(*events.values())
        where.wait_events(None)
        assert cuda.made[0].told == [("after", ("training", 2)), ("after", ("other", 1))]


def test_a_launch_follows_on_other_streams(cuda: FakeCuda) -> None:
    """On all that is queued there when it is launched; on its own stream it does so anyway."""
    where, streams = device.of("cuda:0"), {}  # type: ignore[var-annotated]
    other = Stream("other")
    for stream in (cuda.current[0], other, other, cuda.current[0]):
        with cuda.stream(stream):
            where.note_stream(streams)
    assert len(streams) == 2 and not other.told
    where.follow(streams)
    assert other.told == ["event"] and cuda.current[0].told == [("after", ("other", 1))]


def test_a_stream_follows_on_an_event_once(cuda: FakeCuda) -> None:
    """Each result of a bucket asks for it; another stream or event is another matter."""
    where = device.of("cuda:0")
    event, training = where.record_event(), cuda.current[0]
    for _ in range(3):
        where.wait_events(event)
    with where.decoding():
        where.wait_events(event)
        assert cuda.made[1].told == [("after", ("training", 1))]
    where.wait_events(where.record_event(), event)
    waits = [("after", ("training", 1)), ("after", ("training", 3)), ("after", ("training", 1))]
    assert training.told == ["event", waits[0], "event", *waits[1:]]


def test_waiting_looks_until_the_mark_or_the_deadline(cuda: FakeCuda) -> None:
    where = device.of("cuda:0")
    event = where.record_event()
    where.wait(event, Deadline(5.0))
    assert event.looks == 4
    with pytest.raises(ExchangeError, match="cuda:0 did not finish its work on a bucket within 0 s"):
        where.wait(where.record_event(), Deadline(0.0))


def test_memory_is_kept_for_both_threads(cuda: FakeCuda) -> None:
    class Recorded:
        streams: ClassVar[list[Stream]] = []

        def record_stream(self, stream: Stream) -> None:
            self.streams.append(stream)

    device.of("cuda:0").keep([Recorded()])  # type: ignore[list-item]
    assert Recorded.streams == cuda.made[:2]


def test_what_is_still_queued_of_the_backward_pass_is_none_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive schedule would choose buckets by how long the backward pass takes."""
    queued, seconds = 0.3, []
    read, exchanged = NonFinite.read, Watch.exchanged

    def late(self: NonFinite, deadline: Deadline) -> None:
        time.sleep(queued)  # as long as the device takes to come to its counts
        read(self, deadline)

    def noted(self: Watch, bucket: int, taken: float) -> None:
        seconds.append(taken)
        exchanged(self, bucket, taken)

    monkeypatch.setattr(NonFinite, "read", late)
    monkeypatch.setattr(Watch, "exchanged", noted)
    with everything_on_accelerator(), Fleet(1, TENSORS, "marsit") as fleet:
        fleet.reducers[0].watch = Watch(fleet.plan)
        fleet.step(random_grads(1, TENSORS))
    assert len(seconds) == len(fleet.plan.buckets) and max(seconds) < queued
