"""Two groups of ranks with a compression each, which save into one folder, at once or one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horovod_compress.errors import HorovodCompressError
from tests.support.front import DDP, hvc, start
from tests.support.rank import check, folder, rank

if not DDP:
    import horovod.torch as hvd

start()
torch.set_num_threads(1)
GROUPS = ([0, 1], [2, 3])
FIRST = rank() in GROUPS[0]


def groups() -> list[Any]:
    if DDP:
        return [torch.distributed.new_group(ranks) for ranks in GROUPS]
    return [hvd.add_process_set(ranks) for ranks in GROUPS]


ALL = groups()


def barrier() -> None:
    if DDP:
        torch.distributed.barrier()
    else:
        hvd.barrier()


def tried(call: Any, *given: Any) -> str:
    try:
        call(*given)
    except HorovodCompressError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trace(compression: Any) -> list[float]:
    """Return what tells the residuals of one group from those of the other."""
    return [float(kept.sum()) for kept in compression.state_dict()["state"]["residual"].values()]


def one_folder(name: str, apart: bool) -> dict[str, Any]:
    """Return what became of a save and a load by each group.

    Args:
        apart: each has a folder of its own.
    """
    torch.manual_seed(0)
    model, own = nn.Linear(7, 5), ALL[not FIRST]
    named = [(f"{name}.{one}", parameter) for one, parameter in model.named_parameters()]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if DDP:
        compression = hvc.Compression.marsit(named, min_elements=1, timeout=30.0, process_group=own)
        compression.register(model, optimizer)
    else:
        compression = hvc.Compression.marsit(named, min_elements=1, timeout=30.0, process_set=own)
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression, process_set=own)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 7), 1.0 + step + rank())).square().mean().backward()
        optimizer.step()
    path = folder() / (f"{name}.{int(FIRST)}" if apart else name)
    kept = trace(compression)
    found = {"save": tried(compression.save, path)}
    barrier()
    found |= {"load": tried(compression.load, path), "same": trace(compression) == kept, "kept": kept}
    barrier()
    found["again"] = tried(compression.save, path)
    compression.close()
    return found


check("one", lambda: one_folder("one", apart=False))
check("apart", lambda: one_folder("apart", apart=True))
