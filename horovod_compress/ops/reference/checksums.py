"""Checksums and hashes."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .numbers import ALL_ONES, quiet


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: Tensor, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data.numpy().tobytes():
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    dst.numpy()[:] = src.numpy()
    return crc32c(dst, crc)


def _mix(h: int) -> int:
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & ALL_ONES
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & ALL_ONES
    return h ^ h >> 33


@quiet
def _hash_block(words: np.ndarray) -> int:
    """Hash up to 2048 words: word ``i`` is absorbed by lane ``i % 32``."""
    lanes = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 33, dtype=np.uint64)
    for first in range(0, words.size, 32):
        group = words[first : first + 32]
        state = lanes[: group.size] ^ group
        state += state << np.uint64(23)
        lanes[: group.size] = state ^ (state >> np.uint64(31))
    block = 0
    for lane in lanes:
        block = _mix(block ^ int(lane))
    return block


def hash64(data: Tensor, seed: int = 0) -> int:
    raw = data.numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), dtype="<u8")
    h = _mix(seed & ALL_ONES)
    for first in range(0, words.size, 2048):
        h = _mix(h ^ _hash_block(words[first : first + 2048]))
    return _mix(h ^ len(raw))
