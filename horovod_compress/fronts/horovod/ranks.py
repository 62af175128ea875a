"""Horovod's ranks, for the commands that check and measure: ``verify``, ``headroom`` and ``plan --measure``.

As a module, it is a rank that ``verify`` has started itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...codecs.base import Codec
from ...engine.job import Gathering
from ...known import MethodName
from .. import local_ranks, selftest
from ..local_ranks import End, Look
from ..ranks import PATIENCE, Training, usual_optimizer
from ..startup import Wrap, as_it_is
from .compression import Compression
from .job import HorovodJob

_MODULE = "horovod_compress.fronts.horovod.ranks"


def begin() -> HorovodRanks:
    """Start Horovod for a command: one rank where no launcher has started several."""
    hvd.init()
    return HorovodRanks()


class HorovodRanks:
    """The ranks of a Horovod job, which has to run."""

    name = "horovod"

    @property
    def rank(self) -> int:
        return int(hvd.rank())

    @property
    def size(self) -> int:
        return int(hvd.size())

    def undivided(self) -> HorovodRanks:
        return self

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        return HorovodJob(hvd.global_process_set).gather(value, Gathering(name, seconds))

    def barrier(self) -> None:
        hvd.barrier()

    def slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        return float(hvd.allreduce(mine, name="ranks.seconds", op=hvd.Max))

    def mean(self, tensor: Tensor) -> None:
        hvd.allreduce_(tensor, name="ranks.fp32")

    def mean_in_fp16(self, tensor: Tensor) -> None:
        payload, _ = hvd.Compression.fp16.compress(tensor)
        tensor.copy_(hvd.allreduce_(payload, name="ranks.fp16"))

    def train(
        self,
        model: nn.Module,
        method: MethodName | Codec,
        wrap: Wrap = as_it_is,
        optimizer: Optimizer | None = None,
        match_norm: bool = True,
        **options: Any,
    ) -> Training:
        named = list(model.named_parameters())
        compression = Compression(method, named, options, HorovodJob(hvd.global_process_set), wrap)
        plain = optimizer or usual_optimizer(model)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
        return Training(compression, compression.attach(optimizer, match_norm=match_norm), model)

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        parameter.grad = grad
        training.optimizer._synchronized = False  # the step() that would follow is not measured
        training.optimizer.synchronize()


def run_local(
    world: int, what: Any, seconds: float, victims: Collection[int] = (), look: Look = lambda left: None
) -> list[End]:
    """Run this module as every rank of a job on this machine; see :func:`..local_ranks.run`.

    Only the server through which ranks find each other is taken from Horovod's launcher.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
    common = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(plan)
    try:
        own = [{key: str(value) for key, value in (common | create_slot_env_vars(slot)).items()} for slot in plan]
        return local_ranks.run(_MODULE, own, what, seconds, victims, look)
    finally:
        server.stop()
        server._httpd.server_close()  # which stop() leaves to the garbage collector


if __name__ == "__main__":
    selftest.serve(begin)
