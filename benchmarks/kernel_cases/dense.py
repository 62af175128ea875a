"""Methods that send numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .arrays import Arrays
from .case import Case, kernel_case


def dense(a: Arrays) -> Iterable[Case]:
    n, g = a.count, a.grad_bytes
    yield kernel_case("dense_offer", (2 * g + 4) * n, "dense_offer", a.grad, a.residual, a.out)
    yield kernel_case("dense_offer to float16", (g + 6) * n, "dense_offer", a.grad, a.residual, a.half)
    # With gradients of bfloat16 this is dense_offer itself.
    yield kernel_case("dense_offer to bfloat16", 10 * n, "dense_offer", a.grad, a.residual, a.brain)
    yield kernel_case("dense_add", 12 * n, "dense_add", a.work, a.residual)
    yield kernel_case("dense_add float16", 6 * n, "dense_add", a.half, a.other_half)
    yield kernel_case("dense_add bfloat16", 6 * n, "dense_add", a.brain, a.other_brain)
    yield kernel_case("dense_decode", 2 * g * n, "dense_decode", a.grad, a.out, scale=0.25)
    yield kernel_case("dense_decode of float16", (g + 2) * n, "dense_decode", a.other_half, a.out, scale=0.25)
    yield Case("torch add_", 12 * n, lambda: a.work.add_(a.residual))
    yield Case("torch add_ float16", 6 * n, lambda: a.half.add_(a.other_half))
    yield Case("torch mul", 8 * n, lambda: torch.mul(a.grad, 0.25, out=a.out))
    yield Case("torch half to float", 6 * n, lambda: a.out.copy_(a.other_half))
