"""The kernels for folding signs to three values, -1, 0 or 1, and what that rounds off.

Words come in groups of five, and the three-valued elements of a group take eight: ``rules/ternary.h`` says how. Counts
are as in :mod:`.shaped`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .legality import MAX_PARTS, REFERENCE, backend, check_apart, checked, checked_each
from .shaped import checked_rows

__all__ = ["GROUP_WORDS", "PACKED_WORDS", "ternary_fold", "ternary_states", "ternary_unpack"]

#: Words of a group, and of what its three-valued elements are packed in.
GROUP_WORDS = 5
PACKED_WORDS = 8


def ternary_states(ranks: int) -> int:
    """Return how many values the remainder of a fold over this many ranks can take."""
    if not 2 <= ranks <= MAX_PARTS:
        raise ValueError(f"ranks must be in [2, {MAX_PARTS}], got {ranks}")
    return ranks if ranks % 2 else ranks // 2 + (ranks % 4 == 0)


def ternary_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Fold the bits of all ranks to -1, 0 or 1, packed.

    With signs +-1 and E for what is kept, y is the sum of the parts and E; the result is the sign of y where y is at
    least half of ``ranks`` from 0, else 0, and ``y - ranks * result`` is kept.

    Args:
        parts: of at least two ranks, whole groups of words.
        before: the counts as they are, ``count_rows(ternary_states(ranks))`` rows or more.
        after: where they are written; ``before`` itself, or rows apart from it.
    """
    native, device, launch = backend(out)
    words, states = _words_of(out), ternary_states(len(parts))
    before_at = checked_rows("before", before, states, words, device)
    after_at = checked_rows("after", after, states, words, device)
    out_at = checked("out", out, torch.int64, out.numel(), device)
    parts_at = checked_each("parts", parts, torch.int64, words, device)
    if REFERENCE:
        REFERENCE.ternary_fold(parts, out, before, after)
    else:
        native.ternary_fold(parts_at, len(parts), words, out_at, before_at, after_at, launch)


def ternary_unpack(packed: Tensor, bits: Tensor, zeros: Tensor) -> None:
    """Write which elements are 0 or 1 to ``bits``, and which are 0 to ``zeros``; both are whole groups of words."""
    native, device, launch = backend(packed)
    words = _words_of(packed)
    packed_at = checked("packed", packed, torch.int64, packed.numel(), device)
    bits_at = checked("bits", bits, torch.int64, words, device)
    zeros_at = checked("zeros", zeros, torch.int64, words, device)
    check_apart("bits", bits, "zeros", zeros)
    if REFERENCE:
        REFERENCE.ternary_unpack(packed, bits, zeros)
    else:
        native.ternary_unpack(packed_at, words, bits_at, zeros_at, launch)


def _words_of(packed: Tensor) -> int:
    """Return how many words of bits some packed elements are."""
    groups, rest = divmod(packed.numel(), PACKED_WORDS)
    if rest:
        raise ValueError(f"three-valued elements take a multiple of {PACKED_WORDS} words, got {packed.numel()}")
    return groups * GROUP_WORDS
