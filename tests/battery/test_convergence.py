"""A tiny problem, solved with every sample: what the ranks learn from compressed gradients is the same thing."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.battery.cases import each_case
from tests.support.local import Fleet, all_same, spec
from tests.support.samples import Sample

WORLD, STEPS, CLASSES, FEATURES, EXAMPLES = 4, 200, 6, 40, 60
TENSORS = [spec("bias", CLASSES), spec("weight", CLASSES, FEATURES)]
LR, MOMENTUM = 0.1, 0.5
#: What part of the uncompressed run's progress every sample has to make.
LEAST = 0.8


@lru_cache
def _data() -> list[tuple[Tensor, Tensor]]:
    """Return the examples of each rank: normal clouds, some of which are rare on some ranks."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(CLASSES, FEATURES, generator=generator) / 2
    found = []
    for rank in range(WORLD):
        share = torch.ones(CLASSES).index_fill(0, torch.tensor([rank % CLASSES]), 4.0)
        labels = torch.multinomial(share, EXAMPLES, replacement=True, generator=generator)
        found.append((centres[labels] + torch.randn(EXAMPLES, FEATURES, generator=generator), labels))
    return found


def _loss_and_grads(weight: Tensor, bias: Tensor, rank: int) -> tuple[float, dict[str, Tensor]]:
    """Return the cross entropy of one rank's examples, and its gradient by hand."""
    inputs, labels = _data()[rank]
    logs = (inputs @ weight.T + bias).log_softmax(1)
    wrong = (logs.exp() - torch.nn.functional.one_hot(labels, CLASSES)) / EXAMPLES
    loss = float(-logs.gather(1, labels[:, None]).mean())
    return loss, {"bias": wrong.sum(0), "weight": wrong.T @ inputs}


def _train(fleet: Fleet, ranks: int = WORLD) -> tuple[float, float]:
    """Return the mean loss over all ranks before and at the end of training with the gradients of some of them."""
    parameters = {t.name: torch.zeros(t.shape) for t in TENSORS}
    momenta = {t.name: torch.zeros(t.shape) for t in TENSORS}

    losses = []
    for _ in range(STEPS):
        looks = [_loss_and_grads(parameters["weight"], parameters["bias"], rank) for rank in range(WORLD)]
        losses.append(sum(loss for loss, _ in looks) / WORLD)
        results = fleet.step([looks[rank % ranks][1] for rank in range(WORLD)])
        assert all_same(results)
        for name, parameter in parameters.items():
            momenta[name].mul_(MOMENTUM).add_(results[0][name])
            parameter.sub_(momenta[name], alpha=LR)
    return losses[0], losses[-1]


@lru_cache
def _uncompressed() -> tuple[float, float]:
    with Fleet(WORLD, TENSORS, "none") as fleet:
        return _train(fleet)


@pytest.mark.slow
@each_case()
def test_every_sample_learns(case: Sample) -> None:
    """The loss comes down by at least 80 % of what it does without compression."""
    with case.fleet(WORLD, TENSORS) as fleet:
        first, last = _train(fleet)
    before, after = _uncompressed()
    assert first == before and after < 0.3 * before
    assert first - last >= LEAST * (before - after)


def test_one_bit_learns() -> None:
    with Fleet(WORLD, TENSORS, "marsit") as fleet:
        first, last = _train(fleet)
    before, after = _uncompressed()
    assert first == before and first - last >= LEAST * (before - after)


@pytest.mark.slow
def test_the_problem_needs_all_ranks() -> None:
    """The control: with the gradients of one rank alone there is less progress than is asked for."""
    with Fleet(WORLD, TENSORS, "none") as fleet:
        first, last = _train(fleet, ranks=1)
    before, after = _uncompressed()
    assert first - last < LEAST * (before - after)
