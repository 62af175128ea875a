"""All tensors of a bucket at once: every kernel against the reference, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops import legality

from .support import FEW_DTYPES, KEY, bits, compare, numbers, poison, tame, words, work

COUNTS = (0, 1, 63, 64, 65, 0, 1023, 1024, 1025, 5000, 0)
ROWS = [(max(count, 1), 7, 100, 1024)[i % 4] for i, count in enumerate(COUNTS)]
GROUPS = [-(-count // row) for count, row in zip(COUNTS, ROWS, strict=True)]
PLACES = [7 * i for i in range(len(COUNTS))]


def outputs(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [poison(size, dtype) for size in sizes]


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_signs(dtype: torch.dtype) -> None:
    grads = [numbers(count, dtype, count) for count in COUNTS]
    residuals = [numbers(count, work(dtype), count + 1) for count in COUNTS]
    words = [ops.word_count(count) for count in COUNTS]
    steps = [tame(size, torch.float32, size) for size in GROUPS]
    for kept, key in ((residuals, KEY), (None, None)):
        made = (outputs(words, torch.int64), outputs(GROUPS, torch.float32))
        rule = {"ranks": 3, "key": key, "word_offsets": PLACES}
        compare("sign_offer_all", grads, kept, *made, ROWS, shift=1, **rule)
        compare("sign_offer_all", grads, kept, made[0], None, ROWS, key=key)
        feedback = {"feedback": "own" if kept else "none", "decay": 0.9, "key": key, "word_offsets": PLACES}
        compare("sign_decode_all", [bits(n, 2) for n in COUNTS], steps, ROWS, grads, kept, scale=0.3, **feedback)
        feedback["feedback"] = "global" if kept else "none"
        feedback["zeros"] = [bits(n, 3) for n in COUNTS]
        compare("sign_decode_all", [bits(n, 2) for n in COUNTS], steps, ROWS, grads, kept, scale=0.3, **feedback)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_two_value(dtype: torch.dtype) -> None:
    grads = [numbers(count, dtype, count) for count in COUNTS]
    residuals = [numbers(count, work(dtype), count + 1) for count in COUNTS]
    words = [ops.word_count(count) for count in COUNTS]
    made = [outputs(GROUPS, kind) for kind in (torch.float64, torch.float64, torch.int64)]
    for kept in (residuals, None):
        compare("two_value_offer_all", grads, kept, outputs(words, torch.int64), *made, ROWS, shift=1)
    places = {
        "first_words": [2 + sum(words[:i]) for i in range(len(COUNTS))],
        "first_rows": [sum(GROUPS[:i]) for i in range(len(COUNTS))],
    }
    sent = [bits(64 * (2 + sum(words)), rank) for rank in range(3)]
    highs, lows = ([tame(sum(GROUPS), torch.float32, first + rank) for rank in range(3)] for first in (1, 9))
    for low in (None, lows):
        compare("two_value_decode_all", sent, highs, low, ROWS, 1, grads, residuals, scale=0.3, **places)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_plain_numbers(dtype: torch.dtype) -> None:
    grads = [numbers(count, dtype, count) for count in COUNTS]
    residuals = [numbers(count, work(dtype), count + 1) for count in COUNTS]
    for kept in (residuals, None):
        compare("dense_offer_all", grads, kept, outputs(list(COUNTS), torch.float16), shift=1)
        compare("dense_decode_all", [tame(n, torch.bfloat16, n) for n in COUNTS], grads, scale=0.3, residuals=kept)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    grads = [numbers(count, dtype, count) for count in COUNTS]
    for power in legality.POWERS:
        kind = torch.float64 if power else work(dtype)
        compare("norm_offer_all", grads, outputs(GROUPS, kind), ROWS, shift=1, power=power)
    compare("moments_offer_all", grads, outputs(GROUPS, work(dtype)), outputs(GROUPS, torch.float64), ROWS, shift=1)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_codes(dtype: torch.dtype, bits: int) -> None:
    rows = [row + row % 2 for row in ROWS]
    groups = [-(-count // row) for count, row in zip(COUNTS, rows, strict=True)]
    grads = [numbers(count, dtype, count) for count in COUNTS]
    norms, bounds = ([tame(size, work(dtype), size + first).abs() for size in groups] for first in (0, 1))
    layouts = [ops.code_layout(bits, count) for count in COUNTS]
    codes = [poison(size, kind) for kind, size in layouts]
    sent = [words(size, size).to(kind) for kind, size in layouts]
    given, rule = (grads, norms, rows, codes, KEY), {"bits": bits, "levels": 3}
    compare("uniform_encode_all", *given, shift=1, **rule, offsets=PLACES)
    compare("uniform_encode_all", *given, **rule, bounds=bounds)
    compare("uniform_decode_all", sent, norms, rows, grads, shift=1, bits=bits, scale=0.3)
    if bits < 16:
        compare("exponential_encode_all", *given, shift=1, bits=bits, headroom=3, offsets=PLACES)
        compare("exponential_encode_all", *given, bits=bits, headroom=3)
        compare("exponential_decode_all", sent, norms, rows, grads, shift=1, bits=bits, headroom=3, scale=0.3)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("bits", "block", "norm"), [(8, 512, 0), (3, 64, 2)])
def test_records(dtype: torch.dtype, bits: int, block: int, norm: int) -> None:
    rule = {"bits": bits, "block": block}
    sizes = [-(-count // block) * ops.qsgd_record_bytes(**rule) for count in COUNTS]
    grads = [numbers(count, dtype, count) for count in COUNTS]
    compare("qsgd_encode_all", grads, outputs(sizes, torch.uint8), KEY, shift=1, **rule, norm=norm, offsets=PLACES)
    compare("qsgd_encode_all", grads, outputs(sizes, torch.uint8), KEY, **rule, norm=norm)
    sent = [tame(count, dtype, count) for count in COUNTS]
    records = outputs(sizes, torch.uint8)
    ops.qsgd_encode_all(sent, records, KEY, **rule, norm=norm)
    compare("qsgd_decode_all", records, grads, shift=1, **rule, scale=0.3)


def _f(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def _w(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _b(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    """Return as many bytes as a tensor has elements, in its own memory."""
    return tensor.view(torch.uint8)[: tensor.numel()]


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "too few bits": (
        "bits must hold one item for each of 2",
        lambda: ops.sign_offer_all([_f(9)] * 2, None, [_w(1)], None, [9, 9]),
    ),
    "too few residuals": (
        "residuals must hold",
        lambda: ops.sign_offer_all([_f(9)] * 2, [_f(9)], [_w(1)] * 2, None, [9, 9]),
    ),
    "several dtypes": (
        "grad must be a contiguous torch.float32",
        lambda: ops.sign_offer_all([_f(9), _f(9, torch.float64)], None, [_w(1), _w(1)], None, [9, 9]),
    ),
    "a word too few in the second": (
        "bits must be",
        lambda: ops.sign_offer_all([_f(9), _f(65)], None, [_w(1), _w(1)], None, [9, 9]),
    ),
    "a step too few": (
        "steps must be",
        lambda: ops.sign_offer_all([_f(9)], None, [_w(1)], [_f(1)], [8]),
    ),
    "no ranks": ("ranks must be", lambda: ops.sign_offer_all([_f(9)], None, [_w(1)], None, [9], ranks=0)),
    "a place outside": (
        "words must lie",
        lambda: ops.sign_offer_all([_f(9)], None, [_w(1)], None, [9], word_offsets=[-1]),
    ),
    "residuals without feedback": (
        "feedback must be",
        lambda: ops.sign_decode_all([_w(1)], [_f(1)], [9], [_f(9)], [_f(9)], feedback="none"),
    ),
    "rows past the end": (
        "rows must lie within the 1 of the bucket",
        lambda: ops.two_value_decode_all(
            [_w(1)], [_f(1)], None, [8], 0, [_f(9)], [_f(9)], first_words=[0], first_rows=[0]
        ),
    ),
    "outputs of several dtypes": (
        "out must be",
        lambda: ops.dense_offer_all([_f(9)] * 2, None, [_f(9), _f(9, torch.float16)]),
    ),
    "payloads of several dtypes": (
        "payload must be",
        lambda: ops.dense_decode_all([_f(9), _f(9, torch.float16)], [_f(9), _f(9)], scale=1.0),
    ),
    "too few norms": ("norms must hold", lambda: ops.norm_offer_all([_f(9)] * 2, [_f(1)], [9, 9])),
    "a norm too few": ("norms must be", lambda: ops.norm_offer_all([_f(9)], [_f(1)], [8])),
    "a power of five": ("power must be", lambda: ops.norm_offer_all([_f(9)], [_f(1)], [9], power=5)),
    "squares of float32": (
        "squares must be",
        lambda: ops.moments_offer_all([_f(9)], [_f(1)], [_f(1)], [9]),
    ),
    "a level too many": (
        "levels must be",
        lambda: ops.uniform_encode_all([_f(9)], [_f(1)], [9], [_b(5)], KEY, bits=4, levels=8),
    ),
    "integers": (
        "grad must be float32, float64",
        lambda: ops.uniform_encode_all([_b(9)], [_f(1)], [9], [_b(9)], KEY, bits=8, levels=3),
    ),
    "codes over a gradient": (
        "overlap",
        lambda: ops.exponential_encode_all([own := _f(9)], [_f(1)], [9], [_bytes(own)], KEY, bits=8, headroom=3),
    ),
    "a gradient of another dtype": (
        "grad must be a contiguous torch.float32",
        lambda: ops.uniform_decode_all(
            [_b(9)] * 2, [_f(1)] * 2, [9] * 2, [_f(9), _f(9, torch.float16)], bits=8, scale=1.0
        ),
    ),
    "a code too few": (
        "codes must be",
        lambda: ops.uniform_encode_all([_f(9)], [_f(1)], [9], [_b(8)], KEY, bits=8, levels=3),
    ),
    "bounds of one of two": (
        "bounds must hold",
        lambda: ops.uniform_encode_all(
            [_f(9)] * 2, [_f(1)] * 2, [9] * 2, [_b(9)] * 2, KEY, bits=8, levels=3, bounds=[_f(1)]
        ),
    ),
    "elements before the stream": (
        "elements must lie",
        lambda: ops.exponential_encode_all([_f(9)], [_f(1)], [9], [_b(9)], KEY, bits=8, headroom=3, offsets=[-1]),
    ),
    "odd rows of halves": (
        "row_length must be a multiple of 2",
        lambda: ops.exponential_decode_all([_b(5)], [_f(2)], [7], [_f(9)], bits=4, headroom=3, scale=1.0),
    ),
    "no headroom": (
        "headroom must be",
        lambda: ops.exponential_decode_all([_b(9)], [_f(1)], [9], [_f(9)], bits=8, headroom=0, scale=1.0),
    ),
    "codes of nine bits": (
        "bits must be",
        lambda: ops.uniform_decode_all([_b(9)], [_f(1)], [9], [_f(9)], bits=9, scale=1.0),
    ),
    "a record too few": (
        "records must be",
        lambda: ops.qsgd_encode_all([_f(65)], [_b(68)], KEY, bits=8, block=64, norm=0),
    ),
    "blocks of three": (
        "block must be",
        lambda: ops.qsgd_decode_all([_b(68)], [_f(9)], bits=8, block=3, scale=1.0),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    message, call = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_no_tensors_are_no_work() -> None:
    assert ops.sign_offer_all([], None, [], None, []) == []
    ops.sign_decode_all([], [], [], [], None, feedback="none")
    assert ops.dense_offer_all([], None, []) == []
    ops.dense_decode_all([], [], scale=1.0)
    assert ops.norm_offer_all([], [], []) == []
    assert ops.moments_offer_all([], [], [], []) == []
    ops.uniform_encode_all([], [], [], [], KEY, bits=8, levels=3)
    ops.uniform_decode_all([], [], [], [], bits=8, scale=1.0)
    ops.exponential_encode_all([], [], [], [], KEY, bits=8, headroom=3)
    ops.exponential_decode_all([], [], [], [], bits=8, headroom=3, scale=1.0)
    assert ops.qsgd_encode_all([], [], KEY, bits=8, block=64, norm=0) == []
    ops.qsgd_decode_all([], [], bits=8, block=64, scale=1.0)
