"""Factors of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from horovod_compress import ops

from .arrays import KEY, Arrays
from .case import Case, kernel_case


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
        n, g, x = f.used, a.grad_bytes, (f.grad, f.residual, f.rows)
        yield kernel_case(f"lowrank_left rank {rank}", (g + 4) * n, "lowrank_left", *x, f.right, f.left.clone())
        yield kernel_case(f"lowrank_right rank {rank}", (g + 4) * n, "lowrank_right", *x, f.left, f.right.clone())
        given = (f.left.clone(), f.right.clone(), f.rows, f.grad, f.residual)
        yield kernel_case(f"lowrank_decode rank {rank}", (2 * g + 8) * n, "lowrank_decode", *given)
        lines = f.left.clone()
        size = 4 * lines.numel() * (rank + 3)
        yield kernel_case(f"lowrank_orthonormalise rank {rank}", size, "lowrank_orthonormalise", lines, rank)
        yield Case(f"local step of powersgd (lowrank) {rank}", (4 * g + 16) * n, f.step)
        yield Case(f"torch powersgd step (lowrank) {rank}", 32 * n, partial(f.torch_step, a.out))
