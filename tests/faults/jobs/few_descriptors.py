"""A job that trains with few descriptors; before its first step it says where it listens, and waits."""

from __future__ import annotations

import json
import resource
import time

import psutil
import torch

from tests.support.front import hvc, start, trained
from tests.support.nets import batch, digest, net
from tests.support.rank import folder, mark, meet, rank, report

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def ports() -> set[int]:
    found = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


torch.set_num_threads(1)
start()
before = ports()  # the framework's own
model = net()
named = list(model.named_parameters())
compression = hvc.Compression.topk(named, density=0.05, schedule="layerwise", verify_every=1)
model, optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
mark("ports", json.dumps(sorted(ports() - before)))
while not (folder() / "go").exists():
    time.sleep(0.01)
for step in range(12):
    optimizer.zero_grad()
    model(batch(step, rank())).square().mean().backward()
    optimizer.step()
report({"weights": digest(model.parameters())})
meet()
compression.close()
