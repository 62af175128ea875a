"""Ranks of torch.distributed on this machine, with the environment that ``torchrun`` gives them, but not ended by it.

As under ``torchrun``, the process that starts the ranks has the store: it stays when a rank dies.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from ..common import local_ranks
from ..common.local_ranks import End, Look

_MODULE = "horovod_compress.fronts.torch_dist.selftest"
_HOST = "127.0.0.1"


def run(
    world: int, what: Any, seconds: float, victims: Collection[int] = (), look: Look = lambda left: None
) -> list[End]:
    """Run the selftest as every rank of a job; see :func:`..common.local_ranks.run`."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return local_ranks.run(_MODULE, own, what, seconds, victims, look)
