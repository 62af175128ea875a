"""What a rank decodes with beside the consensus bytes: equal on every rank, or their results differ in silence.

A result is a function of consensus bytes and of a few things that each rank has by itself: what it multiplies results
by, a second moment that is held, tables that a method keeps for a bucket. A program that treats one rank differently
changes them there. So every rank shows them before each step, in words; a digest of these words stands in the header
of every frame. Where digests differ, the ranks' notes tell in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .ranks import by_value

#: What is shown, and what to do where it differs.
RESULT_SCALE = "what results are multiplied by"
SECOND_MOMENT = "the second moment that gradients are divided by"
ROUND = "the kind of round"
COUNTERS = "how far update mode is"
GRADIENT_SCALE = "the scale of the gradient scaler"
RATIO = "the ratio of norms"
TABLES = "what the tables of the method hold"

_ADVICE = {
    RESULT_SCALE: "give the optimizer the same op= on every rank: Average multiplies by 1, Sum by the number of ranks",
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
    """What one rank decodes with in the coming step, in words.

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
