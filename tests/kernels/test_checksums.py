"""CRC-32C by published vectors, and the hash by its promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from tests.support.marks import slow

from .support import LENGTHS, compare, poison

#: The vectors of RFC 3720, B.4, and the usual check value.
KNOWN = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def _bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_crc_known_answers(data: bytes, expected: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    copy = poison(len(data), torch.uint8)
    assert ops.crc32c(tensor) == expected
    assert ops.crc32c_copy(copy, tensor) == expected
    assert torch.equal(copy, tensor)


#: Lengths around one and two rounds of three streams of 512 and 16384 bytes, and one of 131072.
ROUNDS = ((3, 512), (6, 512), (3, 16384), (6, 16384), (3, 131072))
CRC_LENGTHS = (*LENGTHS, *(n * stream + d for n, stream in ROUNDS for d in (-1, 0, 1, 1545)))


def test_crc_equals_the_reference() -> None:
    for count in CRC_LENGTHS:
        compare("crc32c", _bytes(count, count), 12345, shift=count)
        compare("crc32c_copy", poison(count, torch.uint8), _bytes(count, count), 0xFFFFFFFF, shift=count)


def test_crc_continues_at_every_split() -> None:
    data = _bytes(2000)
    whole = ops.crc32c(data)
    for split in range(2001):
        assert ops.crc32c(data[split:], ops.crc32c(data[:split])) == whole
        into = poison(2000, torch.uint8)
        first = ops.crc32c_copy(into[:split], data[:split])
        assert ops.crc32c_copy(into[split:], data[split:], first) == whole
        assert torch.equal(into, data)


def test_crc_detects_every_single_bit_flip() -> None:
    data = _bytes(1600)
    whole = ops.crc32c(data)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert ops.crc32c(data) != whole
            data[byte] ^= 1 << bit


def test_hash_equals_the_reference() -> None:
    for count in (*LENGTHS, 16384 * 3 - 8, 16384 * 3, 16384 * 3 + 13):
        compare("hash64", _bytes(count, count), shift=count)
        compare("hash64", _bytes(count, count), 0xFEDCBA9876543210, shift=count)


@pytest.mark.parametrize("every", [7, *slow(1)])
def test_hash_detects_every_single_bit_flip(every: int) -> None:
    """A full block, a second one and a partial word; where bytes are left out, all places in a word are shown."""
    data = _bytes(16384 + 8 * 37 + 5)
    whole = ops.hash64(data)
    for byte in sorted({*range(0, data.numel(), every), *range(16376, 16392), *range(data.numel() - 8, data.numel())}):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert ops.hash64(data) != whole, (byte, bit)
            data[byte] ^= 1 << bit
    assert ops.hash64(data) == whole


@pytest.mark.parametrize("trials", [10_000, *slow(50_000)])
def test_hash_detects_any_change_of_one_word(trials: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (2100,), generator=torch.Generator().manual_seed(1))
    whole = ops.hash64(words.view(torch.uint8))
    changes = torch.randint(-(2**63), 2**63 - 1, (trials,), generator=torch.Generator().manual_seed(2)).tolist()
    for trial, change in enumerate(changes):
        at = trial % words.numel()
        words[at] ^= change
        assert change == 0 or ops.hash64(words.view(torch.uint8)) != whole
        words[at] ^= change


def test_hash_sees_order_length_and_seed() -> None:
    data = _bytes(8 * 5000)
    seen = {ops.hash64(data), ops.hash64(data, 1), ops.hash64(data[:-1])}
    as_words = data.view(torch.int64)
    for a, b in ((0, 1), (0, 32), (0, 2048), (2047, 2048), (31, 4999)):
        swapped = as_words.clone()
        swapped[[a, b]] = as_words[[b, a]]
        seen.add(ops.hash64(swapped.view(torch.uint8)))
    zeros = torch.zeros(100, dtype=torch.uint8)
    seen.update(ops.hash64(zeros[:count]) for count in range(101))
    assert len(seen) == 3 + 5 + 101


def test_hash_bits_depend_on_every_input_bit() -> None:
    """Each flip changes about half of the output: no flip leaves a pattern behind."""
    data = _bytes(8 * 64)
    whole = ops.hash64(data)
    changed = []
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            changed.append((ops.hash64(data) ^ whole).bit_count())
            data[byte] ^= 1 << bit
    assert min(changed) >= 8
    assert abs(sum(changed) / len(changed) - 32) < 0.5
