"""Every sample with payloads that are exchanged from copies in host memory, and without: the same bits everywhere."""

from __future__ import annotations

import contextlib
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.battery.kept import kept_by
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.rank import check
from tests.support.samples import Sample, samples
from tests.support.training import digest, net, optimizer_for, train

STEPS = range(3)
hvd.init()
torch.set_num_threads(1)


def run(sample: Sample, staged: bool, **options: Any) -> dict[str, Any]:
    model, digests = net(), []
    with everything_on_accelerator() if staged else contextlib.nullcontext():
        optimizer, compression = optimizer_for(model, sample.method, True, **options)
        assert isinstance(compression, hvc.Compression) and compression._session.reducer
        for step in STEPS:
            train(model, optimizer, [step])
            digests.append(digest(model.parameters()))
        state = kept_by(compression._session.reducer)
        found = {
            "weights": digests,
            "state": digest(state[name] for name in sorted(state)),
            "bytes": compression.stats()["bytes_sent"],
            "verified": compression.stats()["verified"],
        }
        devices = compression._session.reducer.context.devices.values()
        accelerators = [where for where in devices if isinstance(where, FakeAccelerator)]
        assert bool(accelerators) == staged and all(where.copied for where in accelerators)
        compression.close()
    return found


def compare(sample: Sample) -> dict[str, Any]:
    exchanges = sample.exchanges()
    options = {"exchange": exchanges[sample.number % len(exchanges)]} | sample.options
    return {"plain": run(sample, False, **options), "staged": run(sample, True, **options)}


for sample in samples():
    check(sample.name, lambda: compare(sample))
