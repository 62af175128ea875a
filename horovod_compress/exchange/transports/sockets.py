"""Sockets of this process by their numbers: all that there are, and those that a group of Gloo's has opened.

Most of what a process has open is its program's, and is not to be touched. A socket object of Python's would change how
a descriptor blocks, where the program has set a default timeout. To close a copy of a file's descriptor releases every
lock that the process holds on that file. So only sockets are copied. Gloo closes its own at any time, and the next file
gets the number: what a number stands for is compared whenever it is used.

A process that is forked, such as a worker of a data loader, has a copy of everything that its parent has open, and a
connection breaks only when the last copy is closed. So forks close theirs at once, programs that are started get none,
and a group that ends says so over its connections, whoever may still hold them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

#: What this process has open, by number; and of each more, such as what an epoll watches.
OPEN, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_EPOLL, _WATCHES = "anon_inode:[eventpoll]", "tfd:"
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_MOST_BYTES = 128  # of a socket's address

#: Too many open files, in this process or on this machine.
EXHAUSTED = (errno.EMFILE, errno.ENFILE)

#: A code, how many instructions to skip where a test is true and where it is not, and a number.
Instruction = tuple[int, int, int, int]
#: The device and the inode of a socket, which no other has as long as it is open.
Identity = tuple[int, int]


class Socket:
    """A socket by its number.

    Attributes:
        address: family, port and host as the system keeps them; empty for what is no TCP socket.
        identity: tells it from all others; None for what is no socket.
    """

    def __init__(self, number: int) -> None:
        self._number, self.identity = number, _identity(number)
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

    def finish(self) -> None:
        """Let the other end know, after all that was sent, that nothing more comes.

        What it sends is still taken in: to refuse that would reset the connection, and drop what it has not read yet.
        """
        _system().shutdown(self._number, socket.SHUT_WR)


def tcp_sockets() -> Iterator[Socket]:
    """Yield the TCP sockets of this process, each once, and open until the next: it may be closed meanwhile.

    Raises:
        OSError: the process is out of descriptors.
    """
    seen: set[Identity] = set()
    for number in _numbers():
        # Threads that look at the same time have copies of each other's sockets.
        if (identity := _identity(number)) is None or identity in seen:
            continue
        if (copy := _copied(number, identity)) is None:
            continue
        try:
            seen.add(identity)
            if (one := Socket(copy)).address:
                yield one
        finally:
            os.close(copy)


class Connections:
    """The connections of one group, and the socket at which it listened.

    Where the system does not tell what Gloo's loop watches, they are not known, and forks keep their copies.

    Args:
        listening: the socket at which the group listened, None if that is not known.
    """

    def __init__(self, listening: Identity | None) -> None:
        self._opened: Mapping[int, Identity] = _watched_with(listening)
        for number in self._opened:
            with contextlib.suppress(OSError):
                os.set_inheritable(number, False)
        _of_all_groups.add(self)

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End the connections with a block in which Gloo closes them.

        Not before: Gloo would write to them in that block, and a process may have chosen to be killed by SIGPIPE.
        """
        opened, self._opened = self._opened, {}
        copies: list[int] = []
        with contextlib.suppress(OSError):  # out of descriptors: Gloo closes the others, as it does anyway
            for number, identity in opened.items():
                if (copy := _copied(number, identity)) is not None:
                    copies.append(copy)
        try:
            yield
        finally:
            for copy in copies:
                if not (one := Socket(copy)).listens():  # Gloo aborts where accepting fails
                    one.finish()
                os.close(copy)

    def leave(self) -> None:
        """Close the copies of a fork, which has one thread and takes no lock.

        Nothing else gets their numbers: Gloo may yet close them in the fork, and would close what is not its own.
        """
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            for number, identity in self._opened.items():
                if _identity(number) == identity:
                    os.dup2(nothing, number, inheritable=False)
            os.close(nothing)
        self._opened = {}


_of_all_groups: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_all() -> None:
    for connections in list(_of_all_groups):
        connections.leave()


os.register_at_fork(after_in_child=_leave_all)


def _watched_with(listening: Identity | None) -> dict[int, Identity]:
    """Return the sockets that one loop watches together with this one: each group has a loop to itself."""
    for number in _numbers() if listening else ():
        try:
            if str((OPEN / str(number)).readlink()) != _EPOLL:
                continue
            lines = (_DETAILS / str(number)).read_text().splitlines()
        except OSError:  # it has closed, or it cannot be known
            continue
        watched = [int(line.split()[1]) for line in lines if line.startswith(_WATCHES)]
        found = {one: identity for one in watched if (identity := _identity(one))}
        if listening in found.values():
            return found
    return {}


def _numbers() -> list[int]:
    """Return the numbers of all that is open; none where it cannot be known.

    Raises:
        OSError: the process is out of descriptors.
    """
    try:
        return [int(path.name) for path in OPEN.iterdir()]
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return []


def _identity(number: int) -> Identity | None:
    """Return what tells a socket from all others; None for what is none, or is closed."""
    try:
        about = os.fstat(number)
    except OSError:
        return None
    return (about.st_dev, about.st_ino) if stat.S_ISSOCK(about.st_mode) else None


def _copied(number: int, identity: Identity) -> int | None:
    """Return a copy of a socket's descriptor; None if the number does not stand for that socket any more.

    Raises:
        OSError: the process is out of descriptors.
    """
    if _identity(number) != identity:
        return None
    try:
        copy = os.dup(number)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return None
    if _identity(copy) == identity:
        return copy
    os.close(copy)  # another thread has closed the socket meanwhile, and opened something else
    return None


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)
