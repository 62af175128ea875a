"""Bits in bytes, lowest first, by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

#: On a CPU so many bits are written or read at a time: what lies between two operations stays small.
AT_A_TIME = 1 << 20
# Of 8 bytes that are 0 or 1, times this, the highest byte has them as bits, lowest first.
_GATHERED = 0x0102040810204080
# A byte in each of 8 bytes, and of each the bit with its number.
_EVERYWHERE, _ONE_OF_EACH = 0x0101010101010101, -0x7FBFDFEFF7FBFDFF


def packed(flags: Tensor) -> Tensor:
    """Return flags as bits, lowest first; the last byte is filled with zeros."""
    bytes_ = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(torch.int64)
    return (bytes_ * _GATHERED) >> 56  # the sign that is shifted in is cut off with all but a byte


def ones(words: Tensor) -> Tensor:
    """Return how many bits of each word are 1."""
    pairs = words - ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    return ((fours + (fours >> 4) & 0x0F0F0F0F0F0F0F0F) * _EVERYWHERE) >> 56


def set_bits(bitmap: Tensor) -> Tensor:
    """Return the numbers of bits that are 1, in order. Most bytes are 0: only the others are spread out."""
    size = max(1, bitmap.numel() if bitmap.is_cuda else AT_A_TIME // 8)
    found = []
    for at in range(0, max(1, bitmap.numel()), size):
        some = bitmap[at : at + size]
        there = some.nonzero().view(-1)
        spread = (some[there].to(torch.int64) * _EVERYWHERE & _ONE_OF_EACH).view(torch.uint8)
        number = spread.nonzero().view(-1)
        found.append(there[number >> 3].add_(at).mul_(8).add_(number & 7))
    return torch.cat(found)


def unpacked(bitmap: Tensor) -> Tensor:
    """Return bits as numbers of a byte, 0 or 1."""
    return ((bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1).view(-1)
