"""Whole runs of a few steps through ranks in one process, and the hashes that every version must find in them.

The engine may be rearranged at will: whatever it is made of, these stay. What changes them on purpose, such as another
way of encoding, changes the golden payloads too. Remove the lines of such cases and write them anew:

    python -m tests.golden.runs
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import horovod_compress.codecs.by_step as methods
from horovod_compress.codecs.base import Codec
from horovod_compress.engine.methods import per_layer, single
from horovod_compress.errors import ConfigError, NonFiniteError
from horovod_compress.schedule.plan import Plan
from tests.golden.play import (
    DTYPES,
    FIRST,
    MIDDLE,
    TENSORS,
    WORLD,
    Found,
    Run,
    grads,
    lines,
    played,
    tensors,
    two_buckets,
)
from tests.golden.trained import trainings
from tests.support.local import Fleet
from tests.support.samples import KINDS, samples

FILE = Path(__file__).with_name("runs.json")
#: For runs in which something special happens.
OTHERS = ("ef_signsgd", "sketch_fusion", "dgc", "signum", "sparse_binary")
SOME = [sample for sample in FIRST if sample.method in (*KINDS, *OTHERS)]


def fleet_of(method: Any, dtype: str = "float32", world: int = WORLD, **options: Any) -> Fleet:
    return Fleet(world, tensors(dtype), method, **{"schedule": two_buckets(dtype), "verify_every": 2} | options)


# ---- the usual steps ----


def usual(codec: Any, dtype: str, world: int = WORLD, **options: Any) -> Found:
    with fleet_of(codec, dtype, world, **options) as fleet:
        return played(fleet, dtype=dtype)


def by_dtype() -> dict[str, Run]:
    """Return every sample of every method with gradients of every type."""
    return {
        f"{sample.name} | {dtype}": Run(
            partial(usual, sample.codec(), dtype), sample.quick and (dtype == "float32" or sample.method == "marsit")
        )
        for sample in samples()
        for dtype in DTYPES
    }


def by_exchange() -> dict[str, Run]:
    """Return every way of exchanging, with other numbers of ranks too."""
    return {
        f"{sample.name} | {exchange}, {world} ranks": Run(
            partial(usual, sample.codec(), "float32", world, exchange=exchange),
            sample.method == "marsit" and exchange in ("fold", "torus") and world == 4,
        )
        for sample in FIRST
        for exchange in sample.exchanges()
        for world in (2, 4)
        if exchange != "auto" or world == 4
    }


# ---- something happens in the middle ----


def sums(codec: Codec) -> Found:
    """Let results be sums."""
    with fleet_of(codec) as fleet:
        for reducer in fleet.reducers:
            reducer.result_scale = float(WORLD)
        return played(fleet, lambda number: fleet.step(grads(number, TENSORS)))


def nonfinite(codec: Codec, policy: str) -> Found:
    """Let two values of one rank not be finite in the middle."""
    told: list[str] = []

    def step(number: int) -> list[dict[str, Tensor]]:
        given = grads(number, TENSORS)
        if number == MIDDLE:
            given[1]["wide"].view(-1)[7], given[1]["tall"].view(-1)[0] = float("nan"), -float("inf")
        at = fleet.offer(given)
        return [{name: result(rank, name, at) for name in given[0]} for rank in range(WORLD)]

    def result(rank: int, name: str, at: int) -> Tensor:
        try:
            return fleet.reducers[rank].result(fleet._index[name], at).clone()
        except NonFiniteError as error:
            told.append(str(error))
            return torch.zeros(0)

    with fleet_of(codec, nonfinite=policy) as fleet:
        return played(fleet, step) | ({"told": sorted(set(told))} if told else {})


def left_out(codec: Codec, frozen: bool) -> Found:
    """Leave a tensor out of every second step: it is frozen, or has sparse gradients that the framework reduces."""
    name = "wide"

    def step(number: int) -> list[dict[str, Tensor]]:
        given, index = grads(number, TENSORS), fleet._index[name]
        for mine, reducer in zip(given, fleet.reducers, strict=True):
            assert reducer.wait_idle(5.0)
            if frozen:
                reducer.freeze([index] if number % 2 else [])
            elif number % 2:
                del mine[name]
                reducer.skip(index)
        return fleet.step(given)

    with fleet_of(codec) as fleet:
        return played(fleet, step)


def other_buckets(codec: Codec) -> Found:
    """Change the buckets in the middle: three others, one of which travels uncompressed where that may be."""

    def step(number: int) -> list[dict[str, Tensor]]:
        if number == MIDDLE:
            plain = fleet.methods.may_be_plain(1)
            plan = Plan.of([(TENSORS[2:6], 1), (TENSORS[:2], 1, plain), (TENSORS[6:], 1)])
            for reducer in fleet.reducers:
                reducer.replan(plan)
            fleet._index = {name: index for index, name in enumerate(plan.names())}
        return fleet.step(grads(number, TENSORS))

    with fleet_of(codec) as fleet:
        try:
            return played(fleet, step)
        except ConfigError as error:
            return {"told": str(error)}


def in_the_middle() -> dict[str, Run]:
    found: dict[str, Run] = {}
    for sample in SOME:
        codec, quick = sample.codec(), sample.method == "marsit"
        plays: dict[str, Callable[[], Found]] = {
            "sum": partial(sums, codec),
            "other buckets": partial(other_buckets, codec),
            "frozen": partial(left_out, codec, True),
            "sparse": partial(left_out, codec, False),
            "min_elements": partial(usual, codec, "float32", schedule="size:2KB", min_elements=40),
            "warm-up": partial(usual, codec, "float32", warmup_steps=2),
        }
        if single(codec).may_be_plain(1):
            plays["plain bucket"] = partial(usual, codec, "float32", schedule=two_buckets(plain=True))
        plays |= {f"nonfinite {p}": partial(nonfinite, codec, p) for p in ("propagate", "zero", "raise")}
        found |= {
            f"{sample.name} | {what}": Run(play, quick, (sample.method, what) == ("onebit_adam", "other buckets"))
            for what, play in plays.items()
        }
    return found


# ---- several methods ----


def several() -> dict[str, Run]:
    layers = {"w*": "topk", "t*": "powersgd", "kernel": methods.method("dgc", density=0.05), "*": "marsit"}
    stages = [(0, "none"), (2, methods.method("marsit", full_precision_every=0)), (4, "topk")]
    by_step, schedule = methods.by_step(dict(stages)), {"schedule": "size:2KB"}
    return {
        "per_layer": Run(partial(usual, per_layer(layers), "float32", **schedule), True),
        "per_layer, bfloat16": Run(partial(usual, per_layer(layers), "bfloat16", **schedule)),
        "by_step": Run(partial(usual, by_step, "float32"), True),
        "by_step, float64": Run(partial(usual, by_step, "float64")),
    }


RUNS: dict[str, Run] = by_dtype() | by_exchange() | in_the_middle() | several() | trainings()


def add_missing() -> None:
    """Play the runs that the file lacks; nothing that it holds is changed."""
    held: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    missing = [name for name in RUNS if name not in held]
    FILE.write_text(lines(held | {name: RUNS[name].play() for name in missing}))
    print(f"{FILE}: {len(missing)} added, {len(held)} left as they were")
    if stale := sorted(set(held) - set(RUNS)):
        print(f"no case any more, remove these lines: {stale}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    add_missing()
