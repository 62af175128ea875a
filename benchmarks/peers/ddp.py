"""PyTorch's DistributedDataParallel over Gloo, with its own communication hooks."""

from __future__ import annotations

import os
import socket
from typing import Any

import horovod.torch as hvd
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_compress.exchange.transports.addresses import own_address

from .base import Adapter, Check, ring_bytes
from .names import PeerError

_RANKS = {"ddp powersgd r1": 1, "ddp powersgd r4": 4}


def adapter(name: str) -> Adapter:
    return PowerSGD(name, _RANKS[name]) if name in _RANKS else Plain(name)


class _DDP:
    name: str
    check: Check
    bucket_mb: int | None = None  # DDP's own default

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        join()
        # Gradients live in the buckets, which spares DDP a copy; the default would be slower.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket_mb)
        self._hook(wrapped)
        return wrapped, optimizer

    def _hook(self, model: DistributedDataParallel) -> None:
        pass


class Plain(_DDP):
    """DDP without compression, or with its own cast to float16."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._half = name == "ddp fp16"
        self.check = "float16" if self._half else "float32"
        self._steps, self._payload = 0, 0

    def _hook(self, model: DistributedDataParallel) -> None:
        if self._half:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        width = 2 if self._half else 4
        self._payload = sum(width * p.numel() for p in model.parameters() if p.requires_grad)
        model.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: Any) -> None:
        self._steps += 1

    def stats(self) -> dict[str, Any]:
        sent = ring_bytes(self._steps * self._payload, hvd.size())
        return {"bytes_sent": sent, "bytes_computed": True, "seconds": {}}


class PowerSGD(_DDP):
    """DDP's PowerSGD: every matrix becomes two thin ones of this rank, with error feedback.

    All gradients are one bucket. The hook starts a bucket's later all-reduces from Gloo's two worker
    threads, and blocks one of them until each is done: with several buckets under way both threads
    wait for ever, or the ranks start all-reduces in different orders. So nothing hides behind backward.
    """

    check: Check = "identical"
    bucket_mb = 1 << 20
    warm_up = 5  # two steps are not compressed, and some more are to have settled buffers

    def __init__(self, name: str, rank: int) -> None:
        self.name, self._rank = name, rank
        self._state: Any = None

    def _hook(self, model: DistributedDataParallel) -> None:
        self._state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=self._rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    def stats(self) -> dict[str, Any]:
        """The two uncompressed first steps are left out: the state does not count them."""
        elements = self._state.compression_stats()[2] if self._state else 0
        return {"bytes_sent": ring_bytes(4 * elements, hvd.size()), "bytes_computed": True, "seconds": {}}


# ---- the process group ------------------------------------------------------------------------


def join() -> None:
    """Make the default process group over Gloo, once; the ranks meet where rank 0 says, through Horovod.

    Raises:
        PeerError: a default group of another backend is there already.
    """
    if dist.is_initialized():
        if "gloo" not in dist.get_backend():
            raise PeerError(f"the ddp contestants need a default group over gloo, it is {dist.get_backend()}")
        return
    one_host = hvd.local_size() == hvd.size()
    if interface := os.environ.get("HOROVOD_GLOO_IFACE") or (_loopback() if one_host else None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    own = own_address(one_host)
    # Rank 0 opens the store first, and then says at which port.
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    mine = (own, store.port) if store else None
    host, port = hvd.broadcast_object(mine, root_rank=0, name="bench.ddp.address")
    store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def _loopback() -> str | None:
    """Return the loopback interface: a host's name need not resolve when all ranks are on it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == "127.0.0.1" for entry in addresses):
            return name
    return None


def leave() -> None:
    """End the process group, if there is one; all ranks together, before they exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
