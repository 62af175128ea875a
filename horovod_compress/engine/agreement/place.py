"""Where the ranks are: on one host they connect over loopback, else at the addresses of their hosts.

Nothing in the environment tells this for certain, so every rank shows the name of its host in its document.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .handshake import Document

LOOPBACK = "127.0.0.1"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Attributes:
        address: at which other hosts reach it, None if at none.
        host: what no other host is called; empty where the address holds wherever the other ranks are.
        problem: why there is no address.
    """

    address: str | None
    host: str = ""
    problem: str | None = None


def host_name() -> str:
    """Return a name that ranks share if they reach each other over loopback.

    The host's own name is not enough: clones of one image may share it, and so do network namespaces of one host.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_BOOT.read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(_NETWORK.readlink()))
    return " ".join(parts)


def own_address(place: Place, documents: Sequence[Document]) -> str:
    """Return the address at which this rank listens, when all have shown where they are.

    Raises:
        ConfigError: the ranks are on several hosts, and one of them cannot be reached; every rank raises it.
    """
    if place.host and {document.host for document in documents} == {place.host}:
        return LOOPBACK
    for rank, document in enumerate(documents):
        if document.unreachable:
            raise ConfigError(f"rank {rank} is not on the same host as the others: {document.unreachable}")
    assert place.address is not None
    return place.address
