"""An elastic job that saves, and loads where all ranks do, or at the top of its program, where a new rank is alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc

case: dict[str, Any] = json.loads(os.environ["HVC_TEST_ARGUMENTS"])
folder = Path(os.environ["HVC_TEST_FOLDER"])
STEPS, SAVED, PAUSE = 8, 2, 0.1
PATIENCE = 60.0


def step() -> None:
    optimizer.zero_grad()
    model(torch.full((2, 8), 1.0 + hvd.rank())).square().sum().backward()
    optimizer.step()


def load(where: str) -> None:
    if case["where"] == where and (folder / "saved" / "manifest.json").exists():
        compression.load(folder / "saved", residuals="redistribute")
        (folder / f"loaded.{os.getpid()}").touch()


def change_hosts(state: Any) -> None:
    """Let another host come, and wait until this rank has heard of it."""
    if hvd.rank() == 0 and not (folder / "changed").exists():
        (folder / "changed").write_text(str(time.time()))
        (folder / "new").write_text("\n".join(case["then"]) + "\n")
        (folder / "new").rename(folder / "hosts")
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("began.*"))) < len(case["then"]) and time.monotonic() < end:
        time.sleep(PAUSE)
        state.commit()


@hvd.elastic.run
def train(state: Any) -> None:
    if state.batch == 0:
        load("inside")
    while state.batch < STEPS:
        if state.batch == SAVED and not state.saved:
            compression.save(folder / "saved")
            state.saved = True
        if state.batch == SAVED + 1:
            change_hosts(state)
        step()
        state.batch += 1
        state.commit()


hvd.init()
(folder / f"began.{os.getpid()}").touch()
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
compression = hvc.Compression.topk(model.named_parameters(), timeout=case["timeout"])
plain = torch.optim.SGD(model.parameters(), lr=0.001)
if case["where"] == "before an update optimizer":
    load(case["where"])
    optimizer = hvc.DistributedUpdateOptimizer(plain, model.named_parameters(), compression)
else:
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
    compression.attach(optimizer)
kept = {"optimizer": optimizer, "compression": compression}
if case["where"] == "before a start":
    load(case["where"])
    of_another = torch.nn.Linear(2, 2)
    kept["other"] = hvc.Compression.topk(of_another.named_parameters(), timeout=case["timeout"])
state = hvd.elastic.TorchState(model=model, batch=0, saved=False, **kept)
load("top")
train(state)
end = {"rank": hvd.rank(), "world": hvd.size(), "step": compression.stats()["steps"], "at": time.time()}
(folder / f"unfinished.{hvd.rank()}").write_text(json.dumps(end))
(folder / f"unfinished.{hvd.rank()}").rename(folder / f"end.{hvd.rank()}")
