"""Parts of the weights that update mode exchanges by turns (Douillard et al. 2025, Streaming DiLoCo, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Fragment:
    """A part of the weights: whole buckets.

    Attributes:
        indices: of its parameters, rising.
        at: the local step of a cycle that ends with its exchange.
        since: local steps since its updates were taken last.
        strayed: whether this rank's weights have left the common ones.
    """

    indices: list[int]
    at: int
    since: int = 0
    strayed: bool = False


def fragments_of(buckets: Sequence[tuple[Sequence[int], int]], number: int, delay: int) -> list[Fragment]:
    """Return parts of about the same number of elements: neighbouring buckets, one at least in each.

    Args:
        buckets: the indices of their parameters, and the number of elements; as many as fragments, at least.
        number: of fragments.
        delay: local steps of a cycle.
    """
    total, done, cuts = sum(count for _, count in buckets), 0, [0]
    for place, (_, count) in enumerate(buckets):
        due, left = len(cuts), len(buckets) - place
        if len(cuts) < number and place and (done + count / 2 > total * due / number or left == number - due):
            cuts.append(place)
        done += count
    parts = [buckets[start:end] for start, end in zip(cuts, [*cuts[1:], len(buckets)], strict=True)]
    return [
        Fragment(sorted(index for indices, _ in part for index in indices), (p + 1) * delay // number)
        for p, part in enumerate(parts)
    ]
