"""A program that is tried with one process: Horovod reduces nothing, and calls nobody."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.support.logs import told
from tests.support.nets import digest
from tests.support.rank import report

hvd.init()


def trained(way: str) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.0)  # with more ranks it is refused
    if way != "alone":
        compression = hvc.Compression.marsit(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        if way == "attached":
            compression.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return digest(model.parameters())


with told() as texts:
    weights = {way: trained(way) for way in ("alone", "tokens", "attached")}
report({"weights": weights, "told": texts})
