"""Adaptive schedules with ranks in threads: they agree, lose nothing, and come to an end."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horovod_compress.codecs.base import Codec, Properties, TableMoves, tables_that_stay
from horovod_compress.codecs.by_step import by_step
from horovod_compress.codecs.registry import codec_class, methods
from horovod_compress.codecs.sketch_fusion import SketchFusion
from horovod_compress.engine import tuning
from horovod_compress.engine.bucket.memory import Memory
from horovod_compress.engine.bucket.rounds import Tables
from horovod_compress.engine.kept import Kept
from horovod_compress.engine.methods import per_layer, single
from horovod_compress.engine.reducer import Reducer
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.tuning import TRIAL_STEPS, Tuner
from horovod_compress.errors import ConfigError, CorruptFrameError, MismatchError, StateError
from horovod_compress.exchange.device import Deadline
from horovod_compress.schedule import mergecomp
from horovod_compress.schedule.by_name import is_adaptive, make_plan
from horovod_compress.schedule.costs import Arrivals
from horovod_compress.schedule.plan import Plan
from horovod_compress.schedule.trial import BucketCost, Measured, SearchSpace, Watch
from tests.battery.toys import Steps
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import each_value, slow

WORLD = 3
TENSORS = [spec(f"layer{number}.weight", 30 + 7 * number, 11) for number in range(9)]
#: Residual and momentum are tables that belong to buckets.
IN_SKETCH = SketchFusion(cells=0.5, error_feedback="sketch", momentum=0.5)


class Meeting:
    """What ``share`` is to the ranks of a job."""

    def __init__(self, world: int) -> None:
        self._values: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=20)

    def share(self, rank: int) -> Callable[[Any], list[Any]]:
        def share(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return share


class Job:
    """A fleet whose ranks step side by side, each with a tuner."""

    def __init__(self, fleet: Fleet, schedule: str) -> None:
        self.fleet, meeting = fleet, Meeting(fleet.world)
        self.tuners = [Tuner(r, schedule, meeting.share(rank), fleet.methods) for rank, r in enumerate(fleet.reducers)]
        self._pool = ThreadPoolExecutor(fleet.world)

    def step(self, seed: int, order: Callable[[int], list[str]] | None = None) -> list[dict[str, torch.Tensor]]:
        return self.take(random_grads(self.fleet.world, self.fleet.tensors, seed=seed), order)

    def take(
        self, grads: list[dict[str, torch.Tensor]], order: Callable[[int], list[str]] | None = None
    ) -> list[dict[str, torch.Tensor]]:
        def one(rank: int) -> dict[str, torch.Tensor]:
            self.tuners[rank].begin_step()
            reducer, mine = self.fleet.reducers[rank], grads[rank]
            index = {name: place for place, name in enumerate(reducer.plan.names())}
            names = order(rank) if order else list(mine)
            step, *_ = [reducer.offer(index[name], mine[name]) for name in names]
            return {name: reducer.result(index[name], step).clone() for name in names}

        return list(self._pool.map(one, range(self.fleet.world)))

    def same(self, results: list[dict[str, torch.Tensor]]) -> bool:
        return all(torch.equal(mine[name], results[0][name]) for mine in results for name in mine)


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_ELEMENTS", 1)


def test_ranks_that_come_for_other_compressions_meet_seldom() -> None:
    """As in every step of two networks whose order differs: nothing is chosen, and nothing grows."""
    asked: list[Any] = []
    with Fleet(WORLD, TENSORS, "marsit", schedule="mergecomp:2") as fleet:
        job = Job(fleet, "mergecomp:2")
        for tuner in job.tuners:
            tuner._share = asked.append  # which returns nothing
        for number in range(10 * TRIAL_STEPS):
            job.step(number)
            assert all(r.watch is not None and r.watch.steps() <= TRIAL_STEPS for r in fleet.reducers)
        assert 5 * WORLD <= len(asked) <= 10 * WORLD and not any(tuner.done for tuner in job.tuners)


def test_ranks_that_come_for_another_compression_amid_a_choice_are_told_why() -> None:
    """One thread of each rank cannot come to that, two can."""
    with Fleet(WORLD, TENSORS, "marsit", schedule="mergecomp:2") as fleet:
        job = Job(fleet, "mergecomp:2")
        for tuner in job.tuners:
            shows = tuner._share
            tuner._share = lambda value, shows=shows: shows(value) if isinstance(value, list) else None
        for number in range(TRIAL_STEPS):
            job.step(number)
        with pytest.raises(ConfigError, match="met for another compression while they chose the buckets"):
            job.step(TRIAL_STEPS)


@each_value
@pytest.mark.parametrize("schedule", ["auto", "layerfusion", "mergecomp", "mergecomp:2"])
@pytest.mark.parametrize("method", ["marsit", "topk", "none", "signsgd", "powersgd", IN_SKETCH])
def test_ranks_agree_in_every_step_and_choose_in_time(schedule: str, method: str | Codec) -> None:
    with Fleet(WORLD, TENSORS, method, schedule=schedule, verify_every=1) as fleet:
        job = Job(fleet, schedule)
        for number in range(90):
            assert job.same(job.step(number))
            plans = {reducer.plan.fingerprint() for reducer in fleet.reducers}
            assert len(plans) == 1
            if all(tuner.done for tuner in job.tuners):
                break
        assert number < (80 if schedule == "mergecomp" else 50) and all(tuner.chosen for tuner in job.tuners)
        assert sorted(fleet.reducers[0].plan.names()) == sorted(spec.name for spec in TENSORS)
        assert fleet.reducers[0].context.watch is None  # nothing is measured any more
        before = fleet.reducers[0].plan
        assert job.same(job.step(number + 1)) and fleet.reducers[0].plan is before


def test_the_order_is_that_of_rank_0() -> None:
    names = [tensor.name for tensor in TENSORS]
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        for number in range(3 * TRIAL_STEPS + 1):  # rank 0 backwards, the others in three other orders
            job.step(number, lambda rank: names[::-1] if rank == 0 else names[rank:] + names[:rank])
        assert job.tuners[0].done
        assert [r.plan.names() for r in fleet.reducers] == [names[::-1]] * WORLD


def test_other_buckets_change_nothing_that_is_kept() -> None:
    with Fleet(2, TENSORS, "sketch_fusion", density=0.1, cells=0.5, momentum=0.5) as fleet:
        for number in range(3):
            fleet.step(random_grads(2, TENSORS, seed=number))
        for groups in ([4, 5], [1] * 9, [9]):
            before = [
                {k: {n: t.clone() for n, t in kept.items()} for k, kept in r.kept.states().items()}
                for r in fleet.reducers
            ]
            cut, first = [], 0
            for count in groups:
                cut.append((TENSORS[::-1][first : first + count], 1))
                first += count
            plan = Plan.of(cut)
            for reducer in fleet.reducers:
                reducer.replan(plan)
            for reducer, was in zip(fleet.reducers, before, strict=True):
                now = reducer.kept.states()
                assert now.keys() == was.keys() and all(
                    torch.equal(now[kind][name], tensor) for kind, kept in was.items() for name, tensor in kept.items()
                )
            fleet._index = {name: place for place, name in enumerate(plan.names())}
            fleet.step(random_grads(2, TENSORS, seed=len(groups)))


@pytest.mark.parametrize(
    ("part", "name", "number"), [(Memory, "payload_for", 2), (Kept, "put", 1), (Tables, "write", 2)]
)
def test_where_there_is_no_memory_for_other_buckets_all_is_as_before(
    part: type, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next steps are those of a job that has not tried; the call of that number fails."""
    usual, calls = getattr(part, name), count(1)

    def fails(*given: Any) -> Any:
        if next(calls) == number:
            raise MemoryError
        return usual(*given)

    with Fleet(1, TENSORS, "powersgd") as fleet, Fleet(1, TENSORS, "powersgd") as other:
        (reducer,) = fleet.reducers
        for step in range(4):
            if step == 2:
                with monkeypatch.context() as patch, pytest.raises(MemoryError):
                    patch.setattr(part, name, fails)
                    reducer.replan(make_plan("layerwise", TENSORS, 0, fleet.methods.number))
                assert reducer.plan == fleet.plan and len(reducer.buckets) == 1
            found, due = (each.step(random_grads(1, TENSORS, seed=step)) for each in (fleet, other))
            assert all_same([found[0], due[0]])
        reducer.replan(make_plan("layerwise", TENSORS, 0, fleet.methods.number))  # once there is


@pytest.mark.parametrize("fail", [(0, 1), (1,)])
def test_ranks_notice_where_one_has_no_memory_for_other_buckets(
    fail: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of one shape fit each other's frames; where all ranks go back, they go on."""
    tensors, usual = [spec("a", 64), spec("b", 64)], Kept.put

    def fails(kept: Kept, *given: Any) -> None:
        if kept._context.rank in fail:
            raise MemoryError
        usual(kept, *given)

    with Fleet(2, tensors, "topk", density=0.5, schedule="layerwise", timeout=5.0) as fleet:
        fleet.step(random_grads(2, tensors, seed=0))
        other = Plan.of([(each.tensors, each.method) for each in reversed(fleet.plan.buckets)])
        with monkeypatch.context() as patch:
            patch.setattr(Kept, "put", fails)
            for rank, reducer in enumerate(fleet.reducers):
                assert reducer.wait_idle(10.0)
                with pytest.raises(MemoryError) if rank in fail else nullcontext():
                    reducer.replan(other)
        if len(fail) == 2:
            assert all_same(fleet.step(random_grads(2, tensors, seed=1)))
        else:
            with pytest.raises(MismatchError, match="buckets"):
                fleet.step(random_grads(2, tensors, seed=1))


def test_a_search_begins_anew_where_there_was_no_memory_for_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the steps after that are those of the buckets of before."""

    def fails(*given: Any) -> None:
        raise MemoryError

    with Fleet(WORLD, TENSORS, "topk", schedule="mergecomp:3") as fleet:
        job = Job(fleet, "mergecomp:3")
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(Reducer, "replan", fails)
            for step in range(3 * TRIAL_STEPS):
                job.step(step)
        tried = [tuner for tuner, reducer in zip(job.tuners, fleet.reducers, strict=True) if reducer.watch is None]
        assert tried and all(tuner._tuning is None and not tuner.done for tuner in tried)


def test_buckets_are_changed_between_steps_only_and_not_under_tables_of_the_bucket_as_a_whole() -> None:
    with Fleet(2, TENSORS, "topk", timeout=1.0) as fleet:
        fleet.reducers[0].offer(0, random_grads(2, TENSORS)[0][TENSORS[0].name])
        with pytest.raises(ConfigError, match="between steps only"):
            fleet.reducers[0].replan(fleet.plan)
    with Fleet(2, TENSORS, Steps()) as fleet:
        with pytest.raises(ConfigError, match="keeps largest for whole buckets"):
            fleet.reducers[0].replan(fleet.plan)


def test_methods_stay_and_small_tensors_stay_uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, arrivals = [], Watch.arrivals
    monkeypatch.setattr(Watch, "arrivals", lambda *given: seen.append(arrivals(*given)) or seen[-1])
    tensors = [spec("a.bias", 5), *TENSORS, spec("b.bias", 7)]
    methods = per_layer({"*.bias": "none", "*": "topk"})
    with Fleet(WORLD, tensors, methods, schedule="layerfusion", min_elements=100) as fleet:
        job = Job(fleet, "layerfusion")
        for number in range(3 * TRIAL_STEPS + 2):
            assert job.same(job.step(number))
        plan = fleet.reducers[0].plan
        assert job.tuners[0].done and {methods.codecs[b.method].name for b in plan.buckets} == {"topk", "none"}
        assert {a.counts for a in seen} == {
            tuple(t.count for t in job.tuners[0]._tensors)
        }  # no other tensor is planned for
        assert [b.compressed for b in plan.buckets][-1] is False and fleet.reducers[0].kept.residual_norm({}) > 0
        with pytest.raises(ConfigError, match="a different method"):
            fleet.reducers[0].replan(Plan.of([(tensors, 1)]))


def test_a_search_waits_for_the_end_of_warm_up_and_for_something_to_choose() -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion", warmup_steps=5) as fleet:
        job = Job(fleet, "layerfusion")
        job.tuners = [
            Tuner(r, "layerfusion", t._share, fleet.methods, 5) for r, t in zip(fleet.reducers, job.tuners, strict=True)
        ]
        for number in range(5 + 2 * TRIAL_STEPS):
            job.step(number)
            assert not job.tuners[0].done
        for number in range(TRIAL_STEPS):
            job.step(number)
        job.step(0)
        assert job.tuners[0].done
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion", min_elements=10**6) as fleet:
        assert all(tuner.done for tuner in Job(fleet, "layerfusion").tuners)


def test_a_resume_into_the_middle_of_a_search_goes_on_searching() -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        for number in range(3 * TRIAL_STEPS + 2):
            job.step(number)
        assert job.tuners[0].done
        for tuner, reducer in zip(job.tuners, fleet.reducers, strict=True):
            tuner.resume(reducer.plan, False)
            assert not tuner.done
        for number in range(3 * TRIAL_STEPS + 2):
            assert job.same(job.step(number))
        assert job.tuners[0].done


def test_a_job_goes_on_with_the_tables_of_the_buckets_that_were_chosen() -> None:
    """Saved once the search is over and loaded before the other job's own: the bits are those of a job that went on."""
    wanted: dict[str, torch.Tensor] = {}
    for zeroed in (None, False, True):
        with Fleet(WORLD, TENSORS, IN_SKETCH, schedule="layerfusion") as fleet:
            job = Job(fleet, "layerfusion")
            if zeroed is None:
                _until_done(job)
                for reducer in fleet.reducers:  # the search may have ended with the buckets that every job begins with
                    reducer.replan(make_plan("layerwise", TENSORS, 0, fleet.methods.number))
                job.step(50)
                states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
                wanted = job.step(51)[0]
                continue
            job.step(0)
            for reducer, tuner, state in zip(fleet.reducers, job.tuners, states, strict=True):
                assert reducer.plan.fingerprint() != state["plan"]
                checkpoint.check(reducer, fleet.methods, state, "restore", tuner.check)
                tuner.resume(checkpoint.saved_plan(state), True)
                checkpoint.restore(reducer, state, "restore")
                if zeroed:  # the control
                    reducer.kept.tables()["0 error"].zero_()
            found = job.step(51)[0]
            assert all(torch.equal(found[name], result) for name, result in wanted.items()) != zeroed


def test_one_rank_goes_on_with_saved_buckets_too() -> None:
    """It has nothing to search for, but tables that it is given are of the buckets that others chose."""
    plan = make_plan("layerwise", TENSORS, 0)
    with Fleet(1, TENSORS, IN_SKETCH, schedule="layerfusion") as fleet:
        (reducer,), (tuner,) = fleet.reducers, Job(fleet, "layerfusion").tuners
        assert reducer.plan != plan == tuner.check(plan)
        tuner.resume(plan, True)
        assert reducer.plan == plan
        tuner.stop()
        assert tuner.check(make_plan("single", TENSORS, 0)) == plan


def test_corrupt_buckets_are_not_taken_for_other_options() -> None:
    with Fleet(WORLD, TENSORS, IN_SKETCH, schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        job.step(0)
        state = checkpoint.save(fleet.reducers[0], fleet.methods)
        entries = [entry | {"method": entry["method"] + 1} for entry in state["buckets"]]
        with pytest.raises(CorruptFrameError):
            checkpoint.check(
                fleet.reducers[0], fleet.methods, state | {"buckets": entries}, "restore", job.tuners[0].check
            )


def test_tables_of_other_buckets_are_refused_where_buckets_are_fixed() -> None:
    with Fleet(WORLD, TENSORS, IN_SKETCH, schedule="layerwise") as fleet:
        fleet.step(random_grads(WORLD, TENSORS))
        state = checkpoint.save(fleet.reducers[0], fleet.methods)
    with (
        Fleet(WORLD, TENSORS, IN_SKETCH, schedule="single") as fleet,
        pytest.raises(StateError, match="different plan"),
    ):
        checkpoint.load(fleet.reducers[0], fleet.methods, state, "restore")


def test_a_table_stays_if_any_stage_that_has_it_cannot_move_it() -> None:
    class Moving(Steps):
        def properties(self) -> Properties:
            return replace(super().properties(), moves_tables=TableMoves(read=lambda *_: [], write=lambda *_: None))

    (bucket,) = make_plan("single", TENSORS, 0).buckets
    assert Moving().layout(bucket, 2).tables.keys() == {"largest"} == Steps().layout(bucket, 2).tables.keys()
    assert tables_that_stay(Moving(), bucket, 2) == []
    assert tables_that_stay(by_step({0: Moving(), 2: Steps()}), bucket, 2) == ["largest"]


def test_tables_of_several_stages_move_together() -> None:
    method = by_step({0: "powersgd", 3: IN_SKETCH})
    with Fleet(2, TENSORS, method, schedule="layerwise", verify_every=1) as fleet:
        for number, buckets in enumerate([["single", "layerwise"], ["single"], [], ["layerwise"], []]):
            results = fleet.step(random_grads(2, TENSORS, seed=number))
            assert all_same(results)
            before = [{n: t.clone() for n, t in r.kept.tables().items()} for r in fleet.reducers]
            assert all_same(before) and any(t.any() for n, t in before[0].items() if n.endswith("factor"))
            for schedule in buckets:
                plan = make_plan(schedule, TENSORS, 0, fleet.methods.number)
                for reducer in fleet.reducers:
                    reducer.replan(plan)
            now = fleet.reducers[0].kept.tables()
            for kind in ("factor", "error"):  # which of them there is depends on the stage
                kept = [any(t.any() for n, t in tables.items() if n.endswith(kind)) for tables in (before[0], now)]
                assert kept[0] == kept[1]
            if len(buckets) == 2:  # there and back: factors are the same bits
                now = [r.kept.tables() for r in fleet.reducers]
                assert all(torch.equal(now[0][n], t) for n, t in before[0].items() if n.endswith("factor"))


# ---- buckets that are left uncompressed ----


def _mean_of_all(fleet: Fleet, grads: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of gradient + residual over ranks."""
    kept = [reducer.kept.residuals() for reducer in fleet.reducers]
    return {
        n: sum(g[n] + k[n].view(g[n].shape) for g, k in zip(grads, kept, strict=True)) / fleet.world for n in grads[0]
    }


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("method", ["topk", "marsit"])
def test_what_waits_is_sent_in_full_precision_for_gradients_of_16_bits_too(method: str, warm: int) -> None:
    tensors = [spec("half", 40, 30, dtype=torch.float16)]
    with Fleet(2, tensors, method, warmup_steps=warm) as fleet:
        for number in range(3):
            fleet.step(random_grads(2, tensors, seed=number))
        for reducer in fleet.reducers:
            reducer.replan(Plan.of([(tensors, 1, True)]))
        grads = random_grads(2, tensors, seed=9)
        kept = [reducer.kept.residuals()["half"].view(40, 30).clone() for reducer in fleet.reducers]
        expected = ((grads[0]["half"].float() + kept[0]) + (grads[1]["half"].float() + kept[1])) / 2
        assert torch.equal(fleet.step(grads)[0]["half"], expected.half())


@pytest.mark.parametrize("method", ["topk", "marsit", "ef_signsgd"])
def test_a_bucket_left_uncompressed_sends_what_waits_and_is_compressed_again_later(method: str) -> None:
    with Fleet(2, TENSORS, method) as fleet:
        for number in range(3):
            fleet.step(random_grads(2, TENSORS, seed=number))
        half = [(fleet.plan.buckets[0].tensors[:4], 1, True), (fleet.plan.buckets[0].tensors[4:], 1)]
        for reducer in fleet.reducers:
            reducer.replan(Plan.of(half))
        fleet._index = {name: place for place, name in enumerate(fleet.reducers[0].plan.names())}
        plain = [tensor.name for tensor in half[0][0]]
        assert all(fleet.reducers[0].kept.residuals()[name].any() for name in plain)
        grads = random_grads(2, TENSORS, seed=9)
        expected = _mean_of_all(fleet, grads)
        results = fleet.step(grads)
        for name in plain:
            for rank in range(2):
                assert torch.allclose(results[rank][name], expected[name], rtol=1e-5, atol=1e-6)
                assert not fleet.reducers[rank].kept.residuals()[name].any()
        compressed = half[1][0][0].name
        assert not torch.allclose(results[0][compressed], expected[compressed], rtol=1e-5, atol=1e-6)
        for reducer in fleet.reducers:
            reducer.replan(fleet.plan)
        fleet._index = {name: place for place, name in enumerate(fleet.plan.names())}
        fleet.step(random_grads(2, TENSORS, seed=10))
        assert all(fleet.reducers[0].kept.residuals()[name].any() for name in plain)


def test_which_methods_may_be_left_out() -> None:
    may = {name for name in methods() if single(codec_class(name)()).may_be_plain(1)}
    assert may >= {
        "topk",
        "marsit",
        "ef_signsgd",
        "onebit",
        "qsgd",
        "global_qsgd",
        "natural",
        "terngrad",
        "sparse_binary",
        "fp16",
        "bf16",
    }
    assert not may & {"signsgd", "signum", "onebit_adam", "none"}


def test_a_given_plan_may_leave_buckets_uncompressed_where_the_method_allows_it() -> None:
    plan = Plan.of([(TENSORS[:3], 1, True), (TENSORS[3:], 1)])
    assert (
        Plan.from_document(plan.document()) == plan
        and plan.fingerprint() != Plan.of([(TENSORS[:3], 1), (TENSORS[3:], 1)]).fingerprint()
    )
    with Fleet(2, TENSORS, "signsgd") as fleet, pytest.raises(ConfigError, match="left uncompressed"):
        fleet.methods.check_bucket(plan.buckets[0], 2)
    with Fleet(2, TENSORS, "topk", schedule=plan, verify_every=1) as fleet:
        fleet.step(random_grads(2, TENSORS))


# ---- where auto stands aside ----


def test_auto_leaves_the_buckets_where_it_cannot_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(WORLD, TENSORS, Steps(), schedule="auto") as fleet:
        job = Job(fleet, "auto")
        assert all(tuner.done for tuner in job.tuners) and job.same(job.step(0))
        before = fleet.reducers[0].plan
        job.tuners[0].resume(before, False)
        assert job.tuners[0].done and not job.tuners[0].chosen and fleet.reducers[0].plan is before
    monkeypatch.setattr(tuning, "LEAST_ELEMENTS", 1 << 18)
    with Fleet(WORLD, TENSORS, "topk", schedule="auto") as fleet:
        assert all(tuner.done for tuner in Job(fleet, "auto").tuners)


@pytest.mark.parametrize("schedule", ["auto", "mergecomp:2", *slow("layerfusion")])
def test_tensors_of_several_methods_and_dtypes_are_planned_together(schedule: str) -> None:
    tensors = [spec(t.name, *t.shape, dtype=torch.float16) if n % 2 else t for n, t in enumerate(TENSORS)]
    methods = per_layer({"layer[0-3].*": "topk", "*": "marsit"})
    with Fleet(WORLD, tensors, methods, schedule=schedule, verify_every=1) as fleet:
        job = Job(fleet, schedule)
        before, waited = fleet.plan, []
        for number in range(50):
            assert job.same(job.step(number))
            waited.append(len(fleet.reducers[0].plan.buckets))
            if all(tuner.done for tuner in job.tuners):
                break
        assert all(tuner.chosen for tuner in job.tuners) and len(set(waited)) > 1
        plan = fleet.reducers[0].plan
        assert {t.name: b.method for b in plan.buckets for t in b.tensors} == {
            t.name: b.method for b in before.buckets for t in b.tensors
        }
        assert {bucket.method for bucket in plan.buckets} == {1, 2}


def test_plain_numbers_beside_a_method_do_not_forbid_uncompressed_buckets() -> None:
    methods = per_layer({"layer[0-3].*": "none", "*": "topk"})
    with Fleet(WORLD, TENSORS, methods, schedule="auto") as fleet:
        job, plain = Job(fleet, "auto"), set()
        for number in range(50):
            assert job.same(job.step(number))
            plain |= {(bucket.method, bucket.plain) for bucket in fleet.reducers[0].plan.buckets}
        assert job.tuners[0].chosen and plain == {(1, False), (2, False), (2, True)}


@pytest.mark.parametrize("schedule", ["auto", *slow("layerfusion", "mergecomp:2")])
def test_a_kind_that_is_never_exchanged_and_one_of_nothing_take_part(schedule: str) -> None:
    """Sparse gradients are skipped on every rank; tensors without elements are offered."""
    dense = [*TENSORS, spec("empty", 0, dtype=torch.float64)]
    with Fleet(WORLD, [spec("sparse", 30, 30, dtype=torch.float16), *dense], "topk", schedule=schedule) as fleet:
        job = Job(fleet, schedule)

        def step(rank: int) -> dict[str, torch.Tensor]:
            job.tuners[rank].begin_step()
            reducer = fleet.reducers[rank]
            index = {name: place for place, name in enumerate(reducer.plan.names())}
            at, *_ = [reducer.offer(index[name], grad) for name, grad in grads[rank].items()]
            reducer.settle(at - 1)
            reducer.skip(index["sparse"])
            return {name: reducer.result(index[name], at).clone() for name in grads[rank]}

        for number in range(50):
            grads = random_grads(WORLD, dense, seed=number)
            assert job.same(list(job._pool.map(step, range(WORLD))))
            if all(tuner.done for tuner in job.tuners):
                break
        assert all(tuner.chosen for tuner in job.tuners)


def test_a_chosen_plan_of_several_kinds_is_gone_on_with() -> None:
    tensors = [spec(t.name, *t.shape, dtype=torch.float16) if n % 2 else t for n, t in enumerate(TENSORS)]
    with Fleet(WORLD, tensors, "topk", schedule="auto") as fleet:
        job = Job(fleet, "auto")
        _until_done(job)
        saved = Plan.from_document(fleet.reducers[0].plan.document())
        for reducer, tuner in zip(fleet.reducers, job.tuners, strict=True):
            reducer.replan(Plan.of([([tensor], 1) for tensor in tensors]))
            tuner.resume(saved, True)
            assert tuner.chosen and reducer.plan == saved
        assert job.same(job.step(0))


def test_a_saved_plan_whose_buckets_lie_on_several_devices_now_is_searched_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(plan: Plan, tensors: object) -> Plan:
        raise ConfigError("several devices")

    for schedule in ("auto", "layerfusion"):
        with Fleet(WORLD, TENSORS, "topk", schedule=schedule) as fleet:
            job, before = Job(fleet, schedule), fleet.reducers[0].plan
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(Plan, "placed", refuse)
                if schedule == "auto":
                    job.tuners[0].resume(Plan.of([(TENSORS, 1)]), True)
                else:
                    with pytest.raises(ConfigError, match="several devices"):
                        job.tuners[0].resume(Plan.of([(TENSORS, 1)]), True)
            assert not job.tuners[0].done and fleet.reducers[0].plan is before


def test_a_search_after_a_resume_counts_its_own_steps(caplog: Any) -> None:
    caplog.set_level("INFO", "horovod_compress")
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        for reducer, tuner in zip(fleet.reducers, job.tuners, strict=True):
            tuner.resume(reducer.plan, False)
            reducer.resume(5000)
        _until_done(job)
        assert f" in {3 * TRIAL_STEPS} steps" in caplog.text


def test_nothing_is_left_uncompressed_where_one_of_the_methods_has_to_compress() -> None:
    methods = per_layer({"layer[0-3].*": "topk", "*": "signsgd"})
    with Fleet(WORLD, TENSORS, methods, schedule="auto") as fleet:
        job = Job(fleet, "auto")
        for number in range(50):
            assert job.same(job.step(number))
            assert not any(bucket.plain for bucket in fleet.reducers[0].plan.buckets)
        assert all(tuner.chosen for tuner in job.tuners)


@pytest.mark.parametrize("trials", [0, 2])
def test_auto_goes_back_to_its_first_buckets_where_a_search_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, trials: int
) -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="auto") as fleet:
        job = Job(fleet, "auto")

        def refuse(bucket: Any) -> None:
            raise ConfigError("too large")

        before = fleet.reducers[0].plan
        for number in range((1 + trials) * TRIAL_STEPS):
            job.step(number)
        assert (fleet.reducers[0].plan is before) == (trials == 0)
        monkeypatch.setattr(type(fleet.methods), "check_bucket", lambda methods, bucket, world: refuse(bucket))
        for number in range(8):
            assert job.same(job.step(number))
        assert all(tuner.done for tuner in job.tuners) and {r.plan for r in fleet.reducers} == {before}
        assert caplog.text.count("returns to its initial buckets: ConfigError: too large") == 1


# ---- what is measured ----


def test_steps_with_values_that_are_not_finite_do_not_count() -> None:
    with Fleet(WORLD, TENSORS, "global_qsgd", schedule="auto") as fleet:
        job = Job(fleet, "auto")
        watch = None
        for number in range(TRIAL_STEPS + 2):
            grads = random_grads(WORLD, TENSORS, seed=number)
            if number in (1, 2):
                grads[1][TENSORS[0].name][0, 0] = float("inf")
            job.take(grads)
            watch = watch or fleet.reducers[0].context.watch
            assert fleet.reducers[0].context.watch is watch and watch.steps() == [1, 1, 1, 2, 3][number]
        assert all(len(taken) == 3 for taken in watch._exchanges.values())
        job.step(9)
        assert fleet.reducers[0].context.watch is not watch  # the first trial


def test_what_is_never_offered_comes_last() -> None:
    names = [tensor.name for tensor in TENSORS]
    with Fleet(2, TENSORS, "topk", schedule="auto") as fleet:
        watch = fleet.reducers[0].context.watch = Watch(fleet.plan)
        for _ in range(3):
            watch.begin()
            for index in range(1, len(names)):  # the first one is sparse
                watch.offered(index)
        assert watch.order() == [*range(1, len(names)), 0]
        seconds = watch.arrivals(TENSORS[1:] + TENSORS[:1]).seconds
        assert seconds[-1] == seconds[-2] > 0


def test_a_step_ends_with_its_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("horovod_compress.schedule.trial.time", SimpleNamespace(perf_counter=lambda: now))
    watch = Watch(Plan.of([(TENSORS, 1)]))
    for begin, results in [(0, [5, 6]), (10, [11, 13]), (14, [15]), (30, [31]), (40, []), (50, [])]:
        now = begin
        watch.begin()
        for now in results:  # noqa: B007  the clock above reads it
            watch.decoded(0, 0.1)
        if begin == 30:
            watch.spoil()
    # The first pays for buffers, the fourth is spoiled, the fifth had no result, the last goes on.
    assert watch.step_seconds() == [3, 1, 10]


def test_a_step_is_the_mean_over_ranks_and_the_shortest_counts() -> None:
    trials = [[1.0, 5.0], [4.0, 3.0]]
    assert tuning.step_over_ranks(trials) == 2.5
    with pytest.raises(ValueError, match=r"zip\(\) argument 3 is shorter"):
        tuning.step_over_ranks([*trials, [1.0]])


@pytest.mark.slow
@pytest.mark.parametrize(("late", "others_wait"), [([0], 2 / 3), ([0, 1, 2], 0.0), ([1, 2], 1 / 3)])
def test_what_lies_between_steps_counts_only_where_ranks_differ_in_it(
    monkeypatch: pytest.MonkeyPatch, late: list[int], others_wait: float
) -> None:
    found: list[float] = []
    monkeypatch.setattr(tuning, "Measured", lambda step, *rest: found.append(step) or Measured(step, *rest))
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        for tuner in (job.tuners[rank] for rank in late):
            monkeypatch.setattr(tuner, "begin_step", partial(_later, tuner.begin_step))
        _until_done(job)
    assert len(found) >= 2 and all(-0.02 < step - _LATE * others_wait < _LATE / 4 for step in found)


_LATE = 0.4


def _later(begin_step: Callable[[], bool]) -> bool:
    time.sleep(_LATE)
    return begin_step()


def test_a_device_s_work_is_part_of_a_decoding() -> None:
    class Slow(FakeAccelerator):
        """Queues what is asked of it, and does it when somebody waits."""

        slow = False

        def wait(self, event: int, deadline: Deadline) -> None:
            time.sleep(0.02 if self.slow else 0.0)
            super().wait(event, deadline)

    with everything_on_accelerator(Slow), Fleet(2, TENSORS, "topk", schedule="single") as fleet:
        found = []
        for Slow.slow in (False, True):
            watch = fleet.reducers[0].context.watch = Watch(fleet.plan)
            for number in range(3):
                watch.begin()
                fleet.step(random_grads(2, TENSORS, seed=number))
            found.append(min(cost.decode for cost in watch.buckets().values()))
    assert found[0] < 0.02 <= found[1]


def test_spoiled_steps_of_a_trial_are_left_out_on_every_rank() -> None:
    with Fleet(WORLD, TENSORS, "global_qsgd", schedule="auto") as fleet:
        job = Job(fleet, "auto")
        for number in range(60):
            grads = random_grads(WORLD, TENSORS, seed=number)
            if number in (3, 9, 14, 20):  # the first of trials, and measured ones
                grads[number % WORLD][TENSORS[0].name][0, 0] = float("nan")
            job.take(grads)
            if job.tuners[0].done:
                break
        assert all(tuner.chosen for tuner in job.tuners)


def test_every_trial_is_told_to_who_wants_to_know(caplog: pytest.LogCaptureFixture) -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="auto") as fleet, caplog.at_level("DEBUG", "horovod_compress"):
        _until_done(Job(fleet, "auto"))
    told = [record.getMessage() for record in caplog.records]
    trials = [text for text in told if " tried " in text]
    steps = int(re.search(r"in (\d+) steps", told[-1])[1])  # type: ignore[index]
    assert len(trials) == steps // TRIAL_STEPS - 1  # the first steps show the order of the tensors only
    assert "tried 1 bucket(s): " in trials[0] and trials[0].endswith("tensors in each: 9")
    assert all(float(re.search(r"([0-9.]+) ms", text)[1]) > 0 for text in trials)  # type: ignore[index]


def test_nothing_is_marked_before_the_search_begins() -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="auto", warmup_steps=4) as fleet:
        job = Job(fleet, "auto")
        job.tuners = [
            Tuner(r, "auto", t._share, fleet.methods, 4) for r, t in zip(fleet.reducers, job.tuners, strict=True)
        ]
        for number in range(4):
            job.step(number)
            assert fleet.reducers[0].context.watch is None
        job.step(4)
        assert fleet.reducers[0].context.watch is not None


# ---- drift ----


def _until_done(job: Job, steps: int = 60) -> None:
    for number in range(steps):
        job.step(number)
        if all(tuner.done for tuner in job.tuners):
            return
    raise AssertionError("the search does not end")


def test_buckets_are_chosen_again_when_exchanges_take_longer(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(tuning, "EVERY", 3)
    with Fleet(WORLD, TENSORS, "topk", schedule="auto") as fleet:
        job = Job(fleet, "auto")
        _until_done(job)
        spent = [reducer.metrics.seconds for reducer in fleet.reducers]
        for number in range(20):  # the control: rank 1 waits long for others, and nothing has changed
            for rank, seconds in enumerate(spent):
                seconds["exchange"] = 5.0 * number * (1 + (rank == 1) * number)
            job.step(number)
            assert all(tuner.done for tuner in job.tuners)
        for number in range(20, 40):
            for seconds in spent:
                seconds["exchange"] += 50.0
            assert job.same(job.step(number))
            if not job.tuners[0].done:
                break
        assert number < 32 and not any(tuner.done for tuner in job.tuners)
        assert caplog.text.count("choosing again") == 1
        _until_done(job)


def test_only_auto_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EVERY", 1)
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        _until_done(job)
        for number in range(6):
            for reducer in fleet.reducers:
                reducer.metrics.seconds["exchange"] += 10.0**number
            job.step(number)
        assert all(tuner.done for tuner in job.tuners)


# ---- many models ----


@pytest.mark.parametrize("models", [4, *slow(200)])
def test_random_models_with_random_orders_get_one_plan_on_all_ranks(models: int) -> None:
    """Every rank has an order of its own in every step; a shared parameter is one tensor, unused ones come last."""
    for model in range(models):
        draw = random.Random(model)
        dtypes = draw.choice([[torch.float32], [torch.float32, torch.float16]])
        tensors = [
            spec(f"p{number}", draw.randint(1, 60), draw.randint(1, 40), dtype=draw.choice(dtypes))
            for number in range(draw.randint(1, 14))
        ]
        names = [tensor.name for tensor in tensors]
        unused = draw.sample(names, draw.randint(0, len(names) // 2))
        several = per_layer({"p[02468]": "topk", "*": "marsit"})
        method = draw.choice(["topk", "marsit", "qsgd", "none", several])
        schedule = draw.choice(["auto", "layerfusion", "mergecomp:2"])

        def order(rank: int) -> list[str]:
            mine = [name for name in names if name not in unused]
            random.Random(rank * 1000 + number).shuffle(mine)
            return mine + unused

        with Fleet(2, tensors, method, schedule=schedule, min_elements=draw.choice([0, 300]), verify_every=1) as fleet:
            job = Job(fleet, schedule)
            stood_aside = job.tuners[0].done
            for number in range(55):
                assert job.same(job.step(number, order)), model
                assert len({reducer.plan.fingerprint() for reducer in fleet.reducers}) == 1, model
                if all(tuner.done for tuner in job.tuners):
                    break
            assert all(tuner.chosen or stood_aside for tuner in job.tuners) and number < 50, (model, schedule)
            assert sorted(fleet.reducers[0].plan.names()) == sorted(names)


def test_an_error_of_rank_0_reaches_all() -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule="layerfusion") as fleet:
        job = Job(fleet, "layerfusion")
        job.tuners[0]._schedule = "nothing"
        for number in range(TRIAL_STEPS):
            job.step(number)
        with pytest.raises(ConfigError, match="rank 0 could not choose buckets: KeyError"):
            job.step(TRIAL_STEPS)


def test_mergecomp_finds_the_lowest_place_of_one_cut() -> None:
    for count in (2, 3, 10, 161):
        for target in {1, count // 3, count - 1} - {0}:
            tries, search = 0, mergecomp.tune(SearchSpace(count, "2"))
            groups = next(search)
            try:
                while True:
                    tries += 1
                    cut = groups.counts[0] if len(groups.counts) == 2 else 10 * count
                    costs = [BucketCost(number, number * 1.0, 0.0) for number in groups.counts]
                    arrivals = Arrivals((1,) * count, tuple(map(float, range(count))))
                    groups = search.send(Measured(1.0 + abs(cut - target), arrivals, costs))
            except StopIteration as end:
                found = end.value.counts
            assert abs(found[0] - target) <= max(1, count // 10) and tries <= 16


def test_names_and_arguments() -> None:
    assert is_adaptive("mergecomp:3") and is_adaptive("layerfusion") and not is_adaptive("single")
    for bad in ("mergecomp:0", "mergecomp:x", "layerfusion:3"):
        with pytest.raises(ConfigError, match="takes"):
            Fleet(1, TENSORS, "none", schedule=bad)
