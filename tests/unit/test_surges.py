"""Which coded results are surges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.optimizer.held_moment import HeldMoment
from horovod_compress.engine.optimizer.surges import FIRST, LOOKED_AT, SHARE, TIMES, Result, surges


def held_of(moment: Tensor) -> HeldMoment:
    return HeldMoment(moment, 30.0, 30.0, 1e-8, True)


def looked(held: HeldMoment, *grads: Tensor, times: float = 1.0) -> list[bool]:
    return [bool(surges([Result("w", grad, times, held)])) for grad in grads]


def noise(seed: int, size: float, count: int = 1000) -> Tensor:
    return size * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_results_of_the_usual_size_are_none() -> None:
    for size in (0.01, 1.0, 5.0, 0.9 * TIMES * FIRST):  # of coded results, with their errors
        assert not any(looked(held_of(torch.ones(1000)), *(noise(seed, size) for seed in range(50)))), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_result_is_one_that_is_larger_than_usual_and_than_the_second_moment(dtype: torch.dtype) -> None:
    usual, more = torch.full((70,), 0.5, dtype=dtype), TIMES * 1.01
    assert looked(held_of(torch.ones(70)), usual, torch.full((70,), more, dtype=dtype)) == [False, True]
    assert looked(held_of(torch.ones(70)), usual, torch.full((70,), 1.9, dtype=dtype)) == [False, False]
    assert looked(held_of(torch.full((70,), 0.01)), usual, 1.9 * usual, more * usual) == [False, False, False]
    assert looked(held_of(torch.full((70,), 0.01)), usual, more * usual) == [False, True]


def test_a_result_counts_as_the_optimizer_sees_it() -> None:
    held = held_of(torch.ones(8))
    assert looked(held, torch.full((8,), 8.0), torch.full((8,), 16.0), times=1 / 16) == [False, False]
    assert held.usual == pytest.approx(0.25 + SHARE * 0.75)
    assert looked(held, torch.full((8,), 40.0), times=1 / 16) == [True]


def test_the_first_one_says_what_is_usual_unless_it_is_a_surge_itself() -> None:
    large, huge = torch.full((8,), 9.0), torch.full((8,), 60.0)
    assert looked(held_of(torch.ones(8)), large, large, huge) == [False, False, True]
    assert looked(held_of(torch.ones(8)), huge, large, huge) == [True, False, True]
    assert looked(held_of(torch.zeros(8)), huge, huge) == [False, False]  # the second moment says nothing of it


def test_a_result_with_gaps_in_memory_counts_like_any_other() -> None:
    large, huge = torch.full((16,), 9.0)[::2], torch.full((8, 2), 60.0)[:, 1]
    assert looked(held_of(torch.ones(8)), large, large, huge) == [False, False, True]


def test_what_comes_again_and_again_becomes_usual() -> None:
    """A method whose results are always so large costs the second moment a few steps, and no more."""
    assert sum(looked(held_of(torch.ones(8)), *[torch.full((8,), 30.0)] * 50)) == 3


def test_a_result_of_zeros_is_not_usual() -> None:
    """As where no word of these rows came."""
    held = held_of(torch.ones(8))
    assert not any(looked(held, torch.full((8,), 3.0), *(torch.zeros(8) for _ in range(30)), torch.full((8,), 3.0)))
    assert looked(held, torch.full((8,), 7.0)) == [True]


def test_it_is_looked_for_in_the_middle_of_a_tensor_and_there_only() -> None:
    outside, inside = (torch.ones(3, LOOKED_AT) for _ in range(2))
    outside[0] = outside[2] = inside[1] = 100.0
    moment = torch.ones(3, LOOKED_AT)
    moment[0] = 1e6
    for grad, found in ((outside, False), (inside, True), (inside.t().contiguous().t(), True)):
        assert looked(held_of(moment.clone()), torch.ones(3, LOOKED_AT), grad) == [False, found]


def test_tensors_are_told_apart_and_types_may_differ() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    held = [held_of(torch.ones(5 + n, dtype=torch.promote_types(kind, torch.float32))) for n, kind in enumerate(kinds)]
    sizes = ([1.0] * 4, [1.0, 1.0, 9.0, 9.0])
    found = [
        surges([Result(str(n), torch.full((5 + n,), size[n], dtype=kinds[n]), 1.0, held[n]) for n in range(4)])
        for size in sizes
    ]
    assert found == [frozenset(), {"2", "3"}]
    assert surges([]) == frozenset()


def test_what_is_usual_stays_finite() -> None:
    """Else the state could not be loaded."""
    held = held_of(torch.ones(4, dtype=torch.float64))
    huge = torch.full((4,), 1e200, dtype=torch.float64)
    assert looked(held, torch.ones(4), huge, torch.ones(4)) == [False, False, False] and held.usual == 1.0


def test_what_is_not_finite_is_none() -> None:
    assert looked(held_of(torch.ones(4)), torch.ones(4), torch.full((4,), torch.inf)) == [False, False]
