"""The cases of the benchmark of kernels: what each runs, beside what, and what it should give."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from typing import Any

from benchmarks import results, single
from benchmarks.results import Record, processor, spread
from horovod_compress import ops
from horovod_compress.ops.dispatch import by_reference
from horovod_compress.ops.keys import NORM, SAMPLE, SKETCH, Key

KEY = Key(seed=1, step=2, bucket=3, rank=4)
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01}
ADAM_STEP: dict[str, Any] = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "lr": 1e-3, "eps": 1e-8, "by": 0.7}
SGD_STEP: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
ROW = 1000
BLOCK = 2048
QSGD_BLOCK = 512
KEPT_ONE_IN = 100
DENSITIES = (0.01, 0.05, 0.2, 0.5)  # of what is mostly zeros
SKETCH_ROWS, SKETCH_SHARE, TOP_SHARE = 5, 50, 100  # 1/50 of the elements as columns, 1/100 chosen
CHECKED_ELEMENTS = 1 << 17  # the reference of Elias codes
CHECKED_BYTES = 1 << 20  # the reference of CRC-32C takes 0.1 microseconds a byte


@dataclass
class Case:
    """One line of the table."""

    name: str
    bytes_moved: int
    run: Callable[[], object]
    wrong: Callable[[], int] | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return spread(self.seconds).median


class Arrays:
    """Everything that the cases read and write, allocated and touched once."""

    def __init__(self, count: int) -> None:
        self.count, self.words = count, ops.word_count(count)
        generator = torch.Generator().manual_seed(1)
        self.grad = torch.randn(count, generator=generator)
        self.residual = torch.randn(count, generator=generator)
        self.work, self.left = self.grad.clone(), self.residual.clone()
        self.short_left = self.left.bfloat16()
        self.out = torch.zeros(count)
        self.half, self.other_half = self.grad.half(), self.residual.half()
        self.brain, self.other_brain = self.grad.bfloat16(), self.residual.bfloat16()
        self.flags = np.zeros(count, dtype=bool)
        self.bits, self.more = torch.zeros(self.words, dtype=torch.int64), torch.zeros(self.words, dtype=torch.int64)
        ops.bernoulli_words(self.more, 1, 2, KEY)
        self.parts = [self.more.clone() for _ in range(8)]
        for hop, part in enumerate(self.parts):
            ops.bernoulli_words(part, 1, 2, KEY.at(hop=hop))
        self.folded, self.merged = self.more.clone(), self.more.clone()
        self.sums, self.row_sums = (torch.zeros(rows, dtype=torch.float64) for rows in (1, -(-count // ROW)))
        self.counters = torch.zeros(256, dtype=torch.float64)
        self.norm, self.norms = self.grad.abs().max().view(1), torch.full((-(-count // BLOCK),), 6.0)
        self.bytes, self.more_bytes = (torch.zeros(count, dtype=torch.uint8) for _ in range(2))
        self.packed, self.more_packed = (torch.zeros((count + 1) // 2, dtype=torch.uint8) for _ in range(2))
        for rank, codes in enumerate((self.bytes, self.more_bytes)):
            single.exponential_encode(self.grad, self.norm, count, codes, KEY.at(rank=rank), bits=8, headroom=3)
        self.kept = max(1, count // KEPT_ONE_IN)
        self.parameter = ops.golomb_parameter(self.kept, count)
        self.positions, self.values = torch.zeros(self.kept, dtype=torch.int32), torch.zeros(self.kept)
        numbers, chosen = single.numbers_for(self.grad), (self.positions, self.values[:1])
        single.binary_select(self.grad, self.residual, self.kept, *chosen, numbers)
        self.found = int(numbers[0])
        room = ops.golomb_bound(self.kept, count, self.parameter, 4)
        self.section = torch.zeros(room, dtype=torch.uint8)
        encoded = (self.positions, self.found, self.values[:1], self.parameter, count)
        single.binary_encode(*encoded, place := single.place_in(self.section), self.section)
        self.section_bytes = int(place[1])
        self.step, self.row_steps = torch.full((1,), 0.01), torch.full((self.row_sums.numel(),), 0.01)

    @property
    def raw(self) -> Tensor:
        return self.grad.view(torch.uint8)


# ---- wrong elements ---------------------------------------------------------------------------


def differences(a: Tensor, b: Tensor) -> int:
    """Count elements that are not the same bits."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return int((a.view(integers) != b.view(integers)).sum())


def against_reference(name: str, *arguments: object, **options: object) -> Callable[[], int]:
    """Return a check that runs a kernel and its reference on copies of the same arguments."""

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(part) for part in value]
        return value.clone() if isinstance(value, Tensor) else value

    def check() -> int:
        mine, theirs = copied(list(arguments)), copied(list(arguments))
        named = [{key: copied(value) for key, value in options.items()} for _ in range(2)]
        results = [single.named(name)(*mine, **named[0])]
        with by_reference():
            results.append(single.named(name)(*theirs, **named[1]))
        pairs = [*zip(mine, theirs, strict=True), *zip(named[0].values(), named[1].values(), strict=True)]
        lists = [zip(a, b, strict=True) for a, b in pairs if isinstance(a, list)]
        pairs = [(a, b) for a, b in [*pairs, *(pair for each in lists for pair in each)] if isinstance(a, Tensor)]
        return int(results[0] != results[1]) + sum(differences(a, b) for a, b in pairs)

    return check


# ---- cases ------------------------------------------------------------------------------------


def kernel_case(label: str, bytes_moved: int, name: str, *arguments: object, **options: object) -> Case:
    function = single.named(name)
    check = against_reference(name, *arguments, **options)
    return Case(label, bytes_moved, lambda: function(*arguments, **options), check)


def yardsticks(a: Arrays) -> Iterable[Case]:
    yield kernel_case("triad", 12 * a.count, "triad", a.out, a.grad, a.residual, 0.5)
    yield Case("memcpy (torch copy_)", 8 * a.count, lambda: a.out.copy_(a.grad))
    # What one core can read while it writes nothing: the ceiling of sign_pack, sign_offer and the checksums.
    yield Case("torch dot (reads only)", 8 * a.count, lambda: torch.dot(a.grad, a.residual))
    x = a.grad.numpy()
    yield Case("numpy packbits(x >= 0)", 4 * a.count, lambda: np.packbits(np.greater_equal(x, 0, out=a.flags)))
    yield Case("torch sign step", 24 * a.count, lambda: torch_sign_step(a))


def torch_sign_step(a: Arrays) -> None:
    """What sign_offer and sign_decode do, without the packing, in torch with preallocated outputs."""
    torch.add(a.grad, a.residual, out=a.work)
    step = torch.linalg.vector_norm(a.work, ord=1) / a.count
    torch.sign(a.work, out=a.out).mul_(step)
    torch.sub(a.work, a.out, out=a.left)


def one_bit(a: Arrays) -> Iterable[Case]:
    n, bit_bytes = a.count, 8 * a.words
    yield kernel_case("sign_pack", 4 * n + bit_bytes, "sign_pack", a.grad, a.bits)
    yield kernel_case("sign_pack float16", 2 * n + bit_bytes, "sign_pack", a.half, a.bits)
    offered = (a.grad, a.residual, a.bits)
    yield kernel_case("sign_offer", 8 * n + bit_bytes, "sign_offer", *offered, a.sums, n, key=KEY)
    yield kernel_case("sign_offer rows", 8 * n + bit_bytes, "sign_offer", *offered, a.row_sums, ROW, key=KEY)
    decoded = (a.work, a.left)
    moved = 16 * n + bit_bytes
    yield kernel_case("sign_decode global", moved, "sign_decode", a.more, a.step, n, *decoded, feedback="global")
    yield kernel_case("sign_decode own", moved, "sign_decode", a.more, a.step, n, *decoded, feedback="own", key=KEY)
    rows = (a.more, a.row_steps, ROW)
    yield kernel_case("sign_decode rows", moved, "sign_decode", *rows, *decoded, feedback="global")
    alone = (a.more, a.step, n, a.out, None)
    yield kernel_case("sign_decode alone", 4 * n + bit_bytes, "sign_decode", *alone, feedback="none")
    yield from two_values(a)
    yield Case("local step (offer + decode)", 24 * n + 2 * bit_bytes, lambda: local_step(a))
    shorter = (a.work, a.short_left)
    yield kernel_case("sign_offer of bfloat16", 6 * n + bit_bytes, "sign_offer", *shorter, a.bits, a.sums, n, key=KEY)
    given = {"feedback": "own", "key": KEY, "rounding": KEY}
    yield kernel_case("sign_decode to bfloat16", 12 * n + bit_bytes, "sign_decode", *rows, *shorter, **given)
    moved = 18 * n + 2 * bit_bytes
    yield Case("local step, residual of bfloat16", moved, lambda: local_step(a, short=True))


def two_values(a: Arrays) -> Iterable[Case]:
    n, size = a.count, 8 * a.words
    counts = torch.zeros(1, dtype=torch.int64)
    sides = (a.bits, a.sums, a.sums.clone(), counts, n)
    yield kernel_case("two_value_offer", 8 * n + size, "two_value_offer", a.grad, a.residual, *sides)
    values, lows = [a.step] * 8, [-2 * a.step] * 8
    for ranks in (1, 4, 8):
        given = (a.parts[:ranks], values[:ranks], lows[:ranks], n, 0, a.work, a.left)
        yield kernel_case(f"two_value_decode of {ranks}", 16 * n + ranks * size, "two_value_decode", *given, scale=0.25)
    moved = 24 * n + 2 * size
    yield Case("local step of ef_signsgd (two values)", moved, lambda: two_value_step(a))
    yield Case("local step of onebit (two values)", moved, lambda: two_value_step(a, sides))


def two_value_step(a: Arrays, sides: Any = None) -> None:
    if sides is None:
        single.sign_offer(a.work, a.left, a.bits, a.sums, a.count)
    else:
        single.two_value_offer(a.work, a.left, *sides)
    lows = None if sides is None else [-2 * a.step]
    single.two_value_decode([a.bits], [a.step], lows, a.count, 0, a.work, a.left)


def local_step(a: Arrays, divisor: Tensor | None = None, *, short: bool = False) -> None:
    residual, rounding = (a.short_left, KEY) if short else (a.left, None)
    single.sign_offer(a.work, residual, a.bits, a.sums, a.count, key=KEY, divisor=divisor)
    divisors = None if divisor is None else [divisor]
    given = ([a.bits], [a.step], [a.count], [a.work], [residual])
    ops.sign_decode_all(*given, feedback="global", divisors=divisors, rounding=rounding)


class Held:
    """Marsit's local step with AdamW behind it: torch's own, and one that divides by a second moment that is held."""

    def __init__(self, a: Arrays) -> None:
        self.a, self.divisor, self.square = a, a.grad.abs() + 0.5, a.residual.square()
        parameter = torch.nn.Parameter(a.work.clone())
        parameter.grad = a.work
        self.adam = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        self.adam.step()
        self.state, self.weight = self.adam.state[parameter], parameter.detach()

    def arguments(self) -> tuple[object, ...]:
        return [self.state["exp_avg_sq"]], [self.state["exp_avg"]], [self.a.work], [self.square], None

    def own(self) -> None:
        local_step(self.a)
        self.adam.step()

    def moved(self) -> tuple[object, ...]:
        return [self.weight], [self.state["exp_avg"]], [self.a.work], [self.square], None

    def held(self, *, short: bool = False) -> None:
        local_step(self.a, self.divisor, short=short)
        ops.adam_step_all(*self.moved(), **ADAM_STEP)  # type: ignore[arg-type]


def adam(a: Arrays) -> Iterable[Case]:
    h, n, bit_bytes = Held(a), a.count, 8 * a.words
    yield kernel_case("adam_hold_all", 16 * n, "adam_hold_all", *h.arguments(), **ADAM)
    yield kernel_case("adam_step_all", 24 * n, "adam_step_all", *h.moved(), **ADAM_STEP)
    yield Case("torch's AdamW, fused", 28 * n, h.adam.step)
    yield Case("local step and AdamW", 52 * n + 2 * bit_bytes, h.own)
    yield Case("local step, AdamW, second moment held", 56 * n + 2 * bit_bytes, h.held)
    shorter = 50 * n + 2 * bit_bytes
    yield Case("local step, AdamW, second moment held, bfloat16", shorter, lambda: h.held(short=True))


def sgd(a: Arrays) -> Iterable[Case]:
    """SGD with momentum and weight decay: ours, and torch's with its defaults and fused."""
    n, parameter = a.count, torch.nn.Parameter(a.work.clone())
    parameter.grad = a.grad.clone()
    optimizers = {fused: torch.optim.SGD([parameter], **SGD_STEP, fused=fused) for fused in (False, True)}
    for optimizer in optimizers.values():
        optimizer.step()
    moved = [parameter.detach()], [optimizers[True].state[parameter]["momentum_buffer"]], [a.grad]
    yield kernel_case("sgd_step_all", 20 * n, "sgd_step_all", *moved, **SGD_STEP, by=0.7)
    yield Case("torch's SGD", 44 * n, optimizers[False].step)
    yield Case("torch's SGD, fused", 20 * n, optimizers[True].step)


def bit_vectors(a: Arrays) -> Iterable[Case]:
    size = 8 * a.words
    yield kernel_case("merge_bits p=1/2", 3 * size, "merge_bits", a.merged, a.parts[0], 1, 1, KEY)
    yield kernel_case("merge_bits p=1/3", 3 * size, "merge_bits", a.merged, a.parts[0], 2, 1, KEY)
    for ranks in (3, 4, 8):
        rows, fresh = ([torch.zeros_like(a.more) for _ in range(ops.count_rows(ranks))] for _ in range(2))
        moved = (3 + 2 * len(rows)) * size
        yield kernel_case(f"shaped_merge of {ranks}", moved, "shaped_merge", a.merged, a.parts[0], rows, fresh, ranks)
        moved = (1 + ranks + 2 * len(rows)) * size
        yield kernel_case(f"shaped_fold of {ranks}", moved, "shaped_fold", a.parts[:ranks], a.folded, rows, fresh)
    yield kernel_case("bernoulli_words p=1/7", size, "bernoulli_words", a.merged, 1, 7, KEY)
    yield kernel_case("majority_fold of 8", 9 * size, "majority_fold", a.parts, a.folded, a.count)


def dithering(a: Arrays) -> Iterable[Case]:
    n = a.count
    yield kernel_case("norm_offer", 4 * n, "norm_offer", a.grad, a.norm, n)
    yield kernel_case("norm_offer blocks", 4 * n, "norm_offer", a.grad, a.norms, BLOCK)
    yield kernel_case("norm_offer squares", 4 * n, "norm_offer", a.grad, a.sums, n, power=2)
    yield kernel_case("norm_sketch", 4 * n, "norm_sketch", a.grad, a.counters, KEY.at(purpose=NORM), counters=256)
    given, blocks = (a.grad, a.norm, n), (a.grad, a.norms, BLOCK)
    yield kernel_case("uniform_encode 8 bits", 5 * n, "uniform_encode", *blocks, a.bytes, KEY, bits=8, levels=31)
    yield kernel_case("uniform_encode 4 bits", 9 * n // 2, "uniform_encode", *blocks, a.packed, KEY, bits=4, levels=1)
    yield kernel_case("uniform_add 8 bits", 3 * n, "uniform_add", a.bytes, a.more_bytes, bits=8)
    yield kernel_case("uniform_add 4 bits", 3 * n // 2, "uniform_add", a.packed, a.more_packed, bits=4)
    six = torch.zeros(ops.code_layout(6, n)[1], dtype=torch.uint8)
    yield kernel_case("uniform_encode 6 bits", 19 * n // 4, "uniform_encode", *blocks, six, KEY, bits=6, levels=31)
    yield kernel_case("uniform_fold of 4", 4 * n, "uniform_fold", [six] * 4, a.bytes.clone(), n, bits=6, sum_bits=8)
    decoded = (a.more_bytes, *blocks[1:], a.out)
    yield kernel_case("uniform_decode 8 bits", 5 * n, "uniform_decode", *decoded, bits=8, scale=0.01)
    yield kernel_case(
        "exponential_encode 8 bits", 5 * n, "exponential_encode", *given, a.bytes, KEY, bits=8, headroom=3
    )
    yield kernel_case(
        "exponential_encode 4 bits", 9 * n // 2, "exponential_encode", *given, a.packed, KEY, bits=4, headroom=3
    )
    yield kernel_case("exponential_merge 8 bits", 3 * n, "exponential_merge", a.bytes, a.more_bytes, KEY, bits=8)
    yield kernel_case("exponential_merge 4 bits", 3 * n // 2, "exponential_merge", a.packed, a.more_packed, KEY, bits=4)
    rule = {"bits": 8, "headroom": 3, "scale": 0.3}
    yield kernel_case("exponential_decode 8 bits", 5 * n, "exponential_decode", a.more_bytes, *given[1:], a.out, **rule)


def quantising(a: Arrays) -> Iterable[Case]:
    """QSGD, TernGrad and natural compression, and the same rounding in torch."""
    n, blocks, ranks = a.count, -(-a.count // QSGD_BLOCK), 4
    parts = [a.bytes, a.more_bytes] * (ranks // 2)
    for bits in (8, 4, 3):
        rule = {"bits": bits, "block": QSGD_BLOCK}
        records = torch.zeros(blocks * ops.qsgd_record_bytes(**rule), dtype=torch.uint8)
        size, label = records.numel(), f"{bits} bits"
        yield kernel_case(f"qsgd_encode {label}", 4 * n + size, "qsgd_encode", a.grad, records, KEY, **rule, norm=0)
        made = records.clone()
        single.qsgd_encode(a.grad, made, KEY, **rule, norm=0)
        given = ([made] * ranks, records.clone(), KEY)
        yield kernel_case(f"qsgd_fold of {ranks} {label}", (ranks + 1) * size, "qsgd_fold", *given, **rule, norm=0)
        yield kernel_case(f"qsgd_decode {label}", 4 * n + size, "qsgd_decode", made, a.out, **rule, scale=0.01)
    yield from loco(a, blocks, ranks)
    rule = {"bits": 8, "block": QSGD_BLOCK, "norm": 2}
    records = torch.zeros(blocks * ops.qsgd_record_bytes(8, QSGD_BLOCK), dtype=torch.uint8)
    yield kernel_case("qsgd_encode 2-norm", 5 * n, "qsgd_encode", a.grad, records, KEY, **rule)
    yield Case("torch qsgd 8 bits", 4 * n, lambda: torch_qsgd(a))
    yield from elias(a)
    yield kernel_case("moments_offer", 4 * n, "moments_offer", a.grad, a.norm.clone(), a.sums.clone(), n)
    bounded = (a.grad, a.norm, n, a.packed.clone(), KEY)
    bound = {"bits": 4, "levels": 1, "bounds": a.norm / 2}
    yield kernel_case("uniform_encode ternary", 9 * n // 2, "uniform_encode", *bounded, **bound)
    yield kernel_case(
        f"exponential_fold of {ranks}", (ranks + 1) * n, "exponential_fold", parts, a.bytes.clone(), KEY, headroom=3
    )


def loco(a: Arrays, blocks: int, ranks: int) -> Iterable[Case]:
    rule = {"bits": 4, "block": QSGD_BLOCK, "norm": 0}
    records, kept = (
        torch.zeros(blocks * ops.qsgd_record_bytes(bits, QSGD_BLOCK), dtype=torch.uint8) for bits in (4, 8)
    )
    single.qsgd_encode(a.grad / 9, kept, KEY, bits=8, block=QSGD_BLOCK, norm=0)
    made, left, more = records.clone(), kept.clone(), rule | {"kept_bits": 8, "beta": 0.8}
    size, both = records.numel(), 2 * kept.numel()
    yield kernel_case("loco_encode", 4 * a.count + size + both, "loco_encode", a.grad, kept, records, left, **more)
    single.qsgd_encode(a.grad, made, KEY, **rule)
    folded = ([made] * ranks, kept, records.clone(), left.clone())
    yield kernel_case(f"loco_fold of {ranks}", (ranks + 1) * size + both, "loco_fold", *folded, **more)


def elias(a: Arrays) -> Iterable[Case]:
    """The reference takes a microsecond for each bit, so it sees the first elements only."""
    n, piece = a.count, a.grad[:CHECKED_ELEMENTS]
    for name, bits, key, more in (("4 bits", 4, KEY, 0.0), ("8 bits", 8, KEY, 0.0), ("error 0.1", 8, None, 0.1)):
        rule = {"bits": bits, "block": QSGD_BLOCK}
        how: dict[str, Any] = {**rule, "norm": 2, "error": more}
        out, small = (torch.zeros(ops.elias_bound(x.numel(), **rule), dtype=torch.uint8) for x in (a.grad, piece))
        place, place_there = single.place_in(out), single.place_in(small)
        encode = partial(ops.elias_encode, a.grad, place, out, key, **how)
        encode()
        ops.elias_encode(piece, place_there, small, key, **how)
        used, scale = int(place[1]), {"scale": 0.01}
        sent, there = out[:used].clone(), small[: int(place_there[1])].clone()

        def decode(ranks: int, sent: Tensor = sent, rule: dict[str, int] = rule) -> None:
            ops.elias_decode([sent] * ranks, a.out, **rule, scale=0.01)

        check = against_reference("elias_encode", piece, place_there, small, key, **how)
        yield Case(f"elias_encode {name}", 4 * n + used, encode, check)
        for ranks in (1, 4):
            given = ([there] * ranks, a.out[: piece.numel()])
            check = against_reference("elias_decode", *given, **rule, **scale)
            run = partial(decode, ranks)
            yield Case(f"elias_decode of {ranks} {name}", 4 * n + ranks * used, run, check)


def torch_qsgd(a: Arrays) -> None:
    """What qsgd_encode does, without the packing and with one norm for all, with preallocated outputs."""
    norm = a.grad.abs().max()
    torch.mul(a.grad, 127 / norm, out=a.out).add_(torch.rand(a.count, out=a.work)).floor_()
    a.bytes.view(torch.int8).copy_(a.out)


def sparse(a: Arrays) -> Iterable[Case]:
    """Bytes of positions and sections are left out beside the tensor's own."""
    n, x, sent = a.count, (a.grad, a.residual, a.kept), a.section[: a.section_bytes]
    numbers, mean = single.numbers_for(a.grad), a.values[:1].clone()
    yield kernel_case("top_select 1 %", 8 * n, "top_select", *x, a.positions.clone(), a.values.clone(), numbers)
    yield kernel_case("binary_select 1 %", 8 * n, "binary_select", *x, a.positions.clone(), mean, numbers)
    place = single.place_in(a.section)
    encoded = (a.positions, a.found, a.values[:1], a.parameter, n, place, a.section.clone())
    yield kernel_case("binary_encode", 4 * a.kept + a.section_bytes, "binary_encode", *encoded)
    decoded = (a.work, a.left, 0.25)
    yield kernel_case("binary_decode", 16 * n, "binary_decode", [sent], 0, a.parameter, *decoded)
    yield kernel_case("binary_decode of 8", 16 * n, "binary_decode", [sent] * 8, 0, a.parameter, *decoded)
    yield kernel_case("binary_clear", 8 * a.kept, "binary_clear", sent, a.parameter, a.out)
    yield kernel_case("count_nonfinite", 4 * n, "count_nonfinite", a.grad)
    yield Case("torch topk 1 %", 8 * n, lambda: torch.topk(torch.add(a.grad, a.residual, out=a.out).abs(), a.kept))
    yield Case("numpy decode", 16 * n, lambda: numpy_sparse_decode(a))


def unions(a: Arrays) -> Iterable[Case]:
    """Of single elements and of rows."""
    n = a.count
    for block, density in ((block, density) for block in (1, 64) for density in DENSITIES):
        there = torch.rand(-(-n // block), generator=torch.Generator().manual_seed(1)) < density
        grad = a.grad * there.repeat_interleave(block)[:n]
        bits = torch.zeros(ops.word_count(there.numel()), dtype=torch.int64)
        single.union_mark(grad, bits, block=block)
        kept = single.union_count(bits, n, block=block)
        given, label = (bits, kept), f"{density:.0%} in blocks of {block}"
        sent = torch.zeros(kept)
        yield kernel_case(f"union_mark {label}", 4 * n + bits.nbytes, "union_mark", grad, bits.clone(), block=block)
        moved = 8 * kept + bits.nbytes
        yield kernel_case(f"union_encode {label}", moved, "union_encode", grad, *given, sent, block=block)
        moved = 4 * (n + kept) + bits.nbytes
        yield kernel_case(f"union_decode {label}", moved, "union_decode", sent, *given, a.out, block=block, scale=0.3)
        moved = 8 * n + 12 * kept + 4 * bits.nbytes
        yield Case(f"homomorphic step {label}", moved, partial(union_step, grad, bits, sent, a.out, block))
    yield kernel_case("union_count", 8 * a.words, "union_count", a.more, n, block=1)


def union_step(grad: Tensor, bits: Tensor, sent: Tensor, out: Tensor, block: int) -> None:
    single.union_mark(grad, bits, block=block)
    kept = single.union_count(bits, grad.numel(), block=block)
    single.union_encode(grad, bits, kept, sent, block=block)
    single.union_decode(sent, bits, kept, out, block=block, scale=0.3)


def values(a: Arrays) -> Iterable[Case]:
    """Bytes of sections and samples are left out beside the tensor's own."""
    n, chosen, found = a.count, a.positions.clone(), a.values.clone()
    single.top_select(a.grad, a.residual, a.kept, chosen, found, numbers := single.numbers_for(a.grad))
    kept = int(numbers[0])
    room = torch.zeros(ops.values_bound(kept, n, a.parameter, 4), dtype=torch.uint8)
    encoded = (chosen, kept, found, a.parameter, n, place := single.place_in(room), room)
    single.values_encode(*encoded)
    sent = room[: int(place[1])].clone()
    yield kernel_case("values_encode", 8 * kept + sent.numel(), "values_encode", *encoded)
    levels = torch.zeros(2)
    yield kernel_case("codebook_fit 2 bits", 4 * kept, "codebook_fit", found[:kept], levels, bits=2)
    coded = (*encoded[:5], single.place_in(room), torch.zeros_like(room))
    rule = {"form": "codes2", "head": levels}
    yield kernel_case("values_encode 2 bits", 8 * kept, "values_encode", *coded, **rule)
    decoded = (0, a.parameter, a.work, a.left, 0.25)
    yield kernel_case("values_decode", 16 * n, "values_decode", [sent], *decoded)
    yield kernel_case("values_decode of 8", 16 * n, "values_decode", [sent] * 8, *decoded)
    kept_here = {"momentum": a.out.clone(), "factor": 0.9}
    yield kernel_case("values_decode momentum", 24 * n, "values_decode", [sent], *decoded, **kept_here)
    of_chunk, rest = 41, -(-(n % 4096) // 100)
    room_for = n // 4096 * of_chunk + rest
    chosen, found = torch.zeros(room_for, dtype=torch.int32), torch.zeros(room_for)
    given = (a.grad, a.residual, rest, chosen, found, numbers)
    yield kernel_case("chunk_select 1 %", 8 * n, "chunk_select", *given, chunk=4096, k=of_chunk)
    sample, key = a.values.clone(), KEY.at(rank=0, purpose=SAMPLE)
    blocks = sample[: len(sample) // 1024 * 1024]
    if len(blocks):
        yield kernel_case("sample_offer blocks", 8 * n, "sample_offer", a.grad, a.residual, blocks, key, block=1024)
    yield kernel_case("sample_offer 1 %", 8 * n, "sample_offer", a.grad, a.residual, sample, key)
    yield kernel_case("sample_offer no residual", 4 * n, "sample_offer", a.grad, None, sample, key)
    yield kernel_case("sample_decode 1 %", 16 * n, "sample_decode", sample, a.work, a.left, key, 0.25)
    yield kernel_case(
        "sample_decode no residual", 4 * n, "sample_decode", sample, a.work, None, key, 0.25, weighted=True
    )


def numpy_sparse_decode(a: Arrays) -> None:
    """What binary_decode does, without the decoding, in NumPy with preallocated outputs."""
    at, left, out = a.positions[: a.found].numpy(), a.left.numpy(), a.out.numpy()
    np.add(a.grad.numpy(), left, out=left)
    left[at] -= 0.25
    out[:] = 0
    out[at] = 0.25


def dense(a: Arrays) -> Iterable[Case]:
    n = a.count
    yield kernel_case("dense_offer", 12 * n, "dense_offer", a.grad, a.residual, a.out)
    yield kernel_case("dense_offer to float16", 10 * n, "dense_offer", a.grad, a.residual, a.half)
    yield kernel_case("dense_offer to bfloat16", 10 * n, "dense_offer", a.grad, a.residual, a.brain)
    yield kernel_case("dense_add", 12 * n, "dense_add", a.work, a.residual)
    yield kernel_case("dense_add float16", 6 * n, "dense_add", a.half, a.other_half)
    yield kernel_case("dense_add bfloat16", 6 * n, "dense_add", a.brain, a.other_brain)
    yield kernel_case("dense_decode", 8 * n, "dense_decode", a.grad, a.out, scale=0.25)
    yield kernel_case("dense_decode of float16", 6 * n, "dense_decode", a.other_half, a.out, scale=0.25)
    yield Case("torch add_", 12 * n, lambda: a.work.add_(a.residual))
    yield Case("torch add_ float16", 6 * n, lambda: a.half.add_(a.other_half))
    yield Case("torch mul", 8 * n, lambda: torch.mul(a.grad, 0.25, out=a.out))
    yield Case("torch half to float", 6 * n, lambda: a.out.copy_(a.other_half))


class Sketched:
    """A sketch, and the same with precomputed hashes of every element for torch."""

    def __init__(self, a: Arrays) -> None:
        self.columns, self.k = ops.sketch_columns(a.count // SKETCH_SHARE), max(1, a.count // TOP_SHARE)
        self.key, self.spans = KEY.at(rank=0, purpose=SKETCH), [(0, a.count)]
        self.table = torch.zeros(SKETCH_ROWS * self.columns)
        ops.sketch_encode(a.grad, None, self.table, SKETCH_ROWS, self.key)
        self.sums, self.cleared = self.table.clone(), self.table.clone()
        self.positions, self.estimates = torch.zeros(self.k, dtype=torch.int64), torch.zeros(self.k)
        ops.sketch_top(self.table, SKETCH_ROWS, self.key, self.spans, self.k, self.positions, self.estimates)
        self.cells: list[Tensor] = []
        self.signs: list[Tensor] = []

    def hash(self, count: int) -> None:
        """Four bytes an element and row for the cells, and as many for the signs."""
        generator = torch.Generator().manual_seed(2)
        for row in range(SKETCH_ROWS - len(self.cells)):
            first = row * self.columns
            drawn = torch.randint(first, first + self.columns, (count,), generator=generator, dtype=torch.int32)
            self.cells.append(drawn)
            self.signs.append(torch.randint(0, 2, (count,), generator=generator, dtype=torch.int32).float() * 2 - 1)

    def torch_encode(self, a: Arrays) -> None:
        self.hash(a.count)
        for cells, signs in zip(self.cells, self.signs, strict=True):
            self.sums.index_add_(0, cells, torch.mul(a.grad, signs, out=a.out))

    def torch_top(self, a: Arrays) -> None:
        self.hash(a.count)
        rows = [
            self.table.index_select(0, cells).mul_(signs) for cells, signs in zip(self.cells, self.signs, strict=True)
        ]
        estimates = torch.stack(rows).median(dim=0).values
        chosen = estimates.abs().topk(self.k, sorted=False).indices.sort().values
        torch.index_select(estimates, 0, chosen)


def sketch_case(label: str, bytes_moved: int, name: str, checked: Sequence[object], *arguments: object) -> Case:
    """Return a case that is checked on other arguments: the reference needs seconds for a million elements."""
    function = single.named(name)
    return Case(label, bytes_moved, lambda: function(*arguments), against_reference(name, *checked))


def sketches(a: Arrays) -> Iterable[Case]:
    n, s = a.count, Sketched(a)
    rows, size = SKETCH_ROWS, min(n, CHECKED_BYTES)
    reads = rows * 4 * n  # of cells, from the cache where the table fits it
    table, piece, k = (s.sums, rows, s.key), slice(0, size), min(s.k, size)
    plain = (a.grad[piece], None, *table)
    yield sketch_case("sketch_encode", 4 * n + 2 * reads, "sketch_encode", plain, a.grad, None, *table)
    encoded = (a.grad[piece], a.residual[piece], *table)
    given = (a.grad, a.residual, *table)
    yield sketch_case("sketch_encode residual", 8 * n + 2 * reads, "sketch_encode", encoded, *given)
    table = (s.table, rows, s.key)
    chosen = (*table, [(0, size)], k, s.positions[:k], s.estimates[:k])
    found = (s.positions, s.estimates)
    yield sketch_case("sketch_top 1 %", reads + 12 * s.k, "sketch_top", chosen, *table, s.spans, s.k, *found)
    touched = (4 * rows + 8) * s.k
    yield kernel_case("sketch_clear 1 %", touched, "sketch_clear", s.cleared, rows, s.key, s.positions)
    yield kernel_case("absorb", 16 * n, "absorb", a.work, a.left)
    yield kernel_case("absorb momentum", 24 * n, "absorb", a.work, a.left, a.out.clone(), 0.9)
    yield Case("torch sketch (index_add_)", 4 * n + 2 * reads, lambda: s.torch_encode(a))
    yield Case("torch sketch_top (topk)", reads + 12 * s.k, lambda: s.torch_top(a))


class Factors:
    """The largest square matrix that the arrays hold, with factors of one rank."""

    def __init__(self, a: Arrays, rank: int) -> None:
        self.rank, self.rows = rank, math.isqrt(a.count)
        self.used = self.rows * self.rows
        self.grad, self.residual = a.work[: self.used], a.left[: self.used]
        generator = torch.Generator().manual_seed(3)
        self.left, self.right, self.start = (
            torch.randn(rank * self.rows, generator=generator).div_(a.count**0.5) for _ in range(3)
        )

    def step(self) -> None:
        """What powersgd does in a world of one."""
        ops.lowrank_start(self.right, self.start, self.rank, KEY)
        ops.lowrank_left(self.grad, self.residual, self.rows, self.start, self.left)
        ops.lowrank_orthonormalise(self.left, self.rank)
        ops.lowrank_right(self.grad, self.residual, self.rows, self.left, self.right)
        ops.lowrank_decode(self.left, self.right, self.rows, self.grad, self.residual)

    def torch_step(self, out: Tensor) -> None:
        """The same in torch with preallocated outputs of the size of the matrix."""
        matrix, left = out[: self.used].view(self.rows, -1), self.left.view(self.rank, -1)
        torch.add(self.grad, self.residual, out=matrix.view(-1))
        basis, _ = torch.linalg.qr(matrix @ self.right.view(self.rank, -1).T)
        left.copy_(basis.T)
        self.right.copy_((left @ matrix).view(-1))
        torch.mm(basis, self.right.view(self.rank, -1), out=self.grad.view(self.rows, -1))
        torch.sub(matrix.view(-1), self.grad, out=self.residual)


def low_rank(a: Arrays) -> Iterable[Case]:
    """Bytes of the factors are left out beside the matrix's own."""
    for rank in (4, 8):
        f = Factors(a, rank)
        n, x = f.used, (f.grad, f.residual, f.rows)
        yield kernel_case(f"lowrank_left rank {rank}", 8 * n, "lowrank_left", *x, f.right, f.left.clone())
        yield kernel_case(f"lowrank_right rank {rank}", 8 * n, "lowrank_right", *x, f.left, f.right.clone())
        given = (f.left.clone(), f.right.clone(), f.rows, f.grad, f.residual)
        yield kernel_case(f"lowrank_decode rank {rank}", 16 * n, "lowrank_decode", *given)
        lines = f.left.clone()
        size = 4 * lines.numel() * (rank + 3)
        yield kernel_case(f"lowrank_orthonormalise rank {rank}", size, "lowrank_orthonormalise", lines, rank)
        yield Case(f"local step of powersgd (lowrank) {rank}", 32 * n, f.step)
        yield Case(f"torch powersgd step (lowrank) {rank}", 32 * n, partial(f.torch_step, a.out))


def records(a: Arrays) -> Iterable[Case]:
    n, blocks = a.count, -(-a.count // BLOCK)
    parts = [torch.zeros(blocks * ops.record_bytes(BLOCK), dtype=torch.uint8) for _ in range(4)]
    for rank, part in enumerate(parts):
        ops.record_offer(a.grad if rank % 2 else a.residual, None, part, BLOCK, rule="l2")
    size, scales = parts[0].numel(), torch.full((blocks,), 0.01)
    for rule in ("l1", "l2"):
        offered = (a.grad, a.residual, parts[0].clone(), BLOCK)
        yield kernel_case(f"record_offer {rule}", 8 * n + size, "record_offer", *offered, rule=rule)
    folded = (parts, a.residual, a.out, parts[0].clone(), BLOCK)
    yield kernel_case("record_fold of 4", 16 * n + 5 * size, "record_fold", *folded, rule="l2")
    yield kernel_case("record_decode", 16 * n + size, "record_decode", parts[1], scales, a.work, a.left, BLOCK)
    yield Case("torch records of a worker", 24 * n, lambda: torch_records(a))


def torch_records(a: Arrays) -> None:
    """What record_offer and record_decode do, without the packing, in torch with preallocated outputs."""
    torch.add(a.grad, a.residual, out=a.work)
    whole = a.count // BLOCK * BLOCK
    scales = torch.linalg.vector_norm(a.work[:whole].view(-1, BLOCK), dim=1, keepdim=True) / BLOCK**0.5
    torch.sign(a.work, out=a.out)
    a.out[:whole].view(-1, BLOCK).mul_(scales)
    torch.sub(a.work, a.out, out=a.left)


def checksums(a: Arrays) -> Iterable[Case]:
    n, piece = a.raw.numel(), a.raw[:CHECKED_BYTES]
    copy = a.out.view(torch.uint8)
    crc_check = against_reference("crc32c", piece)
    copy_check = against_reference("crc32c_copy", copy[: piece.numel()], piece)
    yield Case("crc32c", n, lambda: ops.crc32c(a.raw), crc_check)
    yield Case("crc32c_copy", 2 * n, lambda: ops.crc32c_copy(copy, a.raw), copy_check)
    yield kernel_case("hash64", n, "hash64", a.raw)


FAMILIES = (
    yardsticks, one_bit, bit_vectors, dithering, quantising, sparse, unions, values, dense, sketches, low_rank, records,
    checksums, adam, sgd,
)  # fmt: skip


def cases(a: Arrays, pattern: str) -> list[Case]:
    every = [case for family in FAMILIES for case in family(a)]
    return [case for case in every if pattern in case.name or case.name == "triad"]


# ---- running and reporting --------------------------------------------------------------------


def rounds(number: int) -> Iterable[int]:
    """Count, with a progress bar where somebody watches."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            return tqdm(range(number), unit="round", leave=False)
    return range(number)


def measure(every: list[Case], repeat: int) -> None:
    for case in every:
        case.run()
    for _ in rounds(repeat):
        for case in every:
            start = time.perf_counter()
            case.run()
            case.seconds.append(time.perf_counter() - start)


def report(every: list[Case], wrong: dict[str, int]) -> list[Record]:
    """Print the table and return its lines as records."""
    triad = next(case for case in every if case.name == "triad")
    speed = triad.bytes_moved / triad.median
    print(f"{'kernel':28s} {'median ms':>9s} {'min ms':>8s} {'GB/s':>7s} {'of triad':>8s} {'wrong':>6s}")
    records: list[Record] = []
    for case in every:
        rate, errors = case.bytes_moved / case.median, wrong.get(case.name)
        shown = "-" if errors is None else str(errors)
        times = f"{1e3 * case.median:9.3f} {1e3 * min(case.seconds):8.3f}"
        print(f"{case.name:28s} {times} {rate / 1e9:7.2f} {rate / speed:8.2f} {shown:>6s}")
        found = spread(case.seconds)
        records.append(
            {
                "bench": "kernels",
                "name": case.name,
                "bytes": case.bytes_moved,
                "median_seconds": found.median,
                "min_seconds": min(case.seconds),
                "spread_seconds": found.q3 - found.q1,
                "repeats": len(case.seconds),
                "bytes_per_second": rate,
                "fraction_of_triad": rate / speed,
                "wrong": errors,
            }
        )
    return records


def draw(records: Sequence[Record], first: Record, path: Path) -> None:
    """Draw bars of every kernel's bandwidth as a fraction of the triad's."""
    from benchmarks.figures import COLOURS, GREY, bars, new_figure, save_as  # matplotlib is needed for plots only

    black, blue, *_ = COLOURS
    machine = first["machine"]
    title = "Bandwidth of the kernels against the memory's own"
    notes = (
        f"Measured on {machine['processor']} ({machine['cores']} cores), {first['instruction_set']}, "
        f"{first['threads']} thread(s), {first['count']:,} float32; medians of {records[0]['repeats']}.\n"
        "Each array counts once for each time that it is read or written. A triad a = b + s * c reads two arrays and "
        "writes one, so kernels that mostly read, or use arrays again from the cache, can exceed it. "
        "Blue: horovod-compress; grey: NumPy and torch."
    )
    figure, (panel,) = new_figure(title, notes, 8.5, 0.7 + 0.25 * len(records))
    colours = [GREY if by_others(r["name"]) else black if r["name"] == "triad" else blue for r in records]
    values = [r["fraction_of_triad"] for r in records]
    bars(panel, [r["name"] for r in records], values, colours, lambda value: f"{value:.2f}")
    panel.axvline(1.0, color=black, linewidth=0.9)
    panel.set_xlabel("bytes per second, as a fraction of the triad's")
    save_as(figure, path)


def by_others(name: str) -> bool:
    """Return whether a case is not a kernel of this project."""
    return any(word in name for word in ("torch", "numpy"))


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Run the cases and print the table; return 1 where a result is wrong."""
    torch.set_num_threads(options.threads)
    print(f"{processor()}, {ops.instruction_set()}, {options.count:,} float32, {options.threads} thread(s)")
    try:
        arrays = Arrays(options.count)
    except (MemoryError, RuntimeError) as error:  # torch's own error is the last
        print(f"kernels: --count {options.count} takes more memory than there is: {error}", file=sys.stderr)
        return 1
    every = cases(arrays, options.filter)
    wrong = {case.name: case.wrong() for case in every if case.wrong}
    measure(every, options.repeat)
    facts = {"instruction_set": ops.instruction_set(), "count": options.count, "threads": options.threads}
    first, records = results.header("kernels", argv, **facts), report(every, wrong)
    if options.json:
        results.append_json(options.json, [first, *records])
    if options.plot:
        draw(records, first, options.plot)
    bad = [name for name, count in wrong.items() if count]
    if bad:
        print(f"wrong results: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0
