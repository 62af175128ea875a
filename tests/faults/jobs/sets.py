"""A compression for some ranks beside an optimizer for others."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.support.rank import arguments, folder, report

case = arguments()
some = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[some])
sets = {"some": some, "all": hvd.global_process_set}
model = torch.nn.Linear(2, 2)
named = list(model.named_parameters())
compression = hvc.Compression.none(named, timeout=case["timeout"], process_set=sets[case["compression"]])
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    plain, named_parameters=named, compression=compression, process_set=sets[case["optimizer"]]
)
began = time.monotonic()
try:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
except Exception as error:
    report({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began})
else:
    report({"error": None})
# The first rank that ends would end Horovod for all.
until = time.monotonic() + case["timeout"]
while len(list(folder().glob("report.*"))) < hvd.size() and time.monotonic() < until:
    time.sleep(0.01)
