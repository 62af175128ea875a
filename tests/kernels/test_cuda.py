"""CUDA gives the bits of the CPU: on a GPU where there is one, and emulated everywhere.

The emulation compiles the same texts with g++ and runs the threads of a block as fibers: it shows
what the texts compute, with every thread in another order as well, but neither what nvcc makes of
them nor what threads do at the same time.
"""

from __future__ import annotations

import ast
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import dispatch, legality, loader
from horovod_compress.ops.dispatch import as_tensor, by_reference
from horovod_compress.ops.sizes import FORMS, ternary_states
from tests.support.marks import slow
from tests.support.sections import (
    begins,
    binary_encode,
    binary_select,
    chunk_select,
    elias_encode,
    head_of,
    top_select,
    values_encode,
)

from . import emulator
from .parity import Target
from .support import (
    DTYPES,
    KEY,
    LENGTHS as EVERY_LENGTH,
    bits,
    differences,
    numbers,
    poison,
    tame,
    words,
    work,
)

Same = Callable[..., Any]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(loader.__file__).resolve().parents[1]
#: Around the sizes of words, warps and blocks of a sum.
SHORT = (0, 1, 31, 33, 64, 257, 1025, 4097)
#: And of superblocks.
LENGTHS = (*SHORT, 63, 65, 1000, 1023, 8191, 65_537)
#: Beyond what an emulated kernel does in reasonable time.
LONG = (65_535, 300_001, (1 << 20) + 1)
#: Emulated kernels are slow: `make test` takes the others in the tests of batches, and of the CPU's kernels.
FEW_DTYPES = [DTYPES[0], *slow(*DTYPES[1:])]

no_compiler = pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")
TARGETS = [
    pytest.param((Target("emulated", "cpu"), 0), id="emulated", marks=no_compiler),
    pytest.param((Target("emulated", "cpu"), 1), id="emulated-backwards", marks=[no_compiler, pytest.mark.slow]),
    pytest.param((Target("emulated", "cpu"), 2), id="emulated-shuffled", marks=[no_compiler, pytest.mark.slow]),
    pytest.param((Target("cuda", "cuda"), None), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Where the CUDA texts run, and in which order if they are emulated."""
    target, order = request.param
    if order is not None:
        emulator.order(order)
    yield target
    if order is not None:
        emulator.order(0)


@pytest.fixture
def same(target: Target) -> Same:
    return target.same


@pytest.fixture
def lengths(target: Target, request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Few where every kernel is slow: under compute-sanitizer, and emulated in the tests of every day."""
    if os.environ.get("HVC_TEST_LENGTHS") == "short":
        return SHORT
    if target.name == "cuda":
        return (*LENGTHS, *LONG)
    return LENGTHS if request.node.get_closest_marker("slow") else SHORT


def few_if_long(count: int, every: Sequence[Any], few: int = 2) -> Sequence[Any]:
    """Return what a test does with so many elements: the first few of it, if to compare them takes long."""
    return every if count < LONG[1] else every[:few]


@pytest.fixture
def every_length(target: Target) -> tuple[int, ...]:
    short = target.name != "cuda" or os.environ.get("HVC_TEST_LENGTHS") == "short"
    return (*range(0, 258, 9), *SHORT[5:]) if short else EVERY_LENGTH


@pytest.mark.parametrize("dtype", FEW_DTYPES)
class TestNumbers:
    def test_sign(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for row_length in few_if_long(count, (max(count, 1), 100, 7, 1024, 65_600)):
                rows, size = -(-count // row_length), ops.word_count(count)
                grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
                residual[::3] = -grad[::3].to(work(dtype))
                outputs = (poison(size, torch.int64), poison(rows, torch.float64), row_length)
                same("sign_offer", grad, residual, *outputs, key=KEY, word_offset=5)
                same("sign_pack", grad, poison(size, torch.int64))
                steps = tame(rows, torch.float32, 1)
                for feedback in ("global", "own", "momentum"):
                    rule = {"feedback": feedback, "scale": 0.3, "key": KEY, "word_offset": 5}
                    same("sign_decode", bits(count, 2), steps, row_length, grad, residual, **rule)
                given = (bits(count, 2), steps, row_length, poison(count, dtype), None)
                same("sign_decode", *given, feedback="none", scale=-1.5)

    def test_two_value(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for row_length in few_if_long(count, (max(count, 1), 100, 7, 1024, 65_600)):
                rows, size = -(-count // row_length), ops.word_count(count)
                grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
                made = [poison(rows, kind) for kind in (torch.float64, torch.float64, torch.int64)]
                same("two_value_offer", grad, residual, poison(size, torch.int64), *made, row_length)
                sent = [bits(count, rank) for rank in range(3)]
                highs, lows = ([tame(rows, torch.float32, first + rank) for rank in range(3)] for first in (1, 9))
                for low in (None, lows):
                    same("two_value_decode", sent, highs, low, row_length, 1, grad, residual, scale=0.3)

    def test_records(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            for block in (64, 2048):
                blocks = -(-count // block)
                room = [poison(blocks * ops.record_bytes(block), torch.uint8) for _ in range(4)]
                grad, residual = numbers(count, dtype, count), numbers(count, kind, count + 1)
                for rule in ("l1", "l2"):
                    same("record_offer", grad, residual, room[0], block, rule=rule)
                    for rank in range(3):
                        ops.record_offer(tame(count, dtype, rank), None, room[rank], block, rule=rule)
                    given = (room[:3], tame(count, kind, 9), poison(count, kind), room[3], block)
                    same("record_fold", *given, rule=rule)
                    same("record_fold", *given, rule="shared")
                scales = tame(blocks, torch.float32, 3)
                same("record_decode", room[0], scales, grad, residual, block, scale=0.3)

    def test_lowrank(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for rows, columns in ((2, 3), (31, 33), (1, 1), (257, 100), (1025, 40), (40, 2049)):
            count = rows * columns
            if count > 10 * lengths[-1]:
                continue
            for rank in (1, 9) if count > 10_000 else (1, 4, 9):
                left, right = tame(rank * rows, kind, 1), tame(rank * columns, kind, 2)
                for make in (numbers, tame):
                    grad, residual = make(count, dtype, 3), make(count, kind, 4)
                    for kept in (None, residual):
                        same("lowrank_left", grad, kept, rows, right, poison(left.numel(), kind))
                        same("lowrank_right", grad, kept, rows, left, poison(right.numel(), kind))
                        same("lowrank_decode", left, right, rows, grad, kept, scale=0.3)
                    lines = make(rank * columns, kind, 5)
                    same("lowrank_orthonormalise", lines, rank)
                    same("lowrank_start", lines, poison(lines.numel(), kind), rank, KEY, offset=rows)

    def test_dense(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
            for out in DTYPES:
                same("dense_offer", grad, residual, poison(count, out))
                left = numbers(count, work(out), 3)
                same("dense_decode", grad, poison(count, out), scale=0.3, residual=left)
            same("dense_add", grad, numbers(count, dtype, 4))

    def test_adam(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            several = [count]
            given = [[numbers(count, dtype, seed) for count in several] for seed in (1, 2)]
            squares = [tame(count, work(dtype), 3).abs() for count in several]
            kept, rule = (
                [poison(count, dtype) for count in several],
                {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01},
            )
            same("adam_hold_all", kept, *given, squares, None, **rule)
            if count % 3 == 0:
                same("adam_hold_all", kept, *given, squares, [tame(max(count // 3, 1), work(dtype), 4).abs()], **rule)

    def test_a_whole_step_of_adam(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        rule: dict[str, Any] = {"step": 7.0, "bound": 10.0, "lr": 0.01, "eps": 1e-8, "by": -0.7, "weight_decay": 0.1}
        for count in lengths:
            for betas, decoupled in (((0.9, 0.999), True), ((0.4, 0.99), False)):
                given = [[numbers(count, dtype, seed)] for seed in (1, 2, 3)]
                square, rows = tame(count, work(dtype), 3).abs(), 3 if count % 3 == 0 and count else 1
                floors = [tame(rows, work(dtype), 4).abs()] if decoupled else None
                same("adam_step_all", *given, [square], floors, betas=betas, decoupled=decoupled, **rule)

    def test_a_step_of_sgd(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        rule: dict[str, Any] = {"lr": 0.01, "by": -0.7, "weight_decay": 0.1}
        for count in lengths:
            given = [[numbers(count, dtype, seed)] for seed in (1, 2, 3)]
            same("sgd_step_all", *given, **rule, momentum=0.9, dampening=0.25)
            same("sgd_step_all", *given, **rule, momentum=0.9, nesterov=True)
            same("sgd_step_all", given[0], None, given[2], **rule)

    def test_dither(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for row_length in few_if_long(count, (max(count, 1), 100, 2048)):
                grad, rows = numbers(count, dtype, count), -(-count // row_length)
                same("norm_offer", grad, poison(rows, work(dtype)), row_length)
                for power in (1, 2, 4):
                    same("norm_offer", grad, poison(rows, torch.float64), row_length, power=power)
                norms = tame(rows, work(dtype), 1).abs()
                for bits, rule in ((4, {"levels": 3}), (8, {"levels": 31}), (16, {"levels": 999})):
                    kind, size = ops.code_layout(bits, count)
                    given = (grad, norms, row_length, poison(size, kind), KEY)
                    same("uniform_encode", *given, bits=bits, offset=count % 5 * 2, **rule)
                    codes = words(size, 3).to(kind)
                    same("uniform_add", codes, words(size, 4).to(kind), bits=bits)
                    same("uniform_decode", codes, norms, row_length, poison(count, dtype), bits=bits, scale=0.3)
                    if bits < 16:
                        same("exponential_encode", *given, bits=bits, headroom=3, offset=count % 5 * 2)
                        same("exponential_merge", codes, words(size, 4).to(kind), KEY, bits=bits, offset=count % 5)
                        rest = {"bits": bits, "headroom": 3, "scale": 0.3}
                        same("exponential_decode", codes, norms, row_length, poison(count, dtype), **rest)
                    if bits == 8:
                        short = {"bits": 8, "headroom": 1, "mantissa": 2}
                        same("exponential_encode", *given, **short, offset=count % 5 * 2)
                        rest = short | {"scale": 0.3}
                        same("exponential_decode", codes, norms, row_length, poison(count, dtype), **rest)

    def test_packed_levels(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths[::2]:
            for bits, levels, sum_bits in ((2, 1, 4), (3, 3, 5), (5, 15, 7), (6, 31, 8), (7, 63, 8)):
                size, row_length = ops.code_layout(bits, count)[1], (max(count, 1), 104, 2048)[bits % 3]
                grad, norms = numbers(count, dtype, count), tame(-(-count // row_length), work(dtype), 1).abs()
                codes = [poison(size, torch.uint8) for _ in range(3)]
                rule = {"bits": bits, "levels": levels, "offset": count % 5 * 3}
                same("uniform_encode", grad, norms, row_length, codes[0], KEY, **rule)
                for rank, part in enumerate(codes):
                    single.uniform_encode(grad, norms, row_length, part, KEY.at(rank=rank), **rule)
                sums = poison(ops.code_layout(sum_bits, count)[1], torch.uint8)
                same("uniform_fold", codes, sums, count, bits=bits, sum_bits=sum_bits)
                same("uniform_decode", codes[0], norms, row_length, poison(count, dtype), bits=bits, scale=0.3)

    def test_quantise(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for bits, block, norm in ((8, 512, 0), (3, 64, 2), (5, 1152, 2), (2, 8192, 0), (4, 512, 2)):
                rule, blocks = {"bits": bits, "block": block}, -(-count // block)
                grad, size = numbers(count, dtype, count), blocks * ops.qsgd_record_bytes(**rule)
                for offset in (128, count % 13):
                    for key in (KEY, KEY.at(shift=0xBEEF), None):
                        same("qsgd_encode", grad, poison(size, torch.uint8), key, **rule, norm=norm, offset=offset)
                parts = [poison(size, torch.uint8) for _ in range(3)]
                for rank, part in enumerate(parts):
                    single.qsgd_encode(tame(count, dtype, rank), part, KEY.at(rank=rank), **rule, norm=norm)
                same("qsgd_fold", parts, poison(size, torch.uint8), KEY, **rule, norm=norm, offset=64)
                same("qsgd_decode", parts[0], poison(count, dtype), **rule, scale=0.3)
                more = {"norm": norm, "kept_bits": 10 - bits, "beta": 0.8}
                kept = poison(blocks * ops.qsgd_record_bytes(10 - bits, block), torch.uint8)
                single.qsgd_encode(tame(count, dtype, 5) / 9, kept, KEY, bits=10 - bits, block=block, norm=0)
                for before in (kept, None):
                    for x in (grad, tame(count, dtype, count)):
                        room = poison(size, torch.uint8), poison(kept.numel(), torch.uint8)
                        same("loco_encode", x, before, *room, **rule, **more)
                    same("loco_fold", parts, before, *room, **rule, **more)
            codes = [words(count, rank).to(torch.uint8) for rank in range(3)]
            for mantissa in (0, 2):
                rest = {"headroom": 1, "mantissa": mantissa, "offset": count % 5}
                same("exponential_fold", codes, poison(count, torch.uint8), KEY, **rest)
            for row_length in {max(count, 1), 2048}:
                rows = -(-count // row_length)
                grad, largest = numbers(count, dtype, count), tame(rows, work(dtype), 1).abs()
                same("moments_offer", grad, poison(rows, work(dtype)), poison(rows, torch.float64), row_length)
                codes_of = poison(count, torch.uint8)
                rest = {"bits": 8, "levels": 1, "bounds": largest / 2}
                same("uniform_encode", grad, largest, row_length, codes_of, KEY, **rest)

    def test_sketch(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            for rows, columns in few_if_long(count, ((5, ops.sketch_columns(count // 3)), (1, 32), (3, 1072)), 1):
                grad, residual, momentum = numbers(count, dtype, 1), numbers(count, kind, 2), numbers(count, kind, 3)
                table, nasty = tame(rows * columns, kind, 4), numbers(rows * columns, kind, 5)
                same("sketch_encode", grad, None, table, rows, KEY, offset=count % 5 * 64)
                rest = {"momentum": momentum, "factor": -0.3, "offset": count % 5 * 64}
                same("sketch_encode", grad, residual, table, rows, KEY, **rest)
                spans = [(64, count // 2), ((count // 128 + 3) * 64, count - count // 2)]
                for values in few_if_long(count, (table, nasty, table.round(), torch.zeros_like(table))):
                    for k in few_if_long(count, (count // 50, 1, count), 1):
                        given = (spans, k, poison(k, torch.int64), poison(k, kind))
                        same("sketch_top", values, rows, KEY, *given)
                positions = torch.arange(count) * 7919 % (1 << 31)
                same("sketch_clear", table, rows, KEY, positions[: count // 9])
            same("absorb", numbers(count, dtype, 1), numbers(count, kind, 2))
            same("absorb", numbers(count, dtype, 1), numbers(count, kind, 2), numbers(count, kind, 3), 0.9)

    def test_norm_sketch(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for number in few_if_long(count, (128, 256), 1):
                grads = [tame(n, dtype, n) for n in (count, 300, 0)]
                room = [poison(number, torch.float64) for _ in grads]
                same("norm_sketch_all", grads, room, KEY, counters=number, offsets=[6400, 0, 64])

    def test_union(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        """Three tensors, one of them without bits."""
        for count in lengths:
            for block in few_if_long(count, (1, 7, 64), 1):
                grads = [numbers(n, dtype, n) * (tame(n, dtype, 1) > 1) for n in (count, 300, 0)]
                marked = [poison(ops.word_count(-(-grad.numel() // block)), torch.int64) for grad in grads]
                same("union_mark_all", grads, marked, block=block)
                ops.union_mark_all(grads, marked, block=block)
                sizes = [grad.numel() for grad in grads]
                same("union_count_all", marked, sizes, block=block)
                kept = as_tensor(ops.union_count_all(marked, sizes, block=block)).tolist()
                found, kept[1] = [marked[0], None, marked[2]], 300
                values = [tame(number, work(dtype), number) for number in kept]
                same("union_encode_all", grads, found, kept, values, block=block)
                same("union_decode_all", values, found, kept, grads, block=block, scale=0.3)

    def test_sketch_of_many_layers(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        """Across layer 65,536, with few layers and with more than are prepared together."""
        columns, border = 32, 65_536 * 32
        for offset, count in ((border - 128, 300), (0, border + 100)):
            grad, table = tame(count, dtype, 1), tame(3 * columns, work(dtype), 2)
            same("sketch_encode", grad, None, table, 3, KEY, offset=offset)
        k, spans = 20, [(border - 128, 300)]
        given = (poison(k, torch.int64), poison(k, work(dtype)))
        same("sketch_top", tame(3 * columns, work(dtype), 2), 3, KEY, spans, k, *given)

    def test_selection(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            grad, residual = numbers(count, dtype, count), tame(count, kind, count + 1)
            for x, left in ((grad, residual), (tame(count, dtype, 1).round(), None), (grad * 0, None)):
                for k in {min(count, 1), count // 100, count}:
                    numbers_found = poison(3, torch.int64)
                    same(top_select, x, left, k, poison(k, torch.int32), poison(k, kind))
                    same(binary_select, x, left, k, poison(k, torch.int32), poison(1, kind))
                    given = (x, left, k, poison(k, torch.int32))
                    same("top_select", *given, poison(k, kind), numbers_found, whole=True)
                    same("binary_select", *given, poison(1, kind), numbers_found, whole=True)
            same("count_nonfinite", grad)

    def test_selection_in_chunks(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            chunk = (1 if count < 50 else 1000, 700, 300, 4096)[count % 4]
            k, rest = -(-chunk // (1, 3, 50)[count % 3]), count % chunk
            last = min(rest, k)
            room = count // chunk * k + last
            grad, residual = numbers(count, dtype, count), tame(count, kind, count + 1)
            for x, left in ((grad, residual), (tame(count, dtype, 1).round(), None), (grad * 0, None)):
                same(chunk_select, x, left, chunk, k, last, poison(room, torch.int32), poison(room, kind))

    def test_codebooks(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            for values in (numbers(count, kind, 1), tame(count, kind, 2) ** 5, torch.full((count,), 0.1, dtype=kind)):
                for width in (2, 4, 8):
                    same("codebook_fit", values, poison(1 << width - 1, torch.float32), bits=width)

    def test_selection_by_sample(self, dtype: torch.dtype, target: Target, same: Same) -> None:
        """A sample that does, two that mislead, and candidates without room; all the same it is exact."""
        count, sample = (20_479, 4096) if target.name == "emulated" else ((1 << 22) + 7, 1 << 16)
        k, kind = count // 50, work(dtype)
        sampled = torch.arange(count) % (count // sample) == 0
        grad, residual = tame(count, dtype, 1), tame(count, kind, 2)
        low = torch.where(~sampled, grad * 64, grad)
        high = torch.where(sampled & (torch.arange(count) % 40 == 0), grad * 64, grad)
        spoilt = grad.clone()
        spoilt[5::97] = float("nan")
        spoilt[7::1009] = float("-inf")
        sparse = torch.where(torch.arange(count) % 101 == 3, grad, grad * 0)
        close = grad.clone()
        close[5000:5300] *= 64  # more than a chunk has room for
        given = ((grad, residual), (high, None), (low, None), (spoilt, residual), (sparse, None), (close, residual))
        for x, left in given:
            self._selects(target, same, x, left, k, tries=2 if x is high or x is low else 1)
        self._selects(target, same, torch.sign(grad), None, k, tries=2)

    def _selects(self, target: Target, same: Same, x: Tensor, left: Tensor | None, k: int, tries: int) -> None:
        """Select both ways, and see whether the sample did: what is tried again starts more kernels."""
        kind = work(x.dtype)
        digits = 6 if kind == torch.float64 else 3
        # Two digits of the sample, marks, candidates with the first digit; then the others, tallies and what is kept.
        wanted = 4 + digits - 1 + 2 + (tries - 1) * (digits + 2)
        for select, more, out in ((top_select, 0, poison(k, kind)), (binary_select, 3, poison(1, kind))):
            before = emulator.started()[0] if target.name == "emulated" else 0
            same(select, x, left, k, poison(k, torch.int32), out)
            if target.name == "emulated":
                assert emulator.started()[0] - before == wanted + tries * more, (select, tries)

    def test_sections(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            for b in (0, 3, 20):
                positions = torch.arange(0, count, 1 + count % 7, dtype=torch.int32)
                kept, mean = positions.numel(), torch.full((1,), 0.3, dtype=kind)
                section = poison(ops.golomb_bound(kept, count, b, kind.itemsize), torch.uint8)
                same("binary_encode", positions, kept, mean, b, count, begins(), section)
                binary_encode(positions, kept, mean, b, count, section)
                flipped = section.clone()
                flipped[count % section.numel()] ^= 16
                given = ([section, section.roll(0), section], 1, b)
                same("binary_decode", *given, tame(count, dtype, 1), tame(count, kind, 2), 0.3)
                same("binary_decode", *given, tame(count, dtype, 1), None, 0.3)
                for bytes_ in (section, flipped, section[:-1], section[:3]):
                    same("binary_clear", bytes_, b, tame(count, dtype, 1))

    def test_sections_one_behind_the_other(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        """From any byte on; nothing is written where there is no room, or where the one before found none."""
        kind = work(dtype)
        for count in lengths:
            positions = torch.arange(0, count, 1 + count % 5, dtype=torch.int32)
            kept, values, mean = positions.numel(), tame(positions.numel(), kind, 1), torch.full((1,), 0.3, dtype=kind)
            rule, at = {"bits": 4, "block": 64}, count % 7
            sizes = [
                ops.values_bound(kept, count, 3, kind.itemsize),
                ops.golomb_bound(kept, count, 3, kind.itemsize),
                ops.elias_bound(count, **rule),
            ]
            room = [poison(at + size, torch.uint8) for size in sizes]
            same("values_encode", positions, kept, values, 3, count, begins(at), room[0])
            same("binary_encode", positions, kept, mean, 3, count, begins(at), room[1])
            same("elias_encode", tame(count, dtype, 1), begins(at), room[2], KEY, **rule, norm=0)

    def test_elias(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for bits, block, norm in ((8, 512, 0), (3, 64, 2), (2, 8192, 0), (5, 1152, 2)):
                rule = {"bits": bits, "block": block}
                room = ops.elias_bound(count, **rule)
                sections = []
                for rank, grad in enumerate((numbers(count, dtype, 1), tame(count, dtype, 2), spiked(count, dtype))):
                    options = {**rule, "norm": norm, "offset": 8 * (count % 3) + rank}
                    same("elias_encode", grad, begins(), poison(room, torch.uint8), KEY, **options)
                    section = poison(room, torch.uint8)
                    used, _ = elias_encode(grad, section, KEY, **options)
                    sections.append(section[:used])
                same("elias_decode", sections[1:], poison(count, dtype), **rule, scale=0.3)

    def test_elias_within_an_error(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for count in lengths:
            for bits, block, error in ((8, 512, 0.1), (6, 64, 0.3), (8, 8192, 0.6)):
                rule = {"bits": bits, "block": block, "norm": 2, "error": error}
                for grad in (numbers(count, dtype, 1), tame(count, dtype, 2) ** 3, spiked(count, dtype)):
                    room = poison(ops.elias_bound(count, bits=bits, block=block), torch.uint8)
                    same("elias_encode", grad, begins(), room, None, **rule)

    def test_values(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            for form in FORMS:
                b, head = (0, 3, 7, 20)[count % 4], head_of(form, kind)
                sections = []
                for rank, step in enumerate((1 + count % 7, 1, 97)):
                    positions = torch.arange(min(rank, count), count, step, dtype=torch.int32)
                    kept, values = positions.numel(), numbers(positions.numel(), kind, rank)
                    room = ops.values_bound(kept, count, b, kind.itemsize, form=form)
                    given = (positions, max(kept - rank, 0), values, b, count)
                    same("values_encode", *given, begins(), poison(room, torch.uint8), form=form, head=head)
                    section = poison(room, torch.uint8)
                    used = values_encode(*given, section, form=form, head=head)
                    sections.append(section[: used + rank])
                given = (sections, count % 3, b, tame(count, dtype, 1))
                same("values_decode", *given, tame(count, kind, 2), 0.3, form=form)
                same("values_decode", *given, None, 0.3, form=form)
                more = {"decay": 0.9, "by_senders": True}
                same("values_decode", *given, tame(count, kind, 2), 0.3, form=form, **more)

    def test_values_with_momentum(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in lengths:
            positions = torch.arange(0, count, 1 + count % 5, dtype=torch.int32)
            kept, values = positions.numel(), tame(positions.numel(), kind, 4)
            section = poison(ops.values_bound(kept, count, 2, kind.itemsize), torch.uint8)
            values_encode(positions, kept, values, 2, count, section)
            for masking in (False, True):
                given = ([section, section.clone()], 1, 2, numbers(count, dtype, 1), numbers(count, kind, 2), 0.5)
                rule = {"momentum": numbers(count, kind, 3), "factor": 0.9, "masking": masking}
                same("values_decode", *given, **rule)

    def test_samples(self, dtype: torch.dtype, same: Same, every_length: tuple[int, ...]) -> None:
        kind = work(dtype)
        for count in every_length:
            grad, residual = numbers(count, dtype, 1), numbers(count, kind, 2)
            for k in sorted({min(count, 1), -(-count // 100), -(-count // 3), count})[count % 2 :: 2]:
                values = tame(k, kind, 3)
                for kept in (None, residual):
                    same("sample_offer", grad, kept, poison(k, kind), KEY, first=count % 5)
                    same("sample_decode", values, grad, kept, KEY, 0.3, first=count % 5, weighted=bool(k % 2))
            block = min((2, 31, 64)[count % 3], count)
            if block:
                blocks = tame(max(1, -(-count // block) // 3) * block, kind, 4)
                given = {"first": count % 5, "block": block}
                same("sample_offer", grad, residual, poison(blocks.numel(), kind), KEY, **given)
                same("sample_decode", blocks, grad, residual, KEY, 0.3, weighted=bool(count % 2), **given)

    def test_short_and_misaligned(self, dtype: torch.dtype, same: Same, every_length: tuple[int, ...]) -> None:
        """The kernels of every step at every length around a word, a warp and a block; each call shifts memory."""
        kind = work(dtype)
        for count in every_length:
            size = ops.word_count(count)
            grad, residual, row = numbers(count, dtype, count), numbers(count, kind, count + 1), max(count, 1)
            rows = -(-count // row)
            same("sign_offer", grad, residual, poison(size, torch.int64), poison(rows, torch.float64), row, key=KEY)
            same("sign_pack", grad, poison(size, torch.int64))
            steps = tame(rows, torch.float32, 1)
            same("sign_decode", bits(count, 2), steps, row, grad, residual, feedback="own", key=KEY)
            same("dense_offer", grad, residual, poison(count, kind))
            same("dense_add", grad, numbers(count, dtype, 4))
            norms = tame(rows, kind, 1).abs()
            same("uniform_encode", grad, norms, row, poison(count, torch.uint8), KEY, bits=8, levels=31, offset=count)
            k = count // 3
            same(top_select, grad, residual, k, poison(k, torch.int32), poison(k, kind))

    def test_signs_of_nan(self, dtype: torch.dtype, same: Same) -> None:
        """A GPU's arithmetic loses them: a NaN of either sign is the same code on every processor, a positive one."""
        nan = torch.full((16,), float("nan"), dtype=dtype)
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        negative = (nan.view(integers) | torch.iinfo(integers).min).view(dtype)
        assert negative.isnan().all() and negative.signbit().all() and not nan.signbit().any()
        kind, positions, norms = work(dtype), torch.arange(16, dtype=torch.int32), torch.ones(1, dtype=work(dtype))
        for values in (nan, negative):
            for width in (4, 8):
                codes = torch.zeros(ops.code_layout(width, 16)[1], dtype=torch.uint8)
                for encode in (single.exponential_encode, by_reference()(single.exponential_encode)):
                    encode(values, norms, 16, codes, KEY, bits=width, headroom=3)
                    assert codes.tolist() == [0x33 if width == 4 else 3] * codes.numel()
                same("exponential_encode", values, norms, 16, codes, KEY, bits=width, headroom=3)
            for form, most in (("float16", 0x7BFF), ("bfloat16", 0x7F7F)):
                section = poison(ops.values_bound(16, 16, 0, kind.itemsize, form=form), torch.uint8)
                given = (positions, 16, values.to(kind), 0, 16)
                for encode in (values_encode, by_reference()(values_encode)):
                    used = encode(*given, section, form=form)
                    assert section[used - 32 : used].clone().view(torch.int16).tolist() == [most] * 16
                same("values_encode", *given, begins(), section, form=form)

    def test_signs_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        """Tensors of every kind in one launch: empty ones, rows within words, rows of several superblocks."""
        counts = (0, 1, 63, 64, 65, 0, 1023, 1024, 1025, *lengths, 0)
        for given in (counts, counts[:3], counts[4:5], (), (0, 0), (70_001, 3)):
            rows = [(max(count, 1), 7, 100, 1024, 65_600)[i % 5] for i, count in enumerate(given)]
            offered, places = Offered(given, rows, dtype), [7 * i for i in range(len(given))]
            for residuals, key in ((offered.residuals, KEY), (None, None)):
                rule: dict[str, Any] = {"key": key, "word_offsets": places}
                outputs = (offered.bits(), offered.steps())
                same("sign_offer_all", offered.grads, residuals, *outputs, rows, ranks=3, scale=0.7, **rule)
                same("sign_offer_all", offered.grads, residuals, offered.bits(), None, rows, key=key)
            sent, steps = offered.sent()
            for feedback in ("global", "own", "momentum"):
                rule = {"feedback": feedback, "scale": 0.3, "decay": 0.9, "key": KEY, "word_offsets": places}
                same("sign_decode_all", sent, steps, rows, offered.grads, offered.residuals, **rule)
            same("sign_decode_all", sent, steps, rows, offered.grads, None, feedback="none", scale=-1.5)
            none = {"feedback": "global", "scale": 0.3, "zeros": [words(bits.numel(), 3) for bits in sent]}
            same("sign_decode_all", sent, steps, rows, offered.grads, offered.residuals, **none)

    @pytest.mark.slow
    def test_more_tensors_than_a_table_holds(self, dtype: torch.dtype, same: Same) -> None:
        counts = [i % 5 * 13 for i in range(1203)]
        rows = [(max(count, 1), 7)[i % 2] for i, count in enumerate(counts)]
        offered = Offered(counts, rows, dtype)
        same(
            "sign_offer_all", offered.grads, offered.residuals, offered.bits(), offered.steps(), rows, ranks=3, key=KEY
        )
        sent, steps = offered.sent()
        rule = {"feedback": "own", "scale": 0.3, "decay": 0.9, "key": KEY, "word_offsets": counts}
        same("sign_decode_all", sent, steps, rows, offered.grads, offered.residuals, **rule)
        made = [offered.steps(kind) for kind in (torch.float64, torch.float64, torch.int64)]
        same("two_value_offer_all", offered.grads, offered.residuals, offered.bits(), *made, rows)
        same("dense_offer_all", offered.grads, offered.residuals, [poison(n, torch.float32) for n in counts])

    def test_two_value_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for given in ((0, 1, 63, 64, 65, 0, 1023, 1024, 1025, *lengths, 0), (70_001, 3), (1000,), (0, 0)):
            rows = [(max(count, 1), 7, 100, 1024, 65_600)[i % 5] for i, count in enumerate(given)]
            offered = Offered(given, rows, dtype)
            made = [offered.steps(kind) for kind in (torch.float64, torch.float64, torch.int64)]
            for residuals in (offered.residuals, None):
                same("two_value_offer_all", offered.grads, residuals, offered.bits(), *made, rows)
            sizes = [ops.word_count(n) for n in given], [-(-n // row) for n, row in zip(given, rows, strict=True)]
            places = [[3 + sum(part[:i]) for i in range(len(given))] for part in sizes]
            sent = [words(3 + sum(sizes[0]), rank) for rank in range(3)]
            size = 3 + sum(sizes[1])
            highs, lows = ([tame(size, torch.float32, first + rank) for rank in range(3)] for first in (1, 9))
            rule = {"first_words": places[0], "first_rows": places[1], "scale": 0.3}
            for low in (None, lows):
                same("two_value_decode_all", sent, highs, low, rows, 1, offered.grads, offered.residuals, **rule)

    def test_plain_numbers_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for given in ((0, 1, 63, 64, 65, 0, 1023, 1024, 1025, *lengths, 0), (70_001, 3), (1000,), (), (0, 0)):
            offered = Offered(given, [1] * len(given), dtype)
            for out in DTYPES:
                for residuals in (offered.residuals, None):
                    same("dense_offer_all", offered.grads, residuals, [poison(n, out) for n in given])
                left = [numbers(n, work(out), n) for n in given]
                results = [poison(n, out) for n in given]
                same("dense_decode_all", offered.grads, results, scale=0.3, residuals=left)
                same("dense_decode_all", offered.grads, results, scale=-2.0)

    def test_norms_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for given in ((*ODD, *lengths, 0), (70_001, 3), (1000,), (), (0, 0)):
            rows = [(max(count, 1), 7, 100, 1024, 65_600)[i % 5] for i, count in enumerate(given)]
            offered = Offered(given, rows, dtype)
            for power in (0, 1, 2, 4):
                kind = torch.float64 if power else work(dtype)
                same("norm_offer_all", offered.grads, offered.steps(kind), rows, power=power)
            largest, squares = offered.steps(work(dtype)), offered.steps(torch.float64)
            same("moments_offer_all", offered.grads, largest, squares, rows)

    def test_codes_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for given in ((*ODD, *lengths, 0), (70_001, 3), (1000,), (), (0, 0)):
            rows = [(max(count, 1), 100, 2048)[i % 3] for i, count in enumerate(given)]
            offered, places = Offered(given, rows, dtype), [7 * i for i in range(len(given))]
            norms, bounds = ([part.abs().to(work(dtype)) for part in offered.sent(seed)[1]] for seed in (0, 1))
            for bits, levels in ((4, 3), (8, 31), (16, 999)):
                codes, sent = offered.codes(bits), [words(len(part), 3).to(part.dtype) for part in offered.codes(bits)]
                encoded, decoded = (offered.grads, norms, rows, codes, KEY), (sent, norms, rows, offered.grads)
                same("uniform_encode_all", *encoded, bits=bits, levels=levels, offsets=places)
                same("uniform_encode_all", *encoded, bits=bits, levels=levels, bounds=bounds)
                same("uniform_decode_all", *decoded, bits=bits, scale=0.3)
                if bits < 16:
                    same("exponential_encode_all", *encoded, bits=bits, headroom=3, offsets=places)
                    same("exponential_decode_all", *decoded, bits=bits, headroom=3, scale=0.3)

    def test_records_together(self, dtype: torch.dtype, same: Same, lengths: tuple[int, ...]) -> None:
        for given in ((*ODD, *lengths, 0), (70_001, 3), (1000,), (), (0, 0)):
            offered, places = Offered(given, [1] * len(given), dtype), [13 * i for i in range(len(given))]
            for bits, block, norm in ((8, 512, 0), (3, 64, 2)):
                rule = {"bits": bits, "block": block}
                room = [poison(-(-n // block) * ops.qsgd_record_bytes(**rule), torch.uint8) for n in given]
                same("qsgd_encode_all", offered.grads, room, KEY, **rule, norm=norm, offsets=places)
                ops.qsgd_encode_all([tame(n, dtype, n) for n in given], room, KEY, **rule, norm=norm)
                same("qsgd_decode_all", room, offered.grads, **rule, scale=0.3)
                kept, left = ([part.clone() for part in room] for _ in range(2))
                same("loco_encode_all", offered.grads, kept, room, left, **rule, norm=norm, kept_bits=bits, beta=0.8)


#: Tensors of a bucket: empty ones, and around the sizes of words, warps and blocks.
ODD = (0, 1, 63, 64, 65, 0, 1023, 1024, 1025)


class Offered:
    """What tensors of a bucket are offered with."""

    def __init__(self, counts: Sequence[int], row_lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.counts, self.row_lengths = counts, row_lengths
        self.grads = [numbers(count, dtype, seed) for seed, count in enumerate(counts)]
        self.residuals = [numbers(count, work(dtype), seed + 1) for seed, count in enumerate(counts)]
        for grad, residual in zip(self.grads, self.residuals, strict=True):
            residual[::3] = -grad[::3].to(work(dtype))

    def bits(self) -> list[Tensor]:
        return [poison(ops.word_count(count), torch.int64) for count in self.counts]

    def steps(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [poison(rows, dtype) for rows in self._rows()]

    def codes(self, width: int) -> list[Tensor]:
        layouts = [ops.code_layout(width, count) for count in self.counts]
        return [poison(size, kind) for kind, size in layouts]

    def sent(self, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return bits and steps to decode."""
        return [bits(n, 2) for n in self.counts], [tame(rows, torch.float32, rows + seed) for rows in self._rows()]

    def _rows(self) -> list[int]:
        return [-(-n // row) for n, row in zip(self.counts, self.row_lengths, strict=True)]


def spiked(count: int, dtype: torch.dtype) -> Tensor:
    """Few numbers far from zero: long gaps."""
    x = torch.zeros(count, dtype=dtype)
    x[count // 3 :: 5000] = 1.0
    return x


class TestBits:
    def test_random(self, same: Same) -> None:
        for count in (0, 1, 2, 3, 100, 10_001):
            for word_offset in (0, 1, (1 << 32) + 1):
                for k, m in ((0, 1), (1, 1), (1, 2), (1, 3), (63, 64), (1, (1 << 62) - 1)):
                    same("bernoulli_words", poison(count, torch.int64), k, m, KEY, word_offset=word_offset)
                    same("merge_bits", words(count, 1), words(count, 2), m - k, k, KEY, word_offset=word_offset)

    def test_records_of_many_ranks(self, same: Same) -> None:
        """Codes are read by words where all parts begin at one, as in one of four calls; four parts at once, and 32."""
        count, block = 700, 192
        for bits in (3, 4, 8):
            rule: dict[str, Any] = {"bits": bits, "block": block, "norm": 2}
            more: dict[str, Any] = {"kept_bits": bits, "beta": 0.8}
            size = -(-count // block) * ops.qsgd_record_bytes(bits, block)
            parts = [poison(size, torch.uint8) for _ in range(65)]
            for rank, part in enumerate(parts):
                single.qsgd_encode(tame(count, torch.float32, rank), part, KEY.at(rank=rank), **rule)
            for ranks in (1, 5, 65):
                for _ in range(4):
                    same("qsgd_fold", parts[:ranks], poison(size, torch.uint8), KEY, **rule)
                for _ in range(4):
                    rooms = poison(size, torch.uint8), poison(size, torch.uint8)
                    same("loco_fold", parts[:ranks], parts[0], *rooms, **rule, **more)

    def test_majority(self, same: Same) -> None:
        for parts in (1, 2, 3, 8, 64, 65):
            for count in (0, 1, 64, 1000, 100_001):
                same("majority_fold", [bits(count, p) for p in range(parts)], bits(count, 99), count)

    def test_shaped(self, same: Same) -> None:
        """Counts of any bits: those that cannot be have to be alike too."""
        for ranks in (2, 3, 4, 7, 65):
            for count in (0, 1, 100, 1001):
                rows = [words(count, 50 + row) for row in range(ops.count_rows(ranks))]
                fresh = [poison(count, torch.int64) for _ in rows]
                same("shaped_merge", words(count, 1), words(count, 2), rows, fresh, ranks)
                same("shaped_fold", [words(count, part) for part in range(ranks)], words(count, 99), rows, fresh)

    def test_ternary(self, same: Same) -> None:
        for ranks in (2, 3, 4, 7, 65):
            for groups in (0, 1, 20, 201):
                count, packed = groups * ops.GROUP_WORDS, poison(groups * ops.PACKED_WORDS, torch.int64)
                rows = [words(count, 50 + row) for row in range(ops.count_rows(ternary_states(ranks)))]
                fresh = [poison(count, torch.int64) for _ in rows]
                same("ternary_fold", [words(count, part) for part in range(ranks)], packed, rows, fresh)
                every = torch.arange(8 * packed.numel()).to(torch.uint8).view(torch.int64)
                same("ternary_unpack", every, poison(count, torch.int64), poison(count, torch.int64))

    def test_hash(self, same: Same) -> None:
        for count in (0, 1, 7, 8, 16_383, 16_384, 100_003, 32 << 14, (33 << 14) + 5):
            same("hash64", words(ops.word_count(8 * count), 1).view(torch.uint8)[:count], 77)

    def test_rows_of_many_superblocks(self, same: Same) -> None:
        count = (1 << 21) + 65_536 + 5
        grad = tame(count, torch.float32, 1)
        for power, kind in ((0, torch.float32), (2, torch.float64)):
            same("norm_offer", grad, poison(1, kind), count, power=power)
        same("sign_offer", grad, None, poison(ops.word_count(count), torch.int64), poison(1, torch.float64), count)
        many, rows = tame(1 << 20, torch.float32, 1), 1 + (1 << 20) // 70_000
        same("norm_offer", many, poison(rows, torch.float64), 70_000, power=2)  # more rows than an emulated grid

    def test_sections_of_many_ranges(self, same: Same) -> None:
        """More than the threads of an emulated grid in kernels with a thread for each range."""
        count, b, kind = 250_001, 0, torch.float32
        positions, mean = torch.arange(0, count, 7, dtype=torch.int32), torch.full((1,), 0.3)
        kept, values = positions.numel(), tame(positions.numel(), kind, 1)
        assert -(-count // 2048) > 3 * 32
        section = poison(ops.golomb_bound(kept, count, b, 4), torch.uint8)
        same("binary_encode", positions, kept, mean, b, count, begins(), section)
        binary_encode(positions, kept, mean, b, count, section)
        same("binary_decode", [section, section], 1, b, tame(count, kind, 2), tame(count, kind, 3), 0.3)
        same("binary_clear", section, b, tame(count, kind, 2))
        section = poison(ops.values_bound(kept, count, b, 4), torch.uint8)
        same("values_encode", positions, kept, values, b, count, begins(), section)
        used = values_encode(positions, kept, values, b, count, section)
        same("values_decode", [section[:used]] * 2, 1, b, tame(count, kind, 2), tame(count, kind, 3), 0.3)
        count, rule = 800_001, {"bits": 2, "block": 64}
        assert -(-count // 8192) > 3 * 32
        section = poison(ops.elias_bound(count, **rule), torch.uint8)
        same("elias_encode", tame(count, kind, 1), begins(), section, KEY, **rule, norm=2)
        used, _ = elias_encode(tame(count, kind, 1), section, KEY, **rule, norm=2)
        same("elias_decode", [section[:used]], poison(count, kind), **rule, scale=0.3)

    @pytest.mark.parametrize("b", [0, 5])
    def test_longest_codes(self, same: Same, b: int) -> None:
        """Codes longer than what a warp reads in one go, at every place in a byte."""
        length, kind = 1 << b + 11, torch.float32
        for first in range(9):
            positions = torch.tensor([*range(first), length - 1, 2 * length - 1 - first], dtype=torch.int32)
            kept, count = positions.numel(), 2 * length
            section = poison(ops.golomb_bound(kept, count, b, 4), torch.uint8)
            same("binary_encode", positions, kept, torch.ones(1), b, count, begins(), section)
            binary_encode(positions, kept, torch.ones(1), b, count, section)
            same("binary_clear", section, b, tame(count, kind, 2))
            grad = torch.zeros(count)
            same("binary_decode", [section], 0, b, grad, None, 1.0)
            single.binary_decode([section], 0, b, grad, None, 1.0)
            assert grad.nonzero().flatten().tolist() == positions.tolist()

    @pytest.mark.parametrize("own", [0, 3, 66, 69])
    def test_sections_of_many_ranks(self, same: Same, own: int) -> None:
        """More than are read together, with and without the own one among the first, one without a head."""
        count, b, kind, ranks = 5000, 1, torch.float32, 70
        positions = torch.arange(0, count, 3, dtype=torch.int32)
        kept, values = positions.numel(), tame(positions.numel(), kind, 1)
        section = poison(ops.values_bound(kept, count, b, 4), torch.uint8)
        used = values_encode(positions, kept, values, b, count, section)
        sections = [section[:used].clone() for _ in range(ranks)]
        sections[3] = sections[3][:2]
        same("values_decode", sections, own, b, tame(count, kind, 2), tame(count, kind, 3), 0.3)

    def test_triad(self, same: Same) -> None:
        for count in (0, 1, 255, 1025):
            inputs = [numbers(count, torch.float32, seed) for seed in (1, 2)]
            same("triad", poison(count, torch.float32), *inputs, 0.3)


class TestMalformed:
    """What other ranks send is not trusted: the same number of ranges is found wrong, and nothing outside is read."""

    def test_elias(self, same: Same) -> None:
        count, rule = 20_000, {"bits": 4, "block": 256}
        section = poison(ops.elias_bound(count, **rule), torch.uint8)
        used, _ = elias_encode(tame(count, torch.float32, 1), section, KEY, **rule, norm=2)
        for broken in breakages(section[:used]):
            assert_counts_agree(same, "elias_decode", [broken], count, **rule, scale=1.0)

    def test_binary(self, same: Same) -> None:
        count, b = 20_000, 1
        positions = torch.arange(0, count, 3, dtype=torch.int32)
        section = poison(ops.golomb_bound(positions.numel(), count, b, 4), torch.uint8)
        used = binary_encode(positions, positions.numel(), torch.ones(1), b, count, section)
        for broken in breakages(section[:used]):
            assert_counts_agree(same, "binary_decode", [broken], 0, b, count, None, 1.0)

    @pytest.mark.parametrize("form", FORMS)
    def test_values(self, same: Same, form: str) -> None:
        count, b = 20_000, 1
        positions = torch.arange(0, count, 3, dtype=torch.int32)
        values, head = tame(positions.numel(), torch.float32, 1), head_of(form, torch.float32)
        section = poison(ops.values_bound(positions.numel(), count, b, 4, form=form), torch.uint8)
        used = values_encode(positions, positions.numel(), values, b, count, section, form=form, head=head)
        for broken in breakages(section[:used]):
            assert_counts_agree(same, "values_decode", [broken], 0, b, count, None, 1.0, form=form)

    def test_positions_that_do_not_ascend(self, target: Target) -> None:
        given = {"head": torch.ones(1, device=target.device), "form": "signs"}
        out = torch.zeros(1000, dtype=torch.uint8, device=target.device)
        for positions in ([1, 1], [3, 2], [-1, 4], [5, 100]):
            at = torch.tensor(positions, dtype=torch.int32, device=target.device)
            values = torch.ones(2, device=target.device)
            with target.chosen():
                if target.device == "cpu":
                    with pytest.raises(ValueError, match="positions must ascend"):
                        values_encode(at, 2, values, 0, 100, out, **given)
                else:  # where nothing waits, the place says so
                    assert values_encode(at, 2, values, 0, 100, out, **given) == -1

    def test_a_section_behind_one_that_was_not_written(self, target: Target) -> None:
        at, mean = torch.tensor([1, 5], dtype=torch.int32, device=target.device), torch.ones(1, device=target.device)
        out, place = torch.full((1000,), 77, dtype=torch.uint8, device=target.device), begins(-1, target.device)
        refused = pytest.raises(ValueError, match=r"ends\[0\] must say") if target.device == "cpu" else nullcontext()
        with target.chosen(), refused:
            single.values_encode(at, 2, torch.ones(2, device=target.device), 0, 100, place, out)
        with target.chosen(), refused:
            single.binary_encode(at, 2, mean, 0, 100, place, out)
        with target.chosen():
            ops.elias_encode(torch.ones(100, device=target.device), place, out, KEY, bits=4, block=64, norm=0)
        assert place.tolist() == [-1, -1] and bool((out == 77).all())


def breakages(section: Tensor) -> Iterator[Tensor]:
    """Sections with a flipped bit, cut off, or with lengths that lead outside."""
    size = section.numel()
    for bit in range(0, 8 * size, max(1, 8 * size // 60)):
        flipped = section.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        yield flipped
    yield from (section[:0], section[:3], section[: size // 2], section[: size - 1])
    far = section.clone()
    far[:8] = 255
    yield far


def assert_counts_agree(same: Same, name: str, *arguments: Any, **options: Any) -> None:
    """Compare what a decoder returns; its outputs hold anything. The count of elements stands for the gradient."""
    target: Target = same.__self__  # type: ignore[attr-defined]
    counts = []
    for device in ("cpu", target.device):
        moved = [[part.to(device) for part in value] if isinstance(value, list) else value for value in arguments]
        grad = [torch.zeros(value, device=device) if value == 20_000 else value for value in moved]
        if len(counts) == 0:
            counts.append(int(single.named(name)(*grad, **options)))
            continue
        with target.chosen():
            counts.append(int(single.named(name)(*grad, **options)))
    assert counts[0] == counts[1], name


# ---- all tensors of a bucket at once ------------------------------------------------------------

#: More than the arguments of two launches have room for, whatever the kernel.
MANY = 1201


class TestTogether:
    def test_more_tensors_than_a_launch_has_room_for(self, same: Same) -> None:
        counts = [5 * i % 71 for i in range(MANY)]
        counts[7], counts[-1] = 3000, 1025
        rows = [(max(count, 1), 7, 64)[i % 3] for i, count in enumerate(counts)]
        offered = Offered(counts, rows, torch.float32)
        rule: dict[str, Any] = {"key": KEY, "word_offsets": [3 * i for i in range(MANY)]}
        outputs = (offered.bits(), offered.steps())
        found = same("sign_offer_all", offered.grads, offered.residuals, *outputs, rows, ranks=2, **rule)
        assert len(found) == MANY and any(found)
        rule["feedback"] = "own"
        sent, steps = offered.sent()
        same("sign_decode_all", sent, steps, rows, offered.grads, offered.residuals, **rule)
        same("dense_offer_all", offered.grads, offered.residuals, [poison(count, torch.float16) for count in counts])
        same("dense_decode_all", offered.grads, [poison(count, torch.float32) for count in counts], scale=0.5)

    @pytest.mark.slow
    def test_more_quantised_tensors_than_a_launch_has_room_for(self, same: Same) -> None:
        counts = [5 * i % 71 for i in range(MANY)]
        counts[7], counts[-1] = 70_001, 1025
        rows, places = [(max(count, 1), 64)[i % 2] for i, count in enumerate(counts)], [3 * i for i in range(MANY)]
        offered = Offered(counts, rows, torch.float32)
        found = same("norm_offer_all", offered.grads, offered.steps(), rows)
        assert len(found) == MANY and any(found)
        same("moments_offer_all", offered.grads, offered.steps(), offered.steps(torch.float64), rows)
        norms = [part.abs() for part in offered.sent()[1]]
        given = (offered.grads, norms, rows, offered.codes(4), KEY)
        same("uniform_encode_all", *given, bits=4, levels=3, offsets=places, bounds=norms)
        same("exponential_encode_all", *given, bits=4, headroom=3, offsets=places)
        sent = [words(len(part), 3).to(part.dtype) for part in offered.codes(8)]
        same("uniform_decode_all", sent, norms, rows, offered.grads, bits=8, scale=0.3)
        same("exponential_decode_all", sent, norms, rows, offered.grads, bits=8, headroom=3, scale=0.3)
        rule = {"bits": 5, "block": 64}
        records = [poison(-(-n // 64) * ops.qsgd_record_bytes(**rule), torch.uint8) for n in counts]
        same("qsgd_encode_all", offered.grads, records, KEY, **rule, norm=2, offsets=places)
        ops.qsgd_encode_all(offered.grads, records, KEY, **rule, norm=2)
        same("qsgd_decode_all", records, offered.grads, **rule, scale=0.3)

    def test_quantised_together_is_one_by_one(self, target: Target) -> None:
        """On the CPU too, as both are compared with it."""
        counts = [0, 1, 63, 64, 65, 1023, 1024, 1025, 70_001, 5]
        rows, places = [max(n, 1) if i % 2 else 100 for i, n in enumerate(counts)], [9 * i for i in range(len(counts))]
        offered = Offered(counts, rows, torch.float32)
        norms, room = [part.abs() for part in offered.sent()[1]], {"bits": 8, "block": 64}
        records = [poison(-(-n // 64) * ops.qsgd_record_bytes(**room), torch.uint8) for n in counts]
        results = [poison(n, torch.float32) for n in counts]
        several: list[tuple[str, list[Any], dict[str, Any]]] = [
            ("norm_offer", [offered.grads, offered.steps(), rows], {}),
            ("moments_offer", [offered.grads, offered.steps(), offered.steps(torch.float64), rows], {}),
            ("uniform_encode", [offered.grads, norms, rows, offered.codes(4), KEY], {"bits": 4, "levels": 3}),
            ("exponential_encode", [offered.grads, norms, rows, offered.codes(4), KEY], {"bits": 4, "headroom": 3}),
            ("qsgd_encode", [offered.grads, records, KEY], {**room, "norm": 0}),
            ("uniform_decode", [offered.codes(8), norms, rows, results], {"bits": 8, "scale": 0.3}),
            (
                "exponential_decode",
                [offered.codes(8), norms, rows, results],
                {"bits": 8, "headroom": 3, "scale": 0.3},
            ),
            ("qsgd_decode", [records, results], {**room, "scale": 0.3}),
        ]
        for name, given, rule in several:
            alone, together = ([there(value, target.device) for value in given] for _ in range(2))
            drawn = "encode" in name
            with target.chosen():
                found = getattr(ops, f"{name}_all")(*together, **rule, **({"offsets": places} if drawn else {}))
                each = [
                    single.named(name)(*one(alone, i), **rule, **({"offset": places[i]} if drawn else {}))
                    for i in range(len(counts))
                ]
            assert found is None or numbers_of(found) == list(map(int, each)), name
            assert not any(differences(a, b) for a, b in zip(parts(alone), parts(together), strict=True)), name
            assert any(differences(a, b) for a, b in zip(parts(given), parts(together), strict=True)), name

    def test_folds_over_one_of_their_parts(self, target: Target) -> None:
        """What is written there was read before, by all threads."""
        count, ranks = 4000, range(3)
        grads = [tame(count, torch.float32, rank) for rank in ranks]
        folds: list[tuple[str, list[Tensor], list[Any], dict[str, Any]]] = []
        for bits, block in ((8, 512), (8, 2048), (4, 2048), (3, 2048), (5, 64)):
            rule: dict[str, Any] = {"bits": bits, "block": block, "norm": 2}
            sent = [poison(-(-count // block) * ops.qsgd_record_bytes(bits, block), torch.uint8) for _ in ranks]
            for grad, part in zip(grads, sent, strict=True):
                single.qsgd_encode(grad, part, KEY, **rule)
            folds.append(("qsgd_fold", sent, [KEY], rule))
            folds.append(
                ("loco_fold", sent, [sent[0].clone().to(target.device)], rule | {"kept_bits": bits, "beta": 0.8})
            )
        codes = [words(count, rank).to(torch.uint8) for rank in ranks]
        folds.append(("exponential_fold", codes, [KEY], {"headroom": 1, "offset": 3}))
        for block in (64, 2048):
            sent = [poison(-(-count // block) * ops.record_bytes(block), torch.uint8) for _ in ranks]
            for grad, part in zip(grads, sent, strict=True):
                ops.record_offer(grad, None, part, block, rule="l1")
            folds.append(("record_fold", sent, [block], {"rule": "l1"}))
        for name, given, rest, options in folds:
            apart, over = (there(given, target.device) for _ in range(2))
            out = poison(given[0].numel(), torch.uint8).to(target.device)
            of_fold = {"record_fold": grads[:2], "loco_fold": given[2:]}.get(name, [])
            kept = there(of_fold, target.device)
            with target.chosen():
                single.named(name)(apart, *kept, out, *rest, **options)
                single.named(name)(over, *kept, over[1], *rest, **options)
            assert differences(out.cpu(), over[1].cpu()) == 0, (name, rest, options)
            assert differences(apart[1].cpu(), over[1].cpu()) > 0, (name, rest, options)

    def test_together_is_one_by_one(self, target: Target) -> None:
        counts = [0, 1, 63, 64, 65, 1023, 1024, 1025, 70_001, 5]
        rows = [max(count, 1) if i % 2 else 100 for i, count in enumerate(counts)]
        offered = Offered(counts, rows, torch.float32)

        def there(parts: list[Tensor]) -> list[Tensor]:
            return [part.to(target.device, copy=True) for part in parts]

        grads, residuals, alone, together = map(
            there, (offered.grads, offered.residuals, offered.bits(), offered.bits())
        )
        sums, steps = there(offered.steps(torch.float64)), there(offered.steps())
        with target.chosen():
            found = ops.sign_offer_all(grads, residuals, together, steps, rows, ranks=3, key=KEY)
            each = [single.sign_offer(*one, key=KEY) for one in zip(grads, residuals, alone, sums, rows, strict=True)]
        assert numbers_of(found) == list(map(int, each)) and any(numbers_of(found))
        for i, (count, row) in enumerate(zip(counts, rows, strict=True)):
            sizes = torch.tensor([min(row, count - at) for at in range(0, count, row)], dtype=torch.float64)
            expected = (sums[i].cpu() / (3 * sizes)).float()
            assert torch.equal(alone[i], together[i]) and differences(expected, steps[i].cpu()) == 0

    def test_the_bits_of_tensors_that_lie_one_behind_the_other(self, target: Target) -> None:
        """They are cleared together; what lies between and around them stays as it is."""
        counts, rows = [100, 30, 65, 640], [7, 30, 64, 33]
        offered = Offered(counts, rows, torch.float32)
        memory = poison(40, torch.int64).to(target.device)
        expected = memory.cpu().clone()
        starts = (3, 5, 10, 12)
        with target.chosen():
            grads = [grad.to(target.device) for grad in offered.grads]
            places = [memory[at : at + ops.word_count(n)] for at, n in zip(starts, counts, strict=True)]
            ops.sign_offer_all(grads, None, places, None, rows)
        for at, n, grad in zip(starts, counts, offered.grads, strict=True):
            ops.sign_pack(grad, expected[at : at + ops.word_count(n)])
        assert torch.equal(memory.cpu(), expected)

    @pytest.mark.parametrize("rule", [("uniform", {"levels": 3}), ("exponential", {"headroom": 3})])
    def test_halves_of_tensors_in_one_word(self, target: Target, rule: tuple[str, dict[str, int]]) -> None:
        """The last of an odd number of codes has its byte for itself; those of neighbours lie in the same word."""
        counts, (name, options) = [1, 3, 5, 7, 9, 101, 4, 1001, 1], rule
        offered = Offered(counts, [max(counts)] * len(counts), torch.float32)
        sizes = [-(-count // 2) for count in counts]
        starts = [3 + sum(sizes[:i]) for i in range(len(counts))]
        memory = poison(sum(sizes) + 7, torch.uint8).to(target.device)
        expected = memory.cpu().clone()
        norms, rows = [torch.ones(1)] * len(counts), [max(counts) + 1] * len(counts)
        with target.chosen():
            grads, near = ([part.to(target.device) for part in parts] for parts in (offered.grads, norms))
            codes = [memory[at : at + size] for at, size in zip(starts, sizes, strict=True)]
            getattr(ops, f"{name}_encode_all")(grads, near, rows, codes, KEY, bits=4, **options)
        for at, size, grad in zip(starts, sizes, offered.grads, strict=True):
            single.named(f"{name}_encode")(grad, norms[0], rows[0], expected[at : at + size], KEY, bits=4, **options)
        assert torch.equal(memory.cpu(), expected)


def numbers_of(counts: Any) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else list(counts)


def sparse_step(grads: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """Choose a hundredth of tensors, write it into sections and read these; return all that was written.

    Sections are read where they begin if all that is chosen is there, as it is.
    """
    where, sizes = grads[0].device, [grad.numel() for grad in grads]
    ks = [-(-size // 100) for size in sizes]
    parameters = [ops.golomb_parameter(k, size) for k, size in zip(ks, sizes, strict=True)]
    positions = [torch.zeros(k, dtype=torch.int32, device=where) for k in ks]
    values = [torch.zeros(k, device=where) for k in ks]
    numbers = [torch.zeros(3, dtype=torch.int64, device=where) for _ in ks]
    bounds = [ops.values_bound(*shape, 4) for shape in zip(ks, sizes, parameters, strict=True)]
    out = torch.zeros(sum(bounds), dtype=torch.uint8, device=where)
    ends = torch.zeros(len(ks) + 1, dtype=torch.int64, device=where)
    ops.top_select_all(grads, residuals, ks, positions, values, numbers)
    ops.values_encode_all(positions, ks, values, parameters, sizes, ends, out)
    first = out.split([bounds[0], sum(bounds[1:])])[0]
    wrong = ops.values_decode_all([[first]], 0, parameters[:1], grads[:1], residuals[:1], 1.0)
    return [*positions, *values, *numbers, ends, out, *grads, *residuals, as_tensor(wrong)]


def there(value: Any, device: str) -> Any:
    """Return a copy of an argument, on a device."""
    if not isinstance(value, list):
        return value
    return [part.to(device, copy=True) if isinstance(part, Tensor) else part for part in value]


def one(arguments: list[Any], i: int) -> list[Any]:
    """Return what of the arguments for several tensors is for one of them."""
    return [value[i] if isinstance(value, list) else value for value in arguments]


def parts(arguments: list[Any]) -> list[Tensor]:
    """Return the tensors among arguments, on the CPU."""
    return [part.cpu() for value in arguments if isinstance(value, list) for part in value if isinstance(part, Tensor)]


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestStreams:
    """Kernels run on torch's current stream, and those that do not wait in a graph as well."""

    def test_a_step_in_a_graph(self) -> None:
        count = 100_003
        grad, residual = tame(count, torch.float32, 1), tame(count, torch.float32, 2)
        expected, device = sign_step([grad.clone(), residual.clone()]), [grad.cuda(), residual.cuda()]
        sign_step([part.clone() for part in device])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sign_step(device)
        for _ in range(2):
            device[0].copy_(grad)
            device[1].copy_(residual)
            graph.replay()
            assert [bool((a == b.cpu()).all()) for a, b in zip(expected, captured, strict=True)] == [True] * 3

    def test_a_bucket_in_a_graph(self) -> None:
        """Rows of one superblock and of several; the table is among what the graph holds."""
        counts = (100_003, 0, 65, 7, 70_001)
        grads, residuals = ([tame(n, torch.float32, seed + n) for n in counts] for seed in (1, 2))
        expected = bucket_step([g.clone() for g in grads], [r.clone() for r in residuals])
        there = [part.cuda() for part in grads], [part.cuda() for part in residuals]
        bucket_step(*([part.clone() for part in parts] for parts in there))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = bucket_step(*there)
        for _ in range(2):
            for part, value in zip((*there[0], *there[1]), (*grads, *residuals), strict=True):
                part.copy_(value)
            graph.replay()
            assert not any(differences(a, b.cpu()) for a, b in zip(expected, captured, strict=True))

    def test_scratch_memory_and_a_scan_in_a_graph(self) -> None:
        """Norms need memory for sums of superblocks, sections prefix sums over their ranges."""
        count, b = 100_003, 0
        grad, residual = tame(count, torch.float32, 1), tame(count, torch.float32, 2)
        section = section_of(torch.arange(0, count, 3, dtype=torch.int32), b, count)
        expected = decode_step([grad.clone(), residual.clone()], section, b)
        device, sent = [grad.cuda(), residual.cuda()], section.cuda()
        decode_step([part.clone() for part in device], sent, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode_step(device, sent, b)
        for _ in range(2):
            device[0].copy_(grad)
            device[1].copy_(residual)
            graph.replay()
            assert [bool((a == b.cpu()).all()) for a, b in zip(expected, captured, strict=True)] == [True] * 4

    def test_counts_begin_at_zero_in_every_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many are cleared at once, here eight: no call goes on from what another one has counted."""
        monkeypatch.setattr(dispatch, "_CLEARED", 8)
        monkeypatch.setattr(dispatch, "_left", {})
        bad = [torch.tensor(some, device="cuda") for some in ([math.nan, 1.0], [1.0, 2.0], [math.inf, math.nan])]
        torch.cuda.synchronize()
        for streams in ([torch.cuda.current_stream()], [torch.cuda.Stream(), torch.cuda.Stream()]):
            found = []
            for number in range(12):
                with torch.cuda.stream(streams[number % len(streams)]):
                    found.append(ops.dense_offer_all(bad, None, [torch.empty_like(part) for part in bad]))
                    found.append(ops.dense_offer_all(bad * 4, None, [torch.empty_like(part) for part in bad * 4])[-3:])
            torch.cuda.synchronize()
            assert [counts.tolist() for counts in found] == [[1, 0, 2]] * 24

    def test_counts_of_a_graph_begin_at_zero_in_every_replay(self) -> None:
        bad = [torch.tensor(some, device="cuda") for some in ([math.nan, 1.0], [1.0, 2.0], [math.inf, math.nan])]
        into = [torch.empty_like(part) for part in bad]
        ops.dense_offer_all(bad, None, into)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counts = ops.dense_offer_all(bad, None, into)
        for _ in range(3):
            graph.replay()
            assert as_tensor(counts).tolist() == [1, 0, 2]

    def test_selections_and_sections_in_a_graph(self) -> None:
        """Nothing that they count, find or write is left over from one replay to the next."""
        sizes = (100_003, 7, 2_000)
        grads, residuals = ([tame(n, torch.float32, seed + n) for n in sizes] for seed in (1, 2))
        expected = sparse_step([g.clone() for g in grads], [r.clone() for r in residuals])
        there = [part.cuda() for part in grads], [part.cuda() for part in residuals]
        sparse_step(*([part.clone() for part in parts] for parts in there))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sparse_step(*there)
        for _ in range(2):
            for part, value in zip((*there[0], *there[1]), (*grads, *residuals), strict=True):
                part.copy_(value)
            graph.replay()
            assert not any(differences(a, b.cpu()) for a, b in zip(expected, captured, strict=True))

    def test_parts_of_many_ranks_are_refused_in_a_graph(self) -> None:
        parts = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(65)]
        ops.majority_fold(parts, parts[0], 128)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="more than 64 ranks"), torch.cuda.graph(graph):
            ops.majority_fold(parts, parts[0], 128)

    def test_another_stream(self) -> None:
        grad, residual = tame(100_003, torch.float32, 1), tame(100_003, torch.float32, 2)
        expected = sign_step([grad.clone(), residual.clone()])
        with torch.cuda.stream(torch.cuda.Stream()):
            found = sign_step([grad.cuda(), residual.cuda()])
            torch.cuda.current_stream().synchronize()
        assert [bool((a == b.cpu()).all()) for a, b in zip(expected, found, strict=True)] == [True] * 3


def sign_step(pair: list[Tensor]) -> list[Tensor]:
    """What a rank does with a tensor in a step of a method with signs; return everything that is written."""
    grad, residual = pair
    count = grad.numel()
    bits_of = torch.zeros(ops.word_count(count), dtype=torch.int64, device=grad.device)
    steps = torch.full((1,), 0.01, device=grad.device)
    single.sign_offer(grad, residual, bits_of, None, count, key=KEY)
    ops.majority_fold([bits_of, bits_of], bits_of, count)
    single.sign_decode(bits_of, steps, count, grad, residual, feedback="global")
    return [bits_of, grad, residual]


def bucket_step(grads: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """The same with all tensors of a bucket at once, with measured steps."""
    where, rows = grads[0].device, [max(1, grad.numel()) for grad in grads]
    sent = [torch.zeros(ops.word_count(grad.numel()), dtype=torch.int64, device=where) for grad in grads]
    steps = [torch.zeros(min(grad.numel(), 1), device=where) for grad in grads]
    counts = ops.sign_offer_all(grads, residuals, sent, steps, rows, key=KEY)
    ops.sign_decode_all(sent, steps, rows, grads, residuals, feedback="own", key=KEY)
    return [*sent, *steps, *grads, *residuals, as_tensor(counts)]


def section_of(positions: Tensor, b: int, count: int) -> Tensor:
    section = torch.zeros(ops.values_bound(positions.numel(), count, b, 4), dtype=torch.uint8)
    values = tame(positions.numel(), torch.float32, 3)
    return section[: values_encode(positions, positions.numel(), values, b, count, section)]


def decode_step(pair: list[Tensor], section: Tensor, b: int) -> list[Tensor]:
    """Take norms, then decode a section; return everything that is written, and the number of malformed ranges."""
    grad, residual = pair
    norms = torch.zeros(2, dtype=torch.float64, device=grad.device)
    single.norm_offer(grad, norms, 65_600, power=2)
    wrong = single.values_decode([section, section], 1, b, grad, residual, 0.5)
    return [norms, grad, residual, torch.as_tensor(wrong).reshape(1)]


# ---- nothing is left out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "where", "value"),
    [("outside", -1, 1), ("outside", 5, 1), ("elements that differ.*0, 1", 2, 1), ("returned", 2, 0)],
)
def test_the_comparison_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, what: str, where: int, value: int) -> None:
    """One byte before or behind a tensor, or in it, or another number that is returned."""
    runs: list[int] = []

    def run(first: Tensor, second: list[Tensor]) -> int:
        assert first.tolist() == [7] * 3 and second[0].tolist() == [8] * 5
        runs.append(1)
        if len(runs) == 2:
            start = second[0].storage_offset() + where
            torch.as_strided(second[0], (1,), (1,), start).add_(value)
            return value
        return 1

    monkeypatch.setattr(single, "named", lambda name: run)
    given = torch.full((3,), 7, dtype=torch.uint8), [torch.full((5,), 8, dtype=torch.uint8)]
    with pytest.raises(AssertionError, match=what):
        Target("cuda", "cpu").same("run", *given)


#: Entry points that are for host memory, or say something about the processor.
HOST_ONLY = {"crc32c", "crc32c_copy", "instruction_set"}


def entry_points() -> set[str]:
    """Return the names in the one list of kernels."""
    text = re.sub(r"//.*", "", (ROOT / "csrc" / "kernels.h").read_text())
    return set(re.findall(r"^[\w:]+ \**(\w+)\([^;]*\);", text.replace("const char* ", "char "), re.MULTILINE))


def test_every_kernel_has_a_cuda_text_and_is_bound_on_both_sides() -> None:
    names = entry_points()
    assert len(names) > 40 and names > HOST_ONLY
    shared = (ROOT / "csrc" / "bind.h").read_text()
    texts = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
    listed = re.findall(r"\buse\((\w+)\)", (ROOT / "csrc" / "kernels.h").read_text())
    bound = {*re.findall(r'module\.def\("(\w+)"', shared), *listed}
    defined = set(re.findall(r"^\w+ (\w+)\(const|^\w+ (\w+)\(\w+\*? \w+", texts, re.MULTILINE))
    defined = {name for pair in defined for name in pair if name}
    assert names - HOST_ONLY - bound == set(), (
        "kernels that the list in kernels.h lacks, so that neither module binds them"
    )
    assert bound - names == set(), "bindings of what kernels.h does not list"
    assert names - HOST_ONLY - defined == set(), "kernels without a CUDA text"


@no_compiler
def test_every_kernel_is_in_the_emulated_module() -> None:
    with Target("emulated", "cpu").chosen():
        assert legality.backend(torch.zeros(1))[0] is emulator.load() is not loader.load("_cpu")
    assert entry_points() - HOST_ONLY - set(dir(emulator.load())) == set()


MEETINGS = """
#include <cstdlib>
#include <cuda_runtime.h>

__global__ void meet(int bad) {
  if (bad == 1 && threadIdx.x == 7) {
    __shfl_sync(~0u, 1, 0);
  } else {
    __shfl_sync(~0u, 2, 0);
  }
  if (bad == 2 && threadIdx.x == 7) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
int main() {
  cudaLaunchConfig_t grid{};
  grid.blockDim = dim3(64);
  return cudaLaunchKernelEx(&grid, meet, atoi(getenv("BAD")));
}
"""


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulator.program(MEETINGS, tmp_path_factory.mktemp("meetings"))


@no_compiler
@pytest.mark.parametrize(("bad", "what"), [(0, ""), (1, "lanes of a warp meet"), (2, "threads of a block meet")])
def test_the_emulation_finds_threads_that_meet_in_different_lines(bad: int, what: str, meetings: Path) -> None:
    done = subprocess.run([meetings], env={"BAD": str(bad)}, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGABRT if bad else 0), done.stderr
    assert what in done.stderr and ("different places" in done.stderr) == bool(bad)


@pytest.mark.skipif(not list(FOLDER.glob("_cuda*.so")), reason="the CUDA extension is not built")
def test_every_kernel_is_in_the_built_module() -> None:
    assert entry_points() - HOST_ONLY - set(dir(loader.load("_cuda"))) == set()


def test_every_kernel_is_compared_here() -> None:
    tree = ast.parse(Path(__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    first = [call.args[0] for call in calls if call.func.id == "same" and call.args]  # type: ignore[attr-defined]
    compared = {str(name.value).removesuffix("_all") for name in first if isinstance(name, ast.Constant)}
    compared |= {name.id for name in first if isinstance(name, ast.Name)}  # a function of tests.support
    assert entry_points() - HOST_ONLY - compared == set(), "kernels that no test here compares with the CPU"


@pytest.mark.skipif(not list(FOLDER.glob("_cuda*.so")), reason="the CUDA extension is not built")
def test_the_extension_loads_without_a_gpu() -> None:
    program = "from horovod_compress.ops import loader; print(loader.load('_cuda').device_count())"
    environment = {"PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == ["0"]
