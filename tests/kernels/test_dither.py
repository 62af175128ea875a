"""Norms, uniform and exponential codes against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import legality
from tests.support.marks import each_value, slow

from .support import FEW_DTYPES, KEY, LENGTHS, compare, differences, numbers, poison, tame, work

ROWS = (2, 62, 256, 2048)
CODES = ((4, 1), (4, 7), (8, 1), (8, 31), (8, 127), (16, 5), (16, 32767))
PACKED = ((2, 1), (3, 2), (5, 15), (6, 31), (7, 63))
#: Rows of whole bytes, however many bits a code has.
WHOLE_ROWS = (8, 56, 256, 2048)
EXPONENTS = ((4, 1, 0), (4, 3, 0), (4, 6, 0), (8, 1, 0), (8, 3, 0), (8, 31, 0), (8, 1, 2), (8, 6, 2))


def norms_of(x: Tensor, row_length: int, shrink: float = 1.0) -> Tensor:
    """Return what :func:`ops.norm_offer_all` makes of a gradient, every third row 0."""
    norms = poison(-(-x.numel() // row_length), work(x.dtype))
    single.norm_offer(x, norms, row_length)
    norms[2::3] = 0
    return norms * shrink


def codes_for(bits: int, count: int, seed: int) -> Tensor:
    """Any bytes at all."""
    dtype, length = ops.code_layout(bits, count)
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length * size,), generator=generator, dtype=torch.uint8).view(dtype)


def empty(bits: int, count: int) -> Tensor:
    dtype, length = ops.code_layout(bits, count)
    return poison(length, dtype)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("power", legality.POWERS)
def test_norms(power: int, dtype: torch.dtype) -> None:
    out = torch.float64 if power else work(dtype)
    for count in (*LENGTHS[::3], 65_536, 150_001):
        for row_length in {max(count, 1), 7, 1000, 65_600} if count < 20_000 else {count, 65_600}:
            rows = -(-count // row_length)
            x = numbers(count, dtype, count)
            compare("norm_offer", x, poison(rows, out), row_length, power=power, shift=count)


def test_norms_by_hand() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, float("nan"), float("-inf"), -0.0, 1e-45])
    for power, expected in ((0, [3.0, 2.0, 1e-45]), (1, [6.0, 0.0, 1e-45]), (2, [14.0, 0.0, 0.0])):
        norms = poison(3, torch.float64 if power else torch.float32)
        bad = single.norm_offer(x, norms, 3, power=power)
        assert bad == 2
        if power == 0:
            assert norms.tolist() == [3.0, 0.0, torch.tensor(1e-45).item()]
        else:
            assert norms[0] == expected[0] and norms[1] == 0.0


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "levels"), CODES + PACKED)
def test_uniform_encode(bits: int, levels: int, dtype: torch.dtype) -> None:
    for count in LENGTHS[::2]:
        x, rows = numbers(count, dtype, count), ROWS if bits in (4, 8, 16) else WHOLE_ROWS
        for row_length, shrink in ((max(count, 1), 1.0), (rows[count % 4], 1.0), (rows[1], 0.3)):
            rest = {"bits": bits, "levels": levels, "offset": count % 19 * 2}
            norms = norms_of(x, row_length, shrink)
            compare("uniform_encode", x, norms, row_length, empty(bits, count), KEY, **rest, shift=count)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_uniform_add(bits: int) -> None:
    for count in LENGTHS:
        compare("uniform_add", codes_for(bits, count, 1), codes_for(bits, count, 2), bits=bits, shift=count)


@pytest.mark.parametrize(("bits", "sum_bits"), [(2, 4), (2, 3), (4, 8), (5, 8), (6, 8), (7, 8), (8, 8), (3, 5)])
def test_uniform_fold(bits: int, sum_bits: int) -> None:
    for count in LENGTHS:
        parts = [codes_for(bits, count, seed) for seed in range(1 + count % 4)]
        for part in parts:  # bits after the last code are 0
            if count * bits % 8:
                part[-1] &= (1 << count * bits % 8) - 1
        compare("uniform_fold", parts, empty(sum_bits, count), count, bits=bits, sum_bits=sum_bits, shift=count)


def test_the_fold_is_the_sum_that_codes_of_the_full_width_make_on_their_way() -> None:
    """Fewer bits for a rank's own codes change nothing that is decoded."""
    count, levels, kinds = 5000, 31, (torch.ones(1), 5000)
    packed, wide = [empty(6, count) for _ in range(4)], [empty(8, count) for _ in range(4)]
    for rank, codes in enumerate(zip(packed, wide, strict=True)):
        x = torch.linspace(-1, 1, count).roll(rank)
        for out, bits in zip(codes, (6, 8), strict=True):
            single.uniform_encode(x, *kinds, out, KEY.at(rank=rank), bits=bits, levels=levels)
    sums = empty(8, count)
    ops.uniform_fold(packed, sums, count, bits=6, sum_bits=8)
    for other in wide[1:]:
        ops.uniform_add(wide[0], other, bits=8)
    assert torch.equal(sums, wide[0])
    assert int(sums.view(torch.int8).max()) > 31  # more than six bits hold


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
def test_uniform_decode(bits: int, dtype: torch.dtype) -> None:
    for count in LENGTHS[::2]:
        for row_length in (max(count, 1), (ROWS if bits in (4, 8, 16) else WHOLE_ROWS)[count % 4]):
            norms = tame(-(-count // row_length), work(dtype), 5).abs()
            arguments = (codes_for(bits, count, 3), norms, row_length, poison(count, dtype))
            compare("uniform_decode", *arguments, bits=bits, scale=1 / 93, shift=count)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "headroom", "mantissa"), EXPONENTS)
def test_exponential_encode(bits: int, headroom: int, mantissa: int, dtype: torch.dtype) -> None:
    for count in LENGTHS[::2]:
        x = numbers(count, dtype, count)
        for row_length, shrink in ((max(count, 1), 1.0), (ROWS[count % 4], 1.0), (62, 0.3)):
            rest = {"bits": bits, "headroom": headroom, "mantissa": mantissa, "offset": count % 19 * 2}
            norms = norms_of(x, row_length, shrink)
            compare("exponential_encode", x, norms, row_length, empty(bits, count), KEY, **rest, shift=count)


@pytest.mark.parametrize("bits", [4, 8])
def test_exponential_merge(bits: int) -> None:
    for count in LENGTHS:
        a, b = codes_for(bits, count, 1), codes_for(bits, count, 2)
        compare("exponential_merge", a, b, KEY, bits=bits, offset=count % 23, shift=count)


def test_exponential_merge_of_every_pair() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    a, b = every.repeat_interleave(256), every.repeat(256)
    for hop in range(8):
        for bits in (4, 8):
            compare("exponential_merge", a, b, KEY.at(hop=hop), bits=bits, offset=hop)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "headroom", "mantissa"), EXPONENTS)
def test_exponential_decode(bits: int, headroom: int, mantissa: int, dtype: torch.dtype) -> None:
    rest = {"bits": bits, "headroom": headroom, "mantissa": mantissa, "scale": 0.3}
    for count in LENGTHS[::4]:
        for row_length in (max(count, 1), ROWS[count % 4]):
            norms = tame(-(-count // row_length), work(dtype), 5).abs()
            arguments = (codes_for(bits, count, 3), norms, row_length, poison(count, dtype))
            compare("exponential_decode", *arguments, **rest, shift=count)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64, torch.float16, torch.bfloat16)])
def test_every_alignment_and_around_the_cache(dtype: torch.dtype) -> None:
    for count, shifts in ((333, range(64)), ((9 << 20) * 8 // torch.finfo(dtype).bits + 3, (0, 1))):
        norms = torch.ones(1, dtype=work(dtype))
        for shift in shifts:
            given = (codes_for(8, count, 1), norms, count, poison(count, dtype))
            compare("uniform_decode", *given, bits=8, scale=0.3, shift=shift)
            rest = {"bits": 8, "headroom": 2, "scale": 0.3, "shift": shift}
            compare("exponential_decode", codes_for(8, count, 1), norms, count, poison(count, dtype), **rest)


def test_norms_of_every_size_scale_without_loss() -> None:
    """From the smallest subnormal to the largest number the norm itself is always the top code, exactly."""
    for dtype in (torch.float32, torch.float64):
        info = torch.finfo(dtype)
        tiny = info.smallest_normal * info.eps
        sizes = [tiny, 4 * tiny, info.smallest_normal, 1e-20, 1.0, 3.3, 1e20, info.max / 3, info.max]
        for size in sizes:
            x = torch.tensor([size, -size, 0.0, size / 2] * 16, dtype=dtype)
            norm = torch.tensor([size], dtype=dtype)
            codes = empty(8, 64)
            single.uniform_encode(x, norm, 64, codes, KEY, bits=8, levels=42)
            found = codes.view(torch.int8).view(16, 4)
            assert found[:, :3].unique(dim=0).tolist() == [[42, -42, 0]]
            if size > 2 * tiny:
                assert found[:, 3].unique().tolist() == [21]
            for mantissa in (0, 2):
                rule = {"bits": 8, "headroom": 3, "mantissa": mantissa}
                single.exponential_encode(x, norm, 64, codes, KEY, **rule)
                assert codes.view(16, 4)[:, :3].unique(dim=0).tolist() == [[3, 131, 0]]
                back = poison(64, dtype)
                single.exponential_decode(codes, norm, 64, back, **rule, scale=1.0)
                assert differences(back.view(16, 4)[:, :3].contiguous().view(-1), x.view(16, 4)[:, :3].reshape(-1)) == 0


def test_nibbles_do_not_carry_into_each_other() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    a, b = every.repeat_interleave(256).contiguous(), every.repeat(256)
    expected = ((a & 15) + (b & 15) & 15) | ((a >> 4) + (b >> 4) & 15) << 4
    ops.uniform_add(a, b, bits=4)
    assert torch.equal(a, expected)


@pytest.mark.parametrize("threads", [2, *slow(1)])
def test_large_inputs_with_threads(threads: int) -> None:
    before, count = torch.get_num_threads(), 2_100_017  # a MiB of codes of a byte for each thread
    torch.set_num_threads(threads)
    try:
        x = tame(count, torch.float32, 1)
        for row_length in (count, 2048):
            norms = poison(-(-count // row_length), torch.float32)
            compare("norm_offer", x, norms, row_length)
            single.norm_offer(x, norms, row_length)
            compare("uniform_encode", x, norms, row_length, empty(4, count), KEY, bits=4, levels=2, offset=64)
            compare("exponential_encode", x, norms, row_length, empty(8, count), KEY, bits=8, headroom=3, offset=64)
        compare("exponential_merge", codes_for(8, count, 1), codes_for(8, count, 2), KEY, bits=8, offset=5)
    finally:
        torch.set_num_threads(before)


REFUSED = {
    "row_length must be a multiple of 8": lambda: single.uniform_encode(
        torch.ones(5), torch.ones(2), 4, empty(3, 5), KEY, bits=3, levels=1
    ),
    "sum_bits": lambda: ops.uniform_fold([empty(4, 4)], empty(8, 4), 4, bits=4, sum_bits=16),
    "out and parts": lambda: ops.uniform_fold([own := empty(8, 4)], own, 4, bits=8, sum_bits=8),
    r"parts\[1\] must be": lambda: ops.uniform_fold([empty(4, 4), empty(8, 4)], empty(8, 4), 4, bits=4, sum_bits=8),
    "parts must hold": lambda: ops.uniform_fold([], empty(8, 4), 4, bits=4, sum_bits=8),
    "bits": lambda: ops.uniform_add(empty(8, 4), empty(8, 4), bits=5),
    "levels": lambda: single.uniform_encode(torch.ones(4), torch.ones(1), 4, empty(8, 4), KEY, bits=8, levels=128),
    "headroom": lambda: single.exponential_encode(
        torch.ones(4), torch.ones(1), 4, empty(4, 4), KEY, bits=4, headroom=8
    ),
    "power": lambda: single.norm_offer(torch.ones(4), torch.ones(1, dtype=torch.float64), 4, power=3),
    "row_length must be a multiple of 2": lambda: single.uniform_encode(
        torch.ones(5), torch.ones(2), 3, empty(4, 5), KEY, bits=4, levels=1
    ),
    "norms must be": lambda: single.norm_offer(torch.ones(4), torch.ones(2), 4),
    "codes must be": lambda: single.uniform_encode(
        torch.ones(4), torch.ones(1), 4, empty(16, 4), KEY, bits=8, levels=3
    ),
    "elements must lie": lambda: ops.exponential_merge(empty(8, 4), empty(8, 4), KEY, bits=8, offset=-1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
