"""CUDA gives the bits of the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import kernels
from horovod_compress.kernels import loader

from .support import DTYPES, KEY, bits, differences, numbers, poison, tame, words, work

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 1000, 1023, 1024, 1025, 65_535, 65_537, 300_001)
FOLDER = Path(loader.__file__).resolve().parents[1]

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def same(name: str, *arguments: Any, **options: Any) -> None:
    """Run a kernel on the CPU and on CUDA with equal arguments."""

    def to(value: Any, device: str) -> Any:
        if isinstance(value, list):
            return [to(part, device) for part in value]
        # One element further on, so that nothing is aligned by accident.
        if not isinstance(value, Tensor):
            return value
        memory = torch.empty(value.numel() + 1, dtype=value.dtype, device=device)
        return memory[1:].copy_(value)

    def integers(result: Any) -> Any:
        if isinstance(result, tuple):
            return result
        return None if result is None else int(result)

    results, finals = [], []
    for device in ("cpu", "cuda"):
        placed = to(list(arguments), device)
        placed_options = {key: to(value, device) for key, value in options.items()}
        result = getattr(kernels, name)(*placed, **placed_options)
        results.append(integers(result))
        finals.append([value.cpu() for value in [*placed, *placed_options.values()] if isinstance(value, Tensor)])
    assert results[0] == results[1], name
    assert [differences(a, b) for a, b in zip(*finals)] == [0] * len(finals[0]), name


@pytest.mark.parametrize("dtype", DTYPES)
class TestNumbers:
    pytestmark = gpu

    def test_sign(self, dtype: torch.dtype) -> None:
        for count in LENGTHS:
            for row_length in {max(count, 1), 7, 100, 1024, 65_600}:
                rows, size = -(-count // row_length), kernels.word_count(count)
                grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
                residual[::3] = -grad[::3].to(work(dtype))
                outputs = (poison(size, torch.int64), poison(rows, torch.float64), row_length)
                same("sign_offer", grad, residual, *outputs, key=KEY, word_offset=5)
                same("sign_pack", grad, poison(size, torch.int64))
                steps = tame(rows, torch.float32, 1)
                for feedback in ("global", "own", "momentum"):
                    rule = {"feedback": feedback, "scale": 0.3, "key": KEY, "word_offset": 5}
                    same("sign_decode", bits(count, 2), steps, row_length, grad, residual, **rule)
                same("sign_unpack", bits(count, 2), steps, row_length, poison(count, dtype), scale=-1.5)

    def test_points(self, dtype: torch.dtype) -> None:
        for count in LENGTHS:
            for row_length in {max(count, 1), 7, 100, 1024, 65_600}:
                rows, size = -(-count // row_length), kernels.word_count(count)
                grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
                made = [poison(rows, kind) for kind in (torch.float64, torch.float64, torch.int64)]
                same("points_offer", grad, residual, poison(size, torch.int64), *made, row_length)
                sent = [bits(count, rank) for rank in range(3)]
                highs, lows = ([tame(rows, torch.float32, first + rank) for rank in range(3)] for first in (1, 9))
                for low in (None, lows):
                    same("points_decode", sent, highs, low, row_length, 1, grad, residual, scale=0.3)

    def test_records(self, dtype: torch.dtype) -> None:
        kind = work(dtype)
        for count in LENGTHS:
            for block in (64, 2048):
                blocks = -(-count // block)
                room = [poison(blocks * kernels.record_bytes(block), torch.uint8) for _ in range(4)]
                grad, residual = numbers(count, dtype, count), numbers(count, kind, count + 1)
                for rule in ("l1", "l2"):
                    same("record_offer", grad, residual, room[0], block, rule=rule)
                    for rank in range(3):
                        kernels.record_offer(tame(count, dtype, rank), None, room[rank], block, rule=rule)
                    given = (room[:3], tame(count, kind, 9), poison(count, kind), room[3], block)
                    same("record_fold", *given, rule=rule)
                scales = tame(blocks, torch.float32, 3)
                same("record_decode", room[0], scales, grad, residual, block, scale=0.3)

    def test_lowrank(self, dtype: torch.dtype) -> None:
        kind = work(dtype)
        for rows, columns in ((2, 3), (31, 33), (1, 1), (257, 100), (1025, 40), (40, 2049)):
            count = rows * columns
            for rank in (1, 4, 9):
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

    def test_dense(self, dtype: torch.dtype) -> None:
        for count in LENGTHS:
            grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
            for out in DTYPES:
                same("dense_offer", grad, residual, poison(count, out))
                left = numbers(count, work(out), 3)
                same("dense_decode", grad, poison(count, out), scale=0.3, residual=left)
            same("dense_add", grad, numbers(count, dtype, 4))

    def test_dither(self, dtype: torch.dtype) -> None:
        for count in LENGTHS:
            for row_length in {max(count, 1), 100, 2048}:
                grad, rows = numbers(count, dtype, count), -(-count // row_length)
                same("norm_offer", grad, poison(rows, work(dtype)), row_length)
                for power in (1, 2, 4):
                    same("norm_offer", grad, poison(rows, torch.float64), row_length, power=power)
                norms = tame(rows, work(dtype), 1).abs()
                for bits, rule in ((4, {"levels": 3}), (8, {"levels": 31}), (16, {"levels": 999})):
                    kind, size = kernels.code_layout(bits, count)
                    given = (grad, norms, row_length, poison(size, kind), KEY)
                    same("level_encode", *given, bits=bits, offset=count % 5 * 2, **rule)
                    codes = words(size, 3).to(kind)
                    same("level_add", codes, words(size, 4).to(kind), bits=bits)
                    same("level_decode", codes, norms, row_length, poison(count, dtype), bits=bits, scale=0.3)
                    if bits < 16:
                        same("octave_encode", *given, bits=bits, headroom=3, offset=count % 5 * 2)
                        same("octave_merge", codes, words(size, 4).to(kind), KEY, bits=bits, offset=count % 5)
                        rest = {"bits": bits, "headroom": 3, "scale": 0.3}
                        same("octave_decode", codes, norms, row_length, poison(count, dtype), **rest)

    def test_quantise(self, dtype: torch.dtype) -> None:
        for count in LENGTHS:
            for bits, block, norm in ((8, 512, 0), (3, 64, 2), (5, 1152, 2), (2, 8192, 0)):
                rule, blocks = {"bits": bits, "block": block}, -(-count // block)
                grad, size = numbers(count, dtype, count), blocks * kernels.qsgd_record_bytes(**rule)
                same("qsgd_encode", grad, poison(size, torch.uint8), KEY, **rule, norm=norm, offset=128)
                parts = [poison(size, torch.uint8) for _ in range(3)]
                for rank, part in enumerate(parts):
                    kernels.qsgd_encode(tame(count, dtype, rank), part, KEY.at(rank=rank), **rule, norm=norm)
                same("qsgd_fold", parts, poison(size, torch.uint8), KEY, **rule, norm=norm, offset=64)
                same("qsgd_decode", parts[0], poison(count, dtype), **rule, scale=0.3)
            codes = [words(count, rank).to(torch.uint8) for rank in range(3)]
            same("octave_fold", codes, poison(count, torch.uint8), KEY, headroom=1, offset=count % 5)
            for row_length in {max(count, 1), 2048}:
                rows = -(-count // row_length)
                grad, largest = numbers(count, dtype, count), tame(rows, work(dtype), 1).abs()
                same("moments_offer", grad, poison(rows, work(dtype)), poison(rows, torch.float64), row_length)
                codes_of = poison(count, torch.uint8)
                rest = {"bits": 8, "levels": 1, "bounds": largest / 2}
                same("level_encode", grad, largest, row_length, codes_of, KEY, **rest)

    def test_sketch(self, dtype: torch.dtype) -> None:
        kind = work(dtype)
        for count in LENGTHS:
            for rows, columns in ((1, 32), (3, 1072), (5, kernels.sketch_columns(count // 3))):
                grad, residual, momentum = numbers(count, dtype, 1), numbers(count, kind, 2), numbers(count, kind, 3)
                table, nasty = tame(rows * columns, kind, 4), numbers(rows * columns, kind, 5)
                same("sketch_encode", grad, None, table, rows, KEY, offset=count % 5 * 64)
                rest = {"momentum": momentum, "factor": -0.3, "offset": count % 5 * 64}
                same("sketch_encode", grad, residual, table, rows, KEY, **rest)
                spans = [(64, count // 2), ((count // 128 + 3) * 64, count - count // 2)]
                for values in (table, nasty, table.round(), torch.zeros_like(table)):
                    for k in (1, count // 50, count):
                        given = (spans, k, poison(k, torch.int64), poison(k, kind))
                        same("sketch_top", values, rows, KEY, *given)
                positions = torch.arange(count) * 7919 % (1 << 31)
                same("sketch_estimate", nasty, rows, KEY, positions, poison(count, kind))
                same("sketch_clear", table, rows, KEY, positions[: count // 9])
            same("absorb", numbers(count, dtype, 1), numbers(count, kind, 2))
            same("absorb", numbers(count, dtype, 1), numbers(count, kind, 2), numbers(count, kind, 3), 0.9)

    def test_sketch_of_many_layers(self, dtype: torch.dtype) -> None:
        """Across layer 65,536, with few layers and with more than are prepared together."""
        columns, border = 32, 65_536 * 32
        for offset, count in ((border - 128, 300), (0, border + 100)):
            grad, table = tame(count, dtype, 1), tame(3 * columns, work(dtype), 2)
            same("sketch_encode", grad, None, table, 3, KEY, offset=offset)
        k, spans = 20, [(border - 128, 300)]
        given = (poison(k, torch.int64), poison(k, work(dtype)))
        same("sketch_top", tame(3 * columns, work(dtype), 2), 3, KEY, spans, k, *given)

    def test_selection(self, dtype: torch.dtype) -> None:
        kind = work(dtype)
        for count in LENGTHS:
            grad, residual = numbers(count, dtype, count), tame(count, kind, count + 1)
            for x, left in ((grad, residual), (tame(count, dtype, 1).round(), None), (grad * 0, None)):
                for k in {min(count, 1), count // 100, count}:
                    same("top_select", x, left, k, poison(k, torch.int32), poison(k, kind))
                    same("binary_select", x, left, k, poison(k, torch.int32), poison(1, kind))
            same("count_nonfinite", grad)

    def test_sections(self, dtype: torch.dtype) -> None:
        kind = work(dtype)
        for count in LENGTHS:
            for b in (0, 3, 20):
                positions = torch.arange(0, count, 1 + count % 7, dtype=torch.int32)
                kept, mean = positions.numel(), torch.full((1,), 0.3, dtype=kind)
                section = poison(kernels.golomb_bound(kept, count, b, kind.itemsize), torch.uint8)
                same("binary_encode", positions, kept, mean, b, count, section)
                kernels.binary_encode(positions, kept, mean, b, count, section)
                flipped = section.clone()
                flipped[count % section.numel()] ^= 16
                given = ([section, section.roll(0), section], 1, b)
                same("binary_decode", *given, tame(count, dtype, 1), tame(count, kind, 2), 0.3)
                same("binary_decode", *given, tame(count, dtype, 1), None, 0.3)
                for bytes_ in (section, flipped, section[:-1], section[:3]):
                    same("binary_clear", bytes_, b, tame(count, dtype, 1))


class TestBits:
    pytestmark = gpu

    def test_random(self) -> None:
        for count in (0, 1, 2, 3, 100, 10_001):
            for word_offset in (0, 1, (1 << 32) + 1):
                for k, m in ((0, 1), (1, 1), (1, 2), (1, 3), (63, 64), (1, (1 << 62) - 1)):
                    same("bernoulli_words", poison(count, torch.int64), k, m, KEY, word_offset=word_offset)
                    same("merge_bits", words(count, 1), words(count, 2), m - k, k, KEY, word_offset=word_offset)

    def test_majority(self) -> None:
        for parts in (1, 2, 3, 8, 33):
            for count in (0, 1, 64, 1000, 100_001):
                same("majority_fold", [bits(count, p) for p in range(parts)], bits(count, 99), count)

    def test_hash(self) -> None:
        for count in (0, 1, 7, 8, 16_383, 16_384, 100_003):
            same("hash64", words(kernels.word_count(8 * count), 1).view(torch.uint8)[:count], 77)


@pytest.mark.skipif(not list(FOLDER.glob("_cuda*.so")), reason="the CUDA extension is not built")
def test_the_extension_loads_without_a_gpu() -> None:
    program = "from horovod_compress.kernels import loader; print(loader.load('_cuda').device_count())"
    environment = {"PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == ["0"]
