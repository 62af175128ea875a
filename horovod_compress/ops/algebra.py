"""What may be done with the payloads of several ranks: all that an exchange has to know of a method."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Algebra(enum.Enum):
    """How payloads of several ranks become one; it decides which collectives fit."""

    SUM = "payloads add elementwise"
    MERGE = "two payloads become one of the same size"
    FOLD = "all payloads of a chunk at once become one"
    GATHER = "payloads are only concatenated"


@dataclass(frozen=True)
class Piece:
    """Some elements of a region of a payload, where payloads become one.

    Attributes:
        start: index in the region of the first element.
        values: these elements of the own payload, in the region's dtype.
        result: where their result goes, in its own dtype; the same memory if what is passed on is the region itself.
    """

    region: str
    start: int
    values: Tensor
    result: Tensor
