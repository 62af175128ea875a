"""Sparse dithering: a rank's own error is never more than it was told, and few bits suffice for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.errors import ConfigError
from horovod_compress.ops.sizes import least_error
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import slow
from tests.support.sections import elias_encode

COUNT, SMALLEST = 16 * 512 + 100, 2.0**-149
#: What float32 leaves undecided of a squared error.
ROUNDING = 1 + 2.0**-20
OPTIONS: dict[str, Any] = {"norm": 2, "coding": "elias", "rounding": "nearest", "error": 0.1}


def _normal(seed: int = 0) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def _one_of_each_block() -> Tensor:
    x = torch.zeros(COUNT)
    x[5::512] = -3.0
    return x


INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": _normal,
    "heavy tails": lambda: _normal() / _normal(1),
    "heavier tails": lambda: _normal() ** 9,
    "one of each block": _one_of_each_block,
    "one and small ones": lambda: _one_of_each_block() * 100 + _normal(),
    "constant": lambda: torch.full((COUNT,), -0.7),
    "two sizes": lambda: torch.where(torch.arange(COUNT) % 3 == 0, 1.0, 0.46),
    "zeros": lambda: torch.zeros(COUNT),
    "rising": lambda: torch.arange(COUNT).float(),
    "the smallest": lambda: torch.full((COUNT,), SMALLEST),
    "subnormal": lambda: (_normal() * 3).round() * SMALLEST,
    "one subnormal and the smallest": lambda: torch.where(_one_of_each_block() != 0, 203.0, 1.0) * SMALLEST,
    "huge": lambda: _normal().clamp(-3.4, 3.4) * 1e38,
}


def _decoded(section: Tensor, count: int, bits: int, block: int) -> Tensor:
    found = torch.empty(count)
    assert ops.elias_decode([section], found, bits=bits, block=block, scale=1 / ((1 << bits - 1) - 1)) == 0
    return found


def _squares(x: Tensor, block: int) -> Tensor:
    return torch.stack([part.square().sum() for part in x.double().split(block)])


def _sent(x: Tensor, error: float, bits: int = 8, block: int = 512, **more: Any) -> tuple[Tensor, Tensor]:
    """Return the section of x, and the share of its squares that each block loses."""
    out = torch.zeros(ops.elias_bound(x.numel(), bits=bits, block=block), dtype=torch.uint8)
    used, _ = elias_encode(x, out, None, **{"norm": 2, "error": error} | more, bits=bits, block=block)
    section = out[:used].clone()
    lost = _squares(x.double() - _decoded(section, x.numel(), bits, block).double(), block)
    return section, lost / _squares(x, block).clamp(min=SMALLEST**2)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("bits", "block"), [(8, 512), *slow((8, 64), (6, 64), (8, 8192))])
def test_no_block_loses_more_than_it_may(kind: str, bits: int, block: int) -> None:
    x, least = INPUTS[kind](), least_error(bits, block)
    for error in (least, max(least, 0.1), max(least, 0.5), 0.99):
        assert float(_sent(x, error, bits, block)[1].max()) <= error * ROUNDING


def test_the_first_norm_that_is_tried_loses_more() -> None:
    """The control: where errors are not measured, the law does not hold."""
    for kind in ("two sizes", "rising"):
        x = INPUTS[kind]().double()
        step = torch.cat([(12 * 0.1 * part.square().mean()).sqrt().expand(part.numel()) for part in x.split(512)])
        lost = _squares(x - step * (x / step).round(), 512) / _squares(x, 512)
        assert float(lost.max()) > 0.1 * ROUNDING


@pytest.mark.parametrize(("error", "most"), [(0.05, 3.35), (0.1, 2.8), (0.25, 2.15), (0.5, 1.6)])
def test_bits_of_normal_numbers(error: float, most: float) -> None:
    section, lost = _sent(_normal(), error)
    assert 8 * section.numel() / COUNT <= most
    # Of what it may lose a block loses nearly all.
    assert float(lost.mean()) >= 0.92 * error


def test_the_distance_that_is_always_right_takes_more_bits() -> None:
    """What the search is for: an error of at most a quarter of the squared distance, whatever the numbers are."""
    x = _normal()
    out = torch.zeros(ops.elias_bound(COUNT, bits=8, block=512), dtype=torch.uint8)
    norm = 127 * 2 * (0.1 * float(x.square().mean())) ** 0.5
    x[::512] = norm  # the largest of each block is then its norm
    used, _ = elias_encode(x, out, None, bits=8, block=512, norm=0)
    assert 8 * used / COUNT > 3.3


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float16, torch.bfloat16, torch.float64)])
def test_the_residual_is_what_was_lost(dtype: torch.dtype) -> None:
    world, tensors = 3, [spec("large", 40, 77, dtype=dtype), spec("small", 7, dtype=dtype)]
    digits = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    with Fleet(world, tensors, "qsgd", **OPTIONS) as fleet:
        before = [{t.name: torch.zeros(t.count, dtype=torch.float64) for t in tensors} for _ in range(world)]
        for step in range(6):
            grads = random_grads(world, tensors, seed=step)
            x = [{n: before[i][n] + grads[i][n].double().view(-1) for n in before[i]} for i in range(world)]
            results = fleet.step(grads)
            assert all_same(results)
            before = [{n: kept.double().view(-1) for n, kept in mine.items()} for mine in fleet.residuals()]
            for name in before[0]:
                for mine, had in zip(before, x, strict=True):
                    assert float(mine[name].square().sum()) <= 0.1 * float(had[name].square().sum()) * (1 + 1e-5)
                whole = torch.stack([had[name] for had in x]).mean(0)
                found = results[0][name].double().view(-1) + torch.stack([mine[name] for mine in before]).mean(0)
                assert torch.allclose(found, whole, rtol=digits, atol=digits)


def test_what_float16_cannot_hold_waits() -> None:
    with Fleet(2, [spec("w", 640, dtype=torch.float16)], "qsgd", **OPTIONS) as fleet:
        for reducer in fleet.reducers:
            reducer.buckets[0].memory.state["residual"][5] = 300000.0
        total = 0.0
        for _ in range(12):
            result = fleet.step([{"w": torch.zeros(640).half()} for _ in range(2)])[0]["w"]
            assert bool(result.isfinite().all())
            total += float(result[5])
            assert total + float(fleet.residuals()[0]["w"][5]) == pytest.approx(300000.0, rel=1e-3)
    assert total > 0.99 * 300000.0


def test_float64_beyond_float32_is_not_finite() -> None:
    with Fleet(2, [spec("w", 700, dtype=torch.float64)], "qsgd", **OPTIONS) as fleet:
        for huge in (3e38, 1e39):
            grads = random_grads(2, fleet.tensors)
            grads[0]["w"][17] = huge
            fleet.step(grads)
        assert fleet.reducers[0].metrics.nonfinite == 1


def test_the_preset() -> None:
    assert registry.create("sparse_dithering") == registry.create("qsgd", **OPTIONS)
    assert registry.create("sparse_dithering", error=0.5, block=64).error == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({**OPTIONS, "error": 1.0}, "error should be a number below 1"),
        ({**OPTIONS, "error": -0.1}, "error should be"),
        ({**OPTIONS, "error": True}, "error should be"),
        ({**OPTIONS, "error": float("nan")}, "error should be"),
        ({**OPTIONS, "error": 0.02}, r"at least block / .* = 0\.0317.*smaller block"),
        ({**OPTIONS, "bits": 4}, "error should be at least"),
        ({"error": 0.1}, "error= needs norm=2, got 'max'"),
        ({"error": 0.1, "norm": 2}, "error= needs coding='elias'"),
        ({"error": 0.1, "norm": 2, "coding": "elias"}, "error= needs rounding='nearest'"),
        ({**OPTIONS, "feedback": "average"}, "error= needs feedback='none'"),
        ({**OPTIONS, "beta": 0.5}, "error= needs beta=None"),
        ({"norm": 2, "coding": "elias", "rounding": "nearest"}, 'rounding="nearest" would lose'),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.create("qsgd", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_numbers_of_all_ranks_have_a_finite_mean(dtype: torch.dtype) -> None:
    tensors, largest = [spec("w", 64, dtype=dtype)], torch.finfo(dtype).max
    with Fleet(2, tensors, "qsgd", **OPTIONS) as fleet:
        results = fleet.step([{"w": torch.full((64,), largest, dtype=dtype)} for _ in range(2)])
        assert all(bool(result["w"].isfinite().all()) for result in results)
        assert all(bool(kept["w"].isfinite().all()) for kept in fleet.residuals())
        assert not fleet.reducers[0].metrics.nonfinite
