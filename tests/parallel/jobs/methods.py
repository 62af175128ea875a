"""Every method on both paths: equal bits on every rank, after every step, and the right mean."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.support.rank import check
from tests.support.training import digest, farthest, gathered, net, optimizer_for, train, weights

STEPS = range(5)
hvd.init()
torch.set_num_threads(1)


def run(method: str | None, attach: bool, **options: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, **options)
    digests = []
    for step in STEPS:
        train(model, optimizer, [step])
        digests.append(gathered(digest(model.parameters())))
    stats = compression.stats() if compression else {}
    if compression:
        compression.close()
    return weights(model), {"digests": digests, "stats": stats}


baseline = run(None, False)[0]


def compare(method: str, **options: Any) -> dict[str, Any]:
    (stock, told), (attached, told_attached) = (run(method, attach, **options) for attach in (False, True))
    return {
        "stock": told["digests"],
        "attached": told_attached["digests"],
        "stats": told_attached["stats"],
        "from baseline": farthest(baseline, attached),
    }


for name in hvc.available():
    check(name, lambda: compare(name))
check("marsit every", lambda: compare("marsit", full_precision_every=1))
for exchange in ("ring", "fold"):
    options = dict(full_precision_every=3, compensation="global", exchange=exchange, schedule="layerwise")
    check(f"marsit {exchange}", lambda: compare("marsit", **options))
check("global_qsgd exponential", lambda: compare("global_qsgd", dithering="exponential", schedule="layerwise"))
check("global_qsgd 4 bits", lambda: compare("global_qsgd", bits=4, exchange="fold"))
check("global_qsgd one scale", lambda: compare("global_qsgd", block=0, norm=2, bits=16, exchange="ring"))
check("marsit fixed", lambda: compare("marsit", full_precision_every=0, step_size=0.001, min_elements=50))


def again() -> list[Any]:
    before = run("marsit", True)[1]["digests"]
    hvd.shutdown()
    hvd.init()
    return [before, run("marsit", True)[1]["digests"], run("marsit", False)[1]["digests"]]


check("init again", again)
