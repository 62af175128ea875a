"""Which rounds are exact, where a second moment is held."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.engine.optimizer.exact_rounds import (
    GROWTH,
    QUICK_GROWTH,
    QUICKEST_GROWTH,
    ExactRounds,
    chosen,
    usual,
)
from horovod_compress.engine.optimizer.holding import hold
from horovod_compress.schedule.plan import TensorSpec
from tests.support.local import Fleet


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
@pytest.mark.parametrize("growth", [QUICKEST_GROWTH, QUICK_GROWTH, GROWTH])
def test_growing_distances_never_shrink_and_end_at_the_largest(warmup: int, every: int, growth: int) -> None:
    found = steps(ExactRounds(warmup, every, growth=growth), warmup + 2000)
    distances = [b - a for a, b in pairwise(found)]
    assert distances == sorted(distances) and distances[-1] == every


def test_what_somebody_chooses_counts() -> None:
    few, many = usual(50, few=True), usual(50, few=False)
    assert (many, usual(0, few=False), usual(20, few=False)) == (ExactRounds(30, 50),) * 2 + (ExactRounds(30, 20),)
    assert (usual(20, few=True), usual(1, few=True)) == (ExactRounds(20, 20), ExactRounds(20, 1))
    assert usual(200, few=True) == ExactRounds(20, 200, growth=GROWTH)
    assert chosen(50, True) == replace(few, short=20) and chosen(50, False) == replace(many, short=30)
    for needs_few in (True, False):
        assert chosen(0, needs_few, warmup_steps=7) == ExactRounds(7, 50)
        assert chosen(20, needs_few, warmup_steps=7) == ExactRounds(7, 20)
        assert chosen(50, needs_few, rebuild_every=10) == ExactRounds(30, 10, short=30)
        assert chosen(50, needs_few, 1, 1) == ExactRounds(1, 1)
    assert str(few) == "warmup_steps=20 and rebuild_every=up to 100" != str(many)


@pytest.mark.parametrize(
    ("given", "rounds"),
    [
        ({}, ExactRounds(20, 100, growth=GROWTH, short=20)),
        ({"warmup_steps": 2}, ExactRounds(20, 100, growth=GROWTH, short=20, asked=2)),
        ({"warmup_steps": 25}, ExactRounds(25, 100, growth=GROWTH, short=20, asked=25, anew=20)),
        ({"warmup_steps": 2, "total_steps": 100}, ExactRounds(10, 100, growth=QUICKEST_GROWTH, short=10, asked=2)),
        ({"warmup_steps": 2, "levels": 2}, ExactRounds(30, 50, short=30, asked=2)),
    ],
)
def test_uncompressed_first_steps_of_a_method_leave_its_rounds_as_they_are(
    given: dict[str, Any], rounds: ExactRounds
) -> None:
    """Where it has fewer of them than a second moment needs; those that somebody asked for send no 8 bits."""
    named = {"w": nn.Parameter(torch.ones(64))}
    with Fleet(2, [TensorSpec("w", (64,), "float32")], "marsit", **given) as fleet:
        held = hold(torch.optim.AdamW(named.values()), fleet.reducers[0], named.items(), 50, "auto")
    assert held is not None and held.rounds == rounds


@pytest.mark.parametrize(
    ("total", "first", "most"), [(1, 1, 1), (9, 1, 4), (40, 4, 7), (100, 10, 13), (300, 14, 18), (1000, 10, 25)]
)
def test_a_short_training_of_known_length_has_fewer(total: int, first: int, most: int) -> None:
    """Those at the start, all of which may be short, are a tenth at most."""
    found = steps(chosen(50, True, total_steps=total), total)
    assert found[:first] == list(range(first)) and chosen(50, True, total_steps=total).short == first
    assert len(found) == most <= len(steps(usual(50, few=True), total))


def test_the_length_leaves_what_somebody_chooses() -> None:
    for given in ({"warmup_steps": 7}, {"rebuild_every": 10}):
        assert chosen(50, True, **given, total_steps=100) == chosen(50, True, **given)
    assert chosen(1, True, total_steps=100).every == 1  # the stock optimizer


def test_methods_that_need_many_have_fewer_only_in_a_short_training() -> None:
    for total in (300, 1000):
        assert chosen(50, False, total_steps=total) == chosen(50, False)
    found = steps(chosen(50, False, total_steps=100), 100)
    assert found == [*range(10), 14, 21, 32, 48, 72]
    assert max(b - a for a, b in pairwise(steps(chosen(50, False, total_steps=100), 1000))) == 50
