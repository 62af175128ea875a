"""Records, Elias codes, moments and means of powers of two against the reference, and against the rules by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.reference import numbers as reference_numbers, records as reference_records
from tests.support.marks import each_value, slow
from tests.support.sections import begins, elias_encode

from .support import BATCH_DTYPES, FEW_DTYPES, KEY, LENGTHS, Guarded, compare, numbers, poison, tame, work

U8 = torch.uint8
BLOCKS = (64, 128, 320, 512, 1024, 8192)
ODD = (*range(0, 258, 3), 511, 512, 513, 1025, 4097, 8193, 16385)


def shape_of(count: int) -> dict[str, int]:
    """Return bits, block and norm; all of them come, in every combination with the length's last digits."""
    return {"bits": 2 + count % 7, "block": BLOCKS[count % 6], "norm": (0, 2)[count % 2]}


def records_for(count: int, shape: dict[str, int]) -> int:
    return -(-count // shape["block"]) * ops.qsgd_record_bytes(shape["bits"], shape["block"])


def random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).to(U8)


def encoded(x: Tensor, rank: int = 0, **shape: int) -> Tensor:
    records = poison(records_for(x.numel(), shape), U8)
    single.qsgd_encode(x, records, KEY.at(rank=rank), **shape)
    return records


def section(x: Tensor, rank: int = 0, **shape: int) -> Tensor:
    out = poison(ops.elias_bound(x.numel(), bits=shape["bits"], block=shape["block"]), U8)
    used, _ = elias_encode(x, out, KEY.at(rank=rank), **shape)
    assert bool((out[used:] == 0xA5).all())
    return out[:used].clone()


# ---- records ----


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_qsgd_encode(dtype: torch.dtype) -> None:
    for count in ODD:
        for more in (0, 1, 5):
            shape = shape_of(count + more)
            records = poison(records_for(count, shape), U8)
            compare("qsgd_encode", numbers(count, dtype, count), records, KEY, **shape, offset=64 * more, shift=count)
        zeros, tiny = torch.zeros(count, dtype=dtype), tame(count, dtype, 1) * torch.finfo(dtype).smallest_normal
        for x in (zeros, -zeros, tiny):
            compare("qsgd_encode", x, poison(records_for(count, shape), U8), KEY, **shape)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_qsgd_decode(dtype: torch.dtype) -> None:
    for count in ODD:
        shape = shape_of(count)
        records = encoded(tame(count, dtype, count), **shape)
        rule = {"bits": shape["bits"], "block": shape["block"], "scale": 0.3}
        compare("qsgd_decode", records, poison(count, dtype), **rule, shift=count)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_qsgd_fold(ranks: int) -> None:
    for count in (1, 64, 300, 1000, 9000):
        for more in range(7):
            shape = shape_of(count + more)
            parts = [
                encoded(tame(count, torch.float32, rank) * 10.0 ** (rank - 2), rank, **shape) for rank in range(ranks)
            ]
            out = poison(parts[0].numel(), U8)
            compare("qsgd_fold", parts, out, KEY, **shape, offset=64 * more, shift=count + more)


def test_qsgd_fold_of_numbers_of_every_size() -> None:
    """The largest and the smallest numbers there are, zeros, and any codes at all."""
    shape = {"bits": 5, "block": 128, "norm": 0}
    sizes = [0.0, 1e-45, 1e-38, 1e-19, 1.0, 1e19, 3.4e38]
    for norm in (0, 2):
        shape["norm"] = norm
        for a in sizes:
            for b in sizes:
                parts = []
                for rank, size in enumerate((a, b)):
                    part = random_bytes(ops.qsgd_record_bytes(5, 128), rank)
                    part[:4] = torch.tensor([size]).view(U8)
                    parts.append(part)
                compare("qsgd_fold", parts, poison(parts[0].numel(), U8), KEY, **shape)
                compare("qsgd_decode", parts[0], poison(128, torch.float32), bits=5, block=128, scale=1 / 15)


def test_qsgd_fold_in_place() -> None:
    shape = {"bits": 6, "block": 192, "norm": 2}
    parts = [encoded(tame(1000, torch.float32, rank), rank, **shape) for rank in range(3)]
    apart = poison(parts[0].numel(), U8)
    ops.qsgd_fold(parts, apart, KEY, **shape)
    for into in parts:
        ops.qsgd_fold(
            [part.clone() if part is not into else into for part in parts], (mine := into.clone()), KEY, **shape
        )
        copies = [part.clone() for part in parts]
        own = next(i for i, part in enumerate(parts) if part is into)
        ops.qsgd_fold(copies, copies[own], KEY, **shape)
        assert torch.equal(copies[own], apart) and torch.equal(mine, apart)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_loco_encode(dtype: torch.dtype) -> None:
    for count in ODD[::2]:
        shape, kept_bits = shape_of(count), 2 + count % 7 if count % 2 else 8
        errors = encoded(tame(count, torch.float32, 9) / 10, bits=kept_bits, block=shape["block"], norm=0)
        for x in (numbers(count, dtype, count), tame(count, dtype, count)):
            for kept in (errors, None):
                room = poison(records_for(count, shape), U8), poison(errors.numel(), U8)
                rule = {"kept_bits": kept_bits, "beta": (0.0, 0.8)[count // 3 % 2]}
                compare("loco_encode", x, kept, *room, **shape, **rule, shift=count)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_loco_fold(ranks: int) -> None:
    for count in (1, 64, 300, 1000, 9000):
        for more in range(0, 7, 2):
            shape, kept_bits = shape_of(count + more), 8 - more
            parts = [
                encoded(tame(count, torch.float32, rank) * 10.0 ** (rank - 2), rank, **shape) for rank in range(ranks)
            ]
            for size in (0.1, 1e30, 0.0):
                errors = encoded(size * tame(count, torch.float32, 9), bits=kept_bits, block=shape["block"], norm=0)
                room = poison(parts[0].numel(), U8), poison(errors.numel(), U8)
                rule = {"kept_bits": kept_bits, "beta": 0.8}
                compare("loco_fold", parts, errors if size else None, *room, **shape, **rule, shift=count + more)


def test_loco_fold_in_place() -> None:
    """Also where a block is too long to be kept by a warp."""
    for block in (192, 1088):
        shape = {"bits": 6, "block": block, "norm": 2}
        parts = [encoded(tame(5000, torch.float32, rank), rank, **shape) for rank in range(3)]
        errors = encoded(tame(5000, torch.float32, 9), bits=8, block=block, norm=0)
        apart, left = poison(parts[0].numel(), U8), poison(errors.numel(), U8)
        ops.loco_fold(parts, errors, apart, left, **shape, kept_bits=8, beta=0.8)
        for own in range(3):
            copies, mine = [part.clone() for part in parts], poison(errors.numel(), U8)
            ops.loco_fold(copies, errors, copies[own], mine, **shape, kept_bits=8, beta=0.8)
            assert torch.equal(copies[own], apart) and torch.equal(mine, left)


def test_errors_by_hand() -> None:
    """Seven levels: 1.25 + 0.25 is half of a level, which goes up; 1/4 of what was kept and 3/4 of what is lost."""
    x, errors = torch.full((64,), 1.25), torch.full((64,), 0.25)
    x[0], errors[0] = 7.0, 0.0
    kept = encoded(errors, bits=8, block=64, norm=0)
    records, left, back = poison(36, U8), poison(68, U8), poison(64, torch.float32)
    assert single.loco_encode(x, kept, records, left, bits=4, block=64, norm=0, kept_bits=8, beta=0.25) == 0
    single.qsgd_decode(records, back, bits=4, block=64, scale=1 / 7)
    torch.testing.assert_close(back, torch.tensor([7.0] + [2.0] * 63))
    single.qsgd_decode(left, back, bits=8, block=64, scale=1 / 127)
    torch.testing.assert_close(back, torch.tensor([0.0] + [0.25 * 0.25 + 0.75 * (1.5 - 2.0)] * 63))


def test_draws_are_moved_by_a_shift_and_halves_without_a_key() -> None:
    """Of numbers in units of 2^-16 levels the codes tell the draws: the level is that of x + draw."""
    count, norm = 1000, torch.tensor([1.0])
    for offset in (0, 3, 8):
        for shift in (0, 1, 0x8000, 0xFFFF):
            x, codes = torch.full((count,), 0.5 / 100), poison(count, U8)
            key = KEY.at(shift=shift)
            single.uniform_encode(x, norm, count, codes, key, bits=8, levels=100, offset=offset)
            moved = (reference_numbers.draws(KEY, offset, count) + shift) % 65536
            assert codes.tolist() == (moved >= 0x8000).astype(int).tolist()
    for size, level in ((0.499, 0), (0.501, 1), (-0.499, 0), (-0.501, -1)):
        single.uniform_encode(torch.full((count,), size / 100), norm, count, codes, None, bits=8, levels=100)
        assert codes.view(torch.int8).unique().tolist() == [level]
        records = poison(ops.qsgd_record_bytes(8, 64), U8)
        single.qsgd_encode(torch.tensor([127.0, size]), records, None, bits=8, block=64, norm=0)
        assert records[4:6].view(torch.int8).tolist() == [127, level]


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_record_by_hand(bits: int) -> None:
    """Whole numbers of levels are exact: the norm in front, then the codes, the lowest bit first."""
    top = (1 << (bits - 1)) - 1
    codes = torch.arange(64) % (2 * top + 1) - top
    record = encoded(codes.float() * 0.5, bits=bits, block=64, norm=0)
    assert record[:4].view(torch.float32).item() == top * 0.5
    stream = int.from_bytes(record[4:].numpy().tobytes(), "little")
    assert record.numel() == 4 + 8 * bits == ops.qsgd_record_bytes(bits, 64)
    for i, code in enumerate(codes.tolist()):
        assert stream >> bits * i & (1 << bits) - 1 == code & (1 << bits) - 1
    back = poison(64, torch.float32)
    single.qsgd_decode(record, back, bits=bits, block=64, scale=1 / top)
    torch.testing.assert_close(back, codes.float() * 0.5)


def test_norms_by_hand() -> None:
    """Not finite counts as 0; float64 norms are rounded up to float32; a 2-norm is finite, at least the largest."""

    def norm(values: list[float], power: int, dtype: torch.dtype = torch.float32) -> float:
        x = torch.zeros(64, dtype=dtype)
        x[: len(values)] = torch.tensor(values, dtype=dtype)
        return float(encoded(x, bits=4, block=64, norm=power)[:4].view(torch.float32))

    assert norm([3.0, -4.0, math.nan, math.inf], 0) == 4.0 and norm([3.0, -4.0, math.nan, -math.inf], 2) == 5.0
    assert norm([0.1], 0, torch.float64) == float(np.nextafter(np.float32(0.1), np.float32(1))) or (
        float(np.float32(0.1)) >= 0.1 and norm([0.1], 0, torch.float64) == float(np.float32(0.1))
    )
    assert 0.3 <= norm([0.3], 0, torch.float64) <= 0.3 * (1 + 2.0**-23)
    most = torch.finfo(torch.float32).max
    assert norm([most, most], 2) == most and norm([1e300], 0, torch.float64) == most
    assert norm([1e-30], 2) == float(np.float32(1e-30))
    assert norm([1e-200], 2, torch.float64) == float(np.float32(1e-45))  # its square is 0


# ---- Elias codes ----


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_elias_encode(dtype: torch.dtype) -> None:
    for count in ODD:
        shape = shape_of(count)
        x = numbers(count, dtype, count)
        x[count // 3 : count // 2] = 0
        out = poison(ops.elias_bound(count, bits=shape["bits"], block=shape["block"]), U8)
        compare("elias_encode", x, begins(), out, KEY, **shape, offset=128, shift=count)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "block", "error"), [(8, 512, 0.1), (6, 64, 0.3), (8, 8192, 0.6)])
def test_elias_encode_within_an_error(bits: int, block: int, error: float, dtype: torch.dtype) -> None:
    """The norms that are tried, and the one that is taken, are the reference's bit for bit."""
    for count in (1, 2, 63, 64, 65, 511, 513, 1025, 4097, 8193):
        for i, x in enumerate(
            (numbers(count, dtype, count), tame(count, dtype, 1) ** 3, torch.ones(count, dtype=dtype))
        ):
            out = poison(ops.elias_bound(count, bits=bits, block=block), U8)
            rule = {"bits": bits, "block": block, "norm": 2, "error": error}
            compare("elias_encode", x, begins(), out, None, **rule, shift=count + i)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_elias_decode(dtype: torch.dtype) -> None:
    for count in (*ODD[::4], 16385, 20000):
        shape = shape_of(count)
        rule = {"bits": shape["bits"], "block": shape["block"], "scale": 0.3}
        for ranks in (1, 3):
            sections = [section(tame(count, dtype, rank) ** 3, rank, **shape) for rank in range(ranks)]
            compare("elias_decode", sections, poison(count, dtype), **rule, shift=count)
            out = poison(count, dtype)
            assert ops.elias_decode(sections, out, **rule) == 0


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_elias_codes_are_those_of_the_records(bits: int) -> None:
    """The same key gives the same levels, however they are written."""
    for count in (1, 100, 8192, 8193, 30_000):
        rare = torch.zeros(count)
        rare[::300] = 1.0  # so few are read and added in another way
        for x in (tame(count, torch.float32, 3), torch.zeros(count), torch.ones(count), rare):
            shape = {"bits": bits, "block": 512, "norm": 2}
            packed, coded = poison(count, torch.float32), poison(count, torch.float32)
            single.qsgd_decode(encoded(x, **shape), packed, bits=bits, block=512, scale=1.5)
            assert ops.elias_decode([section(x, **shape)], coded, bits=bits, block=512, scale=1.5) == 0
            assert torch.equal(packed + 0.0, coded)


def test_the_bound_holds_for_the_worst_levels() -> None:
    for bits in (2, 4, 8):
        for step in (1, 2, 3, 7, 63):
            x = torch.zeros(20_000)
            x[step - 1 :: step] = -1.0
            used = section(x, bits=bits, block=64, norm=0).numel()
            if step == 1:
                assert used == ops.elias_bound(20_000, bits=bits, block=64)


def test_a_stream_by_hand() -> None:
    x = torch.zeros(64)
    x[0], x[3], x[4] = 7.0, -3.0, 1.0
    found = section(x, bits=4, block=64, norm=0)
    # gamma(1) + gamma(7); gamma(3) - gamma(3); gamma(1) + gamma(1); gamma(60) for the 59 zeros behind
    text = "1000111" + "0111011" + "101" + "00000100111"
    text += "1" * (-len(text) % 8)
    stream = np.packbits(np.array([int(bit) for bit in text], dtype=np.uint8), bitorder="little").tobytes()
    expected = len(stream).to_bytes(4, "little") + np.float32(7).tobytes() + stream
    assert found.numpy().tobytes() == expected


@pytest.mark.slow
def test_any_bytes_are_read_without_leaving_the_section() -> None:
    """Random bytes, cut and changed sections: the count of malformed ranges is the reference's, guards stay."""
    rng = np.random.default_rng(1)
    seen = set()
    for trial in range(300):
        shape = {"bits": 2 + trial % 7, "block": 64, "norm": 0}
        count = int(rng.integers(1, 400)) if trial % 5 else 8500 if trial % 10 else 40_000
        good = section(tame(count, torch.float32, trial), **shape)
        if trial % 3 == 0:
            good = good[: int(rng.integers(0, good.numel() + 1))].clone()
        elif trial % 3 == 1 and good.numel():
            good[int(rng.integers(0, good.numel()))] ^= int(rng.integers(1, 256))
        else:
            good[4 + 4 * -(-count // 64) :] = random_bytes(good.numel(), trial)[4 + 4 * -(-count // 64) :]
        rule = {"bits": shape["bits"], "block": 64, "scale": 1.0}
        guarded = Guarded(good, trial % 64)
        wrong = ops.elias_decode([guarded.view], poison(count, torch.float32), **rule)
        assert guarded.intact()
        assert wrong == reference_records.elias_decode([good], poison(count, torch.float32), **rule)
        seen.add(wrong)
    assert {0, 1} <= seen


# ---- moments, bounds, means of powers of two ----


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_moments(dtype: torch.dtype) -> None:
    for count in (*LENGTHS[::5], 65_536, 150_001):
        for row_length in {max(count, 1), 1000, 65_600} if count < 20_000 else {count, 65_600}:
            rows = -(-count // row_length)
            outputs = (poison(rows, work(dtype)), poison(rows, torch.float64))
            compare("moments_offer", numbers(count, dtype, count), *outputs, row_length, shift=count)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "levels"), [(4, 1), (8, 1), (8, 31), (16, 1)])
def test_uniform_encode_with_bounds(bits: int, levels: int, dtype: torch.dtype) -> None:
    for count in LENGTHS[::3]:
        for row_length in (max(count, 1), 62):
            rows = -(-count // row_length)
            norms, bounds = poison(rows, work(dtype)), tame(rows, work(dtype), 2).abs()
            x = numbers(count, dtype, count)
            single.norm_offer(x, norms, row_length)
            bounds[::3] = math.inf
            codes = poison(ops.code_layout(bits, count)[1], ops.code_layout(bits, count)[0])
            rest = {"bits": bits, "levels": levels, "offset": count % 19 * 2, "bounds": bounds}
            compare("uniform_encode", x, norms, row_length, codes, KEY, **rest, shift=count)


def test_bounds_by_hand() -> None:
    x, codes = torch.tensor([4.0, -4.0, 2.0, -1.0] * 16), poison(64, U8)
    for bound, expected in ((2.0, [50, -50, 50, -25]), (math.inf, [100, -100, 50, -25]), (9.0, [100, -100, 50, -25])):
        rule = {"bits": 8, "levels": 100, "bounds": torch.tensor([bound])}
        single.uniform_encode(x, torch.tensor([4.0]), 64, codes, KEY, **rule)
        assert codes.view(torch.int8).view(16, 4).unique(dim=0).tolist() == [expected]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_exponential_fold(ranks: int) -> None:
    for count in LENGTHS[::3]:
        parts = [random_bytes(count, rank) for rank in range(ranks)]
        for headroom, mantissa in ((1, 0), (5, 0), (1, 2), (6, 2)):
            rest = {"headroom": headroom, "mantissa": mantissa, "offset": count % 23}
            compare("exponential_fold", parts, poison(count, U8), KEY, **rest, shift=count)
        copies = [part.clone() for part in parts]
        apart = poison(count, U8)
        ops.exponential_fold(parts, apart, KEY, headroom=1)
        ops.exponential_fold(copies, copies[-1], KEY, headroom=1)
        assert torch.equal(copies[-1], apart)


def test_exponential_fold_by_hand() -> None:
    """Means that are powers of two are exact: 1 and 1, 1 and -1, 1/2 and -1/4 (headroom 1: 1 is the code 1)."""
    a = torch.tensor([1, 1, 2, 0, 0], dtype=U8)
    b = torch.tensor([1, 129, 131, 5, 0], dtype=U8)
    out = poison(5, U8)
    ops.exponential_fold([a, b], out, KEY, headroom=1)
    assert out.tolist() == [1, 0, 4, 6, 0]


def test_numbers_with_a_mantissa_by_hand() -> None:
    """With headroom 1, 1 is the code 1, and 4 codes further each power of two; levels lie evenly between."""
    x = torch.tensor([1.0, 0.875, -0.75, 0.625, 0.5, 2.0**-31, 0.0])
    codes, back, norm = poison(7, U8), poison(7, torch.float32), torch.ones(1)
    rule = {"bits": 8, "headroom": 1, "mantissa": 2}
    single.exponential_encode(x, norm, 7, codes, KEY, **rule)
    assert codes.tolist() == [1, 2, 128 + 3, 4, 5, 125, 0]
    single.exponential_decode(codes, norm, 7, back, **rule, scale=1.0)
    assert torch.equal(back, x)
    other, out = torch.tensor([5, 3, 3, 0, 5, 0, 0], dtype=U8), poison(7, U8)
    ops.exponential_fold([codes, other], out, KEY, headroom=1, mantissa=2)
    single.exponential_decode(out, norm, 7, back, **rule, scale=1.0)
    means = [{0.75}, {0.75, 0.875}, {0.0}, {0.3125}, {0.5}, {0.0, 2.0**-31}, {0.0}]  # of these, two are between levels
    assert all(number in mean for number, mean in zip(back.tolist(), means, strict=True))


@pytest.mark.parametrize("threads", [2, *slow(1)])
def test_large_inputs_with_threads(threads: int) -> None:
    before, count = torch.get_num_threads(), 2_100_017  # a MiB of codes of a byte for each thread
    torch.set_num_threads(threads)
    try:
        x = tame(count, torch.float32, 1)
        shape = {"bits": 5, "block": 512, "norm": 2}
        records = poison(records_for(count, shape), U8)
        compare("qsgd_encode", x, records, KEY, **shape, offset=512)
        parts = [encoded(x, rank, **shape) for rank in range(2)]
        compare("qsgd_fold", parts, records, KEY, **shape)
        compare("qsgd_decode", parts[0], poison(count, torch.float32), bits=5, block=512, scale=0.1)
        compare(
            "exponential_fold", [random_bytes(count, 1), random_bytes(count, 2)], poison(count, U8), KEY, headroom=1
        )
        sections = [section(x, rank, **shape) for rank in range(2)]
        out, alone = poison(count, torch.float32), poison(count, torch.float32)
        assert ops.elias_decode(sections, out, bits=5, block=512, scale=0.1) == 0
        torch.set_num_threads(1)
        assert ops.elias_decode(sections, alone, bits=5, block=512, scale=0.1) == 0
        assert torch.equal(out, alone)
    finally:
        torch.set_num_threads(before)


# ---- refusals ----

SHAPE = {"bits": 4, "block": 64, "norm": 0}
REFUSED = {
    "bits must be": lambda: ops.qsgd_record_bytes(9, 64),
    "block must be": lambda: ops.qsgd_record_bytes(8, 100),
    "norm must be one of": lambda: single.qsgd_encode(torch.ones(4), poison(36, U8), KEY, bits=4, block=64, norm=1),
    "records must be": lambda: single.qsgd_encode(torch.ones(65), poison(36, U8), KEY, **SHAPE),
    "elements must lie": lambda: single.qsgd_encode(torch.ones(4), poison(36, U8), KEY, **SHAPE, offset=-1),
    "out must hold whole records": lambda: ops.qsgd_fold([poison(37, U8)], poison(37, U8), KEY, **SHAPE),
    "parts must hold 1 to": lambda: ops.qsgd_fold([], poison(36, U8), KEY, **SHAPE),
    r"parts\[1\] must be": lambda: ops.exponential_fold([poison(9, U8), poison(8, U8)], poison(9, U8), KEY, headroom=1),
    "headroom must be": lambda: ops.exponential_fold([poison(9, U8)], poison(9, U8), KEY, headroom=0),
    "mantissa must be": lambda: ops.exponential_fold([poison(9, U8)], poison(9, U8), KEY, headroom=1, mantissa=3),
    "grad must be float32": lambda: single.qsgd_decode(poison(36, U8), poison(4, U8), bits=4, block=64, scale=1.0),
    "error must be in": lambda: elias_encode(torch.ones(64), poison(99, U8), None, **SHAPE, error=0.1),
    r"and no key, got 0\.3": lambda: elias_encode(
        torch.ones(64), poison(99, U8), KEY, bits=8, block=64, norm=2, error=0.3
    ),
    "out must hold at least": lambda: elias_encode(torch.ones(64), poison(30, U8), KEY, **SHAPE),
    "must be on the CPU or the current CUDA device": lambda: elias_encode(
        torch.ones(4, device="meta"), poison(99, U8), KEY, **SHAPE
    ),
    "bounds must be": lambda: single.uniform_encode(
        torch.ones(4), torch.ones(1), 4, poison(4, U8), KEY, bits=8, levels=1, bounds=torch.ones(2)
    ),
    "squares must be": lambda: single.moments_offer(torch.ones(4), torch.ones(1), torch.ones(1), 4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
