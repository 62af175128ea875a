"""Positions in a bucket that all ranks know: shared out among its tensors, and written in a fixed number of bytes.

Of rising positions below n, k at most, each is cut into its low bits and the rest (Elias 1974, Fano 1971):

    bits: for the j-th position p, bit (p >> low) + j is set; k + (n >> low) + 1 of them, lowest first, to a whole byte
    low planes, each of k bits to a whole byte: bit b of the j-th position is bit j of plane b

That is low + 1 bits a position, and n / 2^low for all: at 1 % 8.6 bits, which is also the most that a Golomb code of
them may take; but every position can be read at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..work import Work

#: On a CPU so many bits are read at a time: what lies between two operations stays small.
_AT_A_TIME = 1 << 20
# Of 8 bytes that are 0 or 1, times this, the highest byte has them as bits, lowest first.
_GATHERED = 0x0102040810204080
# A byte in each of 8 bytes, and of each the bit with its number.
_EVERYWHERE, _ONE_OF_EACH = 0x0101010101010101, -0x7FBFDFEFF7FBFDFF
#: A tensor's position, which positions of the bucket lie in it, and where in the tensor they are.
Places = tuple[int, slice, Tensor]


def places(work: Work, positions: Tensor, among: Sequence[int]) -> list[Places]:
    """Share sorted positions of a bucket out among its tensors.

    Raises:
        ValueError: one is in none of these.
    """
    ends = [work.bucket.offsets[p] + work.bucket.tensors[p].count for p in among]
    edges = torch.tensor([work.bucket.offsets[p] for p in among] + ends, device=positions.device)
    bounds = torch.searchsorted(positions, edges).tolist()
    if sum(bounds[len(among) :]) - sum(bounds[: len(among)]) != positions.numel():
        raise ValueError("a position lies in none of the tensors")
    firsts, lasts = bounds[: len(among)], bounds[len(among) :]
    counts = [last - first for first, last in zip(firsts, lasts, strict=True)]
    number = torch.tensor(counts, device=positions.device)
    inside = positions - torch.repeat_interleave(edges[: len(among)], number, output_size=positions.numel())
    each = zip(among, firsts, lasts, inside.split(counts), strict=True)
    return [(position, slice(first, last), some) for position, first, last, some in each if last > first]


def room(most: int, count: int) -> int:
    """Return the bytes that at most ``most`` positions below ``count`` take."""
    low = _low(most, count)
    return -(-_bits(most, count, low) // 8) + low * -(-most // 8)


def write(positions: Tensor, most: int, count: int, out: Tensor) -> None:
    """Write rising int64 positions below ``count``, ``most`` at most, into ``room`` bytes."""
    low = _low(most, count)
    bits = torch.zeros(_bits(most, count, low), dtype=torch.uint8, device=out.device)
    bits[(positions >> low) + torch.arange(positions.numel(), device=out.device)] = 1
    high = packed(bits)
    out[: high.numel()] = high
    planes = out[high.numel() :].view(low, -(-most // 8))
    for bit in range(low):
        plane = torch.zeros(most, dtype=torch.uint8, device=out.device)
        plane[: positions.numel()] = (positions >> bit) & 1
        planes[bit] = packed(plane)


def read(given: Tensor, most: int, count: int) -> Tensor | None:
    """Return the int64 positions that were written; None for what :func:`write` writes of no positions."""
    low = _low(most, count)
    size = -(-_bits(most, count, low) // 8)
    high = set_bits(given[:size])
    number = high.numel()
    if number > most:
        return None
    positions = (high - torch.arange(number, device=given.device)) << low
    for bit, plane in enumerate(given[size:].view(low, -(-most // 8))):
        positions |= unpacked(plane)[:number].long() << bit
    rises = number < 2 or bool((positions[1:] > positions[:-1]).all())
    return positions if rises and (not number or int(positions[-1]) < count) else None


def _low(most: int, count: int) -> int:
    """Return of how many bits the low parts are: those that take the least."""
    return min(range(32), key=lambda low: most * low + (count >> low)) if most else 0


def _bits(most: int, count: int, low: int) -> int:
    return most + (count >> low) + 1 if most else 0


# ---- bits in bytes, lowest first ---------------------------------------------------------------


def packed(flags: Tensor) -> Tensor:
    """Return flags as bits, lowest first; the last byte is filled with zeros."""
    bytes_ = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(torch.int64)
    return (bytes_ * _GATHERED) >> 56  # the sign that is shifted in is cut off with all but a byte


def set_bits(bitmap: Tensor) -> Tensor:
    """Return the numbers of bits that are 1, in order. Most bytes are 0: only the others are spread out."""
    size = max(1, bitmap.numel() if bitmap.is_cuda else _AT_A_TIME // 8)
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
