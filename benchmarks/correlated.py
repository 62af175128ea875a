"""How many times the squared error of the mean is less with correlated rounding than with independent rounding.

Ranks in this process reduce normal numbers: equal ones, ones with nothing in common, and the sum of both. Nothing is
timed, so the figures do not depend on the machine.

    python -m benchmarks.correlated
    python -m benchmarks.correlated --ranks 2,4,8 --elements 40000 --steps 6
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import table
from horovod_compress.engine.methods import parse
from horovod_compress.engine.reducer import Reducer
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import TensorSpec

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("global_qsgd", {}),
    ("terngrad", {}),
    ("qsgd", {"bits": 4, "norm": 2, "coding": "elias"}),
    ("qsgd", {"bits": 4, "block": 64}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--elements", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args()
    lines = []
    for method, options in METHODS:
        for ranks in map(int, chosen.ranks.split(",")):
            line = [" ".join([method, *(f"{name}={value}" for name, value in options.items())]), str(ranks)]
            for grads in given(ranks, chosen.elements).values():
                independent, correlated = (
                    error(method, options | {"rounding": rounding}, grads, chosen.steps)
                    for rounding in ("independent", "correlated")
                )
                line.append(f"{independent / correlated:.1f}")
            lines.append(tuple(line))
    print(table(["method", "ranks", *given(1, 1)], lines, left=1))


def given(ranks: int, elements: int) -> dict[str, list[Tensor]]:
    """Return gradients of all ranks, by what they have in common."""
    generator = torch.Generator().manual_seed(1)
    common, *apart = torch.randn(1 + ranks, elements, generator=generator)
    return {"equal": [common] * ranks, "half": [common + mine for mine in apart], "nothing in common": apart}


def error(method: str, options: dict[str, Any], grads: list[Tensor], steps: int) -> float:
    """Return the squared error of the mean over the ranks, over some steps."""
    ranks, exact = len(grads), torch.stack(grads).double().mean(0)
    methods, common = parse(method, options | {"schedule": "single", "verify_every": 0})
    tensors = [TensorSpec("weight", (exact.numel(),), "float32")]
    plan = make_plan("single", tensors, 0, methods.number)
    reducers = [
        Reducer(plan, methods.codecs, transport, Choose(common.exchange, transport.adds), common)
        for transport in Hub(ranks).transports()
    ]
    total = 0.0
    for _ in range(steps):
        copies = [grad.clone() for grad in grads]
        number = max(reducer.offer(0, grad) for reducer, grad in zip(reducers, copies, strict=True))
        results = [reducer.result(0, number) for reducer in reducers]
        total += float((results[0] - exact).square().sum())
    for reducer in reducers:
        reducer.close()
    return total


if __name__ == "__main__":
    main()
