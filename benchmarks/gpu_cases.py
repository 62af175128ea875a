"""What `benchmarks.gpu` runs: one case for every kernel, and the same jobs in torch and CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import NORM, SAMPLE, SKETCH, Key
from horovod_compress.ops.sizes import ternary_states

KEY = Key(seed=1, step=2, bucket=3, rank=4)
BLOCK, QSGD_BLOCK, RANKS, COMPONENTS = 2048, 512, 4, 4
TENSORS = 161  # as many as ResNet-50 has
KEPT_ONE_IN, SKETCH_ROWS, SKETCH_SHARE = 100, 5, 50
LEVELS, EXPONENTS = {"levels": 31}, {"headroom": 3}
COPY = "torch copy_"


@dataclass
class Arguments:
    """What a kernel is called with, on the CPU, and the bytes that one call reads and writes."""

    positional: tuple[Any, ...]
    bytes_moved: int
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    kernel: str
    make: Callable[[Inputs], Arguments]


@cache
def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Inputs:
    """Arrays on the CPU that cases are made of."""

    def __init__(self, count: int) -> None:
        self.count, self.words = count, ops.word_count(count)
        self.grad, self.residual = normal(count, 1), normal(count, 2)
        self.kept = max(1, count // KEPT_ONE_IN)
        self.parameter = ops.golomb_parameter(self.kept, count)

    def floats(self, count: int | None = None) -> Tensor:
        return torch.zeros(self.count if count is None else count)

    def doubles(self, count: int = 1) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8)

    def bits(self, seed: int = 1) -> Tensor:
        vector = torch.zeros(self.words, dtype=torch.int64)
        ops.bernoulli_words(vector, 1, 2, KEY.at(hop=seed))
        if self.count % 64:
            vector[-1] &= (1 << self.count % 64) - 1
        return vector

    def codes(self, seed: int = 1) -> Tensor:
        out = self.bytes(self.count)
        norm = self.grad.abs().max().view(1)
        single.exponential_encode(self.grad, norm, self.count, out, KEY.at(rank=seed), bits=8, headroom=3)
        return out

    def norms(self) -> Tensor:
        return torch.full((-(-self.count // BLOCK),), 6.0)

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Return the positions and values of the largest elements."""
        positions, values = torch.zeros(self.kept, dtype=torch.int32), torch.zeros(self.kept)
        single.top_select(self.grad, None, self.kept, positions, values, single.numbers_for(self.grad))
        return positions, values


# ---- cases ------------------------------------------------------------------------------------


def sign_offer(a: Inputs) -> Arguments:
    outputs = (torch.zeros(a.words, dtype=torch.int64), a.doubles(), a.count)
    return Arguments((a.grad, a.residual, *outputs), 8 * a.count + 8 * a.words, {"key": KEY})


def sign_decode(a: Inputs) -> Arguments:
    given = (a.bits(), torch.full((1,), 0.01), a.count, a.grad, a.residual)
    return Arguments(given, 16 * a.count + 8 * a.words, {"feedback": "own", "key": KEY})


def in_pieces(array: Tensor) -> list[Tensor]:
    """Return the tensors of a bucket as long as an array: of whole words each, so that their bits do not meet."""
    return list(array.split(-(-array.numel() // (TENSORS * 64)) * 64))


def signs_together(a: Inputs, what: str) -> Arguments:
    grads, residuals = in_pieces(a.grad), in_pieces(a.residual)
    rows, steps = [grad.numel() for grad in grads], [torch.full((1,), 0.01) for _ in grads]
    sent = list(a.bits().split([ops.word_count(row) for row in rows]))
    if what == "offer":
        return Arguments((grads, residuals, sent, steps, rows), 8 * a.count + 8 * a.words, {"key": KEY})
    moved = 16 * a.count + 8 * a.words
    return Arguments((sent, steps, rows, grads, residuals), moved, {"feedback": "own", "key": KEY})


def two_value_offer(a: Inputs) -> Arguments:
    outputs = (torch.zeros(a.words, dtype=torch.int64), a.doubles(), a.doubles(), torch.zeros(1, dtype=torch.int64))
    return Arguments((a.grad, a.residual, *outputs, a.count), 8 * a.count + 8 * a.words)


def points_together(a: Inputs, what: str) -> Arguments:
    grads, residuals = in_pieces(a.grad), in_pieces(a.residual)
    rows = [grad.numel() for grad in grads]
    words = [ops.word_count(row) for row in rows]
    if what == "offer":
        made = [[torch.zeros(1, dtype=kind) for _ in grads] for kind in (torch.float64, torch.float64, torch.int64)]
        return Arguments((grads, residuals, list(a.bits().split(words)), *made, rows), 8 * a.count + 8 * a.words)
    steps = [torch.full((len(grads),), 0.01 * (rank + 1)) for rank in range(RANKS)]
    sent = [a.bits(rank) for rank in range(RANKS)]
    places = {"first_words": [sum(words[:i]) for i in range(len(words))], "first_rows": list(range(len(rows)))}
    moved = 16 * a.count + 8 * RANKS * a.words
    return Arguments((sent, steps, None, rows, 0, grads, residuals), moved, {**places, "scale": 0.25})


def two_value_decode(a: Inputs) -> Arguments:
    steps = [torch.full((1,), 0.01 * (rank + 1)) for rank in range(RANKS)]
    sent = [a.bits(rank) for rank in range(RANKS)]
    moved = 16 * a.count + 8 * RANKS * a.words
    return Arguments((sent, steps, None, a.count, 0, a.grad, a.residual), moved, {"scale": 0.25})


def majority(a: Inputs) -> Arguments:
    parts = [a.bits(rank) for rank in range(8)]
    return Arguments((parts, torch.zeros_like(parts[0]), a.count), 72 * a.words)


def shaped(a: Inputs, folds: bool) -> Arguments:
    parts, rows = [a.bits(rank) for rank in range(RANKS)], ops.count_rows(RANKS)
    counts = [[torch.zeros_like(parts[0]) for _ in range(rows)] for _ in range(2)]
    if folds:
        return Arguments((parts, torch.zeros_like(parts[0]), *counts), 8 * (RANKS + 1 + 2 * rows) * a.words)
    return Arguments((parts[0], parts[1], *counts, RANKS), 8 * (3 + 2 * rows) * a.words)


def ternary(a: Inputs, what: str) -> Arguments:
    words = a.words // ops.GROUP_WORDS * ops.GROUP_WORDS
    packed = torch.zeros(words // ops.GROUP_WORDS * ops.PACKED_WORDS, dtype=torch.int64)
    parts = [a.bits(rank)[:words] for rank in range(RANKS)]
    if what == "unpack":
        return Arguments((packed, parts[0], parts[1]), packed.nbytes + 16 * words)
    rows = ops.count_rows(ternary_states(RANKS))
    counts = [[torch.zeros(words, dtype=torch.int64) for _ in range(rows)] for _ in range(2)]
    return Arguments((parts, packed, *counts), packed.nbytes + 8 * (RANKS + 2 * rows) * words)


def merge(a: Inputs) -> Arguments:
    return Arguments((a.bits(1), a.bits(2), 2, 1, KEY), 24 * a.words)


def uniform_encode(a: Inputs, bits: int) -> Arguments:
    kind, size = ops.code_layout(bits, a.count)
    codes, rule = torch.zeros(size, dtype=kind), {"bits": bits, "levels": (1 << bits - 1) // 4 - (bits > 4)}
    return Arguments((a.grad, a.norms(), BLOCK, codes, KEY), 4 * a.count + codes.nbytes, rule)


def uniform_fold(a: Inputs) -> Arguments:
    parts = [a.bytes(ops.code_layout(6, a.count)[1]) for _ in range(RANKS)]
    return Arguments((parts, a.bytes(a.count), a.count), RANKS * parts[0].numel() + a.count, {"bits": 6, "sum_bits": 8})


def uniform_decode(a: Inputs) -> Arguments:
    return Arguments((a.codes(), a.norms(), BLOCK, a.floats()), 5 * a.count, {"bits": 8, "scale": 0.01})


def exponential_encode(a: Inputs) -> Arguments:
    given = (a.grad, a.norms(), BLOCK, a.bytes(a.count), KEY)
    return Arguments(given, 5 * a.count, {"bits": 8, "headroom": 3})


def exponential_decode(a: Inputs) -> Arguments:
    rule = {"bits": 8, "headroom": 3, "scale": 0.3}
    return Arguments((a.codes(), a.norms(), BLOCK, a.floats()), 5 * a.count, rule)


def exponential_fold(a: Inputs) -> Arguments:
    parts = [a.codes(rank) for rank in range(RANKS)]
    return Arguments((parts, a.bytes(a.count), KEY), (RANKS + 1) * a.count, {"headroom": 3})


def records_of(a: Inputs, bits: int, seed: int) -> Tensor:
    out = a.bytes(-(-a.count // QSGD_BLOCK) * ops.qsgd_record_bytes(bits, QSGD_BLOCK))
    single.qsgd_encode(a.grad, out, KEY.at(rank=seed), bits=bits, block=QSGD_BLOCK, norm=0)
    return out


def qsgd(a: Inputs, what: str, bits: int) -> Arguments:
    rule = {"bits": bits, "block": QSGD_BLOCK}
    records = records_of(a, bits, 1)
    if what == "decode":
        return Arguments((records, a.floats()), 4 * a.count + records.nbytes, rule | {"scale": 0.01})
    if what == "encode":
        return Arguments((a.grad, torch.zeros_like(records), KEY), 4 * a.count + records.nbytes, rule | {"norm": 0})
    parts = [records_of(a, bits, rank) for rank in range(RANKS)]
    return Arguments((parts, torch.zeros_like(records), KEY), (RANKS + 1) * records.nbytes, rule | {"norm": 0})


def loco(a: Inputs, what: str) -> Arguments:
    kept, rule = records_of(a, 8, 9), {"bits": 4, "block": QSGD_BLOCK, "norm": 0, "kept_bits": 8, "beta": 0.8}
    parts = [records_of(a, 4, rank) for rank in range(RANKS)]
    out, left = torch.zeros_like(parts[0]), torch.zeros_like(kept)
    if what == "encode":
        return Arguments((a.grad, kept, out, left), 4 * a.count + out.nbytes + 2 * kept.nbytes, rule)
    return Arguments((parts, kept, out, left), (RANKS + 1) * out.nbytes + 2 * kept.nbytes, rule)


def elias(a: Inputs, what: str) -> Arguments:
    rule = {"bits": 2, "block": QSGD_BLOCK}
    room = a.bytes(ops.elias_bound(a.count, **rule))
    ops.elias_encode(a.grad, place := single.place_in(room), room, KEY, **rule, norm=2)
    used = int(place[1])
    if what == "encode":
        return Arguments((a.grad, place, torch.zeros_like(room), KEY), 4 * a.count + used, rule | {"norm": 2})
    return Arguments(([room[:used]] * RANKS, a.floats()), 4 * a.count + RANKS * used, rule | {"scale": 0.01})


def selection(a: Inputs, mean: bool) -> Arguments:
    outputs = (torch.zeros(a.kept, dtype=torch.int32), a.floats(1 if mean else a.kept))
    return Arguments((a.grad, a.residual, a.kept, *outputs, single.numbers_for(a.grad)), 8 * a.count + 8 * a.kept)


def binary_section(a: Inputs) -> tuple[Tensor, Tensor]:
    positions, _ = a.chosen()
    out = a.bytes(ops.golomb_bound(a.kept, a.count, a.parameter, 4))
    single.binary_encode(positions, a.kept, torch.ones(1), a.parameter, a.count, place := single.place_in(out), out)
    return positions, out[: int(place[1])]


def binary(a: Inputs, what: str) -> Arguments:
    positions, section = binary_section(a)
    if what == "encode":
        out = a.bytes(ops.golomb_bound(a.kept, a.count, a.parameter, 4))
        given = (positions, a.kept, torch.ones(1), a.parameter, a.count, single.place_in(out), out)
        return Arguments(given, 4 * a.kept + section.nbytes)
    if what == "clear":
        return Arguments((section, a.parameter, a.grad), section.nbytes + 4 * a.kept)
    decoded = ([section] * RANKS, 0, a.parameter, a.grad, a.residual, 0.25)
    return Arguments(decoded, 16 * a.count + RANKS * section.nbytes)


def values(a: Inputs, what: str) -> Arguments:
    positions, kept = a.chosen()
    out = a.bytes(ops.values_bound(a.kept, a.count, a.parameter, 4))
    given = (positions, a.kept, kept, a.parameter, a.count, place := single.place_in(out))
    single.values_encode(*given, out)
    used = int(place[1])
    if what == "encode":
        return Arguments((*given, torch.zeros_like(out)), 8 * a.kept + used)
    decoded = ([out[:used]] * RANKS, 0, a.parameter, a.grad, a.residual, 0.25)
    return Arguments(decoded, 16 * a.count + RANKS * used)


def chunks(a: Inputs) -> Arguments:
    """About as many as :func:`selection` keeps."""
    of_chunk, rest = 4096 // KEPT_ONE_IN, -(-(a.count % 4096) // KEPT_ONE_IN)
    room = a.count // 4096 * of_chunk + rest
    outputs = (torch.zeros(room, dtype=torch.int32), a.floats(room), single.numbers_for(a.grad))
    return Arguments((a.grad, a.residual, rest, *outputs), 8 * a.count + 8 * room, {"chunk": 4096, "k": of_chunk})


def codebook(a: Inputs) -> Arguments:
    _, kept = a.chosen()
    return Arguments((kept, a.floats(2)), 8 * a.kept, {"bits": 2})


def sample(a: Inputs, what: str) -> Arguments:
    key, kept = KEY.at(purpose=SAMPLE), a.floats(a.kept)
    if what == "offer":
        return Arguments((a.grad, a.residual, kept, key), 8 * a.count + 4 * a.kept)
    return Arguments((kept, a.grad, a.residual, key, 0.25), 16 * a.count + 4 * a.kept)


def norm_sketch(a: Inputs) -> Arguments:
    return Arguments((a.grad, a.doubles(256), KEY.at(purpose=NORM)), 4 * a.count, {"counters": 256})


def table_of(a: Inputs) -> tuple[Tensor, Key]:
    key = KEY.at(purpose=SKETCH)
    table = a.floats(SKETCH_ROWS * ops.sketch_columns(max(32, a.count // SKETCH_SHARE)))
    ops.sketch_encode(a.grad, None, table, SKETCH_ROWS, key)
    return table, key


def sketch(a: Inputs, what: str) -> Arguments:
    table, key = table_of(a)
    positions = torch.arange(a.kept) * KEPT_ONE_IN
    if what == "encode":
        return Arguments((a.grad, a.residual, torch.zeros_like(table), SKETCH_ROWS, key), 8 * a.count + table.nbytes)
    if what == "top":
        given = (table, SKETCH_ROWS, key, [(0, a.count)], a.kept, torch.zeros_like(positions), a.floats(a.kept))
        return Arguments(given, table.nbytes + 12 * a.kept)
    return Arguments((table, SKETCH_ROWS, key, positions), 4 * a.kept * (SKETCH_ROWS + 2))


def lowrank(a: Inputs, what: str) -> Arguments:
    rows = max(1, math.isqrt(a.count))
    columns = a.count // rows
    size = rows * columns
    grad, residual = a.grad[:size], a.residual[:size]
    left, right = normal(COMPONENTS * rows, 3), normal(COMPONENTS * columns, 4)
    if what == "left":
        return Arguments((grad, residual, rows, right, torch.zeros_like(left)), 8 * size)
    if what == "right":
        return Arguments((grad, residual, rows, left, torch.zeros_like(right)), 8 * size)
    if what == "decode":
        return Arguments((left, right, rows, grad, residual), 16 * size, {"scale": 0.25})
    if what == "orthonormalise":
        return Arguments((left, COMPONENTS), 8 * left.numel())
    return Arguments((right, torch.zeros_like(right), COMPONENTS, KEY), 8 * right.numel())


def signs_of(a: Inputs, seed: int) -> Tensor:
    out = a.bytes(-(-a.count // BLOCK) * ops.record_bytes(BLOCK))
    ops.record_offer(normal(a.count, seed), None, out, BLOCK, rule="l2")
    return out


def record(a: Inputs, what: str) -> Arguments:
    made = signs_of(a, 1)
    if what == "offer":
        return Arguments((a.grad, a.residual, torch.zeros_like(made), BLOCK), 8 * a.count + made.nbytes, {"rule": "l2"})
    if what == "decode":
        return Arguments((made, a.norms(), a.grad, a.residual, BLOCK), 16 * a.count + made.nbytes)
    parts = [signs_of(a, 1 + rank % 2) for rank in range(RANKS)]
    given = (parts, a.residual, a.floats(), torch.zeros_like(made), BLOCK)
    return Arguments(given, 16 * a.count + (RANKS + 1) * made.nbytes, {"rule": "l2"})


def dense(a: Inputs, what: str) -> Arguments:
    half = a.grad.half()
    if what == "offer":
        return Arguments((a.grad, a.residual, torch.zeros_like(half)), 10 * a.count)
    if what == "decode":
        return Arguments((half, a.floats()), 10 * a.count, {"scale": 0.25, "residual": a.residual})
    return Arguments((a.grad, a.residual), 12 * a.count)


def dense_together(a: Inputs, what: str) -> Arguments:
    grads, residuals, half = in_pieces(a.grad), in_pieces(a.residual), in_pieces(a.grad.half())
    if what == "offer":
        return Arguments((grads, residuals, half), 10 * a.count)
    return Arguments((half, grads), 10 * a.count, {"scale": 0.25, "residuals": residuals})


def union(a: Inputs, what: str) -> Arguments:
    """About one element in `KEPT_ONE_IN` is not zero."""
    there = torch.rand(a.count, generator=torch.Generator().manual_seed(3)) < 1 / KEPT_ONE_IN
    grad, bits = a.grad * there, torch.zeros(a.words, dtype=torch.int64)
    single.union_mark(grad, bits, block=1)
    kept, rule = single.union_count(bits, a.count, block=1), {"block": 1}
    if what == "mark":
        return Arguments((grad, bits), 4 * a.count + bits.nbytes, rule)
    if what == "count":
        return Arguments((bits, a.count), bits.nbytes, rule)
    if what == "encode":
        return Arguments((grad, bits, kept, a.floats(kept)), 8 * kept + bits.nbytes, rule)
    moved = 4 * (a.count + kept) + bits.nbytes
    return Arguments((a.floats(kept), bits, kept, a.floats()), moved, {**rule, "scale": 0.25})


def moments(a: Inputs) -> Arguments:
    rows = -(-a.count // BLOCK)
    return Arguments((a.grad, a.floats(rows), a.doubles(rows), BLOCK), 4 * a.count)


def norms_together(a: Inputs, moments: bool) -> Arguments:
    grads = in_pieces(a.grad)
    norms, squares = ([torch.zeros(1, dtype=kind) for _ in grads] for kind in (torch.float32, torch.float64))
    return Arguments((grads, norms, *([squares] if moments else []), [grad.numel() for grad in grads]), 4 * a.count)


def codes_together(a: Inputs, what: str, rule: dict[str, int]) -> Arguments:
    grads, codes, rule = in_pieces(a.grad), in_pieces(a.codes()), {"bits": 8, **rule}
    norms, rows = [torch.full((1,), 6.0) for _ in grads], [grad.numel() for grad in grads]
    if what == "encode":
        return Arguments((grads, norms, rows, codes, KEY), 5 * a.count, rule)
    return Arguments((codes, norms, rows, grads), 5 * a.count, {**rule, "scale": 0.01})


def qsgd_together(a: Inputs, what: str) -> Arguments:
    grads, rule = in_pieces(a.grad), {"bits": 8, "block": QSGD_BLOCK}
    size = ops.qsgd_record_bytes(**rule)
    records = [a.bytes(-(-grad.numel() // QSGD_BLOCK) * size) for grad in grads]
    moved = 4 * a.count + sum(part.nbytes for part in records)
    if what == "encode":
        return Arguments((grads, records, KEY), moved, {**rule, "norm": 0})
    ops.qsgd_encode_all(grads, records, KEY, bits=8, block=QSGD_BLOCK, norm=0)
    return Arguments((records, grads), moved, {**rule, "scale": 0.01})


def adam_hold(a: Inputs) -> Arguments:
    given = [a.floats()], [a.grad], [a.residual], [a.grad.square()], None
    return Arguments(given, 16 * a.count, {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01})


def adam_step(a: Inputs) -> Arguments:
    given = [a.floats()], [a.floats()], [a.grad], [a.grad.square()], None
    rule = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "lr": 1e-3, "eps": 1e-8, "by": 0.7}
    return Arguments(given, 24 * a.count, rule)


def sgd_step(a: Inputs) -> Arguments:
    given = [a.floats()], [a.floats()], [a.grad]
    return Arguments(given, 20 * a.count, {"lr": 1e-3, "momentum": 0.9, "by": 0.7, "weight_decay": 1e-4})


CASES = (
    Case("triad", "triad", lambda a: Arguments((a.floats(), a.grad, a.residual, 0.5), 12 * a.count)),
    Case(
        "sign_pack",
        "sign_pack",
        lambda a: Arguments((a.grad, torch.zeros(a.words, dtype=torch.int64)), 4 * a.count + 8 * a.words),
    ),
    Case("sign_offer", "sign_offer", sign_offer),
    Case("sign_decode", "sign_decode", sign_decode),
    Case(f"sign_offer_all of {TENSORS}", "sign_offer_all", partial(signs_together, what="offer")),
    Case(f"sign_decode_all of {TENSORS}", "sign_decode_all", partial(signs_together, what="decode")),
    Case(
        "sign_decode without residual",
        "sign_decode",
        lambda a: Arguments(
            (a.bits(), torch.ones(1), a.count, a.floats(), None), 4 * a.count + 8 * a.words, {"feedback": "none"}
        ),
    ),
    Case("two_value_offer", "two_value_offer", two_value_offer),
    Case("two_value_decode of 4", "two_value_decode", two_value_decode),
    Case(f"two_value_offer_all of {TENSORS}", "two_value_offer_all", partial(points_together, what="offer")),
    Case(
        f"two_value_decode_all of {TENSORS}, 4 ranks", "two_value_decode_all", partial(points_together, what="decode")
    ),
    Case("merge_bits p=1/3", "merge_bits", merge),
    Case(f"shaped_merge of {RANKS}", "shaped_merge", partial(shaped, folds=False)),
    Case(f"shaped_fold of {RANKS}", "shaped_fold", partial(shaped, folds=True)),
    Case(f"ternary_fold of {RANKS}", "ternary_fold", partial(ternary, what="fold")),
    Case("ternary_unpack", "ternary_unpack", partial(ternary, what="unpack")),
    Case("bernoulli_words p=1/7", "bernoulli_words", lambda a: Arguments((a.bits(), 1, 7, KEY), 8 * a.words)),
    Case("majority_fold of 8", "majority_fold", majority),
    Case("dense_offer to float16", "dense_offer", partial(dense, what="offer")),
    Case("dense_add", "dense_add", partial(dense, what="add")),
    Case("dense_decode of float16", "dense_decode", partial(dense, what="decode")),
    Case(f"dense_offer_all of {TENSORS}", "dense_offer_all", partial(dense_together, what="offer")),
    Case(f"dense_decode_all of {TENSORS}", "dense_decode_all", partial(dense_together, what="decode")),
    Case("union_mark 1%", "union_mark", partial(union, what="mark")),
    Case("union_count", "union_count", partial(union, what="count")),
    Case("union_encode 1%", "union_encode", partial(union, what="encode")),
    Case("union_decode 1%", "union_decode", partial(union, what="decode")),
    Case("adam_hold_all", "adam_hold_all", adam_hold),
    Case("adam_step_all", "adam_step_all", adam_step),
    Case("sgd_step_all", "sgd_step_all", sgd_step),
    Case("absorb", "absorb", lambda a: Arguments((a.grad, a.residual), 16 * a.count)),
    Case("norm_offer blocks", "norm_offer", lambda a: Arguments((a.grad, a.norms(), BLOCK), 4 * a.count)),
    Case("moments_offer blocks", "moments_offer", moments),
    Case("norm_sketch", "norm_sketch", norm_sketch),
    Case(f"norm_offer_all of {TENSORS}", "norm_offer_all", partial(norms_together, moments=False)),
    Case(f"moments_offer_all of {TENSORS}", "moments_offer_all", partial(norms_together, moments=True)),
    Case("uniform_encode 8 bits", "uniform_encode", partial(uniform_encode, bits=8)),
    Case("uniform_encode 4 bits", "uniform_encode", partial(uniform_encode, bits=4)),
    Case("uniform_encode 6 bits", "uniform_encode", partial(uniform_encode, bits=6)),
    Case("uniform_fold of 4", "uniform_fold", uniform_fold),
    Case("uniform_add 8 bits", "uniform_add", lambda a: Arguments((a.codes(1), a.codes(2)), 3 * a.count, {"bits": 8})),
    Case("uniform_decode 8 bits", "uniform_decode", uniform_decode),
    Case(f"uniform_encode_all of {TENSORS}", "uniform_encode_all", partial(codes_together, what="encode", rule=LEVELS)),
    Case(f"uniform_decode_all of {TENSORS}", "uniform_decode_all", partial(codes_together, what="decode", rule={})),
    Case("exponential_encode 8 bits", "exponential_encode", exponential_encode),
    Case(
        "exponential_merge 8 bits",
        "exponential_merge",
        lambda a: Arguments((a.codes(1), a.codes(2), KEY), 3 * a.count, {"bits": 8}),
    ),
    Case("exponential_fold of 4", "exponential_fold", exponential_fold),
    Case("exponential_decode 8 bits", "exponential_decode", exponential_decode),
    Case(
        f"exponential_encode_all of {TENSORS}",
        "exponential_encode_all",
        partial(codes_together, what="encode", rule=EXPONENTS),
    ),
    Case(
        f"exponential_decode_all of {TENSORS}",
        "exponential_decode_all",
        partial(codes_together, what="decode", rule=EXPONENTS),
    ),
    Case("qsgd_encode 8 bits", "qsgd_encode", partial(qsgd, what="encode", bits=8)),
    Case("qsgd_encode 3 bits", "qsgd_encode", partial(qsgd, what="encode", bits=3)),
    Case("qsgd_fold of 4", "qsgd_fold", partial(qsgd, what="fold", bits=8)),
    Case("qsgd_decode 8 bits", "qsgd_decode", partial(qsgd, what="decode", bits=8)),
    Case(f"qsgd_encode_all of {TENSORS}", "qsgd_encode_all", partial(qsgd_together, what="encode")),
    Case(f"qsgd_decode_all of {TENSORS}", "qsgd_decode_all", partial(qsgd_together, what="decode")),
    Case("loco_encode", "loco_encode", partial(loco, what="encode")),
    Case("loco_fold of 4", "loco_fold", partial(loco, what="fold")),
    Case("elias_encode", "elias_encode", partial(elias, what="encode")),
    Case("elias_decode of 4", "elias_decode", partial(elias, what="decode")),
    Case("top_select 1%", "top_select", partial(selection, mean=False)),
    Case("chunk_select 1%", "chunk_select", chunks),
    Case("codebook_fit 1%", "codebook_fit", codebook),
    Case("binary_select 1%", "binary_select", partial(selection, mean=True)),
    Case("binary_encode 1%", "binary_encode", partial(binary, what="encode")),
    Case("binary_decode of 4", "binary_decode", partial(binary, what="decode")),
    Case("binary_clear 1%", "binary_clear", partial(binary, what="clear")),
    Case("values_encode 1%", "values_encode", partial(values, what="encode")),
    Case("values_decode of 4", "values_decode", partial(values, what="decode")),
    Case("sample_offer 1%", "sample_offer", partial(sample, what="offer")),
    Case("sample_decode 1%", "sample_decode", partial(sample, what="decode")),
    Case("sketch_encode", "sketch_encode", partial(sketch, what="encode")),
    Case("sketch_top 1%", "sketch_top", partial(sketch, what="top")),
    Case("sketch_clear 1%", "sketch_clear", partial(sketch, what="clear")),
    Case("lowrank_start of 4", "lowrank_start", partial(lowrank, what="start")),
    Case("lowrank_left of 4", "lowrank_left", partial(lowrank, what="left")),
    Case("lowrank_orthonormalise of 4", "lowrank_orthonormalise", partial(lowrank, what="orthonormalise")),
    Case("lowrank_right of 4", "lowrank_right", partial(lowrank, what="right")),
    Case("lowrank_decode of 4", "lowrank_decode", partial(lowrank, what="decode")),
    Case("record_offer", "record_offer", partial(record, what="offer")),
    Case("record_fold of 4", "record_fold", partial(record, what="fold")),
    Case("record_decode", "record_decode", partial(record, what="decode")),
    Case("hash64", "hash64", lambda a: Arguments((a.grad.view(torch.uint8),), 4 * a.count)),
)


# ---- the same in torch and CuPy -----------------------------------------------------------------

Runs = list[Callable[[], object]]


def peers(count: int) -> Iterator[tuple[str, int, Runs]]:
    """Name, bytes and calls of what others have; the copy, the yardstick, is the first."""
    pairs = [(normal(count, seed).cuda(), normal(count, seed).cuda()) for seed in (1, 2)]
    out = torch.empty(count, device="cuda")
    k = max(1, count // KEPT_ONE_IN)
    yield COPY, 8 * count, [partial(b.copy_, a) for a, b in pairs]
    yield "torch add", 12 * count, [partial(torch.add, a, b, out=out) for a, b in pairs]
    yield "torch to float16", 6 * count, [a.half for a, _ in pairs]
    yield "torch norm", 4 * count, [partial(torch.linalg.vector_norm, a) for a, _ in pairs]
    yield "torch sign step", 24 * count, [partial(sign_step, a, b, out) for a, b in pairs]
    yield "torch topk 1%", 8 * count, [partial(top, a, b, k) for a, b in pairs]
    with suppress(ImportError):
        import cupy

        arrays = [cupy.from_dlpack(a) for a, _ in pairs]
        yield "cupy packbits(x >= 0)", 4 * count + count // 8, [partial(packed, cupy, x) for x in arrays]


def sign_step(grad: Tensor, residual: Tensor, out: Tensor) -> None:
    """What sign_offer and sign_decode do, without the packing."""
    x = torch.add(grad, residual)
    step = torch.linalg.vector_norm(x, ord=1) / x.numel()
    torch.sign(x, out=out).mul_(step)
    torch.sub(x, out, out=x)


def top(grad: Tensor, residual: Tensor, k: int) -> Tensor:
    return torch.topk(torch.add(grad, residual).abs_(), k, sorted=False).indices


def packed(cupy: Any, x: Any) -> Any:
    return cupy.packbits(x >= 0)
