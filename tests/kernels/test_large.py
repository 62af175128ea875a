"""The one-bit kernels with more elements than 31 bits count: a GPU gives the CPU's bits at every position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops

from .support import KEY, differences, poison

#: Of a pattern that is repeated: it fits no power of two, so that every word of bits is another one.
PERIOD = (1 << 20) + 7
ROW = 1 << 30
#: On the CPU alone the second run compares the kernels with themselves: it shows that the test can run.
PLACES = [
    pytest.param("cpu", (1 << 21) + 77, id="cpu"),
    pytest.param("cuda", (1 << 31) + 77, id="cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(900)]),
]


def repeated(count: int) -> Tensor:
    pattern = torch.randn(PERIOD, generator=torch.Generator().manual_seed(1)).half()
    return pattern.repeat(-(-count // PERIOD))[:count]


def offered(x: Tensor) -> list[Tensor]:
    """Return words of signs, packed signs and sums of the magnitudes of each row."""
    rows = -(-x.numel() // ROW)
    words, packed = (poison(ops.word_count(x.numel()), torch.int64).to(x.device) for _ in range(2))
    sums = poison(rows, torch.float64).to(x.device)
    assert int(single.sign_offer(x, None, words, sums, ROW, key=KEY)) == 0
    ops.sign_pack(x, packed)
    return [words, packed, sums]


def two_valued(x: Tensor) -> list[Tensor]:
    rows, words = -(-x.numel() // ROW), poison(ops.word_count(x.numel()), torch.int64).to(x.device)
    kinds = (torch.float64, torch.float64, torch.int64)
    highs, lows, ones = (poison(rows, kind).to(x.device) for kind in kinds)
    assert int(single.two_value_offer(x, None, words, highs, lows, ones, ROW)) == 0
    return [words, highs, lows, ones]


@pytest.mark.parametrize(("where", "count"), PLACES)
def test_one_bit_for_each_of_many_elements(where: str, count: int) -> None:
    """With 2^31 + 77 elements it takes 20 GB of the host's memory and 10 of the GPU's."""
    x = repeated(count)
    there = x.to(where, copy=True)
    for of in (offered, two_valued):
        assert not any(differences(a, b.cpu()) for a, b in zip(of(x), of(there), strict=True))
    # Decoding overwrites the gradient: bits of the other half, so that every position changes its sign or keeps it.
    words = offered(x)[0].roll(ops.word_count(count) // 2)
    steps = torch.arange(1.0, 1.0 + -(-count // ROW))
    single.sign_decode(words, steps, ROW, x, None, feedback="none")
    single.sign_decode(words.to(where), steps.to(where), ROW, there, None, feedback="none")
    assert not differences(x, there.cpu())
    assert float(x[-1].abs()) == -(-count // ROW)  # the step of the last row
