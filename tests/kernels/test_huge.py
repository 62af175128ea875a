"""Finite numbers near the largest one: compiled kernels and NumPy count, bound and keep alike."""

from __future__ import annotations

import pytest
import torch

from horovod_compress import kernels
from horovod_compress.kernels import reference, reference_sketch
from tests.support.local import same_bits

COUNT, ROW = 200, 64
ROWS = -(-COUNT // ROW)


def _huge(dtype: torch.dtype, size: float) -> torch.Tensor:
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x[70:80] = torch.tensor([size, -size] * 5, dtype=dtype)
    return x


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [(torch.float32, 1e37, 0), (torch.float32, 3e38, 1), (torch.float64, 1e39, 1), (torch.float64, 1e308, 1)],
    ids=str,
)
def test_steps_that_are_no_float32_are_counted(dtype: torch.dtype, size: float, expected: int) -> None:
    """The row of 64 that holds ten of them, and of its two sides both."""
    for sign in (kernels.sign_offer, reference.sign_offer):
        bits, sums = torch.zeros(-(-COUNT // 64), dtype=torch.int64), torch.zeros(ROWS, dtype=torch.float64)
        assert sign(_huge(dtype, size), None, bits, sums, ROW) == expected
        spoilt = _huge(dtype, size)
        spoilt[3] = float("nan")
        assert sign(spoilt, None, bits, sums, ROW) == 1  # elements count, then
        highs, lows, ones = sums, sums.clone(), torch.zeros(ROWS, dtype=torch.int64)
        points = kernels.points_offer if sign is kernels.sign_offer else reference.points_offer
        assert points(_huge(dtype, size), None, bits, highs, lows, ones, ROW) == 2 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_kept_with_momentum_is_bounded(dtype: torch.dtype) -> None:
    huge = 0.7 * torch.finfo(dtype).max
    found = []
    for absorb in (kernels.absorb, reference_sketch.absorb):
        grad, residual, momentum = _huge(dtype, huge), _huge(dtype, huge), _huge(dtype, huge)
        absorb(grad, residual, momentum, 0.9)
        assert bool(residual.isfinite().all() and momentum.isfinite().all())
        assert float(residual.abs().max()) == float(momentum.abs().max()) == 2.0 ** (126 if dtype.itemsize == 4 else 1022)
        found.append((residual, momentum))
    assert all(same_bits(a, b) for a, b in zip(*found))
