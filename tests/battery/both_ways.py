"""What tests exchange in two ways that give the same bits: with payloads on a device too, or decoded in parts."""

from __future__ import annotations

from typing import Any

import torch

from tests.battery.kept import Kept, kept
from tests.support.local import random_grads, spec
from tests.support.samples import Sample

#: A long tensor among small ones; rows that are no multiple of a word; an empty tensor; a scalar.
TENSORS = [spec("a", 70, 336), spec("b", 5), spec("empty", 0), spec("c", 9001), spec("d", 40, 64), spec("e")]
#: Of other dtypes.
MIXED = [spec("x", 30, 70), spec("y", 129, dtype=torch.float16), spec("z", 77, dtype=torch.float64), spec("empty", 0)]
STEPS = 3


def with_infinity(case: Sample, **options: Any) -> tuple[list[Kept], Kept]:
    """Return results and what is kept where a value of the second of three steps is not finite."""
    with case.fleet(2, MIXED, timeout=10.0, **options) as fleet:
        results = []
        for step in range(3):
            grads = random_grads(2, MIXED, seed=step)
            if step == 1:
                grads[1]["x"].view(-1)[7] = float("inf")
            results.append(fleet.step(grads))
        return results, kept(fleet)
