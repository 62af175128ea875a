"""What a spike leaves in residuals is clipped as a program clips its result, of several optimizers too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.codecs.by_step import method
from horovod_compress.engine.kept import norm_of
from horovod_compress.engine.methods import per_layer
from horovod_compress.engine.optimizer.matching import Matching
from tests.support.local import Fleet, random_grads, spec

SHAPES = [spec("a", 40, 100), spec("b", 333), spec("c", 64, 64)]
SPIKE = 30
METHODS: list[Any] = [("topk", {"density": 0.05}), ("sketch_fusion", {"error_feedback": "sketch", "momentum": 0.5})]


class Job:
    """Ranks whose parameters two optimizers share.

    Args:
        shared: the names of each one's.
    """

    def __init__(self, method: Any, options: dict[str, Any], shared: Sequence[str] = ("ab", "c")) -> None:
        self.ranks = Fleet(2, SHAPES, method, schedule="layerwise", **options)
        self.models = [{tensor.name: nn.Parameter(torch.zeros(tensor.shape)) for tensor in SHAPES} for _ in range(2)]
        self.made, self.shared = [], shared
        for reducer, model in zip(self.ranks.reducers, self.models, strict=True):
            optimizers = [torch.optim.SGD([model[name] for name in names], lr=0.1) for names in shared]
            self.made.append([Matching(one, reducer, model, lambda: 1.0) for one in optimizers])

    def waiting(self) -> float:
        """Return the norm of all that the first rank keeps."""
        kept = self.ranks.reducers[0].kept
        states = (tensor for each in kept.states().values() for tensor in each.values())
        return norm_of([*states, *kept.tables().values()])

    def step(
        self,
        number: int,
        uses: Sequence[Callable[[list[nn.Parameter]], bool]],
        times: float = 1.0,
        *,
        spoilt: str | None = None,
    ) -> None:
        """Train for a step; what each optimizer's program does with its gradients says whether it makes one.

        Args:
            spoilt: whose gradient is not finite, on the first rank.
        """
        for mine in self.made:
            for one in mine:
                one.begin()
        for reducer in self.ranks.reducers:
            reducer.norms.begin(reducer.next_step())
        grads = random_grads(2, SHAPES, seed=number, scale=times)
        if spoilt:
            grads[0][spoilt].view(-1)[0] = float("nan")
        results = self.ranks.step(grads)
        for model, result, mine in zip(self.models, results, self.made, strict=True):
            for name, parameter in model.items():
                parameter.grad = result[name]
            for one, names, use in zip(mine, self.shared, uses, strict=True):
                if use([model[name] for name in names]):
                    one.take_out()
                for name in names if use is not adds_up else ():
                    model[name].grad = None


def clips(parameters: list[nn.Parameter]) -> bool:
    nn.utils.clip_grad_norm_(parameters, 50.0)
    return True


def takes(parameters: list[nn.Parameter]) -> bool:
    return True


def skips(parameters: list[nn.Parameter]) -> bool:
    return False


def adds_up(parameters: list[nn.Parameter]) -> bool:
    return False


def spoils(parameters: list[nn.Parameter]) -> bool:
    assert parameters[0].grad is not None
    parameters[0].grad.view(-1)[0] = float("nan")
    return True


def check_what_waits(job: Job, uses: Sequence[Callable[[list[nn.Parameter]], bool]], clipped: bool) -> None:
    """Let a spike come in a step of which optimizers make such use, and see what waits behind it."""
    with job.ranks:
        for number in range(SPIKE):
            job.step(number, (clips, clips))
        before = job.waiting()
        job.step(SPIKE, uses, 1000.0)
        job.step(SPIKE + 1, (takes, takes))
        if clipped:
            assert before / 3 < job.waiting() < 3 * before
        else:
            assert job.waiting() > 30 * before


@pytest.mark.parametrize(
    ("uses", "clipped"),
    [
        ((clips, clips), True),
        ((skips, skips), True),
        ((clips, skips), True),
        ((takes, takes), False),
        ((takes, clips), False),
        ((spoils, clips), False),
    ],
)
@pytest.mark.parametrize(("method", "options"), METHODS, ids=["topk", "sketch_fusion"])
def test_what_waits_is_clipped_with_results(
    method: str, options: dict[str, Any], uses: Sequence[Callable[[list[nn.Parameter]], bool]], clipped: bool
) -> None:
    job = Job(method, options)
    check_what_waits(job, uses, clipped)


def test_a_spike_that_is_skipped_as_a_small_tensor_overflows_does_not_wait() -> None:
    job = Job("topk", {"density": 0.05, "min_elements": 1000})  # "b" is not compressed
    with job.ranks:
        for number in range(SPIKE):
            job.step(number, (clips, clips))
        before = job.waiting()
        job.step(SPIKE, (skips, skips), 1000.0, spoilt="b")
        job.step(SPIKE + 1, (takes, takes))
        assert before / 3 < job.waiting() < 3 * before


USES = [((clips, skips), True), ((takes, skips), False), ((takes, takes), False), ((adds_up, skips), False)]


@pytest.mark.parametrize(("uses", "clipped"), USES)
@pytest.mark.parametrize("emptied", [False, True])
def test_an_optimizer_without_residuals_that_skips_says_nothing_of_what_waits(
    uses: Sequence[Callable[[list[nn.Parameter]], bool]], clipped: bool, emptied: bool
) -> None:
    """Its parameters are not compressed, or the spike's round is an exact one of theirs."""
    few = method("topk", density=0.05)
    if emptied:
        job = Job(per_layer({"c": method("marsit", full_precision_every=10), "*": few}), {})
    else:
        job = Job("topk", {"density": 0.05, "min_elements": 1000}, ("ac", "b"))
    check_what_waits(job, uses, clipped)
