"""How ranks connect over Gloo: where they listen, whom they let in, and how each proves that it is of this job.

There is no server: *addresses* are a store that is no more than one exchange. Gloo writes where this rank listens, and
then reads where the others do. With the first read, every rank shows all others what it has written, in whatever way
the framework brings it.

Gloo has no call that closes its listening socket before the group ends. Until then it accepts whoever comes, keeps what
it has accepted, and aborts the process when no descriptor is left. So the kernel drops packets before Gloo sees a
connection: a filter on the listening socket looks at each packet that could open one.

Every connection between ranks begins with 8 bytes, its number on the rank that listens. Until all ranks are connected,
a packet passes if it asks for a connection, or if its data begin with such a number. Who sends nothing or anything else
is never accepted and takes no descriptor; the kernel forgets it after about a minute. Afterwards no packet passes, and
connecting runs into the client's own limit of time. To shut the socket down or to put another in its place would not
do: `accept` fails then, for which Gloo aborts too.

Gloo takes whoever sends the number of a connection for a rank, and the numbers can be guessed. So every rank shows the
others a secret where it shows its address, and the first message over each connection is a digest of the secrets of
its two ends. Whoever has not seen both cannot answer, and the start fails.
"""

from __future__ import annotations

import hashlib
import os
import resource
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ExchangeError
from .sockets import EXHAUSTED, OPEN, Connections, Identity, Instruction, Socket, tcp_sockets

#: What a rank opens beside its connections: the socket that listens, Gloo's loop with its pipe, and some to spare.
_BESIDE = 16

# Classic BPF on a packet from its TCP header on. To load what is not there ends the program: the packet is dropped.
_LOAD_BYTE, _LOAD_4_AT_X, _LOAD_2_AT_X, _LOAD_BYTE_AT_X = 0x30, 0x40, 0x48, 0x50
_AND, _SHIFT_LEFT, _SHIFT_RIGHT, _ADD_X = 0x54, 0x64, 0x74, 0x0C
_INTO_X, _STORE, _X_FROM_STORE = 0x07, 0x02, 0x61
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _PASS = 0x15, 0x35, 0x45, 0x06
_LENGTH_BYTE, _FLAGS_BYTE, _SYN, _ALL = 12, 13, 0x02, 0xFFFFFFFF

_NOBODY: list[Instruction] = [(_PASS, 0, 0, 0)]


def _numbers_below(most: int) -> list[Instruction]:
    """Return a filter that passes requests for a connection, and data that begin with a number below ``most``."""
    return [
        (_LOAD_BYTE, 0, 0, _FLAGS_BYTE),
        (_IF_ANY_BIT, 15, 0, _SYN),  # pass
        (_LOAD_BYTE, 0, 0, _LENGTH_BYTE),  # of the header, in words of 4 bytes, in the upper half of this one
        (_AND, 0, 0, 0xF0),
        (_SHIFT_RIGHT, 0, 0, 2),
        (_INTO_X, 0, 0, 0),
        (_LOAD_4_AT_X, 0, 0, 4),  # the number's lowest byte comes first: of 8 bytes, the last 6 should be 0
        (_IF_EQUAL, 0, 10, 0),  # else drop
        (_LOAD_2_AT_X, 0, 0, 2),
        (_IF_EQUAL, 0, 8, 0),  # else drop
        (_LOAD_BYTE_AT_X, 0, 0, 1),
        (_SHIFT_LEFT, 0, 0, 8),
        (_STORE, 0, 0, 0),
        (_LOAD_BYTE_AT_X, 0, 0, 0),
        (_X_FROM_STORE, 0, 0, 0),
        (_ADD_X, 0, 0, 0),
        (_IF_AT_LEAST, 1, 0, most),  # drop
        (_PASS, 0, 0, _ALL),
        (_PASS, 0, 0, 0),
    ]


class Listener:
    """The socket at which one group of this process listens.

    Where the system has no such filters, it stays open to all.

    Args:
        rank: of this process, for messages.
        size: the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._address = b"-"
        self._narrowed = False
        self._identity: Identity | None = None

    def check_descriptors(self) -> None:
        """Refuse to connect where descriptors will not do: Gloo would abort the process.

        Raises:
            ExchangeError: there are too few left.
        """
        needs, (most, _) = self._size - 1 + _BESIDE, resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            left = most - len(list(OPEN.iterdir()))
        except OSError as error:
            if error.errno not in EXHAUSTED:
                return  # it cannot be known
            left = 0
        if left < needs and most != resource.RLIM_INFINITY:
            raise self._exhausted(f"connecting {self._size} ranks takes {needs} file descriptors, and {left} are left")

    def narrow(self, shown: Collection[bytes]) -> None:
        """From now on, let in only who sends the number of a connection.

        Args:
            shown: what Gloo shows the other ranks, its address among it.

        Raises:
            ExchangeError: the process is out of descriptors.
        """
        for one in self._sockets():
            if one.listens() and any(_is_shown(one.address, text) for text in shown):
                self._address, self._identity = one.address, one.identity
                if sys.byteorder == "little":
                    # Versions of Gloo number from 0, or by rank, with or without the rank itself.
                    self._narrowed = one.attach(_numbers_below(2 * self._size))

    def shut(self) -> None:
        """From now on, let in nobody; all ranks are connected.

        Raises:
            ExchangeError: the process is out of descriptors.
        """
        for one in self._sockets():
            if one.address == self._address and one.listens():
                one.attach(_NOBODY)
        for one in self._sockets() if self._narrowed else ():
            if one.address == self._address and not one.listens() and not one.detach():
                one.end()  # it came before the filter

    def connections(self) -> Connections:
        """Return the connections of the group, once all ranks are connected.

        Raises:
            ExchangeError: the process is out of descriptors.
        """
        try:
            return Connections(self._identity)
        except OSError as error:
            raise self._exhausted(f"connecting {self._size} ranks failed: {error.strerror}") from None

    def _sockets(self) -> Iterator[Socket]:
        try:
            yield from tcp_sockets()
        except OSError as error:
            raise self._exhausted(f"connecting {self._size} ranks failed: {error.strerror}") from None

    def _exhausted(self, what: str) -> ExchangeError:
        return ExchangeError(f"rank {self._rank}: {what}; {advice()}")


def advice() -> str:
    """Return what to do against too few descriptors."""
    return f"raise their number, ulimit -n, which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


def is_exhausted(error: Exception) -> bool:
    """Return whether Gloo's error comes of too few descriptors, by its text, or as there are none left now."""
    if any(os.strerror(number) in str(error) for number in EXHAUSTED):
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as found:
        return found.errno in EXHAUSTED
    return False


def _is_shown(address: bytes, text: bytes) -> bool:
    """Return whether the address of a socket is in a text, as the system keeps addresses."""
    return address[:4] in text and address[4:] in text


#: Shows some bytes by key to all ranks, and returns those of all.
Share = Callable[[dict[str, bytes]], dict[str, bytes]]


class Addresses(dist.Store):
    """The store of one group.

    Attributes:
        problem: what sharing failed with, if it did.
    """

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share, self._values = share, {}  # type: tuple[Share, dict[str, bytes]]
        self._shared = False
        self.problem: Exception | None = None

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode("latin1")

    def get(self, key: str) -> bytes:
        self._learn([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self._learn(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._learn(keys)
        return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _learn(self, keys: Sequence[str]) -> None:
        if not self._shared and not self.check(keys):
            self._shared = True
            try:
                self._values |= self._share(dict(self._values))
            except Exception as error:
                self.problem = error  # on its way through C++ it would become another one
                raise
        if missing := [key for key in keys if key not in self._values]:
            raise RuntimeError(f"no rank advertised the address {missing[0]!r}")


_TAG = 0x48564352
_BYTES = 32


class Proof:
    """One rank's part, in one group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._secrets: dict[int, bytes] = {}

    def shown(self) -> dict[str, bytes]:
        """Return what to show the other ranks, by key."""
        return {_key(self._rank): secrets.token_bytes(_BYTES)}

    def see(self, found: Mapping[str, bytes]) -> None:
        """Take note of what all ranks have shown."""
        self._secrets = {rank: found[_key(rank)] for rank in range(self._size)}

    def check(self, group: Any, left: Callable[[], timedelta]) -> None:
        """Exchange proofs with all others, as the first messages of a group.

        Args:
            left: returns how long that may still take.

        Raises:
            ExchangeError: somebody has none, or none has come in time.
        """
        peers = [peer for peer in range(self._size) if peer != self._rank]
        found = {peer: torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for peer in peers}
        mine = {peer: self._digest(self._rank, peer) for peer in peers}
        works, about = [], peers[0] if peers else 0
        try:
            for about in peers:
                works.append((about, group.recv([found[about]], about, _TAG)))
                works.append((about, group.send([mine[about]], about, _TAG)))
            for about, work in works:  # noqa: B007  the error names it
                work.wait(left())
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            why = "did not answer in time" if "timed out" in text.lower() else "has ended"
            raise ExchangeError(
                f"rank {self._rank}: rank {about} {why} while ranks connected, or somebody outside the job has taken "
                f"its place: {text}; create the compression again on every rank"
            ) from None
        for peer in peers:
            if not torch.equal(found[peer], self._digest(peer, self._rank)):
                raise ExchangeError(
                    f"rank {self._rank}: somebody outside the job has connected in place of rank {peer}; create the "
                    "compression again on every rank, and keep the job's ports out of the reach of others"
                )

    def _digest(self, sender: int, receiver: int) -> Tensor:
        text = b"".join([self._secrets[sender], self._secrets[receiver], b"%d %d" % (sender, receiver)])
        return torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)


def _key(rank: int) -> str:
    return f"hvc/secret/{rank}"
