"""The majority fold against counting."""

from __future__ import annotations

import pytest
import torch

from horovod_compress import ops

from .support import LENGTHS, bits, compare, ones, poison, words


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31])
def test_every_length(parts: int) -> None:
    for count in LENGTHS[:: 1 if parts < 6 else 5]:
        vectors = [bits(count, 100 * count + part) for part in range(parts)]
        compare("majority_fold", vectors, poison(ops.word_count(count), torch.int64), count, shift=count)


@pytest.mark.parametrize("parts", [*range(1, 40), 63, 64, 65, 255, 256, 257])
def test_every_count_of_ones(parts: int) -> None:
    """Lane i holds exactly i ones: the result must turn over at half, and a tie is 1."""
    lanes = parts + 1
    held = torch.arange(lanes)[None, :] > torch.randperm(parts, generator=torch.Generator().manual_seed(1))[:, None]
    vectors = []
    for row in held.tolist():
        whole = sum(1 << lane for lane, one in enumerate(row) if one)
        parts64 = [whole >> 64 * w & (2**64 - 1) for w in range(ops.word_count(lanes))]
        vectors.append(torch.tensor([value - (1 << 64) if value >> 63 else value for value in parts64]))
    out = poison(ops.word_count(lanes), torch.int64)
    ops.majority_fold(vectors, out, lanes)
    assert ones(out)[:lanes].tolist() == [int(2 * lane >= parts) for lane in range(lanes)]
    assert ones(out)[lanes:].sum() == 0


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_in_place_over_any_part(parts: int) -> None:
    count = 64 * 100 - 5
    for place in range(parts):
        vectors = [bits(count, part) for part in range(parts)]
        expected = poison(100, torch.int64)
        ops.majority_fold(vectors, expected, count)
        ops.majority_fold(vectors, vectors[place], count)
        assert torch.equal(vectors[place], expected)


def test_padding_is_cleared_whatever_the_parts_hold() -> None:
    for count in (1, 63, 65, 64 * 40 + 1):
        vectors = [torch.full((ops.word_count(count),), -1) for _ in range(3)]
        out = poison(ops.word_count(count), torch.int64)
        ops.majority_fold(vectors, out, count)
        assert int(ones(out).sum()) == count


def test_the_largest_number_of_parts() -> None:
    """65535 parts, of which 32767 or 32768 hold a one."""
    zero, one = torch.zeros(2, dtype=torch.int64), torch.tensor([-1, 0])
    for held, expected in ((32767, 0), (32768, 64)):
        out = poison(2, torch.int64)
        ops.majority_fold([one] * held + [zero] * (65535 - held), out, 128)
        assert int(ones(out).sum()) == expected


def test_many_words_of_many_parts() -> None:
    vectors = [words(5000, part) for part in range(21)]
    compare("majority_fold", vectors, poison(5000, torch.int64), 64 * 5000)
