"""What compression is worth: the ratio to come, and a saving that is said where there is one, and nowhere else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.by_step import by_step, method
from horovod_compress.engine.methods import parse, per_layer
from horovod_compress.engine.reducer import Next
from horovod_compress.fronts.reports import Counters
from horovod_compress.fronts.session import Session
from horovod_compress.observe import verdict
from horovod_compress.observe.metrics import Metrics, Overlap
from horovod_compress.schedule.plan import TensorSpec
from tests.support.local import Fleet, all_same, random_grads, spec

DENSE = 32_000  # bytes that a float32 ring sends in a step
EXACT, COMPRESSED = DENSE // 2, DENSE // 20


def first_ten(step: int) -> bool:
    return step < 10 or step % 50 == 0


class Job:
    """A job whose clock is set by hand: ``waits`` returns what training waits in a step, beside 0.1 s of compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: Callable[[bool, int], float]) -> None:
        self.metrics, self.overlap, self.now, self._waits = Metrics(), Overlap(), 0.0, waits
        self.pace = verdict.Pace(self.metrics, self.overlap)
        self.exact_bytes: Callable[[int], int] = lambda step: EXACT
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, steps: int, is_exact: Callable[[int], bool] = first_ten) -> Job:
        for step in range(self.metrics.steps, self.metrics.steps + steps):
            self.pace.begin_step()
            exact = is_exact(step)
            self.metrics.sent(self.exact_bytes(step) if exact else COMPRESSED, exact=exact)
            self.metrics.bytes_dense += DENSE
            self.metrics.end_step()
            self.overlap.offered(step)
            began, self.now = self.now, self.now + self._waits(exact, step)
            self.overlap.delivered(began, self.now)
            self.overlap.finish(step)
            self.now += 0.1
        self.pace.begin_step()
        return self

    def said(self, total: int | None = None, is_exact: Callable[[int], bool] = first_ten) -> str:
        return verdict.in_words(self.metrics, self.pace, is_exact, self.metrics.steps, total)


def link(rate: float, coding: float = 0.0) -> Callable[[bool, int], float]:
    """Return what a step waits where bytes cost time, and so does compressing."""
    return lambda exact, step: EXACT / rate if exact else COMPRESSED / rate + coding


def test_a_slow_link_is_worth_it_and_float32_would_take_twice_as_long_as_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Job(monkeypatch, link(16_000)).run(100).said()
    waits = "training waits 0.1 s a step for compressed gradients, about 2 s for float32"
    assert said.endswith(f"saves about 1.9 s of each step: {waits}")


@pytest.mark.parametrize(("rate", "coding"), [(1e9, 0.01), (3e7, 0.0), (1e6, 0.014)])
def test_a_fast_network_is_not(rate: float, coding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes cost nothing; or less than a small part of a step; or less than coding does."""
    said = Job(monkeypatch, link(rate, coding)).run(100).said()
    assert "this network does not need compression: training waits" in said and "saves" not in said


def test_slow_steps_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late rank in half of the steps, of one kind or the other, is in no quartile."""
    late = Job(monkeypatch, lambda exact, step: link(16_000)(exact, step) + 50.0 * (step % 2)).run(200).said()
    assert "saves about 1.9 s" in late
    only = Job(monkeypatch, lambda exact, step: 0.01 + 5.0 * (exact and step % 2)).run(200).said()
    assert "does not need compression" in only


def test_the_first_steps_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Job(monkeypatch, lambda exact, step: 0.01 + 5.0 * (step < verdict.FIRST)).run(100).said()
    assert "does not need compression" in said


def test_noise_is_no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = Job(monkeypatch, lambda exact, step: 0.1 + 0.09 * ((step * 7919) % 13) / 13 + 0.005 * exact).run(100).said()
    assert "saves" not in noisy


@pytest.mark.parametrize("apart", [False, True])
def test_a_saving_is_said_where_steps_differ_and_not_by_chance(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 jobs in which the few exact steps wait as long as the others, or twice as long, and all vary by half."""
    rng = random.Random(1)
    saves = 0
    for _ in range(200):
        job = Job(monkeypatch, lambda exact, step: 0.05 * rng.lognormvariate(0, 0.5) * (2 if exact and apart else 1))
        job.run(100, is_exact=lambda step: step < 2 or step in (20, 26, 34, 45, 59, 78))
        saves += "saves about" in job.said()
    assert saves > 150 if apart else saves <= 8


@pytest.mark.parametrize(
    ("exact", "compressed", "clearly"),
    [
        ([1.0] * 5, [1.0] * 50, False),
        ([2.0] * 3, [1.0] * 50, True),
        ([2.0] * 3, [1.0] * 3, False),
        ([1.0, 1.0, 1e6], [1.0] * 50, False),
        ([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5], False),
        ([1.0] * 50, [2.0] * 3, False),
    ],
)
def test_what_is_clearly_above(exact: list[float], compressed: list[float], clearly: bool) -> None:
    above = verdict.StepTimes(1.0, tuple(exact), 1.0).clearly_above(verdict.StepTimes(1.0, tuple(compressed), 1.0))
    assert above is clearly


def test_the_ratio_that_is_expected_is_the_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, link(1e9)).run(100)
    assert f"{job.metrics.times_fewer_bytes:.1f} times fewer bytes than a float32 ring" in job.said()
    said = job.said(total=700)
    assert f", {job.run(600).metrics.times_fewer_bytes:.1f} expected at step 700;" in said
    assert "expected" not in job.said(total=700)
    # One exact step in 50: 1 / (0.02 / 2 + 0.98 / 20).
    assert ", 16.9 in the long run;" in job.said()


def test_in_the_long_run_exact_steps_are_as_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first are in bfloat16, those that come every 50 steps in float32."""
    job = Job(monkeypatch, link(1e9)).run(100)
    job.metrics.sent(DENSE, exact=True)
    job.metrics.bytes_dense += DENSE
    job.metrics.end_step()
    job.pace.begin_step()
    assert ", 14.5 in the long run;" in job.said()  # 1 / (0.02 + 0.98 / 20)


def test_a_very_long_training_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def is_exact(step: int) -> bool:
        asked.append(step)
        return first_ten(step)

    assert ", 16.9 expected at step 1,000,000;" in Job(monkeypatch, link(1e9)).run(100).said(10**6, is_exact)
    assert len(asked) <= 2 * verdict.AHEAD


@pytest.mark.parametrize(
    ("steps", "is_exact", "ends"),
    [
        (12, first_ten, "too few steps yet to say what compression saves"),
        (50, lambda step: False, "hvd-compress headroom measures it"),
        (50, lambda step: True, "2.0 times fewer bytes than a float32 ring"),
    ],
)
def test_where_nothing_shows_what_is_saved_nothing_is_claimed(
    steps: int, is_exact: Callable[[int], bool], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Job(monkeypatch, link(1000.0)).run(steps, is_exact).said().endswith(ends)


def test_short_exact_steps_show_nothing_and_the_longest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 bits take long to code: by them, a network that costs nothing would be slow."""
    job = Job(monkeypatch, lambda exact, step: 0.02 + 0.02 * (exact and step < 10))
    job.exact_bytes = lambda step: DENSE // 4 if step < 10 else EXACT
    assert (
        job.run(100)
        .said()
        .endswith("no exact step sent enough to show what compression saves: hvd-compress headroom measures it")
    )
    assert job.metrics.exact_steps == 11  # the control: many were short, and one was long
    assert "does not need compression" in job.run(150).said()


def test_before_the_first_step_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job(monkeypatch, link(1000.0)).said() == ""


def test_after_others_have_used_the_counters_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose beginning nobody told, are in no duration."""
    job = Job(monkeypatch, link(16_000)).run(60)
    before = job.pace.of(exact=False)
    job.metrics.steps += 5
    job.now += 1e6
    job.pace.begin_step()
    assert job.pace.of(exact=False) == before


# ---- what is counted ----

TENSORS = [spec("a", 40, 30), spec("b", 7)]


@pytest.mark.parametrize(
    ("name", "exact"), [("marsit", 3), ("topk", 2), ("none", 5), ("fp16", 5), ("qsgd", 2), ("powersgd", 2)]
)
def test_bytes_of_gradients_are_exact_or_compressed(name: str, exact: int) -> None:
    """Two exact steps were asked for, and Marsit has one more; what is left are comparisons."""
    with Fleet(2, TENSORS, name, warmup_steps=2, verify_every=0, **_own(name)) as fleet:
        for step in range(5):
            fleet.step(random_grads(2, TENSORS, seed=step))
        for metrics in (reducer.metrics for reducer in fleet.reducers):
            found = metrics.document()
            assert found["exact_steps"] == exact and found["steps"] == 5
            assert (found["bytes_compressed"] > 0) == (exact < 5)
            other = found["bytes_sent"] - found["bytes_exact"] - found["bytes_compressed"]
            assert 0 < other < 200  # the ranks agree on their start
            assert found["times_fewer_bytes"] == metrics.bytes_dense / metrics.bytes_sent


def _own(name: str) -> dict[str, int]:
    return {"full_precision_every": 3} if name == "marsit" else {}


def test_steps_of_several_buckets_are_exact_if_all_of_them_are() -> None:
    with Fleet(2, TENSORS, per_layer({"a": "topk", "*": "none"}), schedule="layerwise") as fleet:
        fleet.step(random_grads(2, TENSORS))
        found = fleet.reducers[0].metrics
        assert found.exact_steps == 0 and found.bytes_exact > 0 and found.bytes_compressed > 0


@pytest.mark.parametrize(("dtype", "part"), [("float32", 4), ("float64", 1), ("bfloat16", 2)])
def test_the_first_steps_beside_momentum_are_the_mean_in_a_quarter_of_the_bytes(dtype: str, part: int) -> None:
    tensors = [TensorSpec("a", (64, 64), dtype)]
    grads = [{"a": grad["a"].to(getattr(torch, dtype))} for grad in random_grads(2, [spec("a", 64, 64)])]
    sent = []
    for short in (False, True):
        with Fleet(2, tensors, "marsit", verify_every=0) as fleet:
            for reducer in fleet.reducers:
                reducer.buckets.choose(Next("short" if short else "plain"))
            results = fleet.step(grads)
            sent.append(fleet.reducers[0].metrics.bytes_exact)
            assert not any(waits.any() for rank in fleet.residuals() for waits in rank.values())
        first, second = (grad["a"].double() for grad in grads)
        error = (results[0]["a"].double() - (first + second) / 2).abs()
        assert all_same(results)
        # Both roundings are right within a quarter of what they round.
        assert bool((error <= (0.6 if short and part > 1 else 2**-6) * (first.abs() + second.abs()) / 2).all())
        assert bool((error > 2**-6 * first.abs().max()).any()) is (short and part > 1)
    headers = 250  # also of the exchange of a scale before
    assert abs(sent[0] / part - sent[1]) < headers


# ---- what print() shows ----


def test_options_that_were_chosen_are_shown_and_no_others() -> None:
    methods, options = parse("marsit", {"levels": 2, "total_steps": 300, "seed": 7})
    assert (methods.differing(), options.differing()) == ("marsit levels=2", "seed=7 total_steps=300")
    methods, options = parse("marsit", {"levels": 3, "warmup_steps": 0})  # 3 is what the default becomes
    assert (methods.differing(), options.differing()) == ("marsit", "warmup_steps=0")
    methods, options = parse(per_layer({"a*": method("topk", density=0.1), "*": "marsit"}), {})
    assert (methods.differing(), options.differing()) == ("a*: topk density=0.1, *: marsit", "")
    methods, _ = parse(by_step({0: "none", 5: "topk"}), {})
    assert methods.differing().startswith("by_step from step 0='full precision' from step 5=\"topk density=0.01")


@pytest.mark.parametrize(("warmup", "every", "exact"), [(0, 3, [0, 3, 6]), (2, 0, [0, 1]), (0, 0, [])])
def test_exact_steps_are_those_of_the_method_and_the_first_ones(warmup: int, every: int, exact: list[int]) -> None:
    methods, _ = parse("marsit", {"full_precision_every": every, "warmup_steps": warmup})
    assert [step for step in range(8) if methods.is_exact(step)] == exact


@pytest.mark.parametrize("total", [None, 5000])
def test_a_users_function_is_not_asked_for_steps_to_come(total: int | None) -> None:
    """Where there is none, the ratio to come is told."""
    exact = 6
    table = ["early"] * exact + ["late"] * 4
    named = [(tensor.name, nn.Parameter(torch.zeros(tensor.shape))) for tensor in TENSORS]

    def shown(codec: Codec) -> str:
        with Fleet(2, TENSORS, codec, total_steps=total, verify_every=0) as fleet:
            job: Any = SimpleNamespace(number=0, row=None)
            session = Session(job, fleet.methods, fleet.reducers[0], named, "fleet")
            counters = Counters(session, fleet.methods.name)
            for step in range(exact + 4):
                counters.reports.look()
                fleet.step(random_grads(2, TENSORS, seed=step))
                assert fleet.reducers[0].wait_idle(10.0)
            counters.reports.look()
            assert counters.stats()["collectives"] == ["fold"]
            return counters.in_words()

    coming = "in the long run" if total is None else "expected at step 5,000"
    function = by_step(lambda step: table[step], {"early": "none", "late": "marsit"})
    for asked in (function, by_step({0: "none", 1: function})):
        assert "times fewer bytes" in (said := shown(asked)) and coming not in said
    assert coming in shown(by_step({0: "none", exact: "marsit"}))
