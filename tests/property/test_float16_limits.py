"""What waits in float32 may pass 65504, the end of float16: results stay finite, and the rest of a value waits on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import slow

WORLD, COUNT, STEPS, LIMIT = 2, 640, 100, 65504.0
KEEPS_ALL: list[Any] = [
    ("topk", {"density": 0.004}),
    ("sparse_binary", {"density": 0.004}),
    ("spardl", {"density": 0.004, "value_bits": 16}),
    *slow(
        ("topk", {"density": 0.004, "value_bits": 16}),
        ("stc", {"density": 0.004}),
        ("dgc", {"density": 0.004, "momentum": 0.0}),
        ("randomk", {"density": 0.004}),
        ("spardl", {"density": 0.004}),
        ("sketch_fusion", {"density": 0.004, "cells": 2.0}),
    ),
]
OTHERS: list[Any] = [
    ("dgc", {"density": 0.004, "momentum": 0.9}),
    ("randomk", {"density": 0.004, "scaled": True}),
    ("sketch_fusion", {"density": 0.004, "cells": 2.0, "error_feedback": "sketch", "momentum": 0.9}),
    *slow(
        ("dgc", {"density": 0.004, "momentum": 0.9, "masking": False}),
        ("sketch_fusion", {"density": 0.004, "cells": 2.0, "momentum": 0.9}),
        ("sketch_fusion", {"density": 0.004, "cells": 2.0, "error_feedback": "sketch"}),
    ),
]


def _grads(step: int) -> list[dict[str, torch.Tensor]]:
    """Return gradients of 500 to 2000, the same on all ranks and of one sign for each element: they pile up."""
    generator = torch.Generator().manual_seed(step)
    signs = torch.where(torch.arange(COUNT) % 3 == 0, -1.0, 1.0)
    grad = (signs * (500 + 1500 * torch.rand(COUNT, generator=generator))).half()
    return [{"w": grad.clone()} for _ in range(WORLD)]


@pytest.mark.parametrize(("method", "options"), KEEPS_ALL, ids=str)
def test_nothing_is_infinite_and_nothing_is_lost(method: str, options: dict[str, Any]) -> None:
    given, sent, reached = torch.zeros(COUNT, dtype=torch.float64), torch.zeros(COUNT, dtype=torch.float64), False
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float16)], method, **options) as fleet:
        for step in range(STEPS):
            grads = _grads(step)
            given += torch.stack([mine["w"].double() for mine in grads]).mean(0)
            results = fleet.step(grads)
            assert all_same(results) and bool(results[0]["w"].isfinite().all())
            sent += results[0]["w"].double()
            reached = reached or bool((results[0]["w"].abs() > 0.9 * LIMIT).any())
        assert fleet.reducers[0].metrics.nonfinite == 0
        rest = torch.stack([mine["w"].double() for mine in fleet.residuals()]).mean(0)
    assert reached or method in ("stc", "sparse_binary"), "else the test says nothing"
    assert torch.allclose(sent + rest, given, rtol=2e-3)


@pytest.mark.parametrize(("method", "options"), OTHERS, ids=str)
def test_nothing_is_infinite(method: str, options: dict[str, Any]) -> None:
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float16)], method, **options) as fleet:
        for step in range(STEPS):
            results = fleet.step(_grads(step))
            assert all_same(results) and bool(results[0]["w"].isfinite().all())
        assert fleet.reducers[0].metrics.nonfinite == 0
        assert all(bool(t.isfinite().all()) for s in fleet.reducers[0].buckets for t in s.memory.tables.values())


def test_what_dgc_with_momentum_could_not_send_stays() -> None:
    """One large value: the velocity that float16 cannot hold arrives in the steps after, momentum masked."""
    spike, nothing = torch.zeros(COUNT).half(), torch.zeros(COUNT).half()
    spike[5], total = 49984.0, 0.0
    options: dict[str, Any] = {"density": 0.004, "momentum": 0.5}
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float16)], "dgc", **options) as fleet:
        for reducer in fleet.reducers:
            reducer.buckets[0].memory.state["residual"][5] = 100000.0
        for grad in (spike, nothing, nothing, nothing):
            total += float(fleet.step([{"w": grad.clone()} for _ in range(WORLD)])[0]["w"][5])
        assert total == 149984.0 and float(fleet.residuals()[0]["w"][5]) == 0


@pytest.mark.parametrize(("method", "options"), [*KEEPS_ALL, *OTHERS], ids=str)
def test_sums_over_ranks_saturate(method: str, options: dict[str, Any]) -> None:
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float16)], method, **options) as fleet:
        for reducer in fleet.reducers:
            reducer.result_scale = float(WORLD)
        for step in range(STEPS):
            results = fleet.step(_grads(step))
            assert all_same(results) and bool(results[0]["w"].isfinite().all())


@pytest.mark.parametrize("scale", [1.0, float(WORLD)])  # means, and sums over ranks
@pytest.mark.parametrize("options", [{}, {"residual_dtype": "bfloat16"}, {"levels": 2}], ids=str)
def test_an_exact_round_sends_what_fits(options: dict[str, Any], scale: float) -> None:
    """One outlier piles up in rounds of one bit, beyond float16, and the others leave nothing."""
    spike = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    spike[5] = 20000.0
    sent, waits = 0.0, 0.0
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float16)], "marsit", full_precision_every=10, **options) as fleet:
        for reducer in fleet.reducers:
            reducer.result_scale = scale
        for step in range(11):
            exact, before = fleet.reducers[0].buckets[0].round(step).exact, waits
            results = fleet.step([{"w": spike.half()} for _ in range(WORLD)])
            assert all_same(results) and bool(results[0]["w"].isfinite().all())
            sent += float(results[0]["w"][5])
            waits = sum(float(mine["w"][5]) for mine in fleet.residuals()) / WORLD
        assert exact and scale * (before + 20000.0) > LIMIT, "else the test says nothing"
        assert float(results[0]["w"][5]) == LIMIT and not fleet.residuals()[0]["w"][6:].any()
        assert fleet.reducers[0].metrics.nonfinite == 0
    assert sent / scale + waits == pytest.approx(11 * 20000.0, rel=1e-2 if options.get("residual_dtype") else 2e-3)


def test_what_is_left_in_scratch_changes_nothing() -> None:
    """Values are clamped in one tensor, and the other one fills only some of its room."""
    tensors, found = [spec("large", 400), spec("few", 240)], []
    for left in (0.0, torch.inf, torch.nan):
        with Fleet(WORLD, tensors, "topk", density=0.05) as fleet:
            for step in range(3):
                grads = random_grads(WORLD, tensors, seed=step, scale=4e37)
                for reducer, mine in zip(fleet.reducers, grads, strict=True):
                    mine["few"][3:] = 0
                    work = reducer.buckets[0].round(0).work
                    work.local["values"].fill_(left)
                results = fleet.step(grads)
            assert work.memo["rest"][0] is not None and work.memo["kept"][1] == 3
            found.append(results + fleet.residuals())
    for others in found[1:]:
        assert all(same_bits(mine[n], one[n]) for mine, one in zip(found[0], others, strict=True) for n in mine)
