"""Trainings in which a second moment begins later than others, or anew, on a front; the held-out loss at their end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start
from tests.support.rank import check, rank

start()
torch.set_num_threads(1)
RATE, LATER, STEPS = 1e-2, 70, 200
SOUGHT = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


def loss_of(found: Tensor, given: Tensor) -> Tensor:
    return F.mse_loss(found, (given @ SOUGHT).tanh())


def trained(method: str, what: str) -> float:
    """Train; return the loss on data that nobody trains on.

    Args:
        what: happens in step LATER: the first layer is ``frozen`` until then, or ``added`` to the optimizer then; or
            the optimizer's state is ``cleared``.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    used = model[2].parameters() if what == "added" else model.parameters()
    optimizer: Any = torch.optim.AdamW(used, lr=RATE)
    compression = hvc.Compression.create(method, model.named_parameters(), schedule="single", timeout=60.0)
    if DDP:
        compression.register(model, optimizer)
    else:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        compression.attach(optimizer)
    model[0].requires_grad_(what != "frozen")
    generator = torch.Generator().manual_seed(100 + rank())
    for step in range(STEPS):
        if step == LATER:
            model[0].requires_grad_(True)
            if what == "added":
                optimizer.add_param_group({"params": list(model[0].parameters())})
            if what == "cleared":
                optimizer.state.clear()
        given = torch.randn(64, 16, generator=generator)
        optimizer.zero_grad()
        loss_of(model(given), given).backward()
        optimizer.step()
    compression.close()
    unseen = torch.randn(2000, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return loss_of(model(unseen), unseen).item()


for case in ("frozen", "cleared", *(("added",) if DDP else ())):
    check(case, lambda case=case: {method: trained(method, case) for method in ("none", "marsit")})
