"""Methods of one bit: signs, two values, records, and the merging of bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops

from .arrays import BLOCK, KEY, ROW, Arrays
from .case import Case, kernel_case


def one_bit(a: Arrays) -> Iterable[Case]:
    n, g, bit_bytes = a.count, a.grad_bytes, 8 * a.words
    yield kernel_case("sign_pack", g * n + bit_bytes, "sign_pack", a.grad, a.bits)
    yield kernel_case("sign_pack float16", 2 * n + bit_bytes, "sign_pack", a.half, a.bits)
    offered = (a.grad, a.residual, a.bits)
    yield kernel_case("sign_offer", (g + 4) * n + bit_bytes, "sign_offer", *offered, a.sums, n, key=KEY)
    yield kernel_case("sign_offer rows", (g + 4) * n + bit_bytes, "sign_offer", *offered, a.row_sums, ROW, key=KEY)
    decoded = (a.work, a.left)
    moved = (2 * g + 8) * n + bit_bytes
    yield kernel_case("sign_decode global", moved, "sign_decode", a.more, a.step, n, *decoded, feedback="global")
    yield kernel_case("sign_decode own", moved, "sign_decode", a.more, a.step, n, *decoded, feedback="own", key=KEY)
    rows = (a.more, a.row_steps, ROW)
    yield kernel_case("sign_decode rows", moved, "sign_decode", *rows, *decoded, feedback="global")
    alone = (a.more, a.step, n, a.out, None)
    yield kernel_case("sign_decode alone", g * n + bit_bytes, "sign_decode", *alone, feedback="none")
    yield from two_values(a)
    yield Case("local step (offer + decode)", (3 * g + 12) * n + 2 * bit_bytes, lambda: local_step(a))
    shorter = (a.work, a.short_left)
    yield kernel_case(
        "sign_offer of bfloat16", (g + 2) * n + bit_bytes, "sign_offer", *shorter, a.bits, a.sums, n, key=KEY
    )
    given = {"feedback": "own", "key": KEY, "rounding": KEY}
    yield kernel_case("sign_decode to bfloat16", (2 * g + 4) * n + bit_bytes, "sign_decode", *rows, *shorter, **given)
    moved = (3 * g + 6) * n + 2 * bit_bytes
    yield Case("local step, residual of bfloat16", moved, lambda: local_step(a, short=True))


def two_values(a: Arrays) -> Iterable[Case]:
    n, g, size = a.count, a.grad_bytes, 8 * a.words
    counts = torch.zeros(1, dtype=torch.int64)
    sides = (a.bits, a.sums, a.sums.clone(), counts, n)
    yield kernel_case("two_value_offer", (g + 4) * n + size, "two_value_offer", a.grad, a.residual, *sides)
    values, lows = [a.step] * 8, [-2 * a.step] * 8
    for ranks in (1, 4, 8):
        given = (a.parts[:ranks], values[:ranks], lows[:ranks], n, 0, a.work, a.left)
        moved = (2 * g + 8) * n + ranks * size
        yield kernel_case(f"two_value_decode of {ranks}", moved, "two_value_decode", *given, scale=0.25)
    moved = (3 * g + 12) * n + 2 * size
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


def records(a: Arrays) -> Iterable[Case]:
    n, g, blocks = a.count, a.grad_bytes, -(-a.count // BLOCK)
    parts = [torch.zeros(blocks * ops.record_bytes(BLOCK), dtype=torch.uint8) for _ in range(4)]
    for rank, part in enumerate(parts):
        ops.record_offer(a.grad if rank % 2 else a.residual, None, part, BLOCK, rule="l2")
    size, scales = parts[0].numel(), torch.full((blocks,), 0.01)
    for rule in ("l1", "l2"):
        offered = (a.grad, a.residual, parts[0].clone(), BLOCK)
        yield kernel_case(f"record_offer {rule}", (g + 4) * n + size, "record_offer", *offered, rule=rule)
    folded = (parts, a.residual, torch.zeros(n), parts[0].clone(), BLOCK)
    yield kernel_case("record_fold of 4", 16 * n + 5 * size, "record_fold", *folded, rule="l2")
    decoded = (parts[1], scales, a.work, a.left, BLOCK)
    yield kernel_case("record_decode", (2 * g + 8) * n + size, "record_decode", *decoded)
    yield Case("torch records of a worker", 24 * n, lambda: torch_records(a))


def torch_records(a: Arrays) -> None:
    """What record_offer and record_decode do, without the packing, in torch with preallocated outputs."""
    torch.add(a.grad, a.residual, out=a.work)
    whole = a.count // BLOCK * BLOCK
    scales = torch.linalg.vector_norm(a.work[:whole].view(-1, BLOCK), dim=1, keepdim=True) / BLOCK**0.5
    torch.sign(a.work, out=a.out)
    a.out[:whole].view(-1, BLOCK).mul_(scales)
    torch.sub(a.work, a.out, out=a.left)
