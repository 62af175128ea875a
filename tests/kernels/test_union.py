"""Bits of the union, and values in it: against the reference, CUDA's text and torch; and whatever the bits are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops

from . import emulator
from .parity import Target
from .support import BATCH_DTYPES, LENGTHS, bits, compare, numbers, poison, tame, words, work

COUNTS = (0, 1, 31, 32, 33, 63, 64, 65, 200, 1023, 4101)
BLOCKS = (1, 2, 7, 32, 64, 100, 5000)
OF_NO_BLOCK = -(1 << 62)


def words_for(count: int, block: int) -> int:
    return ops.word_count(-(-count // block))


def sparse(count: int, dtype: torch.dtype, density: float) -> Tensor:
    """Return any numbers, of which a share is kept, in runs too."""
    some = torch.rand(count, generator=torch.Generator().manual_seed(count)) < density
    some[count // 3 : count // 2] = density > 0.1
    some[count // 2 : 2 * count // 3] = False
    return torch.where(some, numbers(count, dtype, count), torch.zeros((), dtype=dtype))


def in_union(found: Tensor, count: int, block: int) -> Tensor:
    """Return of which elements bits are 1."""
    spread = (found[:, None] >> torch.arange(64) & 1).view(-1).bool()
    return spread[: -(-count // block)].repeat_interleave(block)[:count]


def union_of(grad: Tensor, block: int) -> tuple[Tensor, int]:
    """Return the bits of a gradient, and how many elements they stand for."""
    found = poison(words_for(grad.numel(), block), torch.int64)
    single.union_mark(grad, found, block=block)
    return found, int(single.union_count(found, grad.numel(), block=block))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_kernels_give_the_bits_of_their_references(dtype: torch.dtype, block: int) -> None:
    for count in LENGTHS if block == 1 else COUNTS:
        for density in (0.0, 0.05, 0.6, 1.0):
            grad = sparse(count, dtype, density)
            compare("union_mark", grad, poison(words_for(count, block), torch.int64), block=block, shift=count)
            found, kept = union_of(grad, block)
            values = poison(kept, work(dtype))
            compare("union_count", found, count, block=block, shift=count)
            compare("union_encode", grad, found, kept, values, block=block, shift=count)
            values, result = numbers(kept, work(dtype), 1), poison(count, dtype)
            compare("union_decode", values, found, kept, result, block=block, scale=-0.3, shift=count)


@pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    """All tensors at once, some of them without bits, and one alone."""
    target = Target("emulated", "cpu")
    for block in BLOCKS:
        for counts in (COUNTS, COUNTS[-1:]):
            grads = [sparse(count, dtype, 0.3) for count in counts]
            room = [poison(words_for(count, block), torch.int64) for count in counts]
            target.same("union_mark_all", grads, room, block=block)
            marked = [union_of(grad, block) for grad in grads]
            found, kept = [each for each, _ in marked], [number for _, number in marked]
            target.same("union_count_all", found, list(counts), block=block)
            for position in range(2, len(counts), 4):
                found[position], kept[position] = None, counts[position]
            values = [poison(number, work(dtype)) for number in kept]
            target.same("union_encode_all", grads, found, kept, values, block=block)
            values = [numbers(number, work(dtype), number) for number in kept]
            results = [poison(count, dtype) for count in counts]
            target.same("union_decode_all", values, found, kept, results, block=block, scale=-0.3)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_decoded_is_what_was_marked(block: int) -> None:
    for count in COUNTS[1:]:
        grad = tame(count, torch.float32, count)
        grad[torch.rand(count, generator=torch.Generator().manual_seed(1)) < 0.9] = 0
        found, kept = union_of(grad, block)
        where = in_union(found, count, block)
        assert kept == int(where.sum()) and not bool(grad[~where].any())
        pairs = zip(grad.split(block), where.split(block), strict=True)
        assert all(bool(part.any()) == bool(mine.all()) for part, mine in pairs)
        values, result = poison(kept, torch.float32), poison(count, torch.float32)
        single.union_encode(grad, found, kept, values, block=block)
        assert torch.equal(values, grad[where])
        single.union_decode(values, found, kept, result, block=block, scale=1.0)
        assert torch.equal(result, grad)


def test_threads_change_nothing() -> None:
    """Large enough that each of them has a share."""
    count, before = 3_000_001, torch.get_num_threads()
    grad = sparse(count, torch.float32, 0.2)
    try:
        for block in (1, 64):
            results = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found, kept = union_of(grad, block)
                values, result = poison(kept, torch.float32), poison(count, torch.float32)
                single.union_encode(grad, found, kept, values, block=block)
                single.union_decode(values, found, kept, result, block=block, scale=0.5)
                results.append([found, values.view(torch.int32), result.view(torch.int32)])
            assert all(map(torch.equal, *results))
    finally:
        torch.set_num_threads(before)


def test_nothing_is_written_beyond_the_values_whatever_the_bits_are() -> None:
    """Bits of no block count as none; the memory around the arrays is compared by all of these."""
    for block in BLOCKS:
        for count in COUNTS[1:]:
            found = words(words_for(count, block), count)
            inside, kept = -(-count // block) % 64, int(in_union(found, count, block).sum())
            wrong = bool(inside and int(found[-1]) >> inside & ((1 << 64 - inside) - 1))
            assert single.union_count(found, count, block=block) == kept + wrong * OF_NO_BLOCK
            grad, fewer = tame(count, torch.float32, 1), kept // 2
            room = poison(fewer + 64, torch.float32)
            single.union_encode(grad, found, fewer, room[:fewer], block=block)
            assert torch.equal(room[fewer:].view(torch.uint8), poison(64, torch.float32).view(torch.uint8))
            single.union_decode(room[:fewer], found, fewer, grad, block=block, scale=1.0)


def test_what_does_not_fit_is_refused() -> None:
    grad, found = torch.ones(65), bits(65, 1)
    with pytest.raises(ValueError, match="bits must be those of 64 elements in blocks of 1, got 2 words"):
        single.union_count(found, 64, block=1)
    with pytest.raises(ValueError, match="row_length must be at least 1, got 0"):
        single.union_mark(grad, found, block=0)
    with pytest.raises(ValueError, match="without bits all 65 elements are kept, got 64"):
        ops.union_encode_all([grad], [None], [64], [torch.zeros(64)], block=1)
