"""Every rank hands its gradients over in the same way: attached, or through Horovod's tokens; to the same optimizer.

A rank that uses tokens waits inside Horovod for those of the others, which an attached rank never sends. So the ranks
compare their ways once, at the first gradient, while none of them waits for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import MismatchError
from .operands import difference
from .ranks import listed


@dataclass(frozen=True)
class Way:
    """How one rank is about to hand over gradients.

    Attributes:
        plan: names the compression; where first gradients may be of several, ranks may meet with different ones.
        attached: whether it needs no tokens.
        second_moment: whose the optimizer's is, in words.
        options: what else the optimizer does, by name, in words.
    """

    plan: str
    attached: bool
    second_moment: str
    options: Mapping[str, str] = field(default_factory=dict)


def check_all(shown: Sequence[Mapping[str, Any]]) -> None:
    """Compare the ways of all ranks, as plain data.

    Raises:
        MismatchError: see :func:`check`.
    """
    check([Way(**way) for way in shown])


def check(ways: Sequence[Way]) -> None:
    """Compare the ways of all ranks; every rank comes to the same end.

    Raises:
        MismatchError: names the ranks that are attached, and those that are not; or what their optimizers do
            otherwise.
    """
    if len({way.plan for way in ways}) > 1:
        return  # of several compressions, each with an optimizer of its own
    attached = [rank for rank, way in enumerate(ways) if way.attached]
    tokens = [rank for rank, way in enumerate(ways) if not way.attached]
    if attached and tokens:
        raise MismatchError(
            f"attach() was called on rank(s) {listed(attached)}, and not on rank(s) {listed(tokens)}; call "
            f"compression.attach(optimizer) on every rank, before the first backward pass, or on none"
        )
    if told := difference({rank: way.options for rank, way in enumerate(ways)}):
        raise MismatchError(told)
    kinds = [way.second_moment for way in ways]
    if len(set(kinds)) > 1:
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise MismatchError(
            f"the second moment of the optimizer is {kinds[0]} on rank 0, and {kinds[other]} on rank {other}; give "
            f"every rank the same optimizer, and attach() the same options"
        )
