"""Which rounds are exact, where a second moment is held."""

from __future__ import annotations

from itertools import pairwise

import pytest

from horovod_compress.engine.optimizer.exact_rounds import ExactRounds, chosen, usual


def steps(rounds: ExactRounds, until: int) -> list[int]:
    return [step for step in range(until) if step in rounds]


@pytest.mark.parametrize(("warmup", "every"), [(1, 1), (1, 4), (3, 4), (30, 50)])
def test_one_round_in_so_many_is_exact(warmup: int, every: int) -> None:
    assert steps(ExactRounds(warmup, every), 300) == [s for s in range(300) if s < warmup or (s - warmup) % every == 0]


def test_distances_grow_by_a_third_of_the_steps_so_far_up_to_the_largest() -> None:
    found = steps(usual(50, few=True), 1000)
    assert found[:20] == list(range(20))
    assert found[19:] == [19, 25, 33, 44, 59, 79, 105, 140, 187, 249, *range(332, 1000, 100)]
    assert len(found) == 36


@pytest.mark.parametrize("warmup", [1, 2, 20, 1000])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_growing_distances_never_shrink_and_end_at_the_largest(warmup: int, every: int) -> None:
    found = steps(ExactRounds(warmup, every, grows=True), warmup + 2000)
    distances = [b - a for a, b in pairwise(found)]
    assert distances == sorted(distances) and distances[-1] == every


def test_what_somebody_chooses_counts() -> None:
    few, many = usual(50, few=True), usual(50, few=False)
    assert (many, usual(0, few=False), usual(20, few=False)) == (ExactRounds(30, 50),) * 2 + (ExactRounds(30, 20),)
    assert (usual(20, few=True), usual(1, few=True)) == (ExactRounds(20, 20), ExactRounds(20, 1))
    assert usual(200, few=True) == ExactRounds(20, 200, grows=True)
    assert chosen(50, True) == few and chosen(50, False) == many
    for needs_few in (True, False):
        assert chosen(0, needs_few, warmup_steps=7) == ExactRounds(7, 50)
        assert chosen(20, needs_few, warmup_steps=7) == ExactRounds(7, 20)
        assert chosen(50, needs_few, rebuild_every=10) == ExactRounds(30, 10)
        assert chosen(50, needs_few, 1, 1) == ExactRounds(1, 1)
    assert str(few) == "warmup_steps=20 and rebuild_every=up to 100" != str(many)
