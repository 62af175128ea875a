"""Sketches, and the same in torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import SKETCH

from .arrays import KEY, Arrays
from .case import Case, against_reference, kernel_case

CHECKED_ELEMENTS = 1 << 20
SKETCH_ROWS, SKETCH_SHARE, TOP_SHARE = 5, 50, 100  # 1/50 of the elements as columns, 1/100 chosen


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
    n, g, s = a.count, a.grad_bytes, Sketched(a)
    rows, size = SKETCH_ROWS, min(n, CHECKED_ELEMENTS)
    reads = rows * 4 * n  # of cells, from the cache where the table fits it
    table, piece, k = (s.sums, rows, s.key), slice(0, size), min(s.k, size)
    plain = (a.grad[piece], None, *table)
    yield sketch_case("sketch_encode", g * n + 2 * reads, "sketch_encode", plain, a.grad, None, *table)
    encoded = (a.grad[piece], a.residual[piece], *table)
    given = (a.grad, a.residual, *table)
    yield sketch_case("sketch_encode residual", (g + 4) * n + 2 * reads, "sketch_encode", encoded, *given)
    table = (s.table, rows, s.key)
    chosen = (*table, [(0, size)], k, s.positions[:k], s.estimates[:k])
    found = (s.positions, s.estimates)
    yield sketch_case("sketch_top 1 %", reads + 12 * s.k, "sketch_top", chosen, *table, s.spans, s.k, *found)
    touched = (4 * rows + 8) * s.k
    yield kernel_case("sketch_clear 1 %", touched, "sketch_clear", s.cleared, rows, s.key, s.positions)
    yield kernel_case("absorb", (2 * g + 8) * n, "absorb", a.work, a.left)
    yield kernel_case("absorb momentum", (2 * g + 16) * n, "absorb", a.work, a.left, torch.zeros(n), 0.9)
    yield Case("torch sketch (index_add_)", 4 * n + 2 * reads, lambda: s.torch_encode(a))
    yield Case("torch sketch_top (topk)", reads + 12 * s.k, lambda: s.torch_top(a))
