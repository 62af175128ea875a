"""In what ranks differ, in words: in what they decode with, and in how they hand gradients over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import MismatchError

# ---- ranks in words ------------------------------------------------------------------------------

#: List at most this many ranks: nobody reads thousands.
_MOST = 64


def listed(ranks: Iterable[int]) -> str:
    """Return ``0, 2``; of very many the first, and how many more there are."""
    every = list(ranks)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return ", ".join(map(str, every[:_MOST])) + more


def by_value(values: Sequence[Any] | Mapping[int, Any]) -> str:
    """Return ``rank 0 = 8, ranks 1, 2 = 4`` for the values of all ranks, or by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"rank{'s' if len(who) > 1 else ''} {listed(who)} = {value}" for value, who in ranks.items())


def minority(values: Sequence[int] | Sequence[str]) -> str:
    """Return the ranks whose value is not that of most, in words; among as many, the lowest rank's counts."""
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    return listed(rank for rank, value in enumerate(values) if value != usual)


# ---- what a rank decodes with --------------------------------------------------------------------

#: What is shown, and what to do where it differs.
RESULT_SCALE = "what results are multiplied by"
WHO_STEPS = "who does the optimizer's step (step=)"
SECOND_MOMENT = "the second moment that gradients are divided by"
ROUND = "the kind of round"
COUNTERS = "how far update mode is"
GRADIENT_SCALE = "the scale of the gradient scaler"
RATIO = "the ratio of norms"
TABLES = "what the tables of the method hold"

_ADVICE = {
    RESULT_SCALE: "give the optimizer the same op= on every rank: Average multiplies by 1, Sum by the number of ranks",
    WHO_STEPS: "attach or register the optimizer with the same step= on every rank",
    SECOND_MOMENT: "give every rank the same optimizer with the same options, load its state on every rank or on none "
    "(hvd.broadcast_optimizer_state gives all ranks that of rank 0), broadcast the weights before the first step, and "
    "call step() equally often",
    ROUND: "call the optimizer's step() after each exchange on every rank or on none",
    COUNTERS: "call step() and flush() equally often on every rank",
    GRADIENT_SCALE: "give every rank a gradient scaler with the same options, and load its state on every rank",
    RATIO: "load states of the same step on every rank",
    TABLES: "call load_state_dict() with the same residuals= on every rank, each with a state of the same step",
}

_ABSENT = "(not there)"
_OF_ALL = "give every rank the same optimizer, and register or attach it on every rank"
_OF_OPTIONS = "give every rank the same optimizer, with the same options, at all times"


class Operands:
    """What one rank decodes with in the coming step, in words: equal on every rank, or results differ in silence.

    A result is a function of consensus bytes and of a few things that each rank has by itself: what it multiplies
    results by, a second moment that is held, tables that a method keeps for a bucket. A program that treats one rank
    differently changes them there. So every rank shows them before each step, and a digest of these words is in the
    header of every frame. Where digests differ, the ranks' notes say in what.

    Attributes:
        shown: by name.
        digest: 64 bits that stand for all of it; 0 where nothing is shown.
        step: it is of.
    """

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.digest = self.step = 0

    def show(self, name: str, value: object) -> None:
        """Show something, in place of what was shown by this name; None for nothing. Between two steps."""
        if self.shown.get(name) == (None if value is None else str(value)):
            return
        if value is None:
            del self.shown[name]
        else:
            self.shown[name] = str(value)
        text = json.dumps(self.shown, sort_keys=True).encode()
        self.digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def difference(shown: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return in words what differs first between ranks, and what to do; None if nothing does.

    Args:
        shown: by rank.
    """
    for name in dict.fromkeys(name for each in shown.values() for name in each):
        values = {rank: str(each.get(name, _ABSENT)) for rank, each in sorted(shown.items())}
        if len(set(values.values())) > 1:
            advice = _OF_ALL if _ABSENT in values.values() else _ADVICE.get(name, _OF_OPTIONS)
            return f"{name} differs between ranks: {by_value(values)}; {advice}"
    return None


# ---- how gradients are handed over ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How one rank is about to hand over gradients: attached, or through Horovod's tokens; to which optimizer.

    A rank that uses tokens waits inside Horovod for those of the others, which an attached rank never sends. So the
    ranks compare their ways once, at the first gradient, while none of them waits for anything else.

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
