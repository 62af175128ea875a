"""1-bit Adam's compressed all-reduce against its rule, and what its two error memories keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import variants_of
from horovod_compress.codecs.onebit_adam import OneBitAdam
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import each_value

F64 = torch.float64
TENSORS = [spec("a", 700, dtype=F64), spec("b", 5, dtype=F64), spec("c", 9, 40, dtype=F64), spec("empty", 0, dtype=F64)]
Kept = dict[str, Tensor]


def _signs(p: Tensor, scale: str, block: int) -> Tensor:
    """Return what the records of one tensor say."""
    found = []
    for part in p.split(block) if p.numel() else []:
        size = part.abs().mean() if scale == "l1" else part.square().mean().sqrt()
        size = size.float().double()
        found.append(torch.where(part >= 0, size, -size))
    return torch.cat(found) if found else p.clone()


def _kept(fleet: Fleet, kind: str) -> list[Kept]:
    return [{n: t.clone() for n, t in reducer.kept.states()[kind].items()} for reducer in fleet.reducers]


def _sum(kept: list[Kept], name: str) -> Tensor:
    return torch.stack([mine[name].double() for mine in kept]).sum(0)


@each_value
@pytest.mark.parametrize(
    ("scale", "times", "owner", "block"),
    [
        (*rule, block)
        for rule in (("l1", 1.0, "own"), ("l2", 1.0, "own"), ("l1", 1.5, "shared"), ("l2", 1.0, "shared"))
        for block in (64, 2048)
    ],
)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_result_and_memories_are_those_of_the_rule(
    scale: str, times: float, owner: str, block: int, world: int
) -> None:
    """In a world of one nothing is folded: the worker's own error is all there is."""
    residuals = [{t.name: torch.zeros(t.count, dtype=F64) for t in TENSORS} for _ in range(world)]
    server = {t.name: torch.zeros(t.count, dtype=F64) for t in TENSORS}
    options: dict[str, Any] = {"scale": scale, "block": block, "step_scale": times, "owner_scale": owner}
    with Fleet(world, TENSORS, "onebit_adam", **options) as fleet:
        for step in range(5):
            grads = random_grads(world, TENSORS, seed=step)
            results = fleet.step(grads)
            assert all_same(results)
            for tensor in TENSORS:
                name, sent = tensor.name, []
                for grad, kept in zip(grads, residuals, strict=True):
                    p = grad[name].flatten() + kept[name]
                    sent.append(_signs(p, scale, block) * times)
                    kept[name] = p - sent[-1]
                mean = torch.stack(sent).mean(0) + server[name]
                wanted = _signs(mean, scale, block) if world > 1 else mean
                if owner == "shared" and world > 1:
                    shared = torch.stack(sent).abs().mean(0)
                    wanted = torch.where(mean >= 0, shared, -shared)
                server[name] = mean - wanted
                assert torch.allclose(results[0][name].flatten(), wanted, rtol=1e-6, atol=1e-12)
        for tensor in TENSORS:
            for mine, theirs in zip(_kept(fleet, "residual"), residuals, strict=True):
                assert torch.allclose(mine[tensor.name], theirs[tensor.name], rtol=1e-6, atol=1e-5)
            assert torch.allclose(_sum(_kept(fleet, "server"), tensor.name), server[tensor.name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("scale", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_both_sides_together_lose_nothing(scale: str, dtype: torch.dtype) -> None:
    """Sum of results + mean residual + server = sum of mean gradients; without either memory it is not."""
    world, tensors = 3, [spec("a", 20, 130, dtype=dtype), spec("b", 65, dtype=dtype)]
    total = {t.name: torch.zeros(t.count, dtype=F64) for t in tensors}
    with Fleet(world, tensors, "onebit_adam", scale=scale, block=128) as fleet:
        for step in range(15):
            grads = random_grads(world, tensors, seed=step)
            result = fleet.step(grads)[0]
            for name in total:
                mean = torch.stack([mine[name].double() for mine in grads]).mean(0)
                total[name] += (mean - result[name].double()).flatten()
        residual, server = _kept(fleet, "residual"), _kept(fleet, "server")
    for name, missing in total.items():
        worker, owner = _sum(residual, name) / world, _sum(server, name)
        assert torch.allclose(missing, worker + owner, atol=1e-9 if dtype is F64 else 1e-4)
        assert float((missing - worker).abs().max()) > 0.1 and float((missing - owner).abs().max()) > 0.1


def test_every_element_has_one_owner() -> None:
    with Fleet(4, TENSORS, "onebit_adam", block=64) as fleet:
        for step in range(3):
            fleet.step(random_grads(4, TENSORS, seed=step))
        kept = _kept(fleet, "server")
    for tensor in TENSORS:
        owners = sum((mine[tensor.name] != 0).int() for mine in kept)
        assert bool((owners == 1).all())


@pytest.mark.parametrize("live", [False, True])
def test_what_an_owner_kept_survives_another_plan(live: bool) -> None:
    """Chunks are cut elsewhere then: what a rank kept for others' elements goes into its residual, and back to all.

    Args:
        live: the state is loaded into reducers that stand at the same step already.
    """
    world, tensors = 2, [spec("a", 640, dtype=F64), spec("b", 3, 100, dtype=F64), spec("c", 129, dtype=F64)]
    total = {t.name: torch.zeros(t.count, dtype=F64) for t in tensors}

    def step(fleet: Fleet, seed: int) -> None:
        grads = random_grads(world, tensors, seed=seed)
        result = fleet.step(grads)[0]
        for name in total:
            total[name] += (torch.stack([mine[name] for mine in grads]).mean(0) - result[name]).flatten()

    with Fleet(world, tensors, "onebit_adam", block=64) as fleet:
        for seed in range(3):
            step(fleet, seed)
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        before = _kept(fleet, "server")
    with Fleet(world, tensors, "onebit_adam", block=64, schedule="layerwise") as fleet:
        for seed in range(3 if live else 0):
            fleet.step(random_grads(world, tensors, seed=50 + seed))
        for reducer, state in zip(fleet.reducers, states, strict=True):
            assert reducer.wait_idle(5.0)
            checkpoint.load(reducer, fleet.methods, state, "restore")
        step(fleet, 10)
        after, residual = _kept(fleet, "server"), _kept(fleet, "residual")
    moved = [bool(((b[n] != 0) & (a[n] == 0)).any()) for b, a in zip(before, after, strict=True) for n in total]
    assert any(moved)
    for name, missing in total.items():
        assert torch.allclose(missing, _sum(residual, name) / world + _sum(after, name), atol=1e-9)


@pytest.mark.parametrize("kind", ["normal", "one large value"])
def test_when_the_scale_of_the_paper_contracts(kind: str) -> None:
    """|p - C(p)|^2 is 1 - |p|_1^2 / (d |p|^2) of |p|^2 with the mean, 2 (1 - |p|_1 / (sqrt(d) |p|)) with the root."""
    (p,) = one_tensor(1, 2048, seed=3, dtype=F64)
    if kind != "normal":
        p[1:] *= 1e-3
        p[0] = 10.0
    share = float(p.abs().sum() / (p.norm() * 2048**0.5))
    for scale, wanted in (("l1", 1 - share**2), ("l2", 2 * (1 - share))):
        options = {"scale": scale, "block": 2048, "step_scale": 1.0}
        with Fleet(1, [spec("a", 2048, dtype=F64)], "onebit_adam", **options) as fleet:
            fleet.step([{"a": p}])
            left = float(fleet.residuals()[0]["a"].square().sum() / p.square().sum())
        assert left == pytest.approx(wanted, rel=1e-5)
        assert (left < 1) == (scale == "l1" or kind == "normal")


def test_the_bytes_of_a_payload() -> None:
    """A record for each block of each tensor; blocks are not shared between tensors."""
    with Fleet(2, TENSORS, "onebit_adam", block=128) as fleet:
        (form,) = variants_of(fleet.methods.codecs[1])
        layout = form.layout(fleet.plan.buckets[0], 2)
        assert layout.regions["records"] == (torch.uint8, (6 + 1 + 3 + 0) * (4 + 16))
        assert layout.records == {"records": 20}


@pytest.mark.parametrize(
    "options",
    [
        {"owner_scale": "mean"},
        {"step_scale": 2.0},
        {"scale": "max"},
        {"block": 63},
        {"block": 0},
        {"block": True},
        {"block": 1 << 17},
        {"block": 64.0},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        OneBitAdam(**options)
