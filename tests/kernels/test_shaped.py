"""Noise-shaped merging: compiled kernels against whole numbers, and what their counts can reach."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.reference import signs as reference_shaped

from .support import compare, count_rows_of, ones, poison, words

WORDS = (0, 1, 3, 4, 7, 8, 9, 33)
RANKS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 200)


def _empty(like: list[Tensor]) -> list[Tensor]:
    return [poison(row.numel(), torch.int64) for row in like]


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_merge_equals_the_reference(ranks: int) -> None:
    for count in WORDS:
        rows = count_rows_of(ranks, count, 3)
        compare("shaped_merge", words(count, 1), words(count, 2), rows, _empty(rows), ranks, shift=count)


@pytest.mark.parametrize("ranks", RANKS)
def test_fold_equals_the_reference(ranks: int) -> None:
    for count in WORDS[:: 1 if ranks < 20 else 3]:
        rows, parts = count_rows_of(ranks, count, 3), [words(count, part) for part in range(ranks)]
        compare("shaped_fold", parts, poison(count, torch.int64), rows, _empty(rows), shift=count)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 9])
def test_in_place(ranks: int) -> None:
    """Counts may be written over those that are read, and a fold over any part."""
    rows, parts = count_rows_of(ranks, 40, 3), [words(40, part) for part in range(ranks)]
    fresh, out = _empty(rows), poison(40, torch.int64)
    ops.shaped_fold(parts, out, rows, fresh)
    for place in range(ranks):
        mine, own = [row.clone() for row in rows], [part.clone() for part in parts]
        ops.shaped_fold(own, own[place], mine, mine)
        assert torch.equal(own[place], out) and all(map(torch.equal, mine, fresh))
    merged, again = parts[0].clone(), parts[0].clone()
    ops.shaped_merge(merged, parts[1], rows, fresh, ranks)
    ops.shaped_merge(again, parts[1], rows, rows, ranks)
    assert torch.equal(merged, again) and all(map(torch.equal, rows, fresh))


@pytest.mark.parametrize("ranks", range(2, 20))
def test_every_case_of_one_element(ranks: int) -> None:
    """From every count, with every pair of bits: the identity, the bound, and a count that there can be."""
    cases = [
        (E, mine, theirs) for E in range(-ranks, ranks) if E % 2 == 0 for mine, theirs in product((-1, 1), (-1, 1))
    ]
    cases = [case for case in cases if -(ranks // 2) <= case[0] // 2 < (ranks + 1) // 2]
    assert len(cases) == 4 * ranks
    E, mine, theirs = (np.array(column) for column in zip(*cases, strict=True))  # noqa: N806  the rule's own name
    count = -(-len(cases) // 64)
    rows, into, other = [poison(count, torch.int64) for _ in range(ops.count_rows(ranks))], *_packed(mine, theirs)
    stored = (E // 2 + ranks // 2) ^ (ranks // 2)
    for place, row in enumerate(rows):
        row.copy_(_packed(np.where(stored >> place & 1, 1, -1))[0])
    ops.shaped_merge(into, other, rows, rows, ranks)
    merged = np.where(ones(into)[: len(cases)], 1, -1)
    left = reference_shaped.rounded_off(rows, ranks)[: len(cases)]
    y = (ranks - 1) * theirs + mine + E
    assert (merged == np.where(y >= 0, 1, -1)).all() and (left == y - ranks * merged).all()
    assert set(left.tolist()) <= set(E.tolist())  # so counts never need more rows


def _packed(*signs: np.ndarray) -> list[Tensor]:
    found = []
    for one in signs:
        padded = np.zeros(64 * -(-one.size // 64), dtype=bool)
        padded[: one.size] = one > 0
        found.append(torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int64).copy()))
    return found


def test_what_all_agree_on_is_the_result_and_rounds_off_nothing() -> None:
    rows = count_rows_of(5, 10, 1)
    same, fresh = words(10, 2), _empty(rows)
    out = poison(10, torch.int64)
    ops.shaped_fold([same.clone() for _ in range(5)], out, rows, fresh)
    assert torch.equal(out, same) and all(map(torch.equal, rows, fresh))


@pytest.mark.parametrize("ranks", [300, 65535])
def test_many_ranks(ranks: int) -> None:
    """The share of ones over the steps is that of the bits, for counts of many rows."""
    assert ops.count_rows(ranks) == (ranks - 1).bit_length()
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(ops.count_rows(ranks))]
    parts = [torch.tensor([-1])] * (ranks // 3) + [torch.zeros(1, dtype=torch.int64)] * (ranks - ranks // 3)
    found = 0
    for _ in range(6):
        out = poison(1, torch.int64)
        ops.shaped_fold(parts, out, rows, rows)
        found += int(out != 0)
        assert int(out) in (0, -1)
    assert found == 2


def test_refused() -> None:
    one, two = words(1, 1), words(1, 2)
    for ranks in (0, 65536):
        with pytest.raises(ValueError, match="ranks must be in"):
            ops.count_rows(ranks)
    with pytest.raises(ValueError, match="before must hold 2 rows for counts below 3, got 1"):
        ops.shaped_merge(one, two, [one.clone()], [one.clone()], 3)
    with pytest.raises(ValueError, match=r"after\[0\] must be"):
        ops.shaped_merge(one, two, [one.clone()], [words(2, 1)], 2)
    with pytest.raises(ValueError, match="overlap"):
        ops.shaped_merge(one, one, [two], [two], 2)
    with pytest.raises(ValueError, match=r"parts\[1\] must be"):
        ops.shaped_fold([one, words(2, 1)], two, [words(1, 3)], [words(1, 4)])
    with pytest.raises(ValueError, match="ranks must be in"):
        ops.shaped_fold([], two, [], [])
