"""The kernels for noise-shaped merging: one bit for several ranks, and what that rounds off.

Counts, which are what is kept, are lists of rows: bit ``l`` of the count of every element is in row ``l``, laid
out as bits are. ``rules/shaped.h`` says what they mean; zeros stand for having rounded off nothing yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .legality import MAX_PARTS, REFERENCE, backend, check_apart, checked, checked_each

__all__ = ["count_rows", "shaped_fold", "shaped_merge"]


def count_rows(ranks: int) -> int:
    """Return how many rows the counts of a merge for that many ranks take."""
    if not 1 <= ranks <= MAX_PARTS:
        raise ValueError(f"ranks must be in [1, {MAX_PARTS}], got {ranks}")
    return (ranks - 1).bit_length()


def shaped_merge(into: Tensor, other: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    """Merge the bits of one rank, ``into``, with ``other``, which stand for all other ``ranks - 1``.

    With signs +-1 and E for what is kept, ``y = (ranks - 1) * other + into + E``; the result is the sign of y, +1 for
    0, and what it differs from y by, ``y - ranks * result``, is kept.

    Args:
        before: the counts as they are, ``count_rows(ranks)`` rows or more, of which only these are used.
        after: where they are written; ``before`` itself, or rows apart from it.
    """
    native, device, launch = backend(into)
    words = into.numel()
    into_at = checked("into", into, torch.int64, words, device)
    other_at = checked("other", other, torch.int64, words, device)
    check_apart("into", into, "other", other)
    before_at, after_at = (checked_rows(n, rows, ranks, words, device) for n, rows in _named(before, after))
    if REFERENCE:
        REFERENCE.shaped_merge(into, other, before, after, ranks)
    else:
        native.shaped_merge(into_at, other_at, words, ranks, before_at, after_at, launch)


def shaped_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Merge the bits of all ranks at once; ``out`` may be one of the parts.

    With signs +-1 and E for what is kept, y is the sum of the parts and E; the result is the sign of y, +1 for 0, and
    ``y - ranks * result`` is kept; see :func:`shaped_merge`.
    """
    ranks, words = len(parts), out.numel()
    native, device, launch = backend(out)
    before_at, after_at = (checked_rows(n, rows, ranks, words, device) for n, rows in _named(before, after))
    out_at = checked("out", out, torch.int64, words, device)
    parts_at = checked_each("parts", parts, torch.int64, words, device)
    if REFERENCE:
        REFERENCE.shaped_fold(parts, out, before, after)
    else:
        native.shaped_fold(parts_at, ranks, words, out_at, before_at, after_at, launch)


def _named(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[tuple[str, Sequence[Tensor]], ...]:
    return ("before", before), ("after", after)


def checked_rows(name: str, rows: Sequence[Tensor], modulus: int, words: int, device: int) -> list[int]:
    """Check the rows that counts below ``modulus`` need and return their addresses."""
    needed = count_rows(modulus)
    if len(rows) < needed:
        raise ValueError(f"{name} must hold {needed} rows for counts below {modulus}, got {len(rows)}")
    return checked_each(name, rows[:needed], torch.int64, words, device)
