"""Starts the ranks of a torch.distributed job, and leaves them alone: torchrun ends all when one has failed.

python -m tests.support.launch WORLD COMMAND...
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(world: int, command: list[str]) -> int:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    common["LOCAL_WORLD_SIZE"] = str(world)
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
