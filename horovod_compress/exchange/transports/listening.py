"""Who may connect where Gloo listens: while the ranks connect, who sends the right number; afterwards nobody.

Gloo has no call that closes its listening socket before the group ends. Until then it accepts whoever comes, keeps what
it has accepted, and aborts the process when no descriptor is left. So the kernel drops packets before Gloo sees a
connection: a filter on the listening socket looks at each packet that could open one.

Every connection between ranks begins with 8 bytes, its number on the rank that listens. Until all ranks are connected,
a packet passes if it asks for a connection, or if its data begin with such a number. Who sends nothing or anything else
is never accepted and takes no descriptor; the kernel forgets it after about a minute. Afterwards no packet passes, and
connecting runs into the client's own limit of time.

To shut the socket down or to put another in its place would not do: `accept` fails then, for which Gloo aborts too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

from ...errors import ExchangeError

_OPEN = Path("/proc/self/fd")
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_MOST_BYTES = 128  # of a socket's address
#: What a rank opens beside its connections: the socket that listens, Gloo's loop with its pipe, and some to spare.
_BESIDE = 16

# Classic BPF on a packet from its TCP header on. To load what is not there ends the program: the packet is dropped.
_LOAD_BYTE, _LOAD_4_AT_X, _LOAD_2_AT_X, _LOAD_BYTE_AT_X = 0x30, 0x40, 0x48, 0x50
_AND, _SHIFT_LEFT, _SHIFT_RIGHT, _ADD_X = 0x54, 0x64, 0x74, 0x0C
_INTO_X, _STORE, _X_FROM_STORE = 0x07, 0x02, 0x61
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _PASS = 0x15, 0x35, 0x45, 0x06
_LENGTH_BYTE, _FLAGS_BYTE, _SYN, _ALL = 12, 13, 0x02, 0xFFFFFFFF

#: A code, how many instructions to skip where a test is true and where it is not, and a number.
Instruction = tuple[int, int, int, int]

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

    def check_descriptors(self) -> None:
        """Refuse to connect where descriptors will not do: Gloo would abort the process.

        Raises:
            ExchangeError: there are too few left.
        """
        needs, (most, _) = self._size - 1 + _BESIDE, resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            left = most - len(list(_OPEN.iterdir()))
        except OSError as error:
            if error.errno not in _EXHAUSTED:
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
                self._address = one.address
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

    def _sockets(self) -> Iterator[_Socket]:
        """Yield the TCP sockets of this process, each once, and open until the next: it may be closed meanwhile."""
        seen: set[int] = set()
        try:
            numbers = [int(path.name) for path in _OPEN.iterdir()]
        except OSError as error:
            self._refuse_if_exhausted(error)
            return  # it cannot be known
        for number in numbers:
            try:
                copy = os.dup(number)
            except OSError as error:
                self._refuse_if_exhausted(error)
                continue  # it has closed
            try:
                about = os.fstat(copy)
                # Threads that look at the same time have copies of each other's sockets.
                if stat.S_ISSOCK(about.st_mode) and about.st_ino not in seen:
                    seen.add(about.st_ino)
                    if (one := _Socket(copy)).address:
                        yield one
            finally:
                os.close(copy)

    def _refuse_if_exhausted(self, error: OSError) -> None:
        if error.errno in _EXHAUSTED:
            raise self._exhausted(f"connecting {self._size} ranks failed: {error.strerror}") from None

    def _exhausted(self, what: str) -> ExchangeError:
        return ExchangeError(f"rank {self._rank}: {what}; {advice()}")


def advice() -> str:
    """Return what to do against too few descriptors."""
    return f"raise their number, ulimit -n, which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


#: Too many open files, in this process or on this machine.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def is_exhausted(error: Exception) -> bool:
    """Return whether Gloo's error comes of too few descriptors, by its text, or as there are none left now."""
    if any(os.strerror(number) in str(error) for number in _EXHAUSTED):
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as found:
        return found.errno in _EXHAUSTED
    return False


class _Socket:
    """A socket by its number. One of Python's would change how it blocks where a program has set a default timeout.

    Attributes:
        address: family, port and host as the system keeps them; empty for what is no TCP socket.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.address = self._named() if self._option(socket.SO_TYPE) == socket.SOCK_STREAM else b""

    def _named(self) -> bytes:
        name, length = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_uint(_MOST_BYTES)
        if _system().getsockname(self._number, name, ctypes.byref(length)):
            return b""
        (family,) = struct.unpack_from("=H", name.raw)
        if family == socket.AF_INET:
            return name.raw[:8]
        return name.raw[:4] + name.raw[8:24] if family == socket.AF_INET6 else b""

    def _option(self, name: int) -> int:
        """Return an option that is a number, 0 if there is none."""
        value, length = ctypes.c_int(0), ctypes.c_uint(4)
        where = (self._number, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(length))
        return 0 if _system().getsockopt(*where) else value.value

    def listens(self) -> bool:
        return bool(self._option(socket.SO_ACCEPTCONN))

    def attach(self, program: Sequence[Instruction]) -> bool:
        """Return whether the socket has a filter now, which the connections that it accepts inherit."""
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
        whole = struct.pack("HP", len(program), ctypes.addressof(code))
        return not _system().setsockopt(self._number, socket.SOL_SOCKET, _ATTACH, whole, len(whole))

    def detach(self) -> bool:
        """Take the filter away; return whether there was one."""
        return not _system().setsockopt(self._number, socket.SOL_SOCKET, _DETACH, struct.pack("i", 0), 4)

    def end(self) -> None:
        """End the connection."""
        _system().shutdown(self._number, socket.SHUT_RDWR)


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _is_shown(address: bytes, text: bytes) -> bool:
    """Return whether the address of a socket is in a text, as the system keeps addresses."""
    return address[:4] in text and address[4:] in text
