"""Ranks that share a host: who they are, their messages, and memory that they share.

With ``exchange="hierarchical"`` the ranks of one host first average their gradients in shared memory. Each then owns a
share of every tensor, and exchanges it with the ranks that own the same share on the other hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .transports.transport import Messages, Pending

# ---- who they are --------------------------------------------------------------------------------


def of_ranks(machines: Sequence[str]) -> list[list[int]]:
    """Return the ranks of every host, in the order of their first ranks.

    Args:
        machines: names the host of each rank.

    Raises:
        ConfigError: hosts have different numbers of ranks.
    """
    hosts: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        hosts.setdefault(machine, []).append(rank)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        told = ", ".join(str(ranks) for ranks in hosts.values())
        raise ConfigError(
            f'exchange="hierarchical" needs as many ranks on every host, but the ranks of the hosts are {told}: start '
            'equally many on each, or use exchange="auto"'
        )
    return list(hosts.values())


class Group:
    """Some ranks of a job, as a job of their own; its messages are those of the whole, and in one order with them."""

    def __init__(self, whole: Messages, ranks: Sequence[int]) -> None:
        self._whole, self.ranks = whole, tuple(ranks)
        self.rank, self.size = self.ranks.index(whole.rank), len(self.ranks)

    def send(self, data: Tensor, to: int) -> Pending:
        return self._whole.send(data, self.ranks[to])

    def receive(self, data: Tensor, frm: int) -> Pending:
        return self._whole.receive(data, self.ranks[frm])


@dataclass(frozen=True)
class LocalHost:
    """The host of one rank, as that rank sees it.

    Attributes:
        within: the ranks of this host; the place of a rank among them says which share of each tensor it owns.
        for_decoding: likewise, for messages of the thread that decodes.
        between: the ranks with this place on all hosts.
        memories: what the ranks of this host share, one array of bytes of each.
    """

    within: Group
    for_decoding: Group
    between: Group
    memories: Sequence[Tensor]


def groups(whole: Messages, for_decoding: Messages, hosts: Sequence[Sequence[int]]) -> tuple[Group, Group, Group]:
    """Return the groups of this rank as a :class:`LocalHost` has them."""
    mine = next(ranks for ranks in hosts if whole.rank in ranks)
    place = mine.index(whole.rank)
    return Group(whole, mine), Group(for_decoding, mine), Group(whole, [ranks[place] for ranks in hosts])


# ---- shared memory -------------------------------------------------------------------------------

_TOKEN_BYTES = 16
_NAME = "horovod-compress"


class Shared:
    """Memory of this rank that the other ranks of its host map, by way of this process's open files.

    It has no name, so nothing of it is left once the processes are gone, however they end; and it is not limited by the
    size of /dev/shm, which containers have little of.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file = os.memfd_create(_NAME)
        try:
            # Memory that is short is an error now, and not the end of the process at the first touch.
            os.posix_fallocate(self._file, 0, nbytes + _TOKEN_BYTES)
            self.data = _mapped(self._file, nbytes)
            os.pwrite(self._file, self._token, nbytes)
        except (OSError, RuntimeError) as error:  # torch's own is the latter
            self.close()
            raise ConfigError(f"{nbytes} bytes of shared memory cannot be had: {_said(error)}") from None

    def shown(self) -> dict[str, Any]:
        """Return what other ranks find it by."""
        return {"process": os.getpid(), "file": self._file, "token": self._token.hex(), "nbytes": self.data.numel()}

    def close(self) -> None:
        """Close the file, once all have mapped it; the memory stays as long as it is used."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def opened(shown: Mapping[str, Any]) -> Tensor:
    """Return the memory that another rank has shown.

    Raises:
        ConfigError: it cannot be reached from this process.
    """
    nbytes, path = int(shown["nbytes"]), f"/proc/{int(shown['process'])}/fd/{int(shown['file'])}"
    try:
        # That of another process may be anything, and to close a file that this process has locked releases the lock.
        if str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
            file = os.open(path, os.O_RDWR)
            try:
                if os.pread(file, _TOKEN_BYTES, nbytes).hex() == shown["token"]:
                    return _mapped(file, nbytes)
            finally:
                os.close(file)
        reason = "it is that of another process"
    except (OSError, RuntimeError) as error:
        reason = _said(error)
    raise ConfigError(
        f'exchange="hierarchical" needs memory that the ranks of a host share, and {path} cannot be used: {reason}; '
        'start the ranks of a host as one user in one container, or use exchange="auto"'
    )


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _mapped(file: int, nbytes: int) -> Tensor:
    # Not Python's mmap, which keeps a file of its own open.
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
