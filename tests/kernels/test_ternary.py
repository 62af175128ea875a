"""Folding signs to three values: compiled kernels against whole numbers, and what their counts can reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.reference import signs as reference
from horovod_compress.ops.sizes import ternary_states

from .support import compare, count_rows_of, ones, poison, words

GROUPS = (0, 1, 2, 7, 8, 9, 17)
RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 63, 64, 65, 200)


def _counts(ranks: int, count: int, seed: int) -> list[Tensor]:
    return count_rows_of(ternary_states(ranks), count, seed)


def _empty(like: list[Tensor]) -> list[Tensor]:
    return [poison(row.numel(), torch.int64) for row in like]


def _unpacked(packed: Tensor) -> np.ndarray:
    """Return the three-valued elements as numbers."""
    count = packed.numel() // ops.PACKED_WORDS * ops.GROUP_WORDS
    bits, zeros = poison(count, torch.int64), poison(count, torch.int64)
    ops.ternary_unpack(packed, bits, zeros)
    return np.where(ones(zeros), 0, np.where(ones(bits), 1, -1))


@pytest.mark.parametrize("ranks", RANKS)
def test_fold_equals_the_reference(ranks: int) -> None:
    for groups in GROUPS[:: 1 if ranks < 20 else 3]:
        count = groups * ops.GROUP_WORDS
        rows, parts = _counts(ranks, count, 3), [words(count, part) for part in range(ranks)]
        out = poison(groups * ops.PACKED_WORDS, torch.int64)
        compare("ternary_fold", parts, out, rows, _empty(rows))


@pytest.mark.parametrize("groups", GROUPS)
def test_unpacking_equals_the_reference_for_every_byte(groups: int) -> None:
    """Also for bytes that packing never writes: what they mean is the same everywhere."""
    packed = torch.arange(64 * groups).to(torch.uint8).view(torch.int64)
    count = groups * ops.GROUP_WORDS
    compare("ternary_unpack", packed, poison(count, torch.int64), poison(count, torch.int64))


@pytest.mark.parametrize("ranks", range(2, 20))
def test_every_case_of_one_element(ranks: int) -> None:
    """From every count, with every sum of signs: the identity, the bound, and a count that there can be."""
    states, step = ternary_states(ranks), 2 - ranks % 2
    kept = [step * (2 * count - (states - 1)) // 2 for count in range(states)]  # around 0
    cases = [(rest, plus) for rest in kept for plus in range(ranks + 1)]
    groups = -(-len(cases) // 320)
    padded = cases + [(kept[0], 0)] * (320 * groups - len(cases))
    left, plus = (np.array(column) for column in zip(*padded, strict=True))
    count = groups * ops.GROUP_WORDS
    parts = [_packed(rank < plus) for rank in range(ranks)]
    stored = np.array([kept.index(rest) for rest in left]) ^ states // 2
    rows = [_packed(stored >> place & 1 == 1) for place in range(ops.count_rows(states))]
    out, y = poison(groups * ops.PACKED_WORDS, torch.int64), 2 * plus - ranks + left
    ops.ternary_fold(parts, out, rows, rows)
    values, after = _unpacked(out), reference.ternary_left_over(rows, ranks, 64 * count)
    assert (values == np.where(2 * abs(y) >= ranks, np.sign(y), 0)).all() and (after == y - ranks * values).all()
    assert set(after.tolist()) <= set(kept)  # so counts never need more rows


def _packed(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int64).copy())


def test_in_place() -> None:
    """Counts may be written over those that are read."""
    rows, parts = _counts(6, 40, 3), [words(40, part) for part in range(6)]
    fresh, out, again = _empty(rows), *(poison(64, torch.int64) for _ in range(2))
    ops.ternary_fold(parts, out, rows, fresh)
    ops.ternary_fold(parts, again, rows, rows)
    assert torch.equal(out, again) and all(map(torch.equal, rows, fresh))


def test_two_ranks_lose_nothing() -> None:
    """Two signs have three sums: there is nothing to keep, and no row for it."""
    assert ops.count_rows(ternary_states(2)) == 0
    one, two, out = words(10, 1), words(10, 2), poison(16, torch.int64)
    ops.ternary_fold([one, two], out, [], [])
    signs = [np.where(ones(part), 1, -1) for part in (one, two)]
    assert (_unpacked(out) * 2 == signs[0] + signs[1]).all()


@pytest.mark.parametrize("ranks", [300, 65535])
def test_many_ranks(ranks: int) -> None:
    """The mean over the steps is that of the signs, for counts of many rows."""
    rows = [torch.zeros(5, dtype=torch.int64) for _ in range(ops.count_rows(ternary_states(ranks)))]
    all_ones, none = torch.full((5,), -1), torch.zeros(5, dtype=torch.int64)
    parts = [all_ones] * (ranks // 3) + [none] * (ranks - ranks // 3)
    found = 0
    for _ in range(6):
        out = poison(8, torch.int64)
        ops.ternary_fold(parts, out, rows, rows)
        values = _unpacked(out)
        assert (values == values[0]).all()
        found += int(values[0])
    assert found == -2


def test_refused() -> None:
    one, out, none = words(5, 1), poison(8, torch.int64), []
    with pytest.raises(ValueError, match="ranks must be in"):
        ops.ternary_fold([one], out, none, none)
    with pytest.raises(ValueError, match="a multiple of 8 words, got 7"):
        ops.ternary_fold([one, one], out[:7], none, none)
    with pytest.raises(ValueError, match="before must hold 2 rows for counts below 3, got 1"):
        ops.ternary_fold([one, one, one], out, [one.clone()], [one.clone()])
    with pytest.raises(ValueError, match=r"parts\[1\] must be"):
        ops.ternary_fold([one, words(4, 1)], out, none, none)
    with pytest.raises(ValueError, match="overlap"):
        ops.ternary_unpack(out, one, one)
