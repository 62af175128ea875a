"""One rank saves while another one steps: with one compression, with two, at the first step, or in a group of ranks.

Or each makes the step of another one of two compressions. In the controls, ranks wait for one that comes late, which
each of them needs.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from horovod_compress.engine import patience
from horovod_compress.errors import HorovodCompressError
from tests.support.rank import arguments, report

case = arguments()
if case["path"] == "ddp":
    import torch.distributed as dist

    import horovod_compress.ddp as front

    dist.init_process_group("gloo")
    rank = dist.get_rank()
else:
    import horovod.torch as hvd

    import horovod_compress.torch as front  # type: ignore[no-redef]

    hvd.init()
    rank = hvd.rank()
patience._SHARE, patience._APART_SECONDS = 1 / 60, case["apart"]


def made(members: list[int] | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    among: dict[str, Any] = {}
    if members and case["path"] == "ddp":
        among = {"process_group": dist.new_group(members)}
    elif members:
        among = {"process_set": hvd.add_process_set(members)}
    compression = front.Compression.topk(model.named_parameters(), schedule="single", **among)
    if members and rank not in members:
        return model, compression, None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if case["path"] == "ddp":
        compression.register(model, optimizer)  # type: ignore[attr-defined]
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **among)
        compression.attach(optimizer)  # type: ignore[attr-defined]
    return model, compression, optimizer


def step(model: Any, compression: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 8), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def come_late() -> None:
    """Save and step, each in its turn, after another rank where this one is late; see the kinds."""
    kind, late = case["kind"], 3 * case["apart"]
    if kind in ("late in a group", "late step of a group"):  # rank 0 waits for rank 1, and rank 2 for both
        time.sleep(late if rank == 1 else 0)
        if second[2] and kind == "late in a group":
            second[1].save(case["folder"])
        elif second[2]:
            step(*second)
        step(*first)
    elif kind == "late beside":  # rank 0 saves on a thread, for which rank 1 is late, and steps late
        thread = threading.Thread(target=lambda: (time.sleep(late if rank else 0), first[1].save(case["folder"])))
        thread.start()
        time.sleep(0 if rank else late)
        step(*second)
        thread.join()
    else:
        time.sleep(0 if rank else late)
        first[1].save(case["folder"])


def stray() -> None:
    """Save on one rank and step on the other, or step in another order on each."""
    if case["kind"] == "other order":
        for each in (second, first) if rank else (first, second):
            step(*each)
        return
    mine = second if case["kind"] in ("other compression", "group") else first
    if rank == SAVER:
        (second if case["kind"] == "group" else first)[1].save(case["folder"])
    elif mine[2]:
        step(*mine)
    else:  # this process has the store
        time.sleep(8 * case["apart"])


MEMBERS = {"late in a group": [0, 1], "late step of a group": [0, 1], "group": [1, 2]}.get(case["kind"])
SAVER = MEMBERS[0] if MEMBERS else 0
first, second = made(), made(MEMBERS)
if case["kind"] != "first step":
    for _ in range(3):
        step(*first)
        if second[2]:
            step(*second)
error, text, began = None, "", time.monotonic()
try:
    (come_late if case["kind"].startswith("late") else stray)()
except HorovodCompressError as found:
    error, text = type(found).__name__, str(found)
report({"error": error, "text": text, "seconds": time.monotonic() - began})
if error:
    sys.exit(1)
