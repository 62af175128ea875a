"""Torch's arithmetic as it may be on a GPU, made of the CPU's.

There torch divides by a number as it multiplies by its rounded reciprocal, adds up in an order of its own, and fuses a
multiplication with an addition; and roots, which are right to the last bit there, are not on every CPU. Whatever
depends on that differs in last bits.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.accelerator import FakeAccelerator

#: What may be another number next to it.
_OFF = {
    *("sum", "mean", "prod", "cumsum", "cumprod", "var", "std", "dot", "mv", "mm", "bmm", "addmm", "logsumexp"),
    *("linalg_vector_norm", "norm", "lerp", "addcmul", "addcdiv", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid"),
}


class OfGpu(TorchDispatchMode):
    """Computes like this on the thread that enters it."""

    #: The operations that were off, on any thread.
    seen: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named, name = named or {}, function.overloadpacket.__name__.rstrip("_")
        if name in ("div", "divide", "true_divide") and isinstance(given[1], (int, float)) and not named.get("alpha"):
            before = given[0].clone()
            found = function(*given, **named)
            if found.is_floating_point() and "rounding_mode" not in named:
                self.seen.add(name)
                by = torch.ones((), dtype=found.dtype) / torch.tensor(float(given[1]), dtype=found.dtype)
                found.copy_(before.to(found.dtype) * by)
            return found
        found = function(*given, **named)
        fused = name in ("add", "sub") and named.get("alpha", 1) not in (1, -1)
        exact = name in ("linalg_vector_norm", "norm") and given[1:] == (math.inf,)
        power = name == "pow" and given[1] not in (1, 2)
        if (name in _OFF or fused or power) and not exact and isinstance(found, Tensor) and found.is_floating_point():
            self.seen.add(name)
            found.copy_(torch.nextafter(found, torch.full_like(found, math.inf)))
        return found


class Gpu(FakeAccelerator):
    """A device whose threads compute so; the training thread has to enter :class:`OfGpu` itself."""

    def exchanging(self) -> OfGpu:
        return OfGpu()

    def decoding(self) -> OfGpu:
        return OfGpu()
