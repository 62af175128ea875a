"""Bytes over TCP through torch.distributed's Gloo, in a group and a store of our own.

The user's default process group is not touched. Gloo breaks a connection as soon as one end dies,
and fails a wait when its deadline passes; what it lacks is telling the ranks that are not
connected in the ring. So a rank that fails closes all its connections, which fails its neighbours
in turn, after leaving a note in the store that says what it saw.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..deadline import Deadline
from ..errors import ConfigError, ExchangeError, PeerError

_TAG = 0x48564346  # one ordered stream per pair of ranks
_NOTE_SECONDS = 0.5
_POLL_SECONDS = 0.05


def available() -> bool:
    """Return whether this torch was built with Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def own_address(one_host: bool) -> str:
    """Return the address at which other ranks reach this one.

    The interface of ``HOROVOD_GLOO_IFACE`` decides where it is set; else loopback when all ranks
    share one host; else the address of this host's name.

    Raises:
        ConfigError: the interface has no address, or the host's name does not resolve.
    """
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if interface:
        return _interface_address(interface)
    if one_host:
        return "127.0.0.1"
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"this host's name {name!r} does not resolve ({error}); add it to /etc/hosts or set "
            f"HOROVOD_GLOO_IFACE to the network interface to use"
        ) from None


def _interface_address(interface: str) -> str:
    import psutil  # a dependency of Horovod

    found = psutil.net_if_addrs()
    for entry in found.get(interface, []):
        if entry.family == socket.AF_INET:
            return entry.address
    raise ConfigError(
        f"HOROVOD_GLOO_IFACE={interface} has no IPv4 address; interfaces here: {', '.join(found)}"
    )


class Meeting:
    """The key-value store through which ranks find each other; rank 0 serves it."""

    def __init__(self, address: tuple[str, int] | None, own: str, seconds: float) -> None:
        host, port = address or (own, 0)
        self.store = dist.TCPStore(
            host, port, is_master=address is None, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        self.address = (host, self.store.port)


class GlooTransport:
    """One rank's connections to all others.

    Args:
        meeting: the store; every rank of the job joins the same one.
        own: the address at which this rank listens.
        seconds: how long to wait for the other ranks to connect.

    Raises:
        ExchangeError: not every rank connected in time.
    """

    name = "gloo"

    def __init__(self, meeting: Meeting, rank: int, size: int, own: str, seconds: float) -> None:
        self.rank, self.size = rank, size
        self._store = meeting.store
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own, lazy_init=False)]
        options._timeout = timedelta(seconds=seconds)
        try:
            self._group: Any = dist.ProcessGroupGloo(
                dist.PrefixStore("hvc", self._store), rank, size, options
            )
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {rank}: not all of {size} ranks connected within {seconds:g} s: {_first_line(error)}"
            ) from None
        # abort() must drop every transfer, or the connections stay open behind them.
        self._pending: weakref.WeakSet[_Transfer] = weakref.WeakSet()

    def send(self, data: Tensor, to: int) -> _Transfer:
        return self._start("send", data, to)

    def receive(self, data: Tensor, frm: int) -> _Transfer:
        return self._start("recv", data, frm)

    def _start(self, what: str, data: Tensor, peer: int) -> _Transfer:
        if self._group is None:
            raise PeerError(peer, False, "this transport was aborted or closed")
        try:
            transfer = _Transfer(getattr(self._group, what)([data], peer, _TAG), peer)
        except RuntimeError as error:
            raise PeerError(peer, False, _first_line(error)) from None
        self._pending.add(transfer)
        return transfer

    def abort(self, note: dict) -> None:
        try:
            self._store.set_timeout(timedelta(seconds=_NOTE_SECONDS))
            self._store.set(f"abort/{self.rank}", json.dumps(note))
        except RuntimeError:
            pass  # the store died with rank 0; closing the connections still tells the others
        self._drop()

    def notes(self, seconds: float) -> dict[int, dict]:
        end = time.monotonic() + seconds
        found: dict[int, dict] = {}
        try:
            while len(found) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - set(found):
                    if self._store.check([f"abort/{rank}"]):
                        found[rank] = json.loads(self._store.get(f"abort/{rank}"))
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            pass  # rank 0 and its store are gone: what was read so far has to do
        return found

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        for transfer in list(self._pending):
            transfer.work = None
        self._group = None


class _Transfer:
    __slots__ = ("work", "_peer", "__weakref__")

    def __init__(self, work: Any, peer: int) -> None:
        self.work, self._peer = work, peer

    def wait(self, deadline: Deadline) -> None:
        if self.work is None:
            raise PeerError(self._peer, False, "this transport was aborted")
        # Gloo takes a timeout of zero for none at all.
        left = timedelta(milliseconds=max(1, int(deadline.left() * 1000)))
        try:
            self.work.wait(left)
        except RuntimeError as error:
            raise PeerError(self._peer, "Timed out" in str(error), _first_line(error)) from None
        finally:
            self.work = None


def _first_line(error: Exception) -> str:
    """Return Gloo's message without its source position and its advice."""
    text = str(error).splitlines()[0]
    return text.partition("] ")[2].partition(". This is typically")[0] or text
