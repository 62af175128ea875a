"""Starts the ranks of a torch.distributed job, and leaves them alone: torchrun ends all when one has failed.

python -m tests.support.launch WORLD COMMAND...
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys

#: Below those that a system gives to whoever asks for any, as other jobs do meanwhile.
_FIRST, _LAST = 10_000, 30_000
_used = itertools.count()


def free_port() -> int:
    """Return a port that nobody listens at, and that nobody gets by chance before it is used."""
    for number in itertools.islice(_used, _LAST - _FIRST):  # each process begins elsewhere
        port = _FIRST + (os.getpid() * 101 + number) % (_LAST - _FIRST)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {_FIRST} to {_LAST} can be listened at")


def of_all(world: int, port: int) -> dict[str, str]:
    """Return what the environment of every rank has."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }


def of_one(rank: int) -> dict[str, str]:
    """Return what the environment of one rank has."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def main(world: int, command: list[str]) -> int:
    common = os.environ | of_all(world, free_port())
    ranks = [subprocess.Popen(command, env=common | of_one(rank)) for rank in range(world)]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
