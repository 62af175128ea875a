"""Everything that the cases read and write."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import Key

KEY = Key(seed=1, step=2, bucket=3, rank=4)
ROW = 1000
BLOCK = 2048
KEPT_ONE_IN = 100


class Arrays:
    """Everything that the cases read and write, allocated and touched once.

    Args:
        dtype: of gradients and results; residuals are float32.
    """

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.count, self.words, self.dtype = count, ops.word_count(count), dtype
        generator = torch.Generator().manual_seed(1)
        self.grad = torch.randn(count, generator=generator).to(dtype)
        self.residual = torch.randn(count, generator=generator)
        self.work, self.left = self.grad.clone(), self.residual.clone()
        self.short_left = self.left.bfloat16()
        self.out = torch.zeros(count, dtype=dtype)
        self.half, self.other_half = self.grad.to(torch.float16, copy=True), self.residual.half()
        self.brain, self.other_brain = self.grad.to(torch.bfloat16, copy=True), self.residual.bfloat16()
        self.flags = np.zeros(count, dtype=bool)
        self.bits, self.more = torch.zeros(self.words, dtype=torch.int64), torch.zeros(self.words, dtype=torch.int64)
        ops.bernoulli_words(self.more, 1, 2, KEY)
        self.parts = [self.more.clone() for _ in range(8)]
        for hop, part in enumerate(self.parts):
            ops.bernoulli_words(part, 1, 2, KEY.at(hop=hop))
        self.folded, self.merged = self.more.clone(), self.more.clone()
        self.sums, self.row_sums = (torch.zeros(rows, dtype=torch.float64) for rows in (1, -(-count // ROW)))
        self.counters = torch.zeros(256, dtype=torch.float64)
        self.norm, self.norms = self.grad.abs().max().float().view(1), torch.full((-(-count // BLOCK),), 6.0)
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
    def grad_bytes(self) -> int:
        """Bytes of one gradient element."""
        return self.grad.element_size()

    @property
    def raw(self) -> Tensor:
        return self.residual.view(torch.uint8)
