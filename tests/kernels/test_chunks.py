"""Selection within chunks, and the levels of codes: against the reference, and against what they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.sizes import CODE_BITS, levels_of
from tests.support.marks import each_value
from tests.support.sections import chunk_select, top_select, values_encode

from .support import DTYPES, LENGTHS, compare, numbers, poison, tame, work
from .test_select import ugly

I32, U8 = torch.int32, torch.uint8


def both(x: Tensor, residual: Tensor | None, chunk: int, k: int, shift: int = 0) -> None:
    last = min(x.numel() % chunk, k)
    room = x.numel() // chunk * k + last
    compare(chunk_select, x, residual, chunk, k, last, poison(room, I32), poison(room, work(x.dtype)), shift=shift)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(dtype: torch.dtype) -> None:
    for count in (*LENGTHS[::17], 9000):
        residual = numbers(count, work(dtype), count + 1) if count % 3 else None
        for chunk, k in ((1 if count < 99 else 50, 1), (64, 7), (100, 100), (4096, 64)):
            both(numbers(count, dtype, count), residual, chunk, k, shift=count)
    for x in ugly(2000, dtype):
        both(x, None, 64, 1), both(x, None, 999, 50)


def test_a_chunk_is_a_tensor() -> None:
    """The control of the reference: each chunk gives what exact selection gives of it alone."""
    x, chunk, k = tame(5000, torch.float32, 3), 640, 10
    positions, values = poison(80, I32), poison(80, torch.float32)
    assert chunk_select(x, None, chunk, k, 10, positions, values) == (80, 0)
    for number, part in enumerate(x.split(chunk)):
        own, found = poison(k, I32), poison(k, torch.float32)
        top_select(part, None, k, own, found)
        mine = slice(number * k, number * k + k)
        assert torch.equal(positions[mine] - number * chunk, own) and torch.equal(values[mine], found)


def test_chunks_with_threads() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x = tame(1_000_003, torch.float32, 1)
            x[300_000:500_000] = 0  # chunks of which nothing is kept
            both(x, None, 4096, 64)
    finally:
        torch.set_num_threads(before)


# ---- levels --------------------------------------------------------------------------------------


def fit(values: Tensor, bits: int) -> Tensor:
    levels = torch.zeros(1 << bits - 1)
    ops.codebook_fit(values, levels, bits=bits)
    return levels


@each_value
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_levels(kind: torch.dtype, bits: int) -> None:
    for count in (*LENGTHS[::19], 9000):
        for values in (numbers(count, kind, 1), tame(count, kind, 2) ** 5, torch.full((count,), 0.1, dtype=kind)):
            compare("codebook_fit", values, poison(1 << bits - 1, torch.float32), bits=bits, shift=count)


def test_levels_rise_and_are_means() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    for bits in (2, 4, 8):
        levels = fit(values, bits)
        assert bool((levels[1:] >= levels[:-1]).all()) and levels.unique().numel() > 0.8 * levels.numel()
    size, (low, high) = values.abs(), fit(values, 2).tolist()
    mean = float(size.mean())
    assert low == pytest.approx(float(size[size <= mean].mean()), rel=3e-2)  # to a cell
    assert high == pytest.approx(float(size[size > mean].mean()), rel=3e-2)


def test_few_values_are_their_own_levels() -> None:
    values = torch.tensor([-3.0, 0.5, 4.0, -1.0] * 5)
    assert set(fit(values, 4).tolist()) == {0.5, 1.0, 3.0, 4.0}
    assert fit(values[:0], 4).tolist() == [0.0] * 8
    # Beyond float32 a value counts as its largest number.
    assert fit(torch.tensor([1e300, 1e300], dtype=torch.float64), 2).tolist() == [torch.finfo(torch.float32).max] * 2


def error(values: Tensor, form: str) -> float:
    """Return the relative squared error of what is read."""
    count, levels = values.numel(), fit(values, CODE_BITS[form])
    out, grad = poison(ops.values_bound(count, count, 0, 4, form=form), U8), torch.zeros(count)
    used = values_encode(torch.arange(count, dtype=I32), count, values, 0, count, out, form=form, head=levels)
    assert single.values_decode([out[:used]], 0, 0, grad, None, 1.0, form=form) == 0
    assert set(grad.abs().tolist()) <= set(levels.tolist()) and torch.equal(grad.sign(), values.sign())
    return float((grad - values).square().sum() / values.square().sum())


def test_more_bits_lose_less() -> None:
    """On the tail of a normal and of a heavy distribution, as a selection sends them."""
    for power in (1, 3):
        x = torch.randn(400_000, generator=torch.Generator().manual_seed(1)) ** power
        values = x[x.abs() > x.abs().kthvalue(396_000).values]
        found = [error(values, form) for form in CODE_BITS]
        assert found[0] < 0.2 and found[1] < found[0] / 5 and found[2] < 2e-4
        assert [levels_of(form) for form in CODE_BITS] == [2, 8, 128]


REFUSED: dict[str, Callable[[], object]] = {
    r"chunk must be in \[1, 4096\]": lambda: chunk_select(torch.ones(9), None, 5000, 1, 1, I1, V1),
    r"k must be in \[1, 4\]": lambda: chunk_select(torch.ones(9), None, 4, 5, 1, I1, V1),
    r"last in \[1, 1\]": lambda: chunk_select(torch.ones(9), None, 4, 1, 0, I1, V1),
    "positions must be": lambda: chunk_select(torch.ones(9), None, 4, 1, 1, I1, V1),
    "bits must be one of": lambda: ops.codebook_fit(V1, V1.clone(), bits=3),
    "levels must be": lambda: ops.codebook_fit(V1, torch.zeros(3), bits=2),
}
I1, V1 = torch.zeros(1, dtype=I32), torch.zeros(1)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
