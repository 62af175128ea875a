"""Tensors of several kinds: of other methods, dtypes or devices, which no bucket can hold together.

Adaptive schedules choose groups of consecutive tensors and know nothing of kinds. A group becomes one bucket for each
kind that it holds, and costs what all its buckets cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .plan import Plan, TensorSpec
from .trial import BucketCost, Choice

#: The number of the method, dtype and device.
Kind = tuple[int, str, str]


def by_kind(tensors: Iterable[TensorSpec], method: Callable[[str], int]) -> dict[Kind, list[TensorSpec]]:
    """Return the tensors of each kind in their order; the kind whose last tensor comes first is the first.

    Args:
        method: returns the number of the method of a tensor, by name.
    """
    kinds: dict[Kind, list[TensorSpec]] = {}
    for tensor in tensors:
        kind = (method(tensor.name), tensor.dtype, tensor.device)
        own = kinds.pop(kind, [])
        own.append(tensor)
        kinds[kind] = own  # at the end now, as this tensor is the last one so far
    return kinds


@dataclass(frozen=True)
class Grouped:
    """A choice as buckets.

    Attributes:
        plan: its buckets in order, and behind them some that the choice is not about.
        groups: the numbers of the buckets of each group.
        plain: the places of groups that are left uncompressed.
    """

    plan: Plan
    groups: tuple[range, ...]
    plain: frozenset[int]

    def costs(self, of_buckets: Mapping[int, BucketCost]) -> list[BucketCost]:
        """Return what each group costs, leaving out those of which no bucket was exchanged."""
        found = []
        for place, group in enumerate(self.groups):
            if known := [of_buckets[bucket] for bucket in group if bucket in of_buckets]:
                elements, exchange, decode = zip(
                    *((one.elements, one.exchange, one.decode) for one in known), strict=True
                )
                found.append(BucketCost(sum(elements), sum(exchange), sum(decode), place in self.plain))
        return found


def as_buckets(
    choice: Choice,
    tensors: Sequence[TensorSpec],
    method: Callable[[str], int],
    may_be_plain: Callable[[int], bool],
    behind: Sequence[Sequence[TensorSpec]] = (),
) -> Grouped:
    """Return a choice as buckets.

    Args:
        tensors: in the order in which their gradients arrive.
        method: returns the number of the method of a tensor, by name.
        may_be_plain: returns whether buckets of a method can be left uncompressed; others of the group stay as they
            are.
        behind: the tensors of further buckets, which have no method.
    """
    runs: list[tuple[Sequence[TensorSpec], int, bool]] = []
    groups = []
    stop = 0
    for place, number in enumerate(choice.counts):
        start, stop = stop, stop + number
        kinds = by_kind(tensors[start:stop], method)
        groups.append(range(len(runs), len(runs) + len(kinds)))
        runs += [(own, of, place in choice.plain and may_be_plain(of)) for (of, _, _), own in kinds.items()]
    return Grouped(Plan.of([*runs, *((own, 0, False) for own in behind)]), tuple(groups), choice.plain)
