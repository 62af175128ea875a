"""Frames: a payload after a small header that is checked field by field.

A frame is 64 bytes of header and the payload. All integers are little-endian:

======  =====  ==============================================================
offset  bytes  field
======  =====  ==============================================================
0       4      magic, ``HVCF``
4       2      wire version
6       2      codec id, see :func:`codec_id`
8       2      phase: 0 reduce, 1 gather, 2 verify
10      2      rank that sent the frame
12      4      step (low 32 bits)
16      4      bucket
20      4      hop
24      4      chunk
28      4      segment
32      4      non-finite values counted so far (stops at 2**32 - 1)
36      4      1 + lowest rank that counted one, 0 for none
40      8      payload length in bytes
48      4      values that were not finite and count as 0, so far (stops at 2**32 - 1)
52      8      digest of what the sender decodes with beside the payload, 0 for nothing
60      4      CRC-32C of bytes 0..59 and the payload
======  =====  ==============================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..errors import CorruptFrameError, DigestError

WIRE_VERSION = 2
HEADER_BYTES = 64
REDUCE, GATHER, VERIFY = 0, 1, 2

_MAGIC = b"HVCF"
_FIELDS = struct.Struct("<4sHHHHIIIIIIIQIQ")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
_MOST = (1 << 32) - 1


class Address(NamedTuple):
    """Where a frame belongs: a receiver knows all of it before the frame arrives.

    Attributes:
        digest: of what its sender decodes with, which is what every rank decodes with.
    """

    codec: int
    phase: int
    sender: int
    step: int
    bucket: int
    hop: int
    chunk: int
    segment: int
    digest: int = 0


class NonFiniteCount(NamedTuple):
    """How many non-finite values were offered.

    Attributes:
        count: of those that keep a bucket from being decoded.
        origin: 1 + the lowest rank that had one of these.
        zeroed: of those that count as 0, with ``nonfinite="zero"``.
    """

    count: int = 0  # type: ignore[assignment]
    origin: int = 0
    zeroed: int = 0

    def plus(self, other: NonFiniteCount) -> NonFiniteCount:
        """Return the sum of two disjoint counts."""
        origins = [origin for origin in (self.origin, other.origin) if origin]
        zeroed = min(self.zeroed + other.zeroed, _MOST)
        return NonFiniteCount(min(self.count + other.count, _MOST), min(origins, default=0), zeroed)


def codec_id(name: str) -> int:
    """Return the 16-bit id of a codec's name."""
    return zlib.crc32(name.encode()) & 0xFFFF


class FrameBuffer:
    """Memory for one frame: the header and up to ``capacity`` payload bytes."""

    __slots__ = ("_bytes", "memory")

    def __init__(self, capacity: int) -> None:
        self.memory = torch.zeros(HEADER_BYTES + capacity, dtype=torch.uint8, device="cpu")
        self._bytes = memoryview(self.memory.numpy().data)

    def frame(self, length: int) -> Tensor:
        """Return the bytes of a frame with ``length`` payload bytes."""
        return self.memory[: HEADER_BYTES + length]

    def pack(self, address: Address, bad: NonFiniteCount, pieces: list[Tensor]) -> Tensor:
        """Copy the pieces after a header, in one pass with the checksum; return the frame."""
        length = sum(piece.numel() for piece in pieces)
        _FIELDS.pack_into(
            self._bytes, 0, _MAGIC, WIRE_VERSION, address.codec, address.phase, address.sender,
            address.step & _MOST, address.bucket, address.hop, address.chunk, address.segment,
            bad.count, bad.origin, length, bad.zeroed, address.digest,
        )  # fmt: skip
        crc = ops.crc32c(self.memory[:_CRC_AT])
        at = HEADER_BYTES
        for piece in pieces:
            crc = ops.crc32c_copy(self.memory[at : at + piece.numel()], piece, crc)
            at += piece.numel()
        _CRC.pack_into(self._bytes, _CRC_AT, crc)
        return self.frame(length)

    def check(self, due: Address, length: int) -> NonFiniteCount:
        """Check a received frame against what is due and return its non-finite counts.

        Raises:
            CorruptFrameError: names the first field that differs.
            DigestError: its sender decodes with something else than this rank.
        """
        magic, version, *fields, count, origin, got_length, zeroed, digest = _FIELDS.unpack_from(self._bytes, 0)
        _field("magic", _MAGIC, magic, due)
        _field("wire version", WIRE_VERSION, version, due)
        _field("payload length", length, got_length, due)
        crc = ops.crc32c(self.memory[:_CRC_AT])
        crc = ops.crc32c(self.memory[HEADER_BYTES : HEADER_BYTES + length], crc)
        _field("checksum", crc, _CRC.unpack_from(self._bytes, _CRC_AT)[0], due)
        expected = due._replace(step=due.step & _MOST)
        if digest != due.digest:
            raise DigestError(due.sender)
        if (*fields, digest) != tuple(expected):
            for name, want, got in zip(Address._fields, expected, fields, strict=False):
                _field(name, want, got, due)
        return NonFiniteCount(count, origin, zeroed)

    def payload(self, start: int, stop: int) -> Tensor:
        """Return payload bytes ``start`` to ``stop``."""
        return self.memory[HEADER_BYTES + start : HEADER_BYTES + stop]


def _field(name: str, want: object, got: object, due: Address) -> None:
    if want != got:
        raise CorruptFrameError(
            f"corrupt frame from rank {due.sender} (step {due.step}, bucket {due.bucket}, "
            f"hop {due.hop}, chunk {due.chunk}, segment {due.segment}): "
            f"{name} should be {want!r}, got {got!r}; check the network and that every rank "
            f"runs the same version of horovod-compress"
        )
