"""Weights are compared at the first step and as often as results, and a difference is said once, by one rank."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.comparison import Weights
from horovod_compress.engine.reducer import Hooks
from tests.support.local import Fleet, random_grads, spec

WORLD = 3
TENSORS = [spec("first", 3, 5), spec("second", 7), spec("third", 2, 2)]


def weights_of(rank: int, odd: int | None) -> list[Tensor]:
    found = [torch.arange(float(tensor.count)).reshape(tensor.shape) for tensor in TENSORS]
    if rank == odd:
        found[1][3] += 1e-6
        found[2][0, 0] = -0.0  # another bit of an equal value
    return found


class Shown:
    """A fleet whose ranks show their weights, each step."""

    def __init__(self, every: int) -> None:
        self.fleet = Fleet(WORLD, TENSORS, "none", verify_every=every)
        for reducer in self.fleet.reducers:
            reducer.verification.weights = Weights(every, warns=reducer.rank == 0)

    def step(self, number: int, odd: int | None = None, silent: int | None = None) -> None:
        for reducer in self.fleet.reducers:
            assert reducer.verification.weights and reducer.next_step() == number
            if reducer.rank != silent:
                reducer.verification.weights.take(number, weights_of(reducer.rank, odd))
        self.fleet.step(random_grads(WORLD, TENSORS, number))

    def compared(self) -> set[int]:
        return {
            reducer.verification.weights.compared for reducer in self.fleet.reducers if reducer.verification.weights
        }


@pytest.mark.parametrize(("every", "expected"), [(0, [0] * 7), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 1, 2, 2, 2, 3, 3])])
def test_the_first_step_and_every_so_many(every: int, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    shown = Shown(every)
    with shown.fleet:
        for number, count in enumerate(expected):
            shown.step(number)
            assert shown.compared() == {count}
        shown.fleet.resume(7)
        shown.step(7)
        assert shown.compared() == {expected[-1] + bool(every)}
    assert not caplog.records


@pytest.mark.parametrize("odd", [0, 2])
def test_a_difference_is_said_once_with_the_first_tensor(odd: int, caplog: pytest.LogCaptureFixture) -> None:
    shown = Shown(2)
    with shown.fleet:
        for number in range(6):
            shown.step(number, odd if number > 2 else None)
    assert shown.compared() == {3}  # steps 0, 1 and 3, and no more
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "at the beginning of step 3, in 2 of 3 parameters, the first of them second" in text
    assert (
        ("rank 0 = " in text and "ranks 1, 2 = " in text)
        if odd == 0
        else ("ranks 0, 1 = " in text and "rank 2 = " in text)
    )
    assert "hvd.broadcast_parameters" in text and "docs/troubleshooting.md" in text


@pytest.mark.parametrize("words", ["", "In the job, rank 0 is rank 3."])
def test_a_warning_says_which_ranks_of_the_job_its_numbers_are(words: str, caplog: pytest.LogCaptureFixture) -> None:
    with Fleet(WORLD, TENSORS, "none", verify_every=1, hooks=Hooks(ranks_in_words=words)) as fleet:
        for reducer in fleet.reducers:
            reducer.verification.watch_weights()
        for number in range(2):
            for reducer in fleet.reducers:
                reducer.verification.take_weights(number, weights_of(reducer.rank, 1))
            fleet.step(random_grads(WORLD, TENSORS, number))
    [record] = caplog.records
    assert record.getMessage().endswith(f"appears only once. {words}" if words else "appears only once")


@pytest.mark.parametrize("lasts", [False, True])
def test_a_difference_at_the_start_has_to_last(lasts: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No step of the optimizer came before the first look, and weights may be those of one pass only."""
    shown = Shown(100)
    with shown.fleet:
        shown.step(0, odd=1)
        assert not caplog.records
        for number in (1, 2):
            shown.step(number, odd=1 if lasts else None)
    assert shown.compared() == {2}
    told = ["at the beginning of step 0, in 2 of 3" in record.getMessage() for record in caplog.records]
    assert told == [True] * lasts


def test_a_rank_that_has_not_looked_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """Whose gradients of a step were all sparse, say: nobody looks then."""
    shown = Shown(1)
    with shown.fleet:
        shown.step(0, silent=1)
        assert shown.compared() == {0}
        shown.step(1)
        assert shown.compared() == {1}
    assert not caplog.records


def test_layouts_and_dtypes_of_parameters() -> None:
    image = torch.randn(2, 3, 4, 5)
    for weight in (torch.tensor(2.0), torch.empty(0), image, torch.ones(3, dtype=torch.bfloat16)):
        shown = Weights(1, warns=False)
        shown.take(0, [weight.requires_grad_()])
        assert shown.hashes(0, 1).numel() == 1 and shown.hashes(0, 1).any()
    assert torch.equal(hash_of(image), hash_of(image.detach().to(memory_format=torch.channels_last)))
    assert not torch.equal(hash_of(image), hash_of(image.detach() + 1))
    single = torch.randn(1, 4)[:, 0]  # contiguous for torch, whatever its stride
    assert single.is_contiguous() and single.stride() == (4,)
    assert torch.equal(hash_of(single), hash_of(single.clone()))


def hash_of(weight: Tensor) -> Tensor:
    shown = Weights(1, warns=False)
    shown.take(0, [weight])
    return shown.hashes(0, 1)


def test_after_a_load_they_are_hashed_anew_though_the_step_is_the_same() -> None:
    shown, weight = Weights(100, warns=False), torch.ones(5)
    shown.take(0, [weight])
    before = shown.hashes(0, 1)
    shown.compare(0, [before, before], ["w"])
    shown.resume()
    shown.take(0, [weight + 1])
    assert not torch.equal(shown.hashes(0, 1), before)
