"""What else a process has open stays as it is, and its children have none of the connections between ranks."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from horovod_compress.errors import PeerError
from horovod_compress.exchange.device import Deadline
from horovod_compress.exchange.transports import sockets
from horovod_compress.exchange.transports.gloo import GlooTransport
from horovod_compress.exchange.transports.sockets import Connections
from tests.support.connected import connected
from tests.support.locks import is_free

LONG = 15.0
OPEN = Path("/proc/self/fd")


def opened() -> dict[int, str]:
    """Return the sockets of this process, by number."""
    found = {}
    for path in OPEN.iterdir():
        try:
            found[int(path.name)] = str(path.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
    return {number: name for number, name in found.items() if name.startswith("socket:")}


@pytest.fixture
def other() -> Iterator[socket.socket]:
    """A socket of the program's own, which its children have too."""
    one, two = socket.socketpair()
    one.set_inheritable(True)
    with one, two:
        yield one


def opened_as(one: socket.socket) -> str:
    return f"socket:[{os.fstat(one.fileno()).st_ino}]"


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    made = connected(2)
    yield made
    for transport in made:
        transport.close()


def of_groups(transports: list[GlooTransport]) -> list[Connections]:
    """Return the connections of both groups of each rank."""
    return [one for transport in transports for one in (transport._connections, transport._board._connections)]


def known(transports: list[GlooTransport]) -> dict[int, str]:
    """Return the sockets that are known of transports, by number."""
    return {number: f"socket:[{inode}]" for one in of_groups(transports) for number, (_, inode) in one._opened.items()}


def watch(monkeypatch: pytest.MonkeyPatch, one: socket.socket) -> None:
    """Have this for the only socket of every group."""
    number, about = one.fileno(), os.fstat(one.fileno())
    monkeypatch.setattr(sockets, "_watched_with", lambda _: {number: (about.st_dev, about.st_ino)})


@pytest.fixture
def copies(pair: list[GlooTransport]) -> Iterator[None]:
    """Have copies of all connections, as a process has that C has forked, where nothing of ours runs."""
    made = [os.dup(number) for number in known(pair)]
    yield
    for copy in made:
        os.close(copy)


def test_locks_of_the_process_stay(tmp_path: Path) -> None:
    """To close a copy of a file's descriptor would release them, as the control does."""
    path = tmp_path / "locked"
    path.touch()
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not is_free(path)
        for transport in connected(2):
            transport.close()
        assert not is_free(path)
        os.close(os.dup(file.fileno()))
        assert is_free(path)


def test_all_sockets_of_a_group_are_known() -> None:
    """Those at which the two groups of each rank listen, and one connection to each of its peers."""
    before = opened()
    made = connected(3)
    try:
        assert {number: name for number, name in opened().items() if before.get(number) != name} == known(made)
        assert [len(one._opened) for one in of_groups(made)] == [3] * 6
    finally:
        for transport in made:
            transport.close()


def test_a_fork_has_no_connections(pair: list[GlooTransport], other: socket.socket) -> None:
    """What else the program has open is there as in any fork, and the ranks go on."""
    mine = known(pair)
    assert len(mine) == 8
    if not (child := os.fork()):
        forked = set(opened().values())
        os._exit(int(not forked.isdisjoint(mine.values()) or opened_as(other) not in forked or bool(known(pair))))
    assert os.waitpid(child, 0)[1] == 0
    assert mine.items() <= opened().items()
    got = torch.zeros(100, dtype=torch.uint8)
    pending = pair[1].receive(got, 0)
    pair[0].send(torch.ones(100, dtype=torch.uint8), 1).wait(Deadline(LONG))
    pending.wait(Deadline(LONG))
    assert bool(got.all())


def test_in_a_fork_no_file_gets_their_numbers(pair: list[GlooTransport]) -> None:
    """Gloo may close them there, as it has not heard of this."""
    mine = known(pair)
    if not (child := os.fork()):
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(len(mine) + 1)]
        os._exit(int(not mine.keys().isdisjoint(files)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_program_that_is_started_has_no_connections(pair: list[GlooTransport], other: socket.socket) -> None:
    """As with os.system, which leaves open what may be inherited."""
    found = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert opened_as(other) in found.stdout
    assert not any(name in found.stdout for name in known(pair).values())


@pytest.mark.parametrize("how", ["abort", "close"])
def test_peers_see_the_end_whoever_has_copies(pair: list[GlooTransport], copies: None, how: str) -> None:
    waiting = pair[1].receive(torch.zeros(8, dtype=torch.uint8), 0)
    pair[0].abort({"why": "a test"}) if how == "abort" else pair[0].close()
    with pytest.raises(PeerError, match="Connection closed by peer"):
        waiting.wait(Deadline(LONG))
    end = time.monotonic() + (LONG if how == "close" else 0.1)
    while pair[1]._board.hears(0) and time.monotonic() < end:
        time.sleep(0.01)
    assert pair[1]._board.hears(0) == (how == "abort")  # which leaves the board, for the notes


def test_the_end_drops_nothing_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the peer goes on sending, and somebody has a copy: else the system would reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        one, _ = server.accept()
        watch(monkeypatch, one)
        connections, copy = Connections(None), os.dup(one.fileno())
        one.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += one.send(bytes(1 << 20))
        with connections.ended():
            one.close()
        peer.sendall(b"more")
        peer.settimeout(LONG)
        got = 0
        while data := peer.recv(1 << 20):
            got += len(data)
        assert got == sent > 1 << 16
        os.close(copy)


def test_a_number_that_another_file_has_got_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo closes its sockets when it sees fit; here the next one to be opened is a file with a lock."""
    one, two = socket.socketpair()
    path = tmp_path / "locked"
    path.touch()
    with one, two, path.open("r+b") as file:
        watch(monkeypatch, one)
        first, second, third = Connections(None), Connections(None), Connections(None)
        two.settimeout(LONG)
        with first.ended():
            pass
        assert two.recv(1) == b""  # the control: it was this socket's
        os.dup2(file.fileno(), one.fileno())
        fcntl.lockf(file, fcntl.LOCK_EX)
        with second.ended():
            third.leave()
        assert os.path.sameopenfile(one.fileno(), file.fileno()) and not is_free(path)


def test_nothing_is_left_of_a_group_that_was_closed_or_dropped() -> None:
    gc.collect()
    before = len(sockets._of_all_groups)
    closed, dropped = connected(2), connected(2)
    assert len(sockets._of_all_groups) == before + 8
    for transport in closed:
        transport.close()
        assert not transport._connections._opened and not transport._board._connections._opened
    for transport in dropped:
        transport._break()
        transport._board.close()
    del closed, dropped, transport
    gc.collect()
    assert len(sockets._of_all_groups) == before
