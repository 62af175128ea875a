"""A rank that comes to something when another one has given it up, and what ranks do behind that, on each front."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.rank import arguments, rank, refusal, report

FRONT, FOLDER = arguments()["front"], Path(arguments()["folder"])
SECONDS = 3.0  # that ranks wait for each other

if FRONT == "horovod":
    import horovod.torch as hvd

    import horovod_compress.torch as hvc

    hvd.init()
    barrier = hvd.barrier
else:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import horovod_compress.ddp
    import horovod_compress.fsdp

    dist.init_process_group("gloo")
    barrier = dist.barrier
    hvc = horovod_compress.fsdp if FRONT == "fsdp" else horovod_compress.ddp  # type: ignore[assignment]
    if FRONT == "fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Trained:
    """A small model and its compression."""

    def __init__(self, seed: int, schedule: str = "single") -> None:
        torch.manual_seed(seed)
        self._seed, self._step = seed, 0
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        if FRONT == "fsdp":
            fully_shard(self.net, mesh=mesh["shard"])
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.1)
        named = list(self.net.named_parameters())
        self.compression: Any = hvc.Compression.topk(
            named, schedule=schedule, density=0.05, min_elements=1, timeout=SECONDS
        )
        if FRONT == "horovod":
            names = [(f"{seed}.{name}", one) for name, one in named]
            stock = {"named_parameters": names, "compression": self.compression}
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, **stock)
            self.compression.attach(self.optimizer)

    def register(self) -> None:
        if FRONT != "horovod":
            more = {"replicate": mesh["replicate"]} if FRONT == "fsdp" else {}
            self.compression.register(self.net, self.optimizer, **more)

    def step(self) -> None:
        self._step += 1
        self.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * self._seed + 10 * self._step + rank())
        self.net(torch.randn(4, 8, generator=draw)).square().mean().backward()
        self.optimizer.step()

    def kept(self) -> list[float]:
        return [float(one.double().norm()) for one in self.compression._saved.state()["state"]["residual"].values()]


def made(seed: int, steps: int, schedule: str = "single") -> Trained:
    found = Trained(seed, schedule)
    found.register()
    for _ in range(steps):
        found.step()
    return found


def _begin(*given: Any) -> None:
    made(*given).compression.close()


def after_one_gave_up(who: int, call: Callable[[], object]) -> str:
    """Let one rank call alone, until it gives up."""
    found = refusal(call) if rank() == who else ""
    barrier()
    return found


def saved() -> dict[str, Any]:
    """The next call of all takes place, whether they have trained meanwhile or not."""
    one, folder = made(1, 3), FOLDER / "saved"
    given_up = after_one_gave_up(0, lambda: one.compression.save(folder))
    told = [refusal(lambda: one.compression.save(folder))]
    again = after_one_gave_up(1, lambda: one.compression.save(folder))
    one.step()
    told.append(refusal(lambda: one.compression.save(folder)))
    one.compression.close()
    return {"given up": given_up or again, "told": told}


def loaded() -> dict[str, Any]:
    """Who comes late loads nothing, and hears of it; the next call of all takes place."""
    one, folder = made(1, 3), FOLDER / "loaded"
    one.compression.save(folder)
    saved = one.kept()
    one.compression.close()
    one = made(2, 5)
    before = one.kept()
    given_up = after_one_gave_up(0, lambda: one.compression.load(folder))
    late = refusal(lambda: one.compression.load(folder)) if rank() == 1 else ""
    barrier()
    after = one.kept()
    one.compression.load(folder)
    found = {"same": before == after, "control": before != saved, "again": one.kept() == saved}
    one.compression.close()
    return {"given up": given_up, "late": late} | found


def of_another() -> dict[str, Any]:
    """What a compression has left is no answer to the next one."""
    first, folder = made(1, 3), FOLDER / "another"
    given_up = after_one_gave_up(1, lambda: first.compression.save(folder))
    left = first.kept()
    first.compression.close()
    second = made(2, 3)
    second.compression.save(folder)
    saved = second.kept()
    second.compression.close()
    third = made(3, 3)
    third.compression.load(folder)
    found = {"given up": given_up, "own": third.kept() == saved, "control": saved != left}
    third.compression.close()
    return found


def started() -> dict[str, Any]:
    """Nor is what was left of a start, or of a registration."""
    given_up = after_one_gave_up(1, lambda: made(1, 0))
    found = {"given up": given_up, "told": [refusal(partial(_begin, seed, 1)) for seed in (2, 3)]}
    one = Trained(4)
    if FRONT == "torch":
        found["unregistered"] = after_one_gave_up(1, one.register)
    found["told"].append(refusal(one.register))
    one.step()
    one.compression.close()
    return found


def begun() -> dict[str, Any]:
    """Nor what was left of a first step, or of the step in which ranks compare measured times."""
    one, given_up = made(1, 0), []
    given_up.append(after_one_gave_up(1, one.step))
    one.compression.close()
    told = [refusal(partial(_begin, seed, 2)) for seed in (2, 3)]
    one = made(4, 3, "mergecomp:2")
    given_up.append(after_one_gave_up(1, lambda: [one.step() for _ in range(4)]))
    one.compression.close()
    told += [refusal(partial(_begin, seed, 8, "mergecomp:2")) for seed in (5, 6)]
    return {"given up": given_up, "told": told}


def ended() -> dict[str, Any]:
    """Where the ranks are gone, it is said."""
    one, folder = made(1, 1), FOLDER / "ended"
    barrier()
    dist.destroy_process_group()
    return {"told": [refusal(lambda: one.compression.save(folder)), refusal(lambda: one.compression.load(folder))]}


cases = (saved, loaded, of_another, started)
cases += {"fsdp": (ended,), "torch": (begun, ended), "horovod": (begun,)}[FRONT]
asked = arguments()["cases"]
report({case.__name__: case() for case in cases if not asked or case.__name__ in asked})
