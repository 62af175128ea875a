"""Counters whose norm is that of a gradient: their bits against the reference, and what they promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.keys import NORM, Key

from .support import FEW_DTYPES, LENGTHS, compare, differences, numbers, poison, tame

KEY = Key(seed=0x0123456789ABCDEF, step=7, bucket=3, rank=0, purpose=NORM)
#: Of a layer, of what is drawn together, and of a unit, with a part of a block more or less.
BORDERS = (128, 255, 257, 512, 640, 65_535, 65_536, 65_553)


def counters(x: Tensor, key: Key = KEY, number: int = 256, offset: int = 0) -> Tensor:
    sums = poison(number, torch.float64)
    ops.norm_sketch_all([x], [sums], key, counters=number, offsets=[offset])
    return sums


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_bits(dtype: torch.dtype) -> None:
    for count in (*LENGTHS, *BORDERS):
        number, offset = (256, 128)[count % 2], (0, 64, 12_800)[count % 3]
        for grad in (numbers(count, dtype, count), tame(count, dtype, count)):
            room = poison(number, torch.float64)
            compare("norm_sketch_all", [grad], [room], KEY, counters=number, offsets=[offset], shift=count)


def test_tensors_together_are_those_alone() -> None:
    grads = [tame(count, torch.float32, count) for count in (0, 5, 1000, 200_000)]
    offsets = [0, 64, 128, 1152]
    together = [poison(256, torch.float64) for _ in grads]
    ops.norm_sketch_all(grads, together, KEY, counters=256, offsets=offsets)
    for grad, offset, found in zip(grads, offsets, together, strict=True):
        assert differences(counters(grad, offset=offset), found) == 0
    ops.norm_sketch_all([], [], KEY, counters=256)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    x, before = tame(1_200_001, torch.float32, 1), torch.get_num_threads()
    alone = counters(x)
    try:
        torch.set_num_threads(threads)
        assert differences(counters(x), alone) == 0
    finally:
        torch.set_num_threads(before)


def test_neighbours_in_a_bucket_draw_their_own_signs() -> None:
    """Tensors begin at multiples of 64 elements, and none shares a random word with the one before or behind it."""
    x = torch.ones(64 * 40)
    found = [counters(x, offset=offset) for offset in range(0, 64 * 40, 64)]
    assert len({tuple(each.tolist()) for each in found}) == len(found)


def test_counters_add_up_as_gradients_do() -> None:
    a, b = (torch.randint(-99, 99, (70_000,)).float() for _ in range(2))
    assert torch.equal(counters(a) + counters(b), counters(a + b))


def test_a_layer_never_meets() -> None:
    """Each of its elements has a counter of its own, whatever is drawn."""
    for number in (128, 256):
        x = torch.zeros(3 * number)
        x[number : 2 * number] = torch.arange(1.0, number + 1)
        found = counters(x, number=number).abs().sort().values
        assert torch.equal(found, torch.arange(1.0, number + 1, dtype=torch.float64))


SHAPES = {
    "even": torch.ones(20_000),
    "a column of a matrix": torch.zeros(80, 256).index_fill_(1, torch.tensor([3]), 1.0).view(-1),
    "few large ones": torch.zeros(20_000).index_fill_(0, torch.arange(0, 20_000, 1000), 1.0),
    "one": torch.zeros(20_000).index_fill_(0, torch.tensor([777]), 1.0),
}


@pytest.mark.parametrize("number", [128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_square_is_unbiased_and_its_variance_bounded(shape: str, number: int) -> None:
    """Over 2,000 keys: the mean within 5 standard errors, the variance within 5 of its own of 2 / counters."""
    x, keys = SHAPES[shape], 2000
    square = float(x.square().sum())
    found = torch.tensor([float(counters(x, KEY.at(step=s), number).square().sum()) / square for s in range(keys)])
    error = math.sqrt(2 / number)
    assert abs(float(found.mean()) - 1) <= 5 * error / math.sqrt(keys), found.mean()
    # The fourth moment of a sum of squares of counters is about that of a normal law: standard error sqrt(2 / keys).
    assert float(found.var()) <= 2 / number * (1 + 5 * math.sqrt(2 / keys)), found.var()


def test_places_without_random_ones_would_be_seen() -> None:
    """A column of a matrix as wide as there are counters lies in one counter, if elements go round and round."""
    x = SHAPES["a column of a matrix"].view(-1, 256)
    signs = torch.randint(0, 2, (2000, *x.shape)) * 2.0 - 1
    found = (signs * x).sum(1).square().sum(1) / x.square().sum()
    assert float(found.var()) > 1.0 > 2 / 256 * (1 + 5 * math.sqrt(2 / 2000))


def test_what_is_not_finite_is_seen() -> None:
    for value in (math.nan, math.inf):
        x = torch.ones(5000)
        x[4321] = value
        assert not counters(x).isfinite().all()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        (
            "counters must be",
            lambda: ops.norm_sketch_all([torch.ones(9)], [torch.zeros(64).double()], KEY, counters=64),
        ),
        ("multiple of 64", lambda: counters(torch.ones(9), offset=32)),
        ("sums must be", lambda: ops.norm_sketch_all([torch.ones(9)], [torch.zeros(256)], KEY, counters=256)),
        (
            "sums must hold",
            lambda: ops.norm_sketch_all([torch.ones(9)] * 2, [torch.zeros(256).double()], KEY, counters=256),
        ),
    ],
)
def test_refused(what: str, call: object) -> None:
    with pytest.raises((ValueError, TypeError), match=what):
        call()  # type: ignore[operator]
