"""Sparse Binary Compression against its rule, written down once more in plain NumPy."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from horovod_compress.codecs.sparse_binary import PRESETS, SparseBinary
from horovod_compress.errors import ConfigError
from horovod_compress.exchange import all_gatherv
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.support.local import Fleet, one_tensor, spec
from tests.support.turns import BucketState, put, turn_of

SHAPES = Path(__file__).resolve().parents[2] / "horovod_compress/cli/plan/shapes/resnet50.csv"


def rule(x: np.ndarray, k: int) -> np.ndarray:
    """Return what one rank sends."""
    sent = np.zeros_like(x)
    sides = []
    for sign in (1, -1):
        order = np.argsort(-sign * x, kind="stable")[:k]
        chosen = order[sign * x[order] > 0]
        sides.append((x[chosen].sum() ** 2 / len(chosen) if len(chosen) else -1.0, chosen))
    gain, chosen = sides[1] if sides[1][0] > sides[0][0] else sides[0]
    if gain >= 0:
        sent[chosen] = x[chosen].mean()
    return sent


@pytest.mark.parametrize("density", [0.003, 0.1, 1.0])
@pytest.mark.parametrize("count", [1, 2, 100, 5000])
def test_the_result_is_the_mean_of_what_the_rule_sends(count: int, density: float) -> None:
    world, k = 3, max(1, -(-count * round(density * 1000) // 1000))
    residuals = [np.zeros(count) for _ in range(world)]
    with Fleet(world, [spec("a", count, dtype=torch.float64)], "sparse_binary", density=density) as fleet:
        for step in range(4):
            grads = one_tensor(world, count, seed=step, dtype=torch.float64)
            results = fleet.step([{"a": grad} for grad in grads])
            offered = [grad.numpy() + residual for grad, residual in zip(grads, residuals, strict=True)]
            sent = [rule(x, k) for x in offered]
            residuals = [x - s for x, s in zip(offered, sent, strict=True)]
            assert np.allclose(results[0]["a"].numpy(), np.mean(sent, axis=0), rtol=1e-12, atol=1e-15)
            for kept, expected in zip(fleet.residuals(), residuals, strict=True):
                assert np.allclose(kept["a"].numpy(), expected, rtol=1e-12, atol=1e-15)


def test_with_both_sides_full_it_is_the_papers_rule() -> None:
    """The paper compares means; so does sum^2 / k where both sides have k elements."""
    for seed in range(50):
        x = np.random.default_rng(seed).normal(size=1000)
        top, bottom = np.sort(x)[-20:], np.sort(-x)[-20:]
        assert np.sign(rule(x, 20).sum()) == (1 if top.mean() >= bottom.mean() else -1)


def test_contraction() -> None:
    """|x - C(x)|^2 = |x|^2 - k mean^2: what is kept shares one value, its own mean."""
    x = one_tensor(1, 100_000, dtype=torch.float64)[0]
    with Fleet(1, [spec("a", 100_000, dtype=torch.float64)], "sparse_binary", density=0.01) as fleet:
        sent = fleet.step([{"a": x}])[0]["a"]
        left = fleet.residuals()[0]["a"]
    mean = float(sent[sent != 0][0])
    assert int((sent != 0).sum()) == 1000
    assert float(left.square().sum()) == pytest.approx(float(x.square().sum()) - 1000 * mean**2, rel=1e-12)
    assert 0.91 < float(left.square().sum() / x.square().sum()) < 0.94  # of a normal distribution: 0.928


def _encoded(tensors: list[TensorSpec], codec: SparseBinary) -> tuple[int, int]:
    """Return the bytes of a payload of normal numbers, and how many positions it holds."""
    total = positions = 0
    generator = torch.Generator().manual_seed(0)
    for index, tensor in enumerate(tensors):
        state = BucketState(Bucket(index, (tensor,)), codec, 0, 2, lambda *_: all_gatherv)
        put(turn_of(state, Key(0, 0, index, 0)), 0, torch.randn(tensor.shape, generator=generator))
        round_ = state.round(0)
        round_.encode(Key(0, 0, index, 0))
        total += round_.work.used
        positions += round_.work.memo["kept"][0]
    return total, positions


def test_bits_of_a_position() -> None:
    total, positions = _encoded([spec("a", 4_000_000)], SparseBinary(0.01))
    assert positions == 40_000
    assert 8 * total / positions == pytest.approx(8.108, rel=0.02)


@pytest.mark.parametrize(("preset", "paper"), [(2, 3531), (3, 37208)])
def test_ratio_on_the_shapes_of_resnet50(preset: int, paper: int) -> None:
    """Against float32 gradients in every step, as the paper counts (its table for ImageNet)."""
    lines = [line for line in SHAPES.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    tensors = [spec(row["name"], *map(int, row["shape"].split("x"))) for row in rows]
    codec = SparseBinary(preset=preset)
    total, _ = _encoded(tensors, codec)
    dense = 4 * sum(tensor.count for tensor in tensors) * codec.properties().communication_delay
    print(f"preset {preset}: {dense / total:.0f} times below float32")
    assert dense / total >= paper


def test_presets() -> None:
    assert PRESETS == {1: (1, 0.001), 2: (10, 0.01), 3: (100, 0.01)}
    assert SparseBinary(preset=2).most(spec("a", 1000)) == SparseBinary(0.01).most(spec("a", 1000)) == 10
    assert SparseBinary().most(spec("a", 1000)) == 10 and SparseBinary().properties().communication_delay == 1
    assert SparseBinary(preset=1).most(spec("a", 1000)) == 1 == SparseBinary(preset=1).properties().communication_delay
    assert SparseBinary(0.3).most(spec("a", 10)) == 3  # 0.3 as a binary fraction would give 4 with some numbers


def test_options() -> None:
    wrong = ({"density": 0}, {"density": 1.5}, {"density": True}, {"density": "1%"}, {"preset": 4})
    for options in (*wrong, {"preset": 1, "density": 0.1}):
        with pytest.raises(ConfigError):
            SparseBinary(**options)


@pytest.mark.parametrize("exchange", ["ring", "fold"])
def test_other_exchanges_are_refused(exchange: str) -> None:
    with pytest.raises(ConfigError, match="gather"):
        Fleet(2, [spec("a", 10)], "sparse_binary", exchange=exchange)
