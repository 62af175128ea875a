"""A rank that comes to a save or a load when another one has given it up, and what ranks do behind that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import horovod_compress.ddp as hvc
from tests.support.rank import arguments, rank, refusal, report

dist.init_process_group("gloo")
FOLDER = Path(arguments()["folder"])
SECONDS = 3.0  # that ranks wait for each other


def made(seed: int, steps: int) -> Any:
    torch.manual_seed(seed)
    net = nn.Linear(8, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.topk(net.named_parameters(), schedule="single", density=0.05, timeout=SECONDS)
    compression.register(net, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        given = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * seed + 10 * step + rank()))
        net(given).square().mean().backward()
        optimizer.step()
    return compression


def kept(compression: Any) -> list[float]:
    return [float(one.double().norm()) for one in compression.state_dict()["state"]["residual"].values()]


def after_one_gave_up(who: int, call: Callable[[], object]) -> str:
    """Let one rank call alone, until it gives up."""
    found = refusal(call) if rank() == who else ""
    dist.barrier()
    return found


def retried() -> dict[str, Any]:
    compression, folder = made(1, 3), FOLDER / "retried"
    given_up = after_one_gave_up(0, lambda: compression.save(folder))
    apart = refusal(lambda: compression.save(folder))  # for one rank the second time, for the other one the first
    dist.barrier()
    again = refusal(lambda: compression.save(folder))
    compression.close()
    return {"given up": given_up, "apart": apart, "again": again}


def loaded() -> dict[str, Any]:
    compression, folder = made(1, 3), FOLDER / "loaded"
    compression.save(folder)
    saved = kept(compression)
    compression.close()
    compression = made(2, 5)
    before = kept(compression)
    given_up = after_one_gave_up(0, lambda: compression.load(folder))
    late = refusal(lambda: compression.load(folder)) if rank() == 1 else ""
    dist.barrier()
    after = kept(compression)
    compression.close()
    return {"given up": given_up, "late": late, "same": before == after, "control": before != saved}


def of_another() -> dict[str, Any]:
    first, folder = made(1, 3), FOLDER / "another"
    given_up = after_one_gave_up(1, lambda: first.save(folder))
    left = kept(first)
    first.close()
    second = made(2, 3)
    second.save(folder)
    saved = kept(second)
    second.close()
    third = made(3, 3)
    third.load(folder)
    found = {"given up": given_up, "own": kept(third) == saved, "control": saved != left}
    third.close()
    return found


report({"retried": retried(), "loaded": loaded(), "of another": of_another()})
