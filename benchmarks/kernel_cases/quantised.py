"""Methods that round: norms, uniform and exponential levels, QSGD, LoCo, Elias codes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import NORM

from .arrays import BLOCK, KEY, Arrays
from .case import Case, against_reference, kernel_case

QSGD_BLOCK = 512
CHECKED_ELEMENTS = 1 << 17  # the reference of Elias codes


def dithering(a: Arrays) -> Iterable[Case]:
    n, g = a.count, a.grad_bytes
    yield kernel_case("norm_offer", g * n, "norm_offer", a.grad, a.norm, n)
    yield kernel_case("norm_offer blocks", g * n, "norm_offer", a.grad, a.norms, BLOCK)
    yield kernel_case("norm_offer squares", g * n, "norm_offer", a.grad, a.sums, n, power=2)
    yield kernel_case("norm_sketch", g * n, "norm_sketch", a.grad, a.counters, KEY.at(purpose=NORM), counters=256)
    given, blocks = (a.grad, a.norm, n), (a.grad, a.norms, BLOCK)
    yield kernel_case("uniform_encode 8 bits", (g + 1) * n, "uniform_encode", *blocks, a.bytes, KEY, bits=8, levels=31)
    yield kernel_case(
        "uniform_encode 4 bits", g * n + n // 2, "uniform_encode", *blocks, a.packed, KEY, bits=4, levels=1
    )
    yield kernel_case("uniform_add 8 bits", 3 * n, "uniform_add", a.bytes, a.more_bytes, bits=8)
    yield kernel_case("uniform_add 4 bits", 3 * n // 2, "uniform_add", a.packed, a.more_packed, bits=4)
    six = torch.zeros(ops.code_layout(6, n)[1], dtype=torch.uint8)
    yield kernel_case(
        "uniform_encode 6 bits", g * n + 3 * n // 4, "uniform_encode", *blocks, six, KEY, bits=6, levels=31
    )
    yield kernel_case("uniform_fold of 4", 4 * n, "uniform_fold", [six] * 4, a.bytes.clone(), n, bits=6, sum_bits=8)
    decoded = (a.more_bytes, *blocks[1:], a.out)
    yield kernel_case("uniform_decode 8 bits", (g + 1) * n, "uniform_decode", *decoded, bits=8, scale=0.01)
    yield kernel_case(
        "exponential_encode 8 bits", (g + 1) * n, "exponential_encode", *given, a.bytes, KEY, bits=8, headroom=3
    )
    yield kernel_case(
        "exponential_encode 4 bits", g * n + n // 2, "exponential_encode", *given, a.packed, KEY, bits=4, headroom=3
    )
    yield kernel_case("exponential_merge 8 bits", 3 * n, "exponential_merge", a.bytes, a.more_bytes, KEY, bits=8)
    yield kernel_case("exponential_merge 4 bits", 3 * n // 2, "exponential_merge", a.packed, a.more_packed, KEY, bits=4)
    rule = {"bits": 8, "headroom": 3, "scale": 0.3}
    yield kernel_case(
        "exponential_decode 8 bits", (g + 1) * n, "exponential_decode", a.more_bytes, *given[1:], a.out, **rule
    )


def quantising(a: Arrays) -> Iterable[Case]:
    """QSGD, TernGrad and natural compression, and the same rounding in torch."""
    n, g, blocks, ranks = a.count, a.grad_bytes, -(-a.count // QSGD_BLOCK), 4
    parts = [a.bytes, a.more_bytes] * (ranks // 2)
    for bits in (8, 4, 3):
        rule = {"bits": bits, "block": QSGD_BLOCK}
        records = torch.zeros(blocks * ops.qsgd_record_bytes(**rule), dtype=torch.uint8)
        size, label = records.numel(), f"{bits} bits"
        yield kernel_case(f"qsgd_encode {label}", g * n + size, "qsgd_encode", a.grad, records, KEY, **rule, norm=0)
        made = records.clone()
        single.qsgd_encode(a.grad, made, KEY, **rule, norm=0)
        given = ([made] * ranks, records.clone(), KEY)
        yield kernel_case(f"qsgd_fold of {ranks} {label}", (ranks + 1) * size, "qsgd_fold", *given, **rule, norm=0)
        yield kernel_case(f"qsgd_decode {label}", g * n + size, "qsgd_decode", made, a.out, **rule, scale=0.01)
    yield from loco(a, blocks, ranks)
    rule = {"bits": 8, "block": QSGD_BLOCK, "norm": 2}
    records = torch.zeros(blocks * ops.qsgd_record_bytes(8, QSGD_BLOCK), dtype=torch.uint8)
    yield kernel_case("qsgd_encode 2-norm", (g + 1) * n, "qsgd_encode", a.grad, records, KEY, **rule)
    yield Case("torch qsgd 8 bits", 4 * n, lambda: torch_qsgd(a))
    yield from elias(a)
    yield kernel_case("moments_offer", g * n, "moments_offer", a.grad, a.norm.clone(), a.sums.clone(), n)
    bounded = (a.grad, a.norm, n, a.packed.clone(), KEY)
    bound = {"bits": 4, "levels": 1, "bounds": a.norm / 2}
    yield kernel_case("uniform_encode ternary", g * n + n // 2, "uniform_encode", *bounded, **bound)
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
    yield kernel_case(
        "loco_encode", a.grad_bytes * a.count + size + both, "loco_encode", a.grad, kept, records, left, **more
    )
    single.qsgd_encode(a.grad, made, KEY, **rule)
    folded = ([made] * ranks, kept, records.clone(), left.clone())
    yield kernel_case(f"loco_fold of {ranks}", (ranks + 1) * size + both, "loco_fold", *folded, **more)


def elias(a: Arrays) -> Iterable[Case]:
    """The reference takes a microsecond for each bit, so it sees the first elements only."""
    n, g, piece = a.count, a.grad_bytes, a.grad[:CHECKED_ELEMENTS]
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
        yield Case(f"elias_encode {name}", g * n + used, encode, check)
        for ranks in (1, 4):
            given = ([there] * ranks, a.out[: piece.numel()])
            check = against_reference("elias_decode", *given, **rule, **scale)
            run = partial(decode, ranks)
            yield Case(f"elias_decode of {ranks} {name}", g * n + ranks * used, run, check)


def torch_qsgd(a: Arrays) -> None:
    """What qsgd_encode does, without the packing and with one norm for all, with preallocated outputs."""
    norm = a.grad.abs().max()
    torch.mul(a.grad, 127 / norm, out=a.out).add_(torch.rand(a.count, out=a.work)).floor_()
    a.bytes.view(torch.int8).copy_(a.out)
