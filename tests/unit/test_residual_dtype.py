"""Residuals of 16 bits through whole rounds: what is kept, sent, moved, dealt out, and refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from horovod_compress.codecs.by_step import by_step, method
from horovod_compress.engine.kept import norm_of
from horovod_compress.engine.methods import per_layer
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import rounded
from horovod_compress.errors import ConfigError, StateError
from horovod_compress.schedule.plan import Plan
from tests.support.local import Fleet, all_same, random_grads, spec

WORLD = 2
TENSORS = [spec("a", 7, 33), spec("b", 65)]
SHORT = {"residual_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "options"),
    [("marsit", {"full_precision_every": 3}), ("marsit", {"merge": "sampled", "full_precision_every": 3})],
)
def test_a_full_precision_round_sends_all_that_waits(name: str, options: dict[str, object]) -> None:
    with Fleet(WORLD, TENSORS, name, **SHORT, **options) as fleet:
        for step in range(7):
            grads = random_grads(WORLD, TENSORS, seed=step)
            waits = [reducer.kept.residuals() for reducer in fleet.reducers]
            assert all(kept.dtype is torch.bfloat16 for mine in waits for kept in mine.values())
            means = {
                t.name: torch.stack(
                    [g[t.name].double() + w[t.name].double().view(t.shape) for g, w in zip(grads, waits, strict=True)]
                ).mean(0)
                for t in TENSORS
            }
            results = fleet.step(grads)
            assert all_same(results)
            sent = all(torch.allclose(results[0][n].double(), mean, atol=1e-6) for n, mean in means.items())
            emptied = not any(kept.any() for mine in waits for kept in mine.values())
            assert sent == emptied == (step % 3 == 0)


def test_a_full_precision_round_in_bfloat16_sends_half_of_the_bytes_and_all_that_waits() -> None:
    """Rounded where a rank sends and where an owner adds, each time by 2^-8 of a number at most, and nowhere else."""
    options: dict[str, Any] = {"full_precision_every": 3, "full_precision_dtype": "bfloat16"}
    with Fleet(WORLD, TENSORS, "marsit", **options) as fleet:
        for step in range(4):
            grads = random_grads(WORLD, TENSORS, seed=step)
            waits = [reducer.kept.residuals() for reducer in fleet.reducers]
            owed = {
                t.name: [g[t.name] + w[t.name].view(t.shape) for g, w in zip(grads, waits, strict=True)]
                for t in TENSORS
            }
            before = fleet.reducers[0].metrics.bytes_sent
            results = fleet.step(grads)
            assert all_same(results)
            if step % 3:
                continue
            for name, mine in owed.items():
                exact, bound = torch.stack(mine).mean(0), torch.stack(mine).abs().mean(0) * 2.0**-7 * 1.01
                assert ((results[0][name] - exact).abs() <= bound).all()
            assert not any(kept.any() for reducer in fleet.reducers for kept in reducer.kept.residuals().values())
            dense = 4 * sum(t.count for t in TENSORS)
            assert fleet.reducers[0].metrics.bytes_sent - before < 0.5 * dense + 2000


@pytest.mark.parametrize("name", ["ef_signsgd", "onebit"])
def test_nothing_is_lost_on_average(name: str) -> None:
    """Over many seeds result + mean residual = mean gradient, not so in one of them.

    An error of a rank is of two values a unit apart, so Hoeffding's bound for the mean holds: e^-27 for each element.
    """
    seeds, grads = 40, random_grads(WORLD, TENSORS, seed=1)
    exact = torch.stack([mine["a"].double() for mine in grads]).mean(0).flatten()
    found, most = [], torch.zeros_like(exact)
    for seed in range(seeds):
        with Fleet(WORLD, TENSORS, name, seed=seed, **SHORT) as fleet:
            result = fleet.step(grads)[0]["a"].double().flatten()
            left = torch.stack([reducer.kept.residuals()["a"].double() for reducer in fleet.reducers])
        found.append(result + left.mean(0) - exact)
        most = most.maximum(left.abs().amax(0))
    wrong, unit = torch.stack(found), 2.0 ** (most.log2().floor() - 7)
    limit = unit * math.sqrt(27 / (2 * seeds * WORLD)) + 1e-6
    assert bool((wrong.mean(0).abs() <= limit).all())
    assert bool((wrong.abs() > limit).any(1).all())


def test_what_waits_goes_with_its_tensors_to_other_buckets() -> None:
    with Fleet(WORLD, TENSORS, "ef_signsgd", schedule="layerwise", **SHORT) as fleet:
        fleet.step(random_grads(WORLD, TENSORS, seed=1))
        before = [{n: kept.clone() for n, kept in r.kept.residuals().items()} for r in fleet.reducers]
        for reducer in fleet.reducers:
            reducer.replan(Plan.of([(TENSORS, 1, False)]))
        for reducer, mine in zip(fleet.reducers, before, strict=True):
            assert all(torch.equal(kept, mine[name]) for name, kept in reducer.kept.residuals().items())


def test_ranks_are_dealt_nothing_that_the_next_step_would_drop() -> None:
    values = torch.full((500,), 2.0**96 * (1 - 2.0**-24), dtype=torch.float64)
    assert bool((rounded(values, torch.bfloat16, 0).double() < 2.0**96).all())


def test_other_numbers_are_rounded_by_other_draws() -> None:
    same = torch.full((1000,), 1.00390625)
    one, other = (rounded(torch.cat([same, torch.tensor([last])]), torch.bfloat16, 0)[:1000] for last in (1.0, 2.0))
    assert 0.4 < float((one != other).float().mean()) < 0.6


def test_ranks_that_are_dealt_the_same_round_it_each_on_its_own() -> None:
    values = torch.linspace(1, 2, 1001, dtype=torch.float64) / 3
    dealt = torch.stack([rounded(values, torch.bfloat16, rank).double() for rank in range(400)])
    assert bool(((dealt - values).abs() < 2.0**-8).all())
    error = 2.0**-9 / math.sqrt(400)
    assert float((dealt.mean(0) - values).abs().max()) < 5 * error
    assert bool((dealt[0] != dealt[1]).any()) and torch.equal(dealt[1], rounded(values, torch.bfloat16, 1).double())
    assert torch.equal(rounded(values, torch.float32, 3), values.float())


@pytest.mark.parametrize("name", ["ef_signsgd", "marsit", "per_layer"])
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_state_of_the_other_dtype_is_refused_and_its_own_is_not(name: str, before: str, after: str) -> None:
    def methods(dtype: str) -> Any:
        if name != "per_layer":
            return method(name, residual_dtype=dtype)
        stages = {0: method("marsit", residual_dtype=dtype), 3: method("marsit", compensation="none")}
        return per_layer({"b*": "topk", "*": by_step(stages)})

    with Fleet(1, TENSORS, methods(before)) as one, Fleet(1, TENSORS, methods(after)) as other:
        one.step(random_grads(1, TENSORS))
        state = checkpoint.save(one.reducers[0], one.methods)
        checkpoint.load(one.reducers[0], one.methods, state, "restore")
        with pytest.raises(StateError, match="configuration"):
            checkpoint.load(other.reducers[0], other.methods, state, "restore")


def test_norms_are_added_up_in_more_than_sixteen_bits() -> None:
    kept = [torch.full((1000,), 1.0), torch.full((4096,), 0.5, dtype=torch.bfloat16), torch.zeros(0)]
    assert norm_of(kept) == pytest.approx(math.sqrt(1000 + 1024), rel=1e-6)


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match='residual_dtype should be "float32" or "bfloat16"'):
        method("marsit", residual_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is none with"):
        method("marsit", compensation="none", **SHORT)
    with pytest.raises(ConfigError, match="topk has no option 'residual_dtype'"):
        method("topk", **SHORT)
    mixed = by_step({0: method("marsit", **SHORT), 5: method("topk")})
    with pytest.raises(ConfigError, match="two stages keep a residual of different dtypes"):
        Fleet(WORLD, TENSORS, mixed)
