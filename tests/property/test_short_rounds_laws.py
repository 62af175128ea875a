"""The first exact rounds send numbers of 8 bits where nobody asked for anything else: right on average, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.codecs.by_step import by_step
from horovod_compress.engine.bucket.rounds import Next
from horovod_compress.engine.methods import per_layer
from tests.property.test_held_laws import Team
from tests.support.local import Fleet, all_same, random_grads, spec

TENSORS = [spec("weight", 24, 64), spec("bias", 48)]
SHORT, LATER = "natural", "bf16"


def labels(fleet: Fleet) -> list[str]:
    """Return by which codec each bucket is exchanged in the coming step."""
    reducer = fleet.reducers[0]
    return [state.round(reducer.next_step()).codec.name for state in reducer.buckets]


def team(method: Any = "marsit", world: int = 2, **options: Any) -> Team:
    """Return ranks that choose their exact rounds themselves."""
    warmup: Any = None
    return Team(method, world, warmup, warmup, tensors=TENSORS, options={"total_steps": 60} | options)


def exchanged(team: Team, steps: int) -> list[str]:
    """Return what the rounds of the first bucket were."""
    found = []
    for step in range(steps):
        team.step(random_grads(team.fleet.world, TENSORS, seed=step))
        state = team.fleet.reducers[0].buckets[0]
        found.append(state.round(step).codec.name)
    return found


@pytest.mark.parametrize("exchange", ["auto", "fold", "ring", "torus", "torus:2"])
def test_they_are_short_where_owners_average(exchange: str) -> None:
    """Of 60 steps, 6 are exact at the start, and the next one is step 11. A ring adds bfloat16, as later rounds do."""
    with team(world=4, exchange=exchange) as ranks:
        found = exchanged(ranks, 13)
    first = SHORT if exchange in ("auto", "fold") else LATER
    assert found == [first] * 6 + ["marsit"] * 5 + [LATER, "marsit"]


@pytest.mark.parametrize(
    ("method", "options", "asked"),
    [
        ("signsgd", {}, 0),  # the control: nobody chose a number
        ("marsit", {"warmup_steps": 3}, 3),
        (by_step({0: "none", 4: "marsit"}), {}, 4),
        (by_step({0: "none", 4: "marsit"}), {"warmup_steps": 2}, 4),
        (by_step({0: "none", 2: by_step({0: "none", 4: "marsit"})}), {}, 4),
    ],
)
def test_rounds_that_somebody_asked_for_are_not(method: Any, options: dict[str, Any], asked: int) -> None:
    """Those behind them, which the second moment needs, are."""
    with team(method, **options) as ranks:
        assert exchanged(ranks, 6) == [LATER] * asked + [SHORT] * (6 - asked)


def test_rounds_that_attach_asks_for_are_not() -> None:
    with Team("marsit", 2, 4, 5, tensors=TENSORS) as ranks:
        assert exchanged(ranks, 6) == [LATER] * 5 + ["marsit"]


def test_their_second_moment_is_that_of_bfloat16() -> None:
    """Within what the roundings add: an element's square is at most 1/80 for each, and its mean over rounds is less."""
    found = []
    for exchange in ("fold", "ring"):
        with team(exchange=exchange) as ranks:
            exchanged(ranks, 7)
            found.append(ranks.moment("weight").moment.double())
    short, exact = found
    assert not torch.equal(short, exact)
    assert float(short.mean() / exact.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(((short - exact) / exact).abs().median()) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_only_float64_is_left_as_it_is(dtype: str) -> None:
    tensors = [spec("weight", 24, 64, dtype=getattr(torch, dtype))]
    with Fleet(2, tensors, "marsit", verify_every=0) as fleet:
        for kind in ("first", "short"):
            for reducer in fleet.reducers:
                assert reducer.wait_idle(5.0)
                reducer.buckets.choose(Next(kind))  # type: ignore[arg-type]
            assert labels(fleet) == ["none" if dtype == "float64" else SHORT]
            assert all_same(fleet.step(random_grads(2, tensors)))


def _stage_of(step: int) -> str:
    return "early" if step < 2 else "late"


def test_a_bucket_whose_method_sends_numbers_keeps_them() -> None:
    """Beside momentum: small tensors, patterns, and the plain beginning of a schedule by step."""
    small = {"min_elements": 100}
    cases: list[tuple[Any, dict[str, Any], list[str], int]] = [
        ("marsit", small, [SHORT, "none"], 0),
        (per_layer({"weight": "marsit", "*": "none"}), {"schedule": "layerwise"}, ["none", SHORT], 0),
        (by_step({0: "none", 2: "marsit"}), {"schedule": "single"}, ["full precision"], 0),
        (by_step({0: "none", 2: "marsit"}), {"schedule": "single"}, [SHORT], 2),
        (by_step({0: "none", 2: "topk", 4: "marsit"}), {"schedule": "single"}, ["full precision"], 0),
        (by_step({0: "none", 2: "topk", 4: "marsit"}), {"schedule": "single"}, [SHORT], 2),
        (by_step(_stage_of, {"early": "none", "late": "marsit"}), {"schedule": "single"}, ["full precision"], 1),
        (by_step(_stage_of, {"early": "none", "late": "marsit"}), {"schedule": "single"}, [SHORT], 2),
    ]
    for method, options, due, at in cases:
        with Fleet(2, TENSORS, method, verify_every=0, **options) as fleet:
            for step in range(at + 1):
                for reducer in fleet.reducers:
                    assert reducer.wait_idle(5.0)
                    reducer.buckets.choose(Next("short"))
                if step == at:
                    assert sorted(labels(fleet)) == sorted(due)
                assert all_same(fleet.step(random_grads(2, TENSORS, seed=step)))


def test_norms_are_measured_behind_them_and_not_in_them() -> None:
    """Results are the mean, so nothing is to be matched; the first coded step after them measures itself."""
    with Fleet(2, TENSORS, "marsit", full_precision_every=0, verify_every=0) as fleet:
        for step in range(12):
            for reducer in fleet.reducers:
                assert reducer.wait_idle(5.0)
                reducer.norms.follow(["weight", "bias"])
                reducer.buckets.choose(Next("short" if step < 8 else "method"))
                reducer.norms.begin(step)
            grads = random_grads(2, TENSORS, seed=step)
            (result, _) = fleet.step(grads)
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
            norms, metrics = fleet.reducers[0].norms, fleet.reducers[0].metrics
            if step < 8:
                assert norms.ratio.value is None and not norms._wait and not metrics.bytes_compressed
                assert metrics.exact_steps == step + 1
                continue
            mean = {name: (grads[0][name] + grads[1][name]) / 2 for name in result}
            size, due = (torch.cat([part.flatten() for part in each.values()]).norm() for each in (result, mean))
            assert metrics.exact_steps == 8 and float(size / due) == pytest.approx(1.0, abs=0.2)


def test_small_elements_beside_a_huge_one_are_right_on_average_and_delivered() -> None:
    """Below 2^-31 of the largest in its bucket, an element is 0 or that, at random; the next exact round sends all."""
    weight = torch.full((24, 64), 2.0**-33)
    weight[0, 0] = 1.0
    grads = [{"weight": weight.clone(), "bias": torch.ones(48)} for _ in range(2)]
    with team() as ranks:
        start, found = ranks.weights()["weight"], []
        for _ in range(20):
            results = ranks.step([{name: grad.clone() for name, grad in mine.items()} for mine in grads])
            found.append(float(results[0]["weight"].view(-1)[1:].mean()) * 2.0**33)
        assert sum(found[:6]) / 6 == pytest.approx(1.0, abs=0.2)
        assert bool((ranks.weights()["weight"] != start).all())
