"""What compression is worth: the ratio to come, and a saving that is said where there is one, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from horovod_compress.observe import verdict
from horovod_compress.observe.metrics import Metrics
from horovod_compress.observe.overlap import Overlap

DENSE = 32_000  # bytes that a float32 ring sends in a step
EXACT, COMPRESSED = DENSE // 2, DENSE // 20


def first_ten(step: int) -> bool:
    return step < 10 or step % 50 == 0


class Job:
    """A job whose clock is set by hand: ``waits`` returns what training waits in a step, beside 0.1 s of compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: Callable[[bool, int], float]) -> None:
        self.metrics, self.overlap, self.now, self._waits = Metrics(), Overlap(), 0.0, waits
        self.pace = verdict.Pace(self.metrics, self.overlap)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, steps: int, is_exact: Callable[[int], bool] = first_ten) -> Job:
        for step in range(self.metrics.steps, self.metrics.steps + steps):
            self.pace.mark()
            exact = is_exact(step)
            self.metrics.sent(EXACT if exact else COMPRESSED, exact=exact)
            self.metrics.bytes_dense += DENSE
            self.metrics.end_step()
            self.overlap.offered(step)
            began, self.now = self.now, self.now + self._waits(exact, step)
            self.overlap.delivered(began, self.now)
            self.overlap.finish(step)
            self.now += 0.1
        self.pace.mark()
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


def test_the_ratio_that_is_expected_is_the_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, link(1e9)).run(100)
    assert f"{job.metrics.times_fewer_bytes:.1f} times fewer bytes than a float32 ring" in job.said()
    said = job.said(total=700)
    assert f", {job.run(600).metrics.times_fewer_bytes:.1f} expected at step 700;" in said
    assert "expected" not in job.said(total=700)
    # One exact step in 50: 1 / (0.02 / 2 + 0.98 / 20).
    assert ", 16.9 in the long run;" in job.said()


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


def test_before_the_first_step_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job(monkeypatch, link(1000.0)).said() == ""


def test_after_others_have_used_the_counters_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were not marked, as of a loaded checkpoint, are in no duration."""
    job = Job(monkeypatch, link(16_000)).run(60)
    before = job.pace.of(exact=False)
    job.metrics.steps += 5
    job.now += 1e6
    job.pace.mark()
    assert job.pace.of(exact=False) == before
