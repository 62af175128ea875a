"""Random words: known answers, exact probabilities, and the laws of the merge."""

from __future__ import annotations

from itertools import product
from statistics import NormalDist

import pytest
import torch

from horovod_compress import ops
from horovod_compress.ops import legality, reference
from horovod_compress.ops.keys import Key

from .support import KEY, compare, ones, poison, words

#: Counter, key and result of Philox4x32-10, from the Random123 distribution's kat_vectors.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
DRAWS = 10_000_000
FRACTIONS = [(k, m) for m in range(2, 65) for k in range(1, m)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected) -> None:
    assert tuple(legality.CPU.philox4x32(counter, key)) == expected
    assert reference.philox4x32(counter, key) == expected


def test_words_come_from_the_counter_that_the_key_describes() -> None:
    """p = 1/2 shows digit 0 inverted: random < p is a random 0."""
    k0, k1, c1, c2, c3, _ = KEY.words()
    out = poison(50, torch.int64)
    for word_offset in (0, 1, 1 << 32, (1 << 33) - 50):
        ops.bernoulli_words(out, 1, 2, KEY, word_offset=word_offset)
        for local, value in enumerate(out.tolist()):
            group, odd = divmod(word_offset + local, 2)
            block = legality.CPU.philox4x32((group, c1, c2, c3), (k0, k1))
            assert ~value & (2**64 - 1) == block[2 * odd] | block[2 * odd + 1] << 32


@pytest.mark.parametrize("word_offset", [0, 1, 2, 7, (1 << 32) + 3])
def test_bernoulli_equals_the_reference(word_offset: int) -> None:
    for count, (k, m) in product((0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 257), ((1, 3), (5, 8), (0, 7), (7, 7))):
        compare("bernoulli_words", poison(count, torch.int64), k, m, KEY, word_offset=word_offset, shift=count)


def test_bernoulli_with_odd_fractions() -> None:
    """Denominators up to the largest, and probabilities that are decided by the last digits only."""
    largest = 1 << 62
    fractions = [(1, 2), (3, 4), (1, 64), (1, 65535), (65534, 65535), (1, largest), (largest - 1, largest)]
    for k, m in [*fractions, (largest // 3, largest), (2**61 + 1, 2**62 - 1)]:
        compare("bernoulli_words", poison(300, torch.int64), k, m, KEY)


def _bias(out: torch.Tensor, k: int, m: int, key: Key) -> float:
    """Return how many standard deviations the share of ones lies from k / m."""
    ops.bernoulli_words(out, k, m, key)
    draws, p = 64 * out.numel(), k / m
    return (int(ones(out).sum(dtype="int64")) - draws * p) / (draws * p * (1 - p)) ** 0.5


def _check_bias(fractions: list[tuple[int, int]]) -> None:
    bound = NormalDist().inv_cdf(1 - 1e-3 / (2 * len(fractions)))
    out = poison(-(-DRAWS // 64), torch.int64)
    scores = {(k, m): _bias(out, k, m, KEY.at(step=100 * m + k)) for k, m in fractions}
    far = {fraction: score for fraction, score in scores.items() if abs(score) > bound}
    assert not far, f"more than {bound:.2f} standard deviations away: {far}"


def test_bernoulli_has_no_bias() -> None:
    _check_bias([(k, m) for k, m in FRACTIONS if m <= 8 or (m in (17, 33, 48, 63, 64) and k in (1, m // 3, m - 1))])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bernoulli_has_no_bias_for_any_fraction() -> None:
    _check_bias(FRACTIONS)


def test_the_bias_test_sees_a_small_bias() -> None:
    """What eight digits of 1/3 would give lies far outside the bound that 1/3 itself must keep."""
    out = poison(-(-DRAWS // 64), torch.int64)
    ops.bernoulli_words(out, 85, 256, KEY)
    draws = 64 * out.numel()
    assert abs(int(ones(out).sum(dtype="int64")) - draws / 3) > 6 * (draws * 2 / 9) ** 0.5


def test_no_lane_is_special() -> None:
    """Each of the 64 bit positions of a word, and even and odd words apart, has the same probability."""
    out = poison(1 << 17, torch.int64)
    ops.bernoulli_words(out, 1, 3, KEY)
    lanes = ones(out).reshape(-1, 128).sum(axis=0, dtype="int64")
    draws = 1 << 16
    bound = NormalDist().inv_cdf(1 - 1e-3 / (2 * 128))
    assert (abs(lanes - draws / 3) < bound * (draws * 2 / 9) ** 0.5).all()


def test_streams_of_different_keys_are_unrelated() -> None:
    """Every field of the key, and the digit, changes about half of the bits."""
    fields = ("seed", "step", "bucket", "rank", "hop", "purpose")
    keys = [KEY, *(KEY.at(**{name: getattr(KEY, name) ^ 1}) for name in fields)]
    drawn = []
    for key in keys:
        out = poison(1 << 12, torch.int64)
        ops.bernoulli_words(out, 1, 2, key)
        drawn.append(ones(out))
    bits = drawn[0].size
    for a, b in product(range(len(keys)), repeat=2):
        if a < b:
            assert abs(int((drawn[a] != drawn[b]).sum()) - bits / 2) < 5 * (bits / 4) ** 0.5


@pytest.mark.parametrize("word_offset", [0, 1, 6, 1 << 32])
def test_merge_equals_the_reference(word_offset: int) -> None:
    for count, (a, b) in product((0, 1, 2, 15, 16, 17, 33, 64, 257), ((1, 1), (2, 1), (1, 6), (0, 3), (3, 0), (5, 11))):
        compare("merge_bits", words(count, 1), words(count, 2), a, b, KEY, word_offset=word_offset, shift=count)


def test_merge_keeps_what_both_sides_agree_on() -> None:
    ours, theirs = words(1000, 1), words(1000, 2)
    merged = ours.clone()
    ops.merge_bits(merged, theirs, 5, 2, KEY)
    assert bool(((merged ^ ours) & ~(ours ^ theirs) == 0).all())
    assert not torch.equal(merged, ours) and not torch.equal(merged, theirs)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_a_chain_of_merges_is_an_unbiased_sample(workers: int) -> None:
    """P(1) is the share of workers that hold 1, for every combination of their bits."""
    per_pattern = 1 << 14
    patterns = 1 << workers
    count = per_pattern * patterns // 64
    local = []
    for worker in range(workers):
        held = torch.tensor([-1 if pattern >> worker & 1 else 0 for pattern in range(patterns)])
        local.append(held.repeat_interleave(per_pattern // 64))
    merged = local[0].clone()
    for hop in range(1, workers):
        ops.merge_bits(merged, local[hop], hop, 1, KEY.at(hop=hop))
    share = ones(merged).reshape(patterns, per_pattern).mean(axis=1)
    bound = NormalDist().inv_cdf(1 - 1e-3 / (2 * patterns))
    for pattern in range(patterns):
        p = pattern.bit_count() / workers
        assert abs(share[pattern] - p) <= bound * (p * (1 - p) / per_pattern) ** 0.5
    assert count == merged.numel()


@pytest.mark.parametrize(("a", "b"), [(1, 1), (3, 1), (2, 5), (0, 1), (4, 0)])
def test_merge_weights_are_those_of_the_two_sides(a: int, b: int) -> None:
    count = 1 << 15
    for ours, theirs, p in ((0, -1, b / (a + b)), (-1, 0, a / (a + b))):
        merged = torch.full((count,), ours)
        ops.merge_bits(merged, torch.full((count,), theirs), a, b, KEY)
        draws = 64 * count
        assert abs(int(ones(merged).sum(dtype="int64")) - draws * p) <= 4.5 * (draws * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("m", [2, 3, 7, 64])
def test_both_forms_of_the_operator_agree(m: int) -> None:
    """The published form draws r with P(r=1) = (m-1)/m where u is 0 and 1/m where u is 1.

    With b of probability 1/m and r = not (b xor u) it is the bit select that merge_bits computes.
    """
    u, v = words(1 << 12, 1), words(1 << 12, 2)
    b = poison(1 << 12, torch.int64)
    ops.bernoulli_words(b, 1, m, KEY)
    r = ~(b ^ u)
    published = (u & v) | ((u ^ v) & r)
    merged = v.clone()
    ops.merge_bits(merged, u, m - 1, 1, KEY)
    assert torch.equal(merged, published)
    for of_u, p in ((0, (m - 1) / m), (1, 1 / m)):
        drawn = ones(r)[ones(u) == of_u]
        assert abs(drawn.mean() - p) <= 4.5 * (p * (1 - p) / drawn.size) ** 0.5
