"""Marsit's laws, through the real reducer: unbiased, unanimous, conserving; ring and fold alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.chance import z
from tests.support.local import Fleet, all_same, one_tensor, random_grads, same_bits, spec
from tests.support.marks import each_value, slow

_PLAIN = {"merge": "sampled", "full_precision_every": 0, "compensation": "none", "step_size": 1.0, "zeros": "random"}


def _samples(world: int, exchange: str, coordinates: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (signs by rank and coordinate, results by sample and coordinate).

    A tensor holds many copies of the coordinates: each copy is a sample.
    """
    copies = 64
    signs = torch.stack(one_tensor(world, coordinates, seed=100 + seed)).sign()
    grads = [{"w": row.repeat(copies)} for row in signs]
    found = []
    with Fleet(world, [spec("w", copies * coordinates)], exchange=exchange, seed=seed, **_PLAIN) as fleet:
        for _ in range(steps):
            results = fleet.step(grads)
            assert all_same(results)
            found.append(results[0]["w"].view(copies, coordinates))
    return signs, torch.cat(found).double()


@pytest.mark.parametrize(
    ("world", "exchange"),
    [
        *((2, "ring"), (3, "fold"), (5, "ring"), (5, "fold"), (6, "torus")),
        *slow((2, "fold"), (3, "ring"), (4, "ring"), (4, "fold"), (4, "torus")),
    ],
)
def test_unbiased_with_the_promised_variance(world: int, exchange: str) -> None:
    signs, samples = _samples(world, exchange, coordinates=250, steps=40)
    assert set(samples.unique().tolist()) == {-1.0, 1.0}
    mean = signs.double().mean(0)
    variance = 1 - mean**2
    number = len(samples)
    uneven = variance > 0
    error = (samples.mean(0) - mean)[uneven] / (variance[uneven] / number).sqrt()
    assert int(uneven.sum()) > 50
    assert float(error.abs().max()) < z(int(uneven.sum()))
    # Unanimous coordinates are deterministic.
    assert torch.equal(samples[:, ~uneven], mean[~uneven].expand(number, -1))
    # The variance of a sum over coordinates is the sum of variances only if they are independent.
    sums = samples.sum(1)
    ratio = float(sums.var() / variance.sum())
    assert abs(ratio - 1) < z(1) * math.sqrt(2 / number)


def test_the_bound_on_the_bias_is_tight_enough() -> None:
    """A merge that took the wrong weight, 1/2 for every hop, would be seen at once."""
    number, right, wrong = 64 * 40, 1 / 3, 1 / 4
    assert abs(wrong - right) / math.sqrt(right * (1 - right) / number) > z(250)


@pytest.mark.parametrize(("world", "other"), [(3, "fold"), (4, "torus"), *slow((4, "fold"), (6, "torus"))])
def test_collectives_have_the_same_distribution(world: int, other: str) -> None:
    """Chi-square over all sign patterns: the fraction of ones is (ranks with bit 1) / M in both."""
    coordinates = max(256, 16 << world)  # so that every pattern is there
    signs, ring = _samples(world, "ring", coordinates, 40, seed=1)
    _, second = _samples(world, other, coordinates, 40, seed=1)
    assert not torch.equal(ring, second)  # another order of draws, so these are two samples
    pattern = ((signs > 0).long() * (2 ** torch.arange(world))[:, None]).sum(0)
    statistic, freedom = 0.0, 0
    for code in range(1, 2**world - 1):
        chosen = pattern == code
        trials = int(chosen.sum()) * len(ring)
        ones = [int((samples[:, chosen] > 0).sum()) for samples in (ring, second)]
        p = code.bit_count() / world
        statistic += sum((count - trials * p) ** 2 / (trials * p * (1 - p)) for count in ones)
        freedom += 2
    assert freedom == 2 * (2**world - 2)
    # Wilson and Hilferty: the cube root of chi-square over its freedom is about normal.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(normal) < 4.5, statistic


def test_zero_gets_a_fair_bit_and_positive_on_request() -> None:
    zeros = [{"w": torch.zeros(64 * 500)} for _ in range(3)]
    with Fleet(3, [spec("w", 64 * 500)], **_PLAIN) as fleet:
        mean = float(fleet.step(zeros)[0]["w"].mean())
        assert abs(mean) < z(1) / math.sqrt(64 * 500)
    with Fleet(3, [spec("w", 64 * 500)], **_PLAIN | {"zeros": "positive"}) as fleet:
        assert float(fleet.step(zeros)[0]["w"].min()) == 1.0


@each_value
@pytest.mark.parametrize("merge", ["shaped", "sampled"])
@pytest.mark.parametrize("step_size", ["row", "tensor", 0.01])
@pytest.mark.parametrize("exchange", ["ring", "fold"])
@pytest.mark.parametrize("every", [0, 4])
def test_conservation(every: int, exchange: str, step_size: str | float, merge: str) -> None:
    """x0 - xt = sum of mean gradients - mean residual, with global compensation, at every step."""
    world, tensors = 3, [spec("a", 20, 30, dtype=torch.float64), spec("b", 77, dtype=torch.float64)]
    options = dict(
        full_precision_every=every, compensation="global", step_size=step_size, exchange=exchange, merge=merge
    )
    moved = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in tensors}
    given = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in tensors}
    with Fleet(world, tensors, **options) as fleet:
        for number in range(10):
            grads = random_grads(world, tensors, seed=number)
            results = fleet.step(grads)
            residuals = fleet.residuals()
            for t in tensors:
                moved[t.name] += results[0][t.name]
                given[t.name] += sum(mine[t.name] for mine in grads) / world
                mean = sum(mine[t.name] for mine in residuals).view(t.shape) / world
                assert float((given[t.name] - mean - moved[t.name]).abs().max()) < 1e-12
                full = every and number % every == 0
                assert full == (float(mean.abs().max()) == 0.0)


@pytest.mark.parametrize("compensation", ["global", "own"])
def test_a_full_precision_round_empties_every_residual(compensation: str) -> None:
    tensors = [spec("a", 1000)]
    with Fleet(2, tensors, full_precision_every=3, compensation=compensation) as fleet:
        for number in range(7):
            fleet.step(random_grads(2, tensors, seed=number))
            empty = all(not bool(mine["a"].any()) for mine in fleet.residuals())
            assert empty == (number % 3 == 0), number


def _dyadic(world: int, count: int, seed: int) -> list[Tensor]:
    """Multiples of 1/64 of moderate size: sums and differences of these are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-512, 512, (count,), generator=generator).float() / 64 for _ in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_own_sign_identity(world: int) -> None:
    """sent + residual == offered, exactly, where a rank sends its own sign times the step."""
    options = dict(full_precision_every=0, compensation="own", step_size=0.5, zeros="positive", residual_decay=1.0)
    with Fleet(world, [spec("a", 3000)], **options) as fleet:
        before = [{"a": torch.zeros(3000)} for _ in range(world)]
        for number in range(4):
            grads = _dyadic(world, 3000, number)
            results = fleet.step([{"a": grad} for grad in grads])
            after = fleet.residuals()
            for rank in range(world):
                offered = grads[rank] + before[rank]["a"]
                sent = torch.where(offered >= 0, 0.5, -0.5)
                assert torch.equal(sent + after[rank]["a"], offered)
                if world == 1:
                    assert torch.equal(results[0]["a"], sent)
            before = after


@pytest.mark.parametrize("world", [2, 3])
def test_global_identity(world: int) -> None:
    """result + residual == offered, exactly, on every rank."""
    options = dict(full_precision_every=0, compensation="global", step_size=0.5)
    with Fleet(world, [spec("a", 3000)], **options) as fleet:
        before = fleet.residuals()
        for number in range(4):
            grads = _dyadic(world, 3000, number)
            results = fleet.step([{"a": grad} for grad in grads])
            after = fleet.residuals()
            for rank in range(world):
                assert torch.equal(results[rank]["a"] + after[rank]["a"], grads[rank] + before[rank]["a"])
            before = after


def test_the_measured_step_is_the_mean_magnitude_over_ranks() -> None:
    tensors = [spec("a", 16, 32, dtype=torch.float64)]
    grads = random_grads(3, tensors)
    magnitudes = torch.stack([mine["a"].abs() for mine in grads]).mean(0)
    for step_size, rows in (("tensor", 16), ("row", 2)):  # rows of 32 are joined until they hold 64
        expected = magnitudes.view(16 // rows, -1).mean(1)
        options = {"step_size": step_size, "step_scale": 1.0, "full_precision_every": 0, "levels": 2}
        with Fleet(3, tensors, **options) as fleet:
            got = fleet.step(grads)[0]["a"].abs().view(16 // rows, -1)
        assert torch.equal(got, got[:, :1].expand_as(got))
        torch.testing.assert_close(got[:, 0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["marsit", "none", "bf16"])
def test_sum_is_the_mean_times_the_world(method: str) -> None:
    tensors = [spec("a", 500), spec("b", 7, 9)]
    options = dict(full_precision_every=2) if method == "marsit" else {}
    for given_late in (True, False):
        with Fleet(4, tensors, method, **options) as mean, Fleet(4, tensors, method, **options) as total:
            for number in range(4):
                grads = random_grads(4, tensors, seed=number)
                if not given_late:
                    for reducer in total.reducers:
                        reducer.result_scale = 4.0
                sums = total.step(grads, result_scale=4.0 if given_late else None)
                means = mean.step(grads)
                for t in tensors:
                    assert torch.equal(sums[0][t.name], 4 * means[0][t.name])
            assert all(
                same_bits(a[name], b[name])
                for a, b in zip(mean.residuals(), total.residuals(), strict=True)
                for name in a
            )


def test_runs_repeat_and_seeds_and_steps_differ() -> None:
    tensors = [spec("a", 4096)]
    grads = random_grads(2, tensors)

    def run(seed: int) -> list[Tensor]:
        with Fleet(2, tensors, seed=seed, **_PLAIN) as fleet:
            return [fleet.step(grads)[0]["a"] for _ in range(2)]

    first, again, other = run(5), run(5), run(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize("method", ["none", "fp16", "bf16", "marsit", "global_qsgd"])
def test_a_gain_that_is_known_late_counts_from_the_next_step_on(method: str) -> None:
    """Where no optimizer is found, a token tells of op=Sum; three ranks make a mean that is rounded once more then."""
    tensors = [spec("a", 500, dtype=torch.bfloat16), spec("b", 7, 90)]
    options = dict(full_precision_every=2) if method == "marsit" else {}
    with Fleet(3, tensors, method, **options) as late, Fleet(3, tensors, method, **options) as early:
        for reducer in early.reducers:
            reducer.result_scale = 3.0
        for number in range(3):
            grads = random_grads(3, tensors, seed=number)
            found, expected = late.step(grads, result_scale=3.0), early.step(grads)
            for x, y in zip(found, expected, strict=True):
                if number:
                    assert all(same_bits(x[name], y[name]) for name in x)
                else:
                    assert all(torch.allclose(x[name], y[name], rtol=2 * torch.finfo(x[name].dtype).eps) for name in x)
