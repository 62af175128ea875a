"""Results depend on nothing but their inputs: not on threads, instruction set, or how work is cut up."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.sizes import ternary_states
from tests.support.marks import slow
from tests.support.sections import (
    binary_encode,
    binary_select,
    chunk_select,
    elias_encode,
    top_select,
    values_encode,
)

from .support import DTYPES, KEY, bits, compare, count_rows_of, numbers, poison, tame, words, work

ROOT = Path(__file__).resolve().parents[2]
SETS = ("generic", "avx2", "avx512")


def _digest(tensors: list[Tensor], *integers: int) -> str:
    """Hash the bits of tensors; the payload of a NaN does not count."""
    digest = hashlib.sha256(repr(integers).encode())
    for tensor in tensors:
        clean = (
            torch.where(tensor.isnan(), torch.full_like(tensor, 7), tensor) if tensor.is_floating_point() else tensor
        )
        digest.update(clean.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sign(dtype: torch.dtype, count: int, row_length: int) -> str:
    grad, residual = numbers(count, dtype, 1), numbers(count, work(dtype), 2)
    residual[::3] = -grad[::3].to(work(dtype))
    rows = -(-count // row_length)
    packed, sums = poison(ops.word_count(count), torch.int64), poison(rows, torch.float64)
    bad = single.sign_offer(grad, residual, packed, sums, row_length, key=KEY, word_offset=5)
    plain = poison(packed.numel(), torch.int64)
    ops.sign_pack(grad, plain)
    out = poison(count, dtype)
    steps = tame(rows, torch.float32, 3)
    single.sign_decode(plain, steps, row_length, out, None, feedback="none", scale=0.7)
    single.sign_decode(plain, steps, row_length, grad, residual, feedback="own", scale=3.0, key=KEY, word_offset=5)
    return _digest([packed, sums, plain, out, grad, residual], bad)


def _dense(dtype: torch.dtype, count: int) -> str:
    grad, residual = numbers(count, dtype, 1), numbers(count, work(dtype), 2)
    outputs = [poison(count, out) for out in DTYPES]
    bad = [single.dense_offer(grad, residual, out) for out in outputs]
    decoded = [poison(count, out) for out in DTYPES]
    for out in decoded:
        single.dense_decode(grad, out, scale=0.7)
    ops.dense_add(grad, numbers(count, dtype, 3))
    return _digest([*outputs, *decoded, grad], *bad)


def _bits(count: int) -> str:
    merged, drawn = words(count, 1), poison(count, torch.int64)
    ops.merge_bits(merged, words(count, 2), 2, 1, KEY, word_offset=3)
    ops.bernoulli_words(drawn, 5, 7, KEY)
    folded, whole = poison(count, torch.int64), poison(count, torch.int64)
    ops.majority_fold([words(count, part) for part in range(5)], folded, 64 * count - 9)
    ops.majority_fold([words(count, part) for part in range(4)], whole, 64 * count)
    shaped, together = words(count, 1), poison(count, torch.int64)
    rows = [words(count, 20 + row) for row in range(3)]
    ops.shaped_merge(shaped, words(count, 2), rows, rows, 8)  # of eight ranks any counts are possible
    ops.shaped_fold([words(count, part) for part in range(8)], together, rows, rows)
    groups = count // ops.GROUP_WORDS
    packed, plain = poison(groups * ops.PACKED_WORDS, torch.int64), [poison(groups * 5, torch.int64) for _ in range(2)]
    few = count_rows_of(ternary_states(8), groups * ops.GROUP_WORDS, 20)  # other counts are never kept
    ops.ternary_fold([words(groups * ops.GROUP_WORDS, part) for part in range(8)], packed, few, few)
    ops.ternary_unpack(packed, *plain)
    data = words(count, 9).view(torch.uint8)[: 8 * count - 3]
    copied = poison(data.numel(), torch.uint8)
    sums = (ops.crc32c(data), ops.crc32c_copy(copied, data), ops.hash64(data))
    return _digest([merged, drawn, folded, whole, copied, shaped, together, *rows, packed, *few, *plain], *sums)


def _dither(dtype: torch.dtype, count: int, row_length: int) -> str:
    grad, rows = numbers(count, dtype, 1), -(-count // row_length)
    norms = poison(rows, work(dtype))
    found: list[Tensor] = [norms]
    bad = [single.norm_offer(grad, norms, row_length)]
    for power in (1, 2, 4):
        found.append(poison(rows, torch.float64))
        bad.append(single.norm_offer(grad, found[-1], row_length, power=power))
    for bits in (4, 8, 16):
        pair = [poison(ops.code_layout(bits, count)[1], ops.code_layout(bits, count)[0]) for _ in range(2)]
        for rank, codes in enumerate(pair):
            single.uniform_encode(grad, norms, row_length, codes, KEY.at(rank=rank), bits=bits, levels=3, offset=64)
        ops.uniform_add(*pair, bits=bits)
        found += [*pair, poison(count, dtype)]
        single.uniform_decode(pair[0], norms, row_length, found[-1], bits=bits, scale=0.7)
    if row_length % 8 == 0 or row_length >= count:
        pair = [poison(ops.code_layout(3, count)[1], torch.uint8) for _ in range(2)]
        for rank, codes in enumerate(pair):
            single.uniform_encode(grad, norms, row_length, codes, KEY.at(rank=rank), bits=3, levels=3, offset=64)
        found += [*pair, poison(ops.code_layout(4, count)[1], torch.uint8)]
        ops.uniform_fold(pair, found[-1], count, bits=3, sum_bits=4)
    for bits in (4, 8):
        pair = [poison(ops.code_layout(bits, count)[1], torch.uint8) for _ in range(2)]
        for rank, codes in enumerate(pair):
            rule = {"bits": bits, "headroom": 3, "offset": 64}
            single.exponential_encode(grad, norms, row_length, codes, KEY.at(rank=rank), **rule)
        ops.exponential_merge(*pair, KEY, bits=bits, offset=6)
        found += [*pair, poison(count, dtype)]
        single.exponential_decode(pair[0], norms, row_length, found[-1], bits=bits, headroom=3, scale=0.7)
    return _digest(found, *map(int, bad))


def _quantise(dtype: torch.dtype, count: int, bits: int, norm: int) -> str:
    grad, rule = numbers(count, dtype, 1), {"bits": bits, "block": 320}
    size = -(-count // 320) * ops.qsgd_record_bytes(**rule)
    parts, coded, bad = [poison(size, torch.uint8) for _ in range(3)], [], []
    for rank, records in enumerate(parts[:2]):
        given = (KEY.at(rank=rank),)
        bad.append(single.qsgd_encode(grad, records, *given, **rule, norm=norm, offset=640))
        out = poison(ops.elias_bound(count, **rule), torch.uint8)
        used, _ = elias_encode(grad, out, *given, **rule, norm=norm, offset=640)
        coded.append(out[:used])
    ops.qsgd_fold(parts[:2], parts[2], KEY, **rule, norm=norm, offset=640)
    decoded = [poison(count, dtype) for _ in range(2)]
    single.qsgd_decode(parts[0], decoded[0], **rule, scale=0.7)
    ops.elias_decode(coded, decoded[1], **rule, scale=0.7)
    moments = [poison(1, work(dtype)), poison(1, torch.float64)]
    bad.append(single.moments_offer(grad, *moments, count))
    codes = [words(count // 8, rank).view(torch.uint8) for rank in range(3)]
    ops.exponential_fold(codes, codes[0], KEY, headroom=2, offset=6)
    small, rule = poison(count, torch.uint8), {"headroom": 1, "mantissa": 2, "offset": 6}
    single.exponential_encode(grad, moments[0], max(count, 1), small, KEY, bits=8, **rule)
    ops.exponential_fold([small[: codes[1].numel()], *codes[1:]], codes[1], KEY, **rule)
    return _digest([*parts, *coded, *decoded, *moments, *codes[:2], small], *map(int, bad))


def _sketch(dtype: torch.dtype, count: int, columns: int) -> str:
    grad, kind = tame(count, dtype, 1), work(dtype)
    table = torch.zeros(5 * columns, dtype=kind)
    bad = ops.sketch_encode(grad, tame(count, kind, 2), table, 5, KEY, offset=640)
    k = count // 20
    positions, estimates = poison(k, torch.int64), poison(k, kind)
    found = ops.sketch_top(table, 5, KEY, [(640, count)], k, positions, estimates)
    tables = [table.clone(), poison(256, torch.float64)]
    ops.norm_sketch_all([grad], [tables[1]], KEY, counters=256, offsets=[640])
    ops.sketch_clear(table, 5, KEY, positions)
    left = tame(count, kind, 2)
    ops.absorb(grad, left, momentum := tame(count, kind, 3), 0.9)
    return _digest([*tables, table, positions, estimates, grad, left, momentum], int(bad), found)


def _sparse(dtype: torch.dtype, count: int) -> str:
    grad, residual, kind = numbers(count, dtype, 1), numbers(count, work(dtype), 2), work(dtype)
    residual[::3] = -grad[::3].to(kind)
    k = count // 50
    b = ops.golomb_parameter(k, count)
    chosen = [poison(k, torch.int32) for _ in range(2)]
    values, mean = poison(k, kind), poison(1, kind)
    top = top_select(grad, residual, k, chosen[0], values)
    binary = binary_select(grad, residual, k, chosen[1], mean)
    finite = torch.full_like(mean, 0.3)
    sections = [poison(ops.golomb_bound(k, count, b, kind.itemsize), torch.uint8) for _ in chosen]
    for positions, section, found in zip(chosen, sections, (top, binary), strict=True):
        binary_encode(positions, found[0], finite, b, count, section)
    cleared = grad.clone()
    wrong = [ops.binary_clear(sections[0], b, cleared)]
    wrong.append(single.binary_decode(sections, 1, b, grad, residual, 0.7))
    return _digest([*chosen, values, mean, *sections, cleared, grad, residual], *top, *binary, *map(int, wrong))


def _union(dtype: torch.dtype, count: int, block: int) -> str:
    grad = numbers(count, dtype, 1)
    grad[count // 3 : -count // 3] = 0
    found = poison(ops.word_count(-(-count // block)), torch.int64)
    bad = single.union_mark(grad, found, block=block)
    kept = single.union_count(found, count, block=block)
    values, result = poison(kept, work(dtype)), poison(count, dtype)
    single.union_encode(grad, found, kept, values, block=block)
    single.union_decode(values, found, kept, result, block=block, scale=0.7)
    return _digest([found, values, result], bad, kept)


def _values(dtype: torch.dtype, count: int) -> str:
    grad, residual, kind = numbers(count, dtype, 1), numbers(count, work(dtype), 2), work(dtype)
    k, chunk = 20, 1000
    last = min(count % chunk, k)
    room = count // chunk * k + last
    positions, values, levels = torch.zeros(room, dtype=torch.int32), torch.zeros(room, dtype=kind), torch.zeros(8)
    found = chunk_select(grad, residual, chunk, k, last, positions, values)
    finite = values[: found[0]].clamp(-9, 9)
    ops.codebook_fit(finite, levels, bits=4)
    section = poison(ops.values_bound(room, count, 5, kind.itemsize, form="codes4"), torch.uint8)
    rule = {"form": "codes4", "head": levels}
    used = values_encode(positions, found[0], finite, 5, count, section, **rule)
    sections = [section[:used], section[:used].clone()]
    wrong = single.values_decode(sections, 1, 5, grad, residual, 0.7, form="codes4", decay=0.9, by_senders=True)
    sample = poison(70 * 32, kind)
    bad = ops.sample_offer(grad, residual, sample, KEY, block=70)
    ops.sample_decode(sample.clamp(-9, 9), grad, residual, KEY, 0.3, weighted=True, block=70)
    return _digest([positions, values, levels, section, sample, grad, residual], *found, used, int(wrong), int(bad))


def _low_rank(dtype: torch.dtype, rows: int, columns: int) -> str:
    grad, residual, kind, rank = tame(rows * columns, dtype, 1), tame(rows * columns, work(dtype), 2), work(dtype), 6
    kept = tame(rank * columns, kind, 3)
    kept[:columns] = 0
    start, left, right = poison(kept.numel(), kind), poison(rank * rows, kind), poison(kept.numel(), kind)
    ops.lowrank_start(kept, start, rank, KEY, offset=3)
    bad = ops.lowrank_left(grad, residual, rows, start, left)
    raw = left.clone()
    ops.lowrank_orthonormalise(left, rank)
    ops.lowrank_right(grad, residual, rows, left, right)
    ops.lowrank_decode(left, right, rows, grad, residual, scale=0.7)
    return _digest([start, raw, left, right, grad, residual], int(bad))


def _records(dtype: torch.dtype, count: int, block: int) -> str:
    grad, residual, blocks = numbers(count, dtype, 1), numbers(count, work(dtype), 2), -(-count // block)
    parts = [poison(blocks * ops.record_bytes(block), torch.uint8) for _ in range(3)]
    bad = [int(ops.record_offer(grad, residual, parts[0], block, rule="l2"))]
    bad += [int(ops.record_offer(tame(count, dtype, i), None, parts[i], block, rule="l1")) for i in (1, 2)]
    left = poison(count, work(dtype))
    ops.record_fold(parts, tame(count, work(dtype), 4), left, parts[1], block, rule="l2")
    ops.record_decode(parts[1], tame(blocks, torch.float32, 5), grad, residual, block, scale=0.7)
    return _digest([*parts, left, grad, residual], *bad)


def digests(scale: int) -> list[str]:
    """Run every kernel on inputs of about ``scale`` elements."""
    signs = [_sign(dtype, scale + 17, rows) for dtype in DTYPES for rows in (scale + 17, scale // 3 + 1, 100)]
    dithered = [_dither(dtype, scale + 5, rows) for dtype in DTYPES for rows in (scale + 5, 2048)]
    rounded = [_quantise(dtype, scale + 7, *rule) for dtype in DTYPES for rule in ((8, 0), (3, 2))]
    wide = ops.sketch_columns(scale // 2)
    sketched = [_sketch(dtype, scale + 9, columns) for dtype in DTYPES for columns in (wide, 1072)]
    plain = [kernel(dtype, scale + 3) for dtype in DTYPES for kernel in (_dense, _sparse, _values)]
    unions = [_union(dtype, scale + 13, block) for dtype in DTYPES for block in (1, 7)]
    sides = [(scale // 30 + 1, 30), (30, scale // 30 + 1)]
    factors = [_low_rank(dtype, *side) for dtype in DTYPES for side in sides]
    records = [_records(dtype, scale + 11, block) for dtype in DTYPES for block in (64, 2048)]
    return [*signs, *plain, *unions, *dithered, *rounded, *sketched, *factors, *records, _bits(scale // 8 + 1)]


def large_digests() -> list[str]:
    """Run the kernels that sample their input first where a sample is less than the whole."""
    count = 300_007
    return [_sparse(torch.float32, count), _sketch(torch.float32, count, ops.sketch_columns(count // 2))]


@pytest.mark.parametrize("override", ["HVC_ISA=generic", *slow("HVC_ISA=avx2", "HVC_KERNELS=reference")])
def test_the_instruction_set_changes_nothing(override: str) -> None:
    """Another process, which really runs something else, computes the same bits."""
    name, _, value = override.partition("=")
    if value in SETS and SETS.index(value) >= SETS.index(ops.instruction_set()):
        value = SETS[max(0, SETS.index(ops.instruction_set()) - 1)]
    program = (
        "from tests.kernels.test_independence import digests, large_digests; from horovod_compress import ops; "
        "print(ops.instruction_set(), *digests(3000), *large_digests())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), name: value}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    chosen, *theirs = result.stdout.split()
    assert chosen == value
    assert theirs == [*digests(3000), *large_digests()]


@pytest.mark.slow
def test_the_number_of_threads_changes_nothing() -> None:
    """Large enough that three threads all get work, at borders inside words."""
    found = {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found[threads] = digests(1_000_000)
    finally:
        torch.set_num_threads(before)
    assert found[2] == found[1]
    assert found[3] == found[1]
    assert found[7] == found[1]


def test_threads_agree_with_the_reference() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        count = 700_001
        grad, residual = numbers(count, torch.float32, 1), numbers(count, torch.float32, 2)
        outputs = (poison(ops.word_count(count), torch.int64), poison(8, torch.float64), 99_999)
        compare("sign_offer", grad, residual, *outputs, shift=1, key=KEY)
        compare("merge_bits", words(40_000, 1), words(40_000, 2), 2, 1, KEY, shift=1)
    finally:
        torch.set_num_threads(before)


# ---- one call equals several on pieces ------------------------------------------------------------

CUTS = (0, 1, 2, 5, 16, 17, 40, 63, 64, 90)  # in words


def _pieces(count: int) -> list[tuple[int, slice, slice]]:
    """First word, words and elements of every piece."""
    borders = [*CUTS, ops.word_count(count)]
    return [(a, slice(a, b), slice(64 * a, min(64 * b, count))) for a, b in pairwise(borders)]


def _merge(into: Tensor, other: Tensor, offset: int) -> None:
    ops.merge_bits(into, other, 2, 1, KEY, word_offset=offset)


def _draw(into: Tensor, _: Tensor, offset: int) -> None:
    ops.bernoulli_words(into, 3, 11, KEY, word_offset=offset)


@pytest.mark.parametrize("run", [_merge, _draw])
def test_random_bits_do_not_depend_on_segmentation(run: Callable[[Tensor, Tensor, int], None]) -> None:
    whole, pieces, other = words(100, 1), words(100, 1), words(100, 2)
    run(whole, other, 11)
    for first, at, _ in _pieces(6400):
        run(pieces[at], other[at], 11 + first)
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_do_not_depend_on_segmentation(dtype: torch.dtype) -> None:
    count = 6400 - 3
    grad, residual = numbers(count, dtype, 1), numbers(count, work(dtype), 2)
    residual[::2] = -grad[::2].to(work(dtype))
    whole, pieces = poison(100, torch.int64), poison(100, torch.int64)
    bad = single.sign_offer(grad, residual, whole, None, 1, key=KEY, word_offset=3)
    bad_pieces = 0
    for first, at, elements in _pieces(count):
        bad_pieces += single.sign_offer(
            grad[elements], residual[elements], pieces[at], None, 1, key=KEY, word_offset=3 + first
        )
    assert torch.equal(whole, pieces)
    assert bad == bad_pieces
    _decode_in_pieces(count, grad, residual)


def _decode_in_pieces(count: int, grad: Tensor, residual: Tensor) -> None:
    consensus, step = bits(count, 5), torch.tensor([0.25])
    grads, residuals = (grad.clone(), grad.clone()), (residual.clone(), residual.clone())
    single.sign_decode(consensus, step, count, grads[0], residuals[0], feedback="own", key=KEY, word_offset=3)
    for first, at, elements in _pieces(count):
        pieces = (grads[1][elements], residuals[1][elements])
        single.sign_decode(consensus[at], step, count, *pieces, feedback="own", key=KEY, word_offset=3 + first)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(residuals[0].nan_to_num(7.0), residuals[1].nan_to_num(7.0))


def test_row_sums_do_not_depend_on_what_surrounds_the_row() -> None:
    count, row_length = 5000, 777
    grad = tame(count, torch.float32, 1)
    together = poison(7, torch.float64)
    single.sign_offer(grad, None, poison(79, torch.int64), together, row_length)
    for row, piece in enumerate(grad.split(row_length)):
        alone = poison(1, torch.float64)
        single.sign_offer(piece, None, poison(ops.word_count(piece.numel()), torch.int64), alone, piece.numel())
        assert alone.item() == together[row].item()
