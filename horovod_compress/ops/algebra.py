"""What may be done with the payloads of several ranks: all that an exchange has to know of a method."""

from __future__ import annotations

import enum


class Algebra(enum.Enum):
    """How payloads of several ranks become one; it decides which collectives fit."""

    SUM = "payloads add elementwise"
    MERGE = "two payloads become one of the same size"
    FOLD = "all payloads of a chunk at once become one"
    GATHER = "payloads are only concatenated"
