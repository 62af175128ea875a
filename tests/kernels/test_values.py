"""Sections with values, and samples: against the reference, against the rule, and against random bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import sizes
from horovod_compress.ops.reference.sparse import section_values
from horovod_compress.ops.sizes import levels_of
from tests.support.marks import each_value
from tests.support.sections import begins, head_of, top_select, values_encode

from .support import FEW_DTYPES, KEY, LENGTHS, Guarded, compare, mask, numbers, poison, tame, work

I32, U8 = torch.int32, torch.uint8
FORMS = tuple(sizes.FORMS)


def encoded(positions: Tensor, values: Tensor, b: int, elements: int, form: str) -> Tensor:
    kept = positions.numel()
    out = poison(ops.values_bound(kept, elements, b, values.element_size(), form=form), U8)
    head = head_of(form, values.dtype)
    used = values_encode(positions, kept, values, b, elements, out, form=form, head=head)
    assert bool((out[used:] == 0xA5).all())
    return out[:used].clone()


@each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_encode(kind: torch.dtype, form: str) -> None:
    for count in (*LENGTHS[::11], 9000):
        for b in (0, 2, 7, 20):
            positions = mask(count, 1 / (count % 13 + 1), count)
            kept = positions.numel()
            out = poison(ops.values_bound(kept, count, b, 8, form=form), U8)
            given = (positions, kept, numbers(kept, kind, count), b, count, begins(), out)
            compare("values_encode", *given, shift=count, form=form, head=head_of(form, kind))


def test_the_bound_holds_for_the_worst_positions() -> None:
    for form in FORMS:
        for b in (0, 1, 3):
            size = 1 << b + 11
            for elements in (1, 100, size, size + 1, 3 * size - 5):
                for step in (1, 2, size - 1, size):
                    for positions in (range(step - 1, elements, step), [elements - 1]):
                        at = torch.tensor(list(positions), dtype=I32)
                        encoded(at, tame(at.numel(), torch.float32, 1), b, elements, form)


def sections_of(count: int, b: int, ranks: int, dtype: torch.dtype, form: str) -> list[Tensor]:
    found = []
    for rank in range(ranks):
        positions = mask(count, 0.5 / (rank + 1), rank)
        found.append(encoded(positions, tame(positions.numel(), work(dtype), rank), b, count, form))
    return found


@each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_decode(dtype: torch.dtype, form: str) -> None:
    for count in (*LENGTHS[::20], 9000):
        b, ranks = (0, 1, 3, 20)[count % 4], (1, 2, 5)[count % 3]
        sections, residual = sections_of(count, b, ranks, dtype, form), tame(count, work(dtype), 2)
        for own in {0, ranks - 1}:
            given = (sections, own, b, tame(count, dtype, 1), residual, 1 / 3)
            compare("values_decode", *given, shift=count, form=form)
        given = (sections, 0, b, numbers(count, dtype, 1), numbers(count, work(dtype), 2), -2.0)
        compare("values_decode", *given, form=form)
        compare("values_decode", *given, form=form, decay=0.95, by_senders=True)
        compare("values_decode", sections, 0, b, numbers(count, dtype, 1), None, 1.0, shift=count, form=form)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_decode_with_momentum(dtype: torch.dtype, masking: bool) -> None:
    for count in (*LENGTHS[::20], 9000):
        b, ranks = (0, 1, 3, 20)[count % 4], (1, 2, 5)[count % 3]
        sections = sections_of(count, b, ranks, dtype, "full")
        kept = (tame(count, work(dtype), 2), tame(count, work(dtype), 3))
        given = (sections, ranks - 1, b, tame(count, dtype, 1), kept[0], 1 / 3)
        compare("values_decode", *given, shift=count, momentum=kept[1], factor=0.9, masking=masking)


def test_many_ranks_and_threads() -> None:
    before, count = torch.get_num_threads(), 150_001
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            places = [mask(count, 0.002, rank) for rank in range(41)]
            sections = [encoded(at, tame(at.numel(), torch.float32, at.numel()), 2, count, "full") for at in places]
            given = (40, 2, tame(count, torch.float32, 1), tame(count, torch.float32, 2), 1 / 41)
            compare("values_decode", sections, *given, shift=1)
    finally:
        torch.set_num_threads(before)


def test_selection_travels_whole() -> None:
    """What one rank sends and what it keeps are what it had, exactly."""
    count, k = 50_000, 500
    grad, residual = tame(count, torch.float64, 1), tame(count, torch.float64, 2)
    positions, values, x = poison(k, I32), poison(k, torch.float64), grad + residual
    kept, _ = top_select(grad, residual, k, positions, values)
    section = encoded(positions[:kept], values[:kept], ops.golomb_parameter(k, count), count, "full")
    assert single.values_decode([section], 0, ops.golomb_parameter(k, count), grad, residual, 1.0) == 0
    assert torch.equal(grad.nonzero().flatten(), positions.long()) and torch.equal(grad + residual, x)
    assert not residual[positions.long()].any()


def test_narrow_values_do_not_become_infinite() -> None:
    values = torch.tensor([1e38, -1e38, 3.4028e38, -3.4028e38, 65519.0, 65520.0])
    at = torch.arange(values.numel(), dtype=I32)
    for form, most in (("float16", 65504.0), ("bfloat16", torch.finfo(torch.bfloat16).max)):
        grad = torch.zeros(values.numel())
        single.values_decode([encoded(at, values, 0, values.numel(), form)], 0, 0, grad, None, 1.0, form=form)
        assert float(grad[2]) == most and float(grad[3]) == -most and bool(grad.isfinite().all())


# ---- bytes that are no section ------------------------------------------------------------------


def _count(section: Tensor, b: int, count: int, form: str) -> int:
    return section_values(section, b, count, form, np.dtype(np.float32))[2]


@pytest.mark.parametrize("form", FORMS)
def test_random_bytes(form: str) -> None:
    """Any bytes: nothing outside is touched, the count of wrong ranges is the reference's."""
    generator = np.random.default_rng(FORMS.index(form))
    for trial in range(100):
        count, b = int(generator.integers(0, 9000)), int(generator.choice([0, 1, 2, 6, 20]))
        ranges = -(-count >> b + 11)
        lengths = generator.integers(0, 200, (ranges, 2), dtype=np.uint32)
        lengths += (generator.random((ranges, 2)) < 0.1) * generator.integers(0, 1 << 32, (ranges, 2), dtype=np.uint32)
        body = generator.integers(0, 256, int(generator.integers(0, 2000)), dtype=np.uint8)
        raw = np.concatenate(
            [
                np.zeros(4 * (levels_of(form) or form == "signs"), dtype=np.uint8),
                lengths.reshape(-1).view(np.uint8),
                body,
            ]
        )
        raw = raw[: int(generator.integers(0, raw.size + 1))] if trial % 5 == 0 else raw
        guarded = [Guarded(torch.from_numpy(raw.copy()), trial % 64)]
        guarded += [Guarded(tame(count, torch.float32, trial), trial % 63) for _ in range(2)]
        section, grad, residual = (part.view for part in guarded)
        wrong = _count(section, b, count, form)
        assert single.values_decode([section, section], 1, b, grad, residual, 1.0, form=form) == 2 * wrong
        assert all(part.intact() for part in guarded)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_flipped_bits(form: str) -> None:
    at, found = mask(9000, 0.02, 1), set()
    good = encoded(at, tame(at.numel(), torch.float32, 1), 1, 9000, form)
    for bit in range(0, 8 * good.numel(), 61):
        section = good.clone()
        section[bit // 8] ^= 1 << (bit % 8)
        guarded = Guarded(tame(9000, torch.float32, 1), bit % 64)
        wrong = single.values_decode([section], 0, 1, guarded.view, None, 1.0, form=form)
        assert wrong == _count(section, 1, 9000, form) and guarded.intact()
        found.add(wrong)
    assert len(found) > 1  # the control: some flips are seen


# ---- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_sample(dtype: torch.dtype) -> None:
    for count in (*LENGTHS[::11], 9000):
        for k in {min(count, 1), -(-count // 100), -(-count // 3), count}:
            values, residual = poison(k, work(dtype)), numbers(count, work(dtype), 2)
            compare("sample_offer", numbers(count, dtype, 1), residual, values, KEY, shift=count, first=count % 9)
            compare("sample_offer", numbers(count, dtype, 1), None, values, KEY, shift=count)
            sums = tame(k, work(dtype), 3)
            given = (numbers(count, dtype, 1), residual, KEY, 0.3)
            compare("sample_decode", sums, *given, shift=count, first=count % 9)
            compare("sample_decode", sums, tame(count, dtype, 1), None, KEY, 2.0, shift=count, weighted=True)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_blocks(dtype: torch.dtype) -> None:
    for count in (*LENGTHS[3::15], 9000):
        for block in sorted({1, 2, 33, 100, count} & set(range(1, count + 1))):
            blocks = -(-count // block)
            for k in {1, -(-blocks // 3), blocks}:
                values, residual = poison(k * block, work(dtype)), numbers(count, work(dtype), 2)
                for kept in (residual, None):
                    given = numbers(count, dtype, 1), kept, values, KEY
                    compare("sample_offer", *given, shift=count, first=count % 9, block=block)
                given = tame(k * block, work(dtype), 3), numbers(count, dtype, 1)
                compare("sample_decode", *given, residual, KEY, 0.3, first=count % 9, shift=count, block=block)
                compare("sample_decode", *given, None, KEY, 2.0, shift=count, weighted=True, block=block)


def test_samples_do_not_depend_on_threads() -> None:
    before, count = torch.get_num_threads(), 600_001
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            grad, residual, values = tame(count, torch.float32, 1), tame(count, torch.float32, 2), torch.zeros(6001)
            compare("sample_offer", grad, residual, values, KEY, first=5)
            compare("sample_decode", tame(6001, torch.float32, 3), grad, residual, KEY, 0.5, first=5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_large_samples_without_a_residual_go_around_the_cache(dtype: torch.dtype) -> None:
    """From 8 MiB on, whatever the alignment and the size of the blocks."""
    count = (8 << 20) // dtype.itemsize + 4111
    for k, shift in ((count // 100, 5), (3, 0)):
        values, grad = tame(k, work(dtype), 3), tame(count, dtype, 1)
        compare("sample_decode", values, grad, None, KEY, 0.5, shift=shift, weighted=True)


def test_every_element_is_as_likely() -> None:
    """100 elements in 7 blocks of 14 or 15, in 3500 draws: each within 5 standard deviations."""
    grad, values, seen = torch.arange(100.0), torch.zeros(7), torch.zeros(100)
    for step in range(3500):
        ops.sample_offer(grad, None, values, KEY.at(step=step))
        seen[values.long()] += 1
    sizes = torch.tensor([100 * (i + 1) // 7 - 100 * i // 7 for i in range(7)])
    expected = (3500 / sizes).repeat_interleave(sizes)
    assert bool(((seen - expected).abs() < 5 * expected.sqrt()).all()) and seen.sum() == 24_500


# ---- what is refused ------------------------------------------------------------------------------


def _encode(positions: list[int], kept: int, b: int, elements: int, room: int, **options: object) -> object:
    at = torch.tensor(positions, dtype=I32)
    return values_encode(at, kept, torch.ones(len(positions)), b, elements, poison(room, U8), **options)


def _decode(section: Tensor, own: int = 0, b: int = 1, residual: Tensor | None = None, **options: object) -> object:
    return single.values_decode([section], own, b, torch.ones(4), residual, 1.0, **options)


NOTHING = poison(9, U8)
REFUSED: dict[str, Callable[[], object]] = {
    "positions must ascend and be below 10": lambda: _encode([3, 3], 2, 1, 10, 99),
    "must ascend and be below 9": lambda: _encode([9], 1, 1, 9, 99),
    r"kept must be in \[0, 1\]": lambda: _encode([1], 2, 1, 10, 99),
    "out must hold at least 13 bytes": lambda: _encode([1], 1, 1, 10, 12),
    r"b must be in \[0, 20\], got 21": lambda: _encode([1], 1, 21, 10, 99),
    "form must be one of": lambda: _encode([1], 1, 1, 10, 99, form="half"),
    'head must be given for "signs" and codes': lambda: _encode([1], 1, 1, 10, 99, form="codes4"),
    "and for no other form": lambda: _encode([1], 1, 1, 10, 99, head=torch.ones(1)),
    "head must be": lambda: _encode([1], 1, 1, 10, 999, form="codes4", head=torch.ones(7)),
    r"heads\[0\] must be torch.float32 for 'codes2', got torch.int32": lambda: _encode(
        [1], 1, 1, 10, 999, form="codes2", head=torch.ones(2, dtype=I32)
    ),
    r"heads\[0\] must be torch.float32 for 'signs', got torch.float64": lambda: _encode(
        [1], 1, 1, 10, 999, form="signs", head=torch.ones(1).double()
    ),
    r"own must be in \[0, 1\)": lambda: _decode(NOTHING, own=1),
    r"sections\[0\] must be a contiguous torch.uint8": lambda: _decode(torch.ones(9)),
    "residual must be": lambda: _decode(NOTHING, residual=torch.ones(3)),
    "momentum needs a residual": lambda: _decode(NOTHING, momentum=torch.ones(4), factor=0.5),
    "and decay 1": lambda: _decode(NOTHING, residual=torch.ones(4), momentum=torch.ones(4), factor=0.5, decay=0.9),
    "factor must be finite": lambda: _decode(NOTHING, residual=torch.ones(4), factor=0.5),
    "sections must hold": lambda: single.values_decode([], 0, 1, torch.ones(4), None, 1.0),
    "values must hold 1 to 4 elements": lambda: ops.sample_offer(torch.ones(4), None, torch.ones(0), KEY),
    "2 for each group": lambda: ops.sample_offer(torch.ones(4), None, torch.ones(3), KEY, block=2),
    r"block must be in \[1, 4\]": lambda: ops.sample_offer(torch.ones(4), None, torch.ones(5), KEY, block=5),
    "draws must lie": lambda: ops.sample_offer(torch.ones(4), None, torch.ones(1), KEY, first=-1),
    "values must be a contiguous": lambda: ops.sample_offer(torch.ones(4), None, torch.ones(1).double(), KEY),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
