"""Correlated rounding: each rank's number is unbiased, errors cancel, and never add up to more than a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import check_world
from horovod_compress.codecs.shared import rounding
from horovod_compress.errors import ConfigError
from horovod_compress.ops.keys import DITHER, Key
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import each_value, slow

LEVELS = 100


def codes(x: Tensor, key: Key) -> Tensor:
    """Return numbers below LEVELS rounded to whole ones."""
    found = torch.empty(x.numel(), dtype=torch.uint8)
    norm = torch.tensor([float(LEVELS)])
    ops.uniform_encode_all([x], [norm], [x.numel()], [found], key, bits=8, levels=LEVELS)
    return found.view(torch.int8).double()


def sums(ranks: list[Tensor], step: int, correlated: bool = True) -> Tensor:
    """Return the sums over the ranks of their rounded numbers."""
    keys = [rounding.key_of(Key(7, step, 0, rank), len(ranks), correlated) for rank in range(len(ranks))]
    return torch.stack([codes(x, key) for x, key in zip(ranks, keys, strict=True)]).sum(0)


def variance(ranks: list[Tensor], steps: int, correlated: bool = True) -> float:
    """Return the mean squared error of the sums, in levels."""
    exact = torch.stack(ranks).double().sum(0)
    found = [((sums(ranks, step, correlated) - exact) ** 2).mean() for step in range(steps)]
    return float(torch.stack(found).mean())


def fractions(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


# ---- a rank alone ----


def test_places_are_a_new_order_in_every_step_and_bucket() -> None:
    keys = [Key(1, step, bucket, 0) for step in range(40) for bucket in range(2)]
    found = [tuple(rounding._order(key, 5)) for key in keys]
    assert all(sorted(order) == list(range(5)) for order in found) and len(set(found)) > 40
    seen = {(rank, order[rank]) for order in found for rank in range(5)}
    assert len(seen) == 25  # every rank comes to every place


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_rank_alone_is_unbiased(world: int) -> None:
    """Within 5 standard errors; a rank that always had its own part of [0, 1) would not be."""
    x, steps = torch.full((4096,), 0.3), 40
    for rank in range(world):
        keys = [rounding.key_of(Key(3, step, 0, rank), world, True) for step in range(steps)]
        mean = torch.stack([codes(x, key).mean() for key in keys]).mean()
        limit = 5 * (0.3 * 0.7 / (4096 * steps)) ** 0.5
        assert abs(float(mean) - 0.3) < limit
    places = [(place + 0.5) / 4 for place in range(4)]
    assert abs(sum(0.3 + u >= 1 for u in places) / 4 - 0.3) > limit


# ---- together ----


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_the_variance_of_equal_numbers_is_that_of_theory(world: int) -> None:
    """frac(M f) (1 - frac(M f)) for the sum, where independent ones have M f (1 - f): M times as much on average."""
    for f in (0.1, 0.77):
        rest = world * f % 1
        equal = [torch.full((20_000,), f)] * world
        assert variance(equal, 4) == pytest.approx(rest * (1 - rest), rel=0.06)
        assert variance(equal, 4, correlated=False) == pytest.approx(world * f * (1 - f), rel=0.06)
    spread = [fractions(20_000, 1)] * world
    ratio = variance(spread, 4, correlated=False) / variance(spread, 4)
    assert ratio == pytest.approx(world, rel=0.06)


@pytest.mark.parametrize("world", [2, 4])
def test_numbers_that_have_nothing_in_common_gain_too(world: int) -> None:
    """(M + 1) / 12 instead of M / 6: with independent fractions only the mean of the ranks' places cancels."""
    apart = [fractions(20_000, rank) for rank in range(world)]
    assert variance(apart, 8) == pytest.approx((world + 1) / 12, rel=0.04)
    assert variance(apart, 8, correlated=False) == pytest.approx(world / 6, rel=0.04)


def _hard(world: int) -> list[list[Tensor]]:
    """Return numbers that may be rounded alike: opposite ones, and halves on one half of the ranks."""
    x = fractions(500, 3)
    halves = [torch.full((500,), 0.5 if rank < world // 2 else 1.0) for rank in range(world)]
    return [[x if rank % 2 else -x for rank in range(world)], halves, [x / (rank + 1) for rank in range(world)]]


def _most(ranks: list[Tensor]) -> float:
    """Return the variance of independent roundings, and 1/4."""
    parts = torch.stack(ranks).double() % 1
    return float((parts * (1 - parts)).sum(0).mean()) + 0.25


@pytest.mark.parametrize("world", [2, 3, *slow(16)])
def test_no_numbers_lose_more_than_a_quarter_of_a_level(world: int) -> None:
    for ranks in _hard(world):
        assert variance(ranks, 400) <= 1.05 * _most(ranks)


def test_that_takes_a_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: ranks side by side have nearly the same numbers, and round the same halves alike."""
    monkeypatch.setattr(rounding, "_order", lambda key, world: list(range(world)))
    halves = _hard(16)[1]
    assert variance(halves, 400) > 2 * _most(halves)


# ---- through the engine ----

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "global_qsgd": ("global_qsgd", {"bits": 8, "block": 256}),
    "levels": ("global_qsgd", {"bits": 8, "block": 256, "levels": 25}),
    "terngrad": ("terngrad", {"bits": 8, "clip": 0}),
}


def _step_of(form: str, x: Tensor, world: int) -> Tensor:
    """Return the distance of two levels for each element."""
    if form == "terngrad":
        return x.abs().max().expand(x.numel())
    levels = 25 if form == "levels" else 127 // world
    return torch.cat([block.abs().max().expand(block.numel()) / levels for block in x.split(256)])


@each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("exchange", ["auto", "ring", "fold", "torus"])
def test_equal_gradients_are_off_by_a_share_of_a_level(form: str, world: int, exchange: str) -> None:
    """At most a level divided by M, in means and in sums; independent roundings are off by more."""
    (method, options), x = FORMS[form], one_tensor(1, 1000, seed=2)[0]
    if form == "levels":
        exchange = "auto"
    worst = {}
    for kind in ("correlated", "independent"):
        options = options | {"rounding": kind, "exchange": exchange}
        with Fleet(world, [spec("w", 1000)], method, **options) as fleet:
            for scale in (1.0, float(world)):
                results = fleet.step([{"w": x}] * world, scale)
                assert all_same(results)
                error = (results[0]["w"] / scale - x).abs() / _step_of(form, x, world)
                worst[kind] = max(worst.get(kind, 0.0), float(error.max()) * world)
    assert worst["correlated"] <= 1.001
    assert worst["independent"] > 1.1 or world == 1


def test_hosts_are_the_ranks_of_a_hierarchical_exchange() -> None:
    x = one_tensor(1, 1000, seed=2)[0]
    for hosts, world in ((2, 4), (3, 6)):
        with Fleet(
            world, [spec("w", 1000)], "global_qsgd", bits=8, block=256, rounding="correlated", hosts=hosts,
            exchange="hierarchical",
        ) as fleet:  # fmt: skip
            results = fleet.step([{"w": x}] * world)
        assert all_same(results)
        error = (results[0]["w"] - x).abs() * hosts
        # Scales are those of blocks of a share: no larger than that of all.
        assert bool((error <= 1.001 * x.abs().max() / (127 // hosts)).all())


def _loss(grads: list[Tensor], **options: Any) -> float:
    """Return how many times the squared error of qsgd is less with correlated rounding."""
    mean, errors = torch.stack(grads).double().mean(0), []
    for kind in ("independent", "correlated"):
        with Fleet(4, [spec("w", mean.numel())], "qsgd", bits=4, block=64, rounding=kind, **options) as fleet:
            found = torch.stack([fleet.step([{"w": grad} for grad in grads])[0]["w"] for _ in range(10)])
        errors.append(float((found - mean).square().mean()))
    return errors[0] / errors[1]


def test_qsgd_gains_as_far_as_its_owner_lets_it() -> None:
    """Gathered codes gain all of it. An owner rounds the mean to levels again: of equal gradients to what they were."""
    equal, apart = one_tensor(1, 6000, seed=4) * 4, one_tensor(4, 6000, seed=4)
    assert _loss(equal, coding="elias") == pytest.approx(4, rel=0.1)
    assert _loss(equal) == pytest.approx(1, rel=0.05)
    assert 1.15 < _loss(apart) < _loss(apart, coding="elias")


# ---- refusals ----


def test_what_makes_no_sense_is_refused() -> None:
    for method, options in (
        ("global_qsgd", {"dithering": "exponential", "rounding": "correlated"}),
        ("global_qsgd", {"rounding": "nearest"}),
        ("terngrad", {"rounding": "even"}),
        ("qsgd", {"rounding": "together"}),
    ):
        with pytest.raises(ConfigError, match="rounding"):
            registry.create(method, **options)
    for world in (1, 5):
        check_world(registry.create("global_qsgd", rounding="correlated"), world)


def test_a_step_with_other_roundings_has_other_results() -> None:
    """The control of all that is equal: the option matters from the second rank on."""
    grads, tensors = random_grads(2, [spec("w", 500)], seed=1), [spec("w", 500)]
    found = {}
    for kind in ("correlated", "independent"):
        with Fleet(2, tensors, "qsgd", bits=4, rounding=kind) as fleet:
            found[kind] = fleet.step(grads)[0]["w"]
    assert not torch.equal(*found.values())
    assert rounding.key_of(Key(0, 1, 2, 3), 4, False) == Key(0, 1, 2, 3, purpose=DITHER)
