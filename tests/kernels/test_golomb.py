"""Golomb sections: against the reference, against a decoder written here, and against random bytes."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.reference.sparse import section_positions
from tests.support.marks import slow
from tests.support.sections import begins, binary_encode, binary_select

from .support import DTYPES, LENGTHS, Guarded, compare, mask, numbers, poison, tame, work

I32, U8 = torch.int32, torch.uint8


def encoded(positions: Tensor, b: int, elements: int, mean: float = 0.5, dtype: torch.dtype = torch.float32) -> Tensor:
    kept = positions.numel()
    value = torch.tensor([mean], dtype=dtype)
    out = poison(ops.golomb_bound(kept, elements, b, value.element_size()), U8)
    used = binary_encode(positions, kept, value, b, elements, out)
    assert bool((out[used:] == 0xA5).all())
    return out[:used].clone()


def read_section(section: bytes, b: int, elements: int) -> tuple[float, list[int]]:
    """Read a float32 section as its description says, sharing nothing with the kernels."""
    size = 2 ** (b + 11)
    ranges = math.ceil(elements / size)
    (value,) = struct.unpack_from("<f", section)
    lengths = struct.unpack_from(f"<{ranges}I", section, 4)
    at, found = 4 + 4 * ranges, []
    for index, length in enumerate(lengths):
        bits = "".join(f"{byte:08b}"[::-1] for byte in section[at : at + length])
        at += length
        cursor, before = 0, index * size - 1
        while (zero := bits.find("0", cursor)) >= 0:
            low = bits[zero + 1 : zero + 1 + b]
            before += ((zero - cursor) << b) + int("0" + low[::-1], 2) + 1
            found.append(before)
            cursor = zero + 1 + b
        assert len(bits) - cursor < 8
    assert at == len(section)
    return value, found


# ---- the parameter and the bound ------------------------------------------------------------------


def test_parameter() -> None:
    known = {(1, 10): 3, (1, 100): 6, (1, 1000): 9, (1, 10_000): 13, (4, 10): 0, (38, 100): 1, (39, 100): 0, (1, 1): 0}
    for (k, count), b in known.items():
        assert ops.golomb_parameter(k, count) == b
    assert ops.golomb_parameter(0, 100) == 20
    assert ops.golomb_parameter(0, 0) == 0
    assert ops.golomb_parameter(1, 2**31 - 1) == 20


def test_parameter_is_the_formula() -> None:
    golden = math.log((math.sqrt(5) - 1) / 2)
    for count in (7, 100, 12_345, 25_000_000):
        for k in {1, 2, 3, count // 1000, count // 77, count // 10, count // 2, count - 1} - {0}:
            exact = math.log2(golden / math.log1p(-k / count))
            if abs(exact - round(exact)) > 1e-9:
                assert ops.golomb_parameter(k, count) == min(20, max(0, 1 + math.floor(exact)))


def check_bound(positions: list[int], b: int, elements: int) -> None:
    """Give a section more room than it may take, so that what is too long is seen and not just written."""
    kept, value = len(positions), torch.tensor([0.5])
    bound = ops.golomb_bound(kept, elements, b, 4)
    out = Guarded(poison(2 * bound + 64, U8), kept % 64)
    used = binary_encode(torch.tensor(positions, dtype=I32), kept, value, b, elements, out.view)
    assert used <= bound
    assert out.intact() and bool((out.view[used:] == 0xA5).all())
    found, wrong = section_positions(out.view[:used], b, elements, 4)
    assert (found.tolist(), wrong) == (positions, 0)


def test_the_bound_holds_for_the_worst_positions() -> None:
    for b in (0, 1, 3):
        size = 1 << b + 11
        for elements in (1, 100, size, size + 1, 3 * size - 5):
            for step in (1, 2, size - 1, size):  # the last: one position at the end of each range
                for positions in (range(step - 1, elements, step), [elements - 1]):
                    check_bound(list(positions), b, elements)


# ---- encoding -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_masks() -> None:
    random.seed(1)
    for seed in range(10_000):
        density = 10 ** random.uniform(-5, math.log10(0.5))
        count = 9000 if seed % 500 == 0 else random.randrange(1, 200)
        positions = mask(count, density, seed)
        best = ops.golomb_parameter(len(positions), count)
        b = 0 if seed % 500 == 0 else random.choice((0, 1, 2, 5, 9, 20, best))
        section = encoded(positions, b, count, mean=seed / 2)
        assert read_section(section.numpy().tobytes(), b, count) == (seed / 2, positions.tolist())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_encode(kind: torch.dtype) -> None:
    for count in (*LENGTHS[::3], 20_000):
        for b in (0, 2, 7, 20):
            positions = mask(count, 1 / (count % 13 + 1), count)
            bound = ops.golomb_bound(positions.numel(), count, b, 8)
            given = (positions, positions.numel(), tame(1, kind, count), b, count, begins(), poison(bound, U8))
            compare("binary_encode", *given, shift=count)


def test_encode_of_a_part_of_the_positions() -> None:
    compare("binary_encode", mask(5000, 0.1, 1), 77, torch.ones(1), 3, 5000, begins(), poison(4000, U8), shift=3)


def test_bits_per_position() -> None:
    count = 4_000_000
    positions = mask(count, 0.01, 5)
    section = encoded(positions, ops.golomb_parameter(positions.numel(), count), count)
    assert abs(8 * section.numel() / positions.numel() / 8.108 - 1) < 0.02
    assert section_positions(section, 6, count, 4)[0].tolist() == positions.tolist()


# ---- decoding -------------------------------------------------------------------------------------


def sections_of(count: int, b: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        encoded(mask(count, 0.5 / (rank + 1), rank), b, count, 0.3 * (-1.5) ** rank, work(dtype))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_and_clear(dtype: torch.dtype) -> None:
    for count in (*LENGTHS[::6], 20_000):
        b, ranks = (0, 1, 3, 20)[count % 4], (1, 2, 5)[count % 3]
        sections = sections_of(count, b, ranks, dtype)
        residual = tame(count, work(dtype), 2)
        for own in {0, ranks - 1}:
            compare("binary_decode", sections, own, b, tame(count, dtype, 1), residual, 1 / 3, shift=count)
        compare("binary_decode", sections, 0, b, numbers(count, dtype, 1), numbers(count, work(dtype), 2), -2.0)
        compare("binary_decode", sections, 0, b, numbers(count, dtype, 1), None, 1.0, shift=count)
        compare("binary_clear", sections[0], b, numbers(count, dtype, 1), shift=count)


def test_many_ranks_and_threads() -> None:
    before, count = torch.get_num_threads(), 150_001
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sections = [encoded(mask(count, 0.002, rank), 2, count, rank - 50.5) for rank in range(101)]
            given = (100, 2, tame(count, torch.float32, 1), tame(count, torch.float32, 2), 1 / 101)
            compare("binary_decode", sections, *given, shift=1)
            compare("binary_clear", sections[7], 2, tame(count, torch.float32, 1), shift=1)
            # As large as it takes for three threads to clear.
            large = encoded(mask(900_001, 0.002, 1), 2, 900_001)
            compare("binary_clear", large, 2, tame(900_001, torch.float32, 1), shift=1)
    finally:
        torch.set_num_threads(before)


def test_bytes_behind_a_section_are_ignored() -> None:
    section = encoded(mask(5000, 0.1, 1), 1, 5000)
    padded = [torch.cat([section, poison(9, U8)])]
    compare("binary_decode", padded, 0, 1, tame(5000, torch.float32, 1), tame(5000, torch.float32, 2), 1.0)


def test_selection_travels_whole() -> None:
    """What one rank sends and what it keeps add up to what it had."""
    count, k = 50_000, 500
    grad, residual = tame(count, torch.float64, 1), tame(count, torch.float64, 2)
    positions, mean, x = poison(k, I32), poison(1, torch.float64), grad + residual
    kept, _ = binary_select(grad, residual, k, positions, mean)
    b = ops.golomb_parameter(k, count)
    section = encoded(positions[:kept], b, count, mean.item(), torch.float64)
    assert single.binary_decode([section], 0, b, grad, residual, 1.0) == 0
    assert torch.equal(grad.nonzero().flatten(), positions.long())
    assert torch.allclose(grad + residual, x, rtol=0, atol=1e-15)


# ---- bytes that are no section ----------------------------------------------------------------------


def test_malformed_by_hand() -> None:
    """b = 0 and 4000 elements are two ranges: 12 bytes before the streams."""
    head = [0, 0, 0, 63]
    cases = {
        (): 2,
        (*head, 0, 0, 0, 0, 0, 0, 0): 2,
        (*head, 0, 0, 0, 0, 0, 0, 0, 0): 0,
        (*head, 1, 0, 0, 0, 0, 0, 0, 0): 2,
        (*head, 0, 0, 0, 0, 1, 0, 0, 0): 1,
        (*head, 255, 255, 255, 255, 0, 0, 0, 0): 2,
        (*head, 1, 0, 0, 0, 0, 0, 0, 0, 0xFF): 1,
        (*head, 1, 0, 0, 0, 0, 0, 0, 0, 0x7F): 0,
        (*head, 1, 0, 0, 0, 1, 0, 0, 0, 0x7F, 0xFE): 0,
        (*head, 2, 0, 0, 0, 1, 0, 0, 0, 0x7F, 0xFF, 0xFE): 1,
        (*head, 1, 1, 0, 0, 0, 0, 0, 0, *[0] * 257): 1,
        (*head, 0, 1, 0, 0, 0, 0, 0, 0, *[0] * 256): 0,
        (*head, 0, 0, 0, 0, 244, 0, 0, 0, *[0] * 244): 0,
        (*head, 0, 0, 0, 0, 245, 0, 0, 0, *[0] * 245): 1,
    }
    for section, wrong in cases.items():
        data = torch.tensor(section, dtype=U8)
        assert ops.binary_clear(data, 0, torch.ones(4000)) == wrong, section
        compare("binary_decode", [data], 0, 0, tame(4000, torch.float32, 1), tame(4000, torch.float32, 2), 1.0)


def test_a_code_word_cut_short() -> None:
    """One position at 0 with b = 9: ten bits, so a stream of one byte ends inside the word."""
    section = torch.tensor([0, 0, 0, 63, 1, 0, 0, 0, 0], dtype=U8)
    assert ops.binary_clear(section, 9, torch.ones(100)) == 1


@pytest.mark.parametrize("first", [0, *slow(500, 1000)])
def test_random_bytes(first: int) -> None:
    """Any bytes: nothing outside is touched, the count of wrong ranges is the reference's."""
    generator = np.random.default_rng(3 + first)
    for trial in range(first, first + 500):
        count, b = int(generator.integers(0, 9000)), int(generator.choice([0, 1, 2, 6, 20]))
        ranges = -(-count >> b + 11)
        streams = [generator.integers(0, 256, int(generator.integers(0, 400)), dtype=np.uint8) for _ in range(ranges)]
        lengths = np.array([stream.size for stream in streams], dtype="<u4")
        lengths += (generator.random(ranges) < 0.1) * generator.integers(0, 1 << 32, ranges, dtype=np.uint32)
        streams = [stream | 0xF7 if trial % 2 else stream for stream in streams]
        raw = np.concatenate([np.zeros(4, dtype=np.uint8), lengths.view(np.uint8), *streams])
        raw = raw[: int(generator.integers(0, raw.size + 1))] if trial % 5 == 0 else raw
        guarded = [Guarded(torch.from_numpy(raw.copy()), trial % 64)]
        guarded += [Guarded(tame(count, torch.float32, trial), trial % 63) for _ in range(3)]
        section, grad, residual, momentum = (part.view for part in guarded)
        wrong = section_positions(section, b, count, 4)[1]
        assert single.binary_decode([section, section], 1, b, grad, residual, 1.0) == 2 * wrong
        assert ops.binary_clear(section, b, momentum) == wrong
        assert all(part.intact() for part in guarded)


@pytest.mark.slow
def test_flipped_bits() -> None:
    good = encoded(mask(9000, 0.02, 1), 1, 9000)
    for bit in range(0, 8 * good.numel(), 7):
        section = good.clone()
        section[bit // 8] ^= 1 << (bit % 8)
        guarded = Guarded(tame(9000, torch.float32, 1), bit % 64)
        assert ops.binary_clear(section, 1, guarded.view) == section_positions(section, 1, 9000, 4)[1]
        assert guarded.intact()


# ---- what is refused ------------------------------------------------------------------------------


def _encode(positions: list[int], kept: int, b: int, elements: int, room: int) -> object:
    return binary_encode(torch.tensor(positions, dtype=I32), kept, torch.ones(1), b, elements, poison(room, U8))


def _decode(section: Tensor, own: int = 0, b: int = 1, residual: Tensor | None = None) -> object:
    return single.binary_decode([section], own, b, torch.ones(4), residual, 1.0)


def _encode_huge(kept: int) -> object:
    """Positions that take no memory, and are not contiguous."""
    return binary_encode(torch.zeros(1, dtype=I32).expand(kept), kept, torch.ones(1), 20, (1 << 31) - 1, BYTES)


WORDS, BYTES = torch.zeros(64), torch.zeros(1 << 14, dtype=U8)
REFUSED: dict[str, Callable[[], object]] = {
    "streams of at most 4294967295 bytes": lambda: _encode_huge((1 << 31) - 1),
    "positions must be a contiguous": lambda: _encode_huge(2),
    "mean and out must not overlap": lambda: binary_encode(
        poison(1, I32), 0, BYTES[:4].view(torch.float32), 1, 1, BYTES
    ),
    r"grad and sections\[0\] must not overlap": lambda: single.binary_decode(
        [WORDS.view(U8)[12:60]], 0, 1, WORDS, None, 1.0
    ),
    r"residual and sections\[1\] must not overlap": lambda: single.binary_decode(
        [BYTES, WORDS.view(U8)[12:60]], 0, 1, torch.ones(64), WORDS, 1.0
    ),
    "residual and grad must not overlap": lambda: single.binary_decode([BYTES], 0, 1, WORDS, WORDS, 1.0),
    "positions must ascend and be below 10": lambda: _encode([3, 3], 2, 1, 10, 99),
    "positions must ascend": lambda: _encode([5, 3], 2, 1, 10, 99),
    "must ascend and be below 9": lambda: _encode([9], 1, 1, 9, 99),
    "ascend": lambda: _encode([-1], 1, 1, 9, 99),
    r"kept must be in \[0, 1\]": lambda: _encode([1], 2, 1, 10, 99),
    "out must hold at least 9 bytes": lambda: _encode([1], 1, 1, 10, 8),
    r"b must be in \[0, 20\], got 21": lambda: _encode([1], 1, 21, 10, 99),
    r"b must be in \[0, 20\], got -1": lambda: _decode(poison(9, U8), b=-1),
    r"own must be in \[0, 1\)": lambda: _decode(poison(9, U8), own=1),
    r"sections\[0\] must be a contiguous torch.uint8": lambda: _decode(torch.ones(9)),
    "residual must be": lambda: _decode(poison(9, U8), residual=torch.ones(3)),
    "sections must hold": lambda: single.binary_decode([], 0, 1, torch.ones(4), None, 1.0),
    "section must be": lambda: ops.binary_clear(torch.ones(4), 1, torch.ones(4)),
    "tensor must be float32": lambda: ops.binary_clear(poison(9, U8), 1, poison(9, U8)),
    "mean must be float32 or float64": lambda: binary_encode(
        poison(1, I32), 0, torch.ones(1).half(), 1, 1, poison(99, U8)
    ),
    r"k must be in \[0, 4\]": lambda: ops.golomb_parameter(5, 4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
