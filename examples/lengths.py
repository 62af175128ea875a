"""How many times fewer bytes a training of some length sends than with a float32 ring.

    python examples/lengths.py --method marsit --ranks 4

Ranks in one process, without a network, exchange random gradients of a model once for each kind of step, and the bytes
are counted. The rest is arithmetic: method, optimizer, and ``total_steps`` decide which steps are exact. Comparisons
between ranks and norms, which take some 0.4 kB a step, are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import nn

from horovod_compress.engine.methods import Methods, parse
from horovod_compress.engine.optimizer.exact_rounds import chosen
from horovod_compress.engine.optimizer.momentum import exact_first
from horovod_compress.engine.reducer import Next, Reducer
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import TensorSpec
from models import CharTransformer, digits_mlp
from options import exchanged, positive

LENGTHS = (100, 300, 1000, 10_000)
#: Of steps; the first of all is a method's own in full precision.
KINDS: tuple[Literal["full", "short", "first", "exact", "coded"], ...] = ("full", "short", "first", "exact", "coded")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD, momentum 0.9": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


def demo() -> nn.Module:
    """Return the network of the demo, a character transformer of 1.3 million parameters."""
    return CharTransformer(vocabulary=103, context=64)


MODELS = {"the demo's transformer, 1.3 million parameters": demo, "MLP on digits, 85 thousand": digits_mlp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", type=exchanged, default="marsit", help="its name, without options")
    parser.add_argument("--ranks", type=positive(int), default=4)
    asked = parser.parse_args()
    if asked.ranks < 2:
        parser.error("--ranks should be at least 2: one rank sends nothing")
    heads = " | ".join(f"{length:,} steps" for length in LENGTHS)
    print(f"| model | optimizer | `total_steps` | {heads} |\n|{'---|' * (3 + len(LENGTHS))}")
    for name, make in MODELS.items():
        model = make()
        sent = bytes_of_steps(model, asked.method, asked.ranks)
        for optimizer, made in OPTIMIZERS.items():
            for known in (False, True):
                found = []
                for length in LENGTHS:
                    kinds = kinds_of_steps(model, asked.method, made, length, known)
                    found.append(length * dense(model, asked.ranks) / total(kinds, sent))
                told = " | ".join(f"{ratio:.1f}" for ratio in found)
                print(f"| {name} | {optimizer} | {'given' if known else '-'} | {told} |")


def dense(model: nn.Module, ranks: int) -> float:
    """Return the bytes that a rank sends in a step of a float32 ring."""
    return 8 * sum(parameter.numel() for parameter in model.parameters()) * (ranks - 1) / ranks


def total(kinds: Mapping[str, int], sent: Mapping[str, int]) -> int:
    return sum(count * sent[kind] for kind, count in kinds.items())


def bytes_of_steps(model: nn.Module, method: str, ranks: int) -> dict[str, int]:
    """Return what a rank sends in a step of each kind."""
    methods, options = parse(method, {"schedule": "size:25MB", "verify_every": 0, "timeout": 600.0})
    named = dict(model.named_parameters())
    plan = make_plan(
        options.schedule, [TensorSpec(name, tuple(p.shape), "float32") for name, p in named.items()], 0, methods.number
    )
    reducers = [
        Reducer(plan, methods.codecs, transport, Choose(options.exchange, transport.adds), options, None)
        for transport in Hub(ranks).transports()
    ]
    found: dict[str, int] = {}
    for kind in KINDS:
        for reducer in reducers:
            if kind != "full":
                reducer.buckets.choose(Next(kind))
        before = reducers[0].metrics.bytes_exact + reducers[0].metrics.bytes_compressed
        for reducer in reducers:
            for index, name in enumerate(plan.names()):
                step = reducer.offer(index, torch.randn_like(named[name]))
        for reducer in reducers:
            for index in range(len(plan.names())):
                reducer.result(index, step)
        found[kind] = reducers[0].metrics.bytes_exact + reducers[0].metrics.bytes_compressed - before
    for reducer in reducers:
        reducer.close()
    return found


def kinds_of_steps(
    model: nn.Module, method: str, make: Callable[..., torch.optim.Optimizer], length: int, known: bool
) -> dict[str, int]:
    """Return how many steps of each kind a training has."""
    methods: Methods = parse(method, {})[0]
    optimizer = make(model.parameters())
    given, every = length if known else None, methods.full_precision_every()
    properties = methods.codecs[1].properties()
    if isinstance(optimizer, torch.optim.AdamW) and properties.divides != "never":
        rounds = chosen(every, properties.law.few_exact, total_steps=given)
        first, exact = min(rounds.short, length), sum(step in rounds for step in range(length))
        return {"first": first, "exact": exact - first, "coded": length - exact}
    first = exact_first(optimizer, methods, model.named_parameters(), given)
    full = sum(step % every == 0 for step in range(first, length)) if every else 0
    return {"short": min(first, length), "full": full, "coded": length - min(first, length) - full}


if __name__ == "__main__":
    main()
