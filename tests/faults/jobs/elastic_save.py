"""An elastic job in which rank 0 saves alone, before all commit or before the next step."""

from __future__ import annotations

import json
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from tests.support.rank import arguments, folder

case = arguments()
hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
compression = hvc.Compression.topk(model.named_parameters())
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), compression=compression)
compression.attach(optimizer)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.batch < 8:
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + hvd.rank())).square().sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch == 5 and (hvd.rank() == 0 or case["on"] == "all"):
            compression.save(folder() / "saved")
        if case["before"] == "commit" or state.batch == 2:
            state.commit()


try:
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, batch=0))
except hvc.MismatchError as error:
    (folder() / f"told.{hvd.rank()}").write_text(str(error))
    raise
(folder() / f"unfinished.{hvd.rank()}").write_text(json.dumps({"world": hvd.size()}))
(folder() / f"unfinished.{hvd.rank()}").rename(folder() / f"end.{hvd.rank()}")
