"""What merging leaves for the next round at the same place: bits that a payload of one bit had no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Carry:
    """Rows of one region's type that a rank keeps for the elements which it merges.

    A round reads ``kept`` and writes ``next``; only when its result is good on every rank does one become the other.
    So a round that is not finite leaves no trace, although ranks merge before they know.

    Args:
        first: the first element of the region that has a place here.
        kept: one row behind the other, empty at first.
    """

    def __init__(self, first: int, kept: Tensor) -> None:
        self.first, self.kept, self.next = first, kept, torch.zeros_like(kept)

    def rows(self, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that were kept for some elements of the region, and those to be written."""
        here = slice(start - self.first, stop - self.first)
        return [row[here] for row in self.kept], [row[here] for row in self.next]

    def keep(self) -> None:
        """Take what the round wrote for what is kept."""
        self.kept, self.next = self.next, self.kept


def again(region: str) -> str:
    """Return the name of what merging keeps for elements of a region that it has merged before in the same round."""
    return f"{region} again"


def carries(
    rows: Mapping[str, int],
    regions: Mapping[str, Tensor],
    spans: Sequence[Mapping[str, tuple[int, int]]],
    device: torch.device,
) -> dict[str, Carry]:
    """Return an empty carry for every region that has rows.

    Args:
        rows: how many, by region.
        spans: the first element that this rank merges, and the end, by region; then of those that it merges again.
        device: where payloads are merged.
    """
    found = {}
    for name, number in rows.items():
        if not number:
            continue
        for key, (first, last) in zip((name, again(name)), (span[name] for span in spans), strict=False):
            found[key] = Carry(first, torch.zeros(number, last - first, dtype=regions[name].dtype, device=device))
    return found
