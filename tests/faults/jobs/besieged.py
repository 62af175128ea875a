"""Two ranks in one process with few descriptors, which say where they listen, and wait at the points of a start.

Their ends are real: Gloo's connections over loopback. Between two points somebody else may knock: a line that is
written here lets the ranks go on. Two threads are enough, as a stranger meets one port of one rank at a time.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from horovod_compress.exchange.device import Deadline
from horovod_compress.exchange.transports.gloo import GlooTransport
from tests.support.connected import shares

WORLD, DEADLINE = 2, float(sys.argv[1])


def opened() -> int:
    """Return the number of descriptors in use."""
    return len(list(Path("/proc/self/fd").iterdir()))


def say(**what: object) -> None:
    """Show what there is now, and wait for a line."""
    found = psutil.Process().net_connections(kind="tcp")
    ports = sorted(one.laddr.port for one in found if one.status == psutil.CONN_LISTEN)
    print(json.dumps({"ports": ports, "descriptors": opened(), **what}), flush=True)
    sys.stdin.readline()


def start() -> list[GlooTransport]:
    """Connect; rank 0 stops wherever all have shown where they listen, and nobody has connected yet."""
    each = shares(WORLD)

    def stopping(share: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Callable[..., dict[str, bytes]]:
        def shown(values: dict[str, bytes]) -> dict[str, bytes]:
            found = share(values)
            say(at="addresses")
            share({})  # the others wait too
            return found

        return shown

    def followed(share: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Callable[..., dict[str, bytes]]:
        def shown(values: dict[str, bytes]) -> dict[str, bytes]:
            found = share(values)
            share({})
            return found

        return shown

    shown = [stopping(each[0]), *map(followed, each[1:])]
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(lambda rank: GlooTransport(shown[rank], rank, WORLD, "127.0.0.1", DEADLINE), range(WORLD)))


def swapped(ranks: list[GlooTransport]) -> bool:
    """Return whether bytes still go from each rank to the other."""
    data = [torch.full((100_000,), rank + 1, dtype=torch.uint8) for rank in range(WORLD)]
    found = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(WORLD)]
    waits = [ranks[rank].receive(found[rank], 1 - rank) for rank in range(WORLD)]
    waits += [ranks[rank].send(data[rank], 1 - rank) for rank in range(WORLD)]
    for wait in waits:
        wait.wait(Deadline(DEADLINE))
    ranks[0].say("topic", "word")
    return torch.equal(found[0], data[1]) and torch.equal(found[1], data[0])


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    torch.zeros(1)
    before = opened()
    ranks = start()
    say(at="connected", right=swapped(ranks))
    say(at="after", right=swapped(ranks), said=ranks[1].said("topic"))
    for rank in ranks:
        rank.close()
    say(at="closed", before=before)


if __name__ == "__main__":
    main()
