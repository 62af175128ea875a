"""Sparse methods: what chooses elements, codes their positions, and adds them up."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import SAMPLE

from .arrays import KEY, Arrays
from .case import Case, kernel_case

DENSITIES = (0.01, 0.05, 0.2, 0.5)  # of what is mostly zeros


def sparse(a: Arrays) -> Iterable[Case]:
    """Bytes of positions and sections are left out beside the tensor's own."""
    n, g, x, sent = a.count, a.grad_bytes, (a.grad, a.residual, a.kept), a.section[: a.section_bytes]
    numbers, mean = single.numbers_for(a.grad), a.values[:1].clone()
    yield kernel_case("top_select 1 %", (g + 4) * n, "top_select", *x, a.positions.clone(), a.values.clone(), numbers)
    yield kernel_case("binary_select 1 %", (g + 4) * n, "binary_select", *x, a.positions.clone(), mean, numbers)
    place = single.place_in(a.section)
    encoded = (a.positions, a.found, a.values[:1], a.parameter, n, place, a.section.clone())
    yield kernel_case("binary_encode", 4 * a.kept + a.section_bytes, "binary_encode", *encoded)
    decoded = (a.work, a.left, 0.25)
    yield kernel_case("binary_decode", (2 * g + 8) * n, "binary_decode", [sent], 0, a.parameter, *decoded)
    yield kernel_case("binary_decode of 8", (2 * g + 8) * n, "binary_decode", [sent] * 8, 0, a.parameter, *decoded)
    yield kernel_case("binary_clear", 8 * a.kept, "binary_clear", sent, a.parameter, a.out)
    yield kernel_case("count_nonfinite", g * n, "count_nonfinite", a.grad)
    yield Case("torch topk 1 %", 8 * n, lambda: torch.topk(torch.add(a.grad, a.residual, out=a.out).abs(), a.kept))
    yield Case("numpy decode", 16 * n, lambda: numpy_sparse_decode(a))


def unions(a: Arrays) -> Iterable[Case]:
    """Of single elements and of rows."""
    n, g = a.count, a.grad_bytes
    for block, density in ((block, density) for block in (1, 64) for density in DENSITIES):
        there = torch.rand(-(-n // block), generator=torch.Generator().manual_seed(1)) < density
        grad = a.grad * there.repeat_interleave(block)[:n]
        bits = torch.zeros(ops.word_count(there.numel()), dtype=torch.int64)
        single.union_mark(grad, bits, block=block)
        kept = single.union_count(bits, n, block=block)
        given, label = (bits, kept), f"{density:.0%} in blocks of {block}"
        sent = torch.zeros(kept)
        yield kernel_case(f"union_mark {label}", g * n + bits.nbytes, "union_mark", grad, bits.clone(), block=block)
        moved = (g + 4) * kept + bits.nbytes
        yield kernel_case(f"union_encode {label}", moved, "union_encode", grad, *given, sent, block=block)
        moved = g * n + 4 * kept + bits.nbytes
        yield kernel_case(f"union_decode {label}", moved, "union_decode", sent, *given, a.out, block=block, scale=0.3)
        moved = 2 * g * n + (g + 8) * kept + 4 * bits.nbytes
        yield Case(f"homomorphic step {label}", moved, partial(union_step, grad, bits, sent, a.out, block))
    yield kernel_case("union_count", 8 * a.words, "union_count", a.more, n, block=1)


def union_step(grad: Tensor, bits: Tensor, sent: Tensor, out: Tensor, block: int) -> None:
    single.union_mark(grad, bits, block=block)
    kept = single.union_count(bits, grad.numel(), block=block)
    single.union_encode(grad, bits, kept, sent, block=block)
    single.union_decode(sent, bits, kept, out, block=block, scale=0.3)


def values(a: Arrays) -> Iterable[Case]:
    """Bytes of sections and samples are left out beside the tensor's own."""
    n, g, chosen, found = a.count, a.grad_bytes, a.positions.clone(), a.values.clone()
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
    yield kernel_case("values_decode", (2 * g + 8) * n, "values_decode", [sent], *decoded)
    yield kernel_case("values_decode of 8", (2 * g + 8) * n, "values_decode", [sent] * 8, *decoded)
    kept_here = {"momentum": torch.zeros(n), "factor": 0.9}
    yield kernel_case("values_decode momentum", (2 * g + 16) * n, "values_decode", [sent], *decoded, **kept_here)
    of_chunk, rest = 41, -(-(n % 4096) // 100)
    room_for = n // 4096 * of_chunk + rest
    chosen, found = torch.zeros(room_for, dtype=torch.int32), torch.zeros(room_for)
    given = (a.grad, a.residual, rest, chosen, found, numbers)
    yield kernel_case("chunk_select 1 %", (g + 4) * n, "chunk_select", *given, chunk=4096, k=of_chunk)
    sample, key = a.values.clone(), KEY.at(rank=0, purpose=SAMPLE)
    blocks = sample[: len(sample) // 1024 * 1024]
    if len(blocks):
        moved = (g + 4) * n
        yield kernel_case("sample_offer blocks", moved, "sample_offer", a.grad, a.residual, blocks, key, block=1024)
    yield kernel_case("sample_offer 1 %", (g + 4) * n, "sample_offer", a.grad, a.residual, sample, key)
    yield kernel_case("sample_offer no residual", g * n, "sample_offer", a.grad, None, sample, key)
    yield kernel_case("sample_decode 1 %", (2 * g + 8) * n, "sample_decode", sample, a.work, a.left, key, 0.25)
    yield kernel_case(
        "sample_decode no residual", g * n, "sample_decode", sample, a.work, None, key, 0.25, weighted=True
    )


def numpy_sparse_decode(a: Arrays) -> None:
    """What binary_decode does, without the decoding, in NumPy with preallocated outputs."""
    at, left, out = a.positions[: a.found].numpy(), a.left.numpy(), a.out.numpy()
    np.add(a.grad.numpy(), left, out=left)
    left[at] -= 0.25
    out[:] = 0
    out[at] = 0.25
