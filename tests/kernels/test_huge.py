"""Finite numbers near the largest one: compiled kernels and NumPy count, bound and keep alike."""

from __future__ import annotations

import pytest
import torch

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import reference
from tests.support.local import same_bits

COUNT, ROW = 200, 64
ROWS = -(-COUNT // ROW)


def _huge(dtype: torch.dtype, size: float) -> torch.Tensor:
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x[70:80] = torch.tensor([size, -size] * 5, dtype=dtype)
    return x


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [(torch.float32, 7e28, 0), (torch.float32, 8e28, 10), (torch.float64, 7e28, 0), (torch.float64, 1e308, 10)],
    ids=str,
)
@pytest.mark.parametrize("kept", [False, True])
def test_values_from_2_to_the_96th_on_are_counted(dtype: torch.dtype, size: float, expected: int, kept: bool) -> None:
    residual = torch.zeros(COUNT, dtype=dtype) if kept else None
    x, spoilt = _huge(dtype, size), _huge(dtype, size)
    spoilt[3] = float("nan")
    for of in (single, reference):
        bits, sums = torch.zeros(-(-COUNT // 64), dtype=torch.int64), torch.zeros(ROWS, dtype=torch.float64)
        highs, lows, ones = sums, sums.clone(), torch.zeros(ROWS, dtype=torch.int64)
        assert of.sign_offer(x, residual, bits, sums, ROW) == expected
        assert of.sign_offer(x, residual, bits, None, ROW) == expected
        assert of.sign_offer(spoilt, residual, bits, sums, ROW) == expected + 1
        assert of.two_value_offer(x, residual, bits, highs, lows, ones, ROW) == expected
    for left in (ops.lowrank_left, reference.lowrank_left):
        factors = torch.ones(2 * 20, dtype=dtype), torch.zeros(2 * 10, dtype=dtype)
        assert left(x, residual, 10, *factors) == expected
    for offer in (ops.record_offer, reference.record_offer):
        records = torch.zeros(ROWS * ops.record_bytes(ROW), dtype=torch.uint8)
        assert [offer(x, residual, records, ROW, rule=rule) for rule in ("l1", "l2")] == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_may_be_larger_than_x_is_cut_at_half_of_that(dtype: torch.dtype) -> None:
    """Global feedback, where the other ranks have another sign, and the product of two factors."""
    bits, steps = torch.zeros(-(-COUNT // 64), dtype=torch.int64), torch.full((ROWS,), 2.0**95)
    left, right = torch.full((10,), 2.0**60, dtype=dtype), torch.full((20,), -(2.0**60), dtype=dtype)
    found = []
    oracles = reference.sign_decode, reference.lowrank_decode
    for sign, lowrank in ((single.sign_decode, ops.lowrank_decode), oracles):
        for decode in ("sign", "lowrank"):
            grad, residual = _huge(dtype, 7e28), torch.zeros(COUNT, dtype=dtype)
            if decode == "sign":
                sign(bits, steps, ROW, grad, residual, feedback="global")
            else:
                lowrank(left, right, 10, grad, residual)
            assert float(residual.abs().max()) == 2.0**95
            found.append((grad, residual))
    assert all(
        same_bits(a, b)
        for mine, oracle in zip(found[:2], found[2:], strict=True)
        for a, b in zip(mine, oracle, strict=True)
    )


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_products_that_float16_cannot_hold_stay(scale: float) -> None:
    left, right = torch.full((10,), 300.0), torch.full((20,), 400.0)
    for decode in (ops.lowrank_decode, reference.lowrank_decode):
        grad, residual = torch.full((COUNT,), 49984.0).half(), torch.full((COUNT,), 70000.0)
        decode(left, right, 10, grad, residual, scale=scale)
        assert bool((grad == 65504).all())
        assert torch.allclose(residual, torch.full((COUNT,), 119984 - 65504 / scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_kept_with_momentum_is_bounded(dtype: torch.dtype) -> None:
    huge = 0.7 * torch.finfo(dtype).max
    found = []
    for absorb in (ops.absorb, reference.absorb):
        grad, residual, momentum = _huge(dtype, huge), _huge(dtype, huge), _huge(dtype, huge)
        absorb(grad, residual, momentum, 0.9)
        assert bool(residual.isfinite().all() and momentum.isfinite().all())
        assert (
            float(residual.abs().max()) == float(momentum.abs().max()) == 2.0 ** (126 if dtype.itemsize == 4 else 1022)
        )
        found.append((residual, momentum))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
