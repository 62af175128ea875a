"""Every sample on both paths: equal bits on every rank, after every step, and the right mean."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.support.rank import arguments, check
from tests.support.samples import Sample, samples
from tests.support.training import digest, farthest, gathered, net, optimizer_for, train, weights

STEPS = range(5)
SCHEDULES = ("size:25MB", "layerwise")
hvd.init()
torch.set_num_threads(1)


def run(method: Any, attach: bool, **options: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, **options)
    digests = []
    for step in STEPS:
        train(model, optimizer, [step])
        digests.append(digest(model.parameters()))
    stats = compression.stats() if compression else {}
    by_rank = gathered(digests)
    if compression:
        compression.close()
    return weights(model), {"digests": [list(step) for step in zip(*by_rank, strict=True)], "stats": stats}


baseline = run(None, False)[0]


def compare(method: Any, **options: Any) -> dict[str, Any]:
    (_, told), (attached, told_attached) = (run(method, attach, **options) for attach in (False, True))
    return {
        "stock": told["digests"],
        "attached": told_attached["digests"],
        "stats": told_attached["stats"],
        "from baseline": farthest(baseline, attached),
    }


def varied(sample: Sample) -> dict[str, Any]:
    """Return a sample's options with common ones that differ from one sample to the next."""
    exchanges = sample.exchanges()
    return {
        "exchange": exchanges[sample.number % len(exchanges)],
        "schedule": SCHEDULES[sample.number % len(SCHEDULES)],
    } | sample.options


for sample in samples(few=arguments()["few"]):
    check(sample.name, lambda: compare(sample.method, **varied(sample)))
MIXED = {"0.*": hvc.method("topk", density=0.1), "*.bias": "none", "*": hvc.by_step({0: "none", 2: "ef_signsgd"})}
check("per layer", lambda: compare(MIXED))
check("by step", lambda: compare(hvc.by_step(lambda step: step % 2, {0: "onebit", 1: "topk"}), schedule="layerwise"))
check("warm-up", lambda: compare("signsgd", warmup_steps=3))
check("marsit every", lambda: compare("marsit", full_precision_every=1))
check("marsit small tensors plain", lambda: compare("marsit", full_precision_every=0, step_size=0.001, min_elements=50))


def again() -> list[Any]:
    before = run("marsit", True)[1]["digests"]
    hvd.shutdown()
    hvd.init()
    return [before, run("marsit", True)[1]["digests"], run("marsit", False)[1]["digests"]]


check("init again", again)
