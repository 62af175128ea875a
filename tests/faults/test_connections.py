"""Gloo's connections really close, whoever waits for them or holds on to them."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_compress.errors import ExchangeError, PeerError
from horovod_compress.exchange.device import Deadline
from horovod_compress.exchange.transports import sockets
from horovod_compress.exchange.transports.board import Board
from horovod_compress.exchange.transports.connecting import Listener
from horovod_compress.exchange.transports.gloo import GlooTransport
from horovod_compress.observe.metrics import FlightRecorder
from tests.support.connected import connected

LONG, SOON = 30.0, 3.0


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    made = connected(2)
    yield made
    for transport in made:
        transport.close()


class Waiter(threading.Thread):
    """Waits for bytes that never come, and keeps the error with its traceback."""

    def __init__(self, transport: GlooTransport, frm: int | None = None) -> None:
        super().__init__(daemon=True)
        peer = 1 - transport.rank if frm is None else frm
        self.pending = transport.receive(torch.zeros(8, dtype=torch.uint8), peer)
        self.error: PeerError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.pending.wait(Deadline(LONG))
        except PeerError as error:
            self.error = error


@pytest.mark.parametrize("how", ["abort", "close"])
def test_ends_every_wait(pair: list[GlooTransport], how: str) -> None:
    waiters = [Waiter(transport) for transport in pair]
    held = pair[0].receive(torch.zeros(8, dtype=torch.uint8), 1)  # as a traceback would hold it
    time.sleep(0.2)
    assert all(waiter.is_alive() for waiter in waiters)
    began = time.monotonic()
    pair[0].abort({"why": "a test"}) if how == "abort" else pair[0].close()
    for waiter in waiters:
        waiter.join(SOON)
        assert waiter.error is not None and not waiter.error.late
    assert time.monotonic() - began < SOON
    with pytest.raises(PeerError):
        held.wait(Deadline(LONG))
    with pytest.raises(PeerError):
        pair[0].send(torch.zeros(8, dtype=torch.uint8), 1)
    assert pair[1].notes(0.3).get(0) == ({"why": "a test"} if how == "abort" else None)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_abort_after_a_peer_is_gone(gone: int) -> None:
    """The rank that lost one peer cuts off the others at once, whatever still holds its connections."""
    ranks = connected(4)
    try:
        waiters = [Waiter(ranks[rank], 0) for rank in {1, 2, 3} - {gone}]
        lost = Waiter(ranks[0], gone)
        held = ranks[0]._group
        ranks[gone].abort({"why": "gone"})
        lost.join(SOON)
        assert lost.error is not None
        assert all(waiter.is_alive() for waiter in waiters)
        ranks[0].abort({"peer": gone})
        for waiter in waiters:
            waiter.join(SOON)
            assert waiter.error is not None and not waiter.error.late
        assert held is not None
    finally:
        for transport in ranks:
            transport.close()


def test_close_delivers_what_was_sent(pair: list[GlooTransport]) -> None:
    data = torch.arange(100, dtype=torch.uint8)
    got = torch.zeros(100, dtype=torch.uint8)
    pending = pair[1].receive(got, 0)
    pair[0].send(data, 1).wait(Deadline(LONG))
    pair[0].close()
    pending.wait(Deadline(LONG))
    assert torch.equal(got, data)


def test_what_a_rank_has_said_outlives_it(pair: list[GlooTransport]) -> None:
    """No rank serves the others: not even that of rank 0 is lost with it."""
    pair[0].say("topic", "word")
    pair[0].abort({"why": "a test"})
    pair[0].close()
    assert pair[1].notes(0.3) == {0: {"why": "a test"}} and pair[1].said("topic") == {0: "word"}
    pair[1].say("topic", "nobody listens")
    assert pair[1].said("topic") == {0: "word", 1: "nobody listens"}


@pytest.mark.parametrize("gone", [True, False])
def test_notes_of_a_rank_that_is_gone_are_not_waited_for(gone: bool) -> None:
    """Those of one that still lives are: it may be about to leave one."""
    ranks = connected(3)
    try:
        for rank in (0, 1):
            ranks[rank].abort({"peer": 2})
        if gone:
            ranks[2].close()
        began = time.monotonic()
        assert ranks[0].notes(LONG if gone else 0.3) == {0: {"peer": 2}, 1: {"peer": 2}}
        took = time.monotonic() - began
        assert took < LONG if gone else took >= 0.3
    finally:
        for transport in ranks:
            transport.close()


def test_no_thread_is_left_in_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that waits for a message to leave, to a rank that takes none: Python aborts a process that ends then."""
    monkeypatch.setattr(Board, "_read", lambda board, group, peer: None)
    first, second = connected(2)
    try:
        first.say("topic", "nobody takes this")
        (waiting,) = first._board._waits
        assert waiting.is_alive()
        first.close()
        assert not waiting.is_alive()
    finally:
        second.close()


def test_words_leave_where_no_thread_starts(pair: list[GlooTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in handlers at the end of the process, from Python 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(threading.Thread, "start", start)
        pair[0].say("topic", "last word")
    end = time.monotonic() + SOON
    while not (said := pair[1].said("topic")) and time.monotonic() < end:
        time.sleep(0.01)
    assert said == {0: "last word"}


def test_many_words_of_several_threads_arrive_whole(pair: list[GlooTransport]) -> None:
    words = {f"topic {number}": "word " * 400 * (number % 3) for number in range(30)}
    threads = [threading.Thread(target=pair[0].say, args=word) for word in words.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    end = time.monotonic() + SOON
    while any(0 not in pair[1].said(topic) for topic in words) and time.monotonic() < end:
        time.sleep(0.01)
    assert {topic: pair[1].said(topic)[0] for topic in words} == words


def test_closing_ends_all_threads() -> None:
    before = threading.active_count()
    for _ in range(3):
        for transport in connected(3):
            transport.close()
    end = time.monotonic() + SOON
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("left", [0, 3, 12])
def test_too_few_descriptors_are_an_error_that_says_so(left: int) -> None:
    """Else Gloo would end the process, or the error would ask for another interface."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # sockets of other tests
    listed = [*Path("/proc/self/fd").iterdir()]
    opened = {int(each.name) for each in listed if each.exists()}  # that of the listing itself is gone
    # The limit is one of numbers: so many below it are free.
    most = next(islice((number for number in count() if number not in opened), left, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with pytest.raises(ExchangeError, match=f"rank 0: .*, ulimit -n, which is {most}$"):
            GlooTransport(lambda values: values, 0, 2, "127.0.0.1", SOON)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", range(4))
def test_descriptors_that_run_out_while_gloo_opens_some(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "check_descriptors", lambda self: None)
    test_too_few_descriptors_are_an_error_that_says_so(left)


def test_other_sockets_of_the_process_stay_as_they_are() -> None:
    """A default timeout makes each new socket object of Python's change how its descriptor blocks."""
    before = socket.getdefaulttimeout()
    pair, other = socket.socketpair()
    with socket.socket() as listening_elsewhere, pair, other:
        listening_elsewhere.bind(("127.0.0.1", 0))
        listening_elsewhere.listen()
        socket.setdefaulttimeout(5)
        try:
            for transport in connected(2):
                transport.close()
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(listening_elsewhere.fileno()) and os.get_blocking(pair.fileno())
        with socket.create_connection(listening_elsewhere.getsockname(), timeout=SOON):
            pass


def test_ranks_connect_where_sockets_have_no_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some sandboxes: an option that no system knows stands for that."""
    monkeypatch.setattr(sockets, "_ATTACH", 9_999)
    made = connected(2)
    try:
        got = torch.zeros(100, dtype=torch.uint8)
        pending = made[1].receive(got, 0)
        made[0].send(torch.ones(100, dtype=torch.uint8), 1).wait(Deadline(LONG))
        pending.wait(Deadline(LONG))
        assert bool(got.all())
    finally:
        for transport in made:
            transport.close()


def test_dump_that_cannot_be_written(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVC_DUMP_DIR", str(tmp_path / "file"))
    FlightRecorder().dump(3, "why")
    assert "the flight record of rank 3 was not written" in caplog.text


def test_last_event_is_of_the_exchange() -> None:
    recorder = FlightRecorder()
    assert recorder.last() == "the start of this compression"
    recorder.note(4, 1, "offer")
    assert recorder.last() == "offer of bucket 1, step 4"
    recorder.note(4, 0, "hop", 2)
    recorder.note(4, 1, "offer")
    assert recorder.last() == "hop 2 of bucket 0, step 4"
