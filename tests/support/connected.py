"""Gloo's transports of several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from horovod_compress.exchange.transports.gloo import GlooTransport

Share = Callable[[dict[str, bytes]], dict[str, bytes]]


def shares(size: int) -> list[Share]:
    """Return, by rank, what shows its values to all."""
    barrier, shown = threading.Barrier(size, timeout=30), [dict[str, bytes]() for _ in range(size)]

    def of(rank: int) -> Share:
        def share(values: dict[str, bytes]) -> dict[str, bytes]:
            shown[rank] = values
            barrier.wait()
            found = {key: value for mine in shown for key, value in mine.items()}
            barrier.wait()
            return found

        return share

    return [of(rank) for rank in range(size)]


def connected(size: int, seconds: float = 30.0, own: str = "127.0.0.1") -> list[GlooTransport]:
    """Return a transport per rank."""
    each = shares(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: GlooTransport(each[rank], rank, size, own, seconds), range(size)))
