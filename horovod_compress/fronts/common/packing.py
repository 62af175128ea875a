"""Plain data as ranks show it to each other: JSON behind a header with its length and checksum.

Nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ...engine.saved import checksums
from ...errors import CorruptFrameError

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"HVCJ"


def pack(value: Any) -> bytes:
    """Return one rank's part."""
    text = json.dumps(value, separators=(",", ":")).encode()  # in its own order, in which differences are told
    return _HEADER.pack(_MAGIC, checksums.crc(text), len(text)) + text


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
            if magic != _MAGIC or len(text) != size or checksums.crc(text) != crc:
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
