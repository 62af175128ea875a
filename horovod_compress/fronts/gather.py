"""Small plain data of all ranks, before and between steps: as bytes, and in words where ranks stay away.

What ranks show each other is JSON behind a header with its length and checksum. Nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from ..engine import sealed
from ..engine.agreement.ranks import listed
from ..errors import CorruptFrameError

#: What ranks meet for, by the second word of its name.
_MEETINGS = {
    "handshake": "the handshake",
    "addresses": "the exchange of addresses, by which ranks connect",
    "connected": "the end of the handshake, where ranks report whether they are connected",
    "nccl": "the set-up of NCCL's connections",
    "linked": "the end of the set-up of NCCL's connections",
    "attach": "the comparison of ranks before the first gradient",
    "tuning": "the comparison of measured times, by which the schedule chooses buckets",
    "update": "the comparison of update-mode optimizers",
    "save": "the saving of a checkpoint folder",
    "load": "the loading of a checkpoint folder",
}


def why_not_all(name: str, rank: int, within: str | None, absent: Sequence[int]) -> str:
    """Return what is known of a meeting that did not take place.

    Args:
        name: of the gather.
        rank: of this one, as people know it.
        within: the time that ranks had to come, None if it was not that.
        absent: the ranks that are known not to have come, as people know them.
    """
    meeting = _MEETINGS.get(name.split(".")[1], name)
    what = f"not every rank came to {meeting} within {within}" if within else f"{meeting} did not take place"
    who = f" Rank(s) {listed(absent)} never came: look at their output." if absent else ""
    return (
        f"rank {rank}: {what}.{who} Usual causes: a rank failed before this point; a rank needs longer to load its "
        "data or model than timeout= allows; compression objects are not created, or used, in the same order on every "
        "rank"
    )


# ---- as bytes ----

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"HVCJ"


def pack(value: Any) -> bytes:
    """Return one rank's part."""
    text = json.dumps(value, separators=(",", ":")).encode()  # in its own order, in which differences are told
    return _HEADER.pack(_MAGIC, sealed.crc(text), len(text)) + text


def unpack(joined: bytes, ranks: int) -> list[Any]:
    """Return the values of all parts, one behind the other.

    Raises:
        CorruptFrameError: these are not so many parts.
    """
    found, at = [], 0
    try:
        while at < len(joined):
            magic, crc, size = _HEADER.unpack_from(joined, at)
            at += _HEADER.size + size
            text = joined[at - size : at]
            if magic != _MAGIC or len(text) != size or sealed.crc(text) != crc:
                break
            found.append(json.loads(text))
    except (struct.error, ValueError, RecursionError):
        found = []
    if len(found) != ranks or at != len(joined):
        raise CorruptFrameError(
            f"{len(joined)} bytes came from {ranks} ranks, but are not a message of this package; check that every "
            "rank runs the same version of horovod-compress, and check the network"
        )
    return found
