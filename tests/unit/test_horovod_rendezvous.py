"""What `hvd.init()` asks of Horovod's rendezvous when it is called a second time."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("horovod.torch")

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

WORLD = 3


@pytest.fixture
def rendezvous() -> Iterator[str]:
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"here:{WORLD}"), WORLD))
    yield f"http://127.0.0.1:{port}"
    server.stop()
    server._httpd.server_close()  # which stop() leaves to the garbage collector


def ask(method: str, url: str) -> int:
    try:
        request = urllib.request.Request(url, method=method, data=b"address" if method == "PUT" else None)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_addresses_are_cleared_although_one_rank_goes_on_sooner(rendezvous: str) -> None:
    """Otherwise a rank that begins Horovod again connects to where nobody listens any more, and aborts."""
    for rank in range(WORLD):
        ask("PUT", f"{rendezvous}/local_here/{rank}")
    ask("DELETE", f"{rendezvous}/local_here/0")
    ask("DELETE", f"{rendezvous}/cross_0/0")  # the only one of its scope: rank 0 has connected to all others
    assert ask("GET", f"{rendezvous}/local_here/1") == 200, "others are still connecting"
    for rank in range(1, WORLD):
        ask("DELETE", f"{rendezvous}/local_here/{rank}")
    assert [ask("GET", f"{rendezvous}/local_here/{rank}") for rank in range(WORLD)] == [404] * WORLD
