"""Choices over tensors of several kinds: of other methods, dtypes or devices, which no bucket can hold together.

Schedules choose groups of consecutive tensors and know nothing of kinds. A group becomes one bucket for each kind that
it holds, and costs what all its buckets cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import Plan, TensorSpec
from .trial import BucketCost, Choice

Run = tuple[Sequence[TensorSpec], int, bool]  # tensors, number of their method, left uncompressed


@dataclass(frozen=True)
class Cut:
    """A choice as buckets.

    Attributes:
        plan: its buckets in order, and behind them some that the choice is not about.
        groups: the numbers of the buckets of each group.
    """

    plan: Plan
    groups: tuple[range, ...]

    def costs(self, of_buckets: Mapping[int, BucketCost]) -> list[BucketCost]:
        """Return what each group costs, leaving out those of which no bucket was exchanged."""
        found = []
        for group in self.groups:
            if known := [of_buckets[bucket] for bucket in group if bucket in of_buckets]:
                found.append(
                    BucketCost(
                        sum(one.elements for one in known),
                        sum(one.exchange for one in known),
                        sum(one.decode for one in known),
                        all(one.plain for one in known),
                    )
                )
        return found


def cut(choice: Choice, tensors: Sequence[TensorSpec], methods: Mapping[str, int], behind: Sequence[Run] = ()) -> Cut:
    """Return a choice as buckets; of a group's, that whose last tensor comes first is exchanged first.

    Args:
        tensors: in the order in which their gradients arrive.
        methods: the number of the method of each, by name.
        behind: further buckets.
    """
    runs: list[Run] = []
    groups = []
    stop = 0
    for place, number in enumerate(choice.counts):
        start, stop = stop, stop + number
        kinds: dict[tuple[int, str, str], list[TensorSpec]] = {}
        for tensor in tensors[start:stop]:
            kind = (methods[tensor.name], tensor.dtype, tensor.device)
            own = kinds.pop(kind, [])
            own.append(tensor)
            kinds[kind] = own  # at the end now, as this tensor is the last one so far
        groups.append(range(len(runs), len(runs) + len(kinds)))
        runs += [(own, method, place in choice.plain) for (method, _, _), own in kinds.items()]
    return Cut(Plan.of([*runs, *behind]), tuple(groups))
