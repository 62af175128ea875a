"""Frames that go wrong on their way, at every place of an exchange: nobody keeps a wrong result.

The ranks are threads of one process, so that each fault hits one exact frame.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from horovod_compress.errors import CorruptFrameError, ExchangeError
from horovod_compress.exchange.device import Deadline
from horovod_compress.exchange.transports.transport import Pending, Transport
from horovod_compress.exchange.wire import FrameBuffer, NonFiniteCount
from tests.support.local import Fleet, random_grads, same_bits, spec
from tests.support.marks import each_value, slow

WORLD = 4
TIMEOUT = 1.0
#: An error comes at the latest so long after the time is over: the notes take half a second.
SLACK = 3.0
TENSORS = [spec("a", 40, 50), spec("b", 700)]
FRAMES = 2 * (WORLD - 1)  # of one rank, in the ring as in the fold
ACTIONS = ("drop", "flip", "flip header", "truncate", "duplicate")


class _Nothing:
    """What a sender waits for when its frame is lost: it cannot know."""

    def wait(self, deadline: Deadline) -> None:
        pass


class Faulty:
    """A transport that does something to one of the frames that it sends.

    Args:
        action: one of ``ACTIONS``, or "delay".
        number: of the frame, counted from the first of the first bucket; -1 is the last of those
            in which the ranks compare their steps before.
    """

    def __init__(self, inner: Transport, action: str, number: int) -> None:
        self._inner, self._action, self._left = inner, action, itertools.count(number + inner.size - 1, -1)
        self.rank, self.size, self.name = inner.rank, inner.size, inner.name
        self.struck = threading.Event()

    @property
    def aside(self) -> Faulty:
        other = Faulty.__new__(Faulty)
        other.__dict__.update(self.__dict__, _inner=self._inner.aside)  # with one count of frames
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: Tensor, to: int) -> Pending:
        if next(self._left):
            return self._inner.send(data, to)
        self.struck.set()
        return getattr(self, "_" + self._action.replace(" ", "_"))(data, to)

    def _drop(self, data: Tensor, to: int) -> Pending:
        return _Nothing()

    def _flip(self, data: Tensor, to: int) -> Pending:
        return self._flipped(data, to, -1)

    def _flip_header(self, data: Tensor, to: int) -> Pending:
        return self._flipped(data, to, 20)

    def _flipped(self, data: Tensor, to: int, at: int) -> Pending:
        other = data.clone()
        other[at] ^= 1
        return self._inner.send(other, to)

    def _truncate(self, data: Tensor, to: int) -> Pending:
        return self._inner.send(data[:-1], to)

    def _duplicate(self, data: Tensor, to: int) -> Pending:
        self._inner.send(data, to)
        return self._inner.send(data, to)

    def _delay(self, data: Tensor, to: int) -> Pending:
        time.sleep(TIMEOUT / 8)
        return self._inner.send(data, to)


class Crew:
    """The reducers of all ranks, one of them behind a faulty transport."""

    def __init__(self, exchange: str, action: str, sender: int, number: int, verify_every: int = 0) -> None:
        def wrap(transport: Transport) -> Transport:
            if transport.rank != sender:
                return transport
            self.faulty = Faulty(transport, action, number)
            return self.faulty

        self.fleet = Fleet(WORLD, TENSORS, wrap=wrap, exchange=exchange, timeout=TIMEOUT, verify_every=verify_every)

    def start(self, number: int) -> list[tuple[int, Mapping[str, Tensor]] | Exception]:
        """Offer the gradients of every rank, before any result is waited for."""
        started: list[Any] = []
        for reducer, mine in zip(self.fleet.reducers, random_grads(WORLD, TENSORS, seed=number), strict=True):
            try:
                steps = [reducer.offer(index, mine[name]) for index, name in enumerate(self.fleet.plan.names())]
                started.append((steps[0], mine))
            except ExchangeError as error:
                started.append(error)
        return started

    def finish(self, started: list[Any]) -> list[Any]:
        ended: list[Any] = []
        for reducer, offered in zip(self.fleet.reducers, started, strict=True):
            if isinstance(offered, Exception):
                ended.append(offered)
                continue
            step, _ = offered
            try:
                found = {n: reducer.result(i, step) for i, n in enumerate(self.fleet.plan.names())}
                ended.append({name: tensor.clone() for name, tensor in found.items()})
            except ExchangeError as error:
                ended.append(error)
        return ended

    def run(self, steps: int) -> list[list[Any]]:
        """Return what every rank has of each step, and close."""
        with self.fleet:
            return [self.finish(self.start(number)) for number in range(steps)]


_expected: dict[str, list[list[Any]]] = {}


def expected(exchange: str) -> list[list[Any]]:
    """The results of two steps without a fault."""
    if exchange not in _expected:
        _expected[exchange] = Crew(exchange, "drop", 0, 10**9).run(2)
    return _expected[exchange]


def is_right(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(same_bits(found[name], right[name]) for name in right)


@pytest.mark.parametrize("exchange", ["ring", "fold"])
def test_control(exchange: str) -> None:
    assert all(isinstance(rank, dict) for step in expected(exchange) for rank in step)


def test_control_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of frames the same fault gives a wrong result: the tests below can fail."""
    right = expected("ring")[0]
    monkeypatch.setattr(FrameBuffer, "check", lambda self, due, length: NonFiniteCount())
    found = Crew("ring", "flip", 1, FRAMES - 1).run(1)[0]
    assert all(isinstance(rank, dict) for rank in found)
    assert not all(is_right(mine, want) for mine, want in zip(found, right, strict=True))


@pytest.mark.parametrize("number", [0, FRAMES - 1, *slow(*range(1, FRAMES - 1))])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("exchange", ["ring", "fold"])
def test_every_frame(exchange: str, action: str, number: int) -> None:
    """All ranks fail, in this step or, where a rank had all it needed already, in the next one."""
    right = expected(exchange)
    crew = Crew(exchange, action, 1, number)
    began = time.monotonic()
    steps = crew.run(2)
    took = time.monotonic() - began
    assert crew.faulty.struck.is_set()
    for step, ranks in enumerate(steps):
        for rank, found in enumerate(ranks):
            # A result that is returned before the fault can be known is right in every bit.
            assert isinstance(found, ExchangeError) or is_right(found, right[step][rank]), (step, rank)
    assert all(isinstance(found, ExchangeError) for found in steps[1]), "a rank has not noticed"
    if action != "duplicate":  # the same bytes once more: the result of this step is right everywhere
        assert any(isinstance(found, ExchangeError) for found in steps[0])
    if action.startswith("flip") or action == "duplicate":
        assert any(isinstance(found, CorruptFrameError) for found in steps[1]), steps[1]
    # Another frame in the place of a lost one is noticed at once; none is waited for.
    awaited = (exchange, action, number) == ("ring", "drop", FRAMES - 1)
    low = TIMEOUT - 0.1 if awaited else 0.0
    assert low <= took <= 2 * TIMEOUT + SLACK


@each_value
@pytest.mark.parametrize("number", [-3, -2, -1])
@pytest.mark.parametrize("action", ["drop", "flip", "flip header", "truncate"])
def test_comparing_steps(action: str, number: int) -> None:
    """The first frames of all: nobody may take a step when they go wrong."""
    found = Crew("ring", action, 1, number).run(1)[0]
    assert all(isinstance(rank, ExchangeError) for rank in found)


@pytest.mark.parametrize("sender", [0, *slow(2, 3)])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_sender(action: str, sender: int) -> None:
    steps = Crew("ring", action, sender, 2).run(2)
    assert all(isinstance(found, ExchangeError) for found in steps[1])


@pytest.mark.parametrize("number", [0, *slow(*range(1, FRAMES))])
@pytest.mark.parametrize("exchange", ["ring", "fold"])
def test_delay_within_the_deadline(exchange: str, number: int) -> None:
    steps = Crew(exchange, "delay", 1, number).run(2)
    right = expected(exchange)
    assert all(is_right(steps[s][r], right[s][r]) for s in range(2) for r in range(WORLD))


@pytest.mark.parametrize("action", ["drop", "flip"])
def test_verified_step_is_all_or_nothing(action: str) -> None:
    """With every step verified, the last frame's loss is known before any rank returns."""
    steps = Crew("ring", action, 1, FRAMES - 1, verify_every=1).run(1)
    assert all(isinstance(found, ExchangeError) for found in steps[0])


@pytest.mark.parametrize("number", range(FRAMES, FRAMES + WORLD - 1))
def test_verification_frames(number: int) -> None:
    steps = Crew("ring", "flip", 1, number, verify_every=1).run(2)
    assert all(isinstance(found, ExchangeError) for found in steps[1])


def test_messages() -> None:
    flipped = Crew("ring", "flip", 1, 1).run(1)[0]
    assert "corrupt frame from rank 1 (step 0, bucket 0, hop 1, chunk 0, segment 0): checksum" in str(flipped[2])
    for rank in (0, 1, 3):
        assert "Rank 2 stopped first: corrupt frame from rank 1" in str(flipped[rank])
    dropped = Crew("ring", "drop", 1, FRAMES - 1).run(1)[0]
    assert f"rank 2: rank 1 did not answer within {TIMEOUT:g} s during hop 4 of bucket 0, step 0" in str(dropped[2])


def test_error_of_a_codec_reaches_every_rank() -> None:
    """Not only faults of the network: whatever ends one rank's exchange ends all, at once."""
    crew = Crew("ring", "drop", 0, 10**9)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    crew.fleet.reducers[1]._exchanging._exchange = fail  # type: ignore[method-assign, assignment]
    began = time.monotonic()
    found = crew.run(1)[0]
    assert time.monotonic() - began < SLACK
    assert all(isinstance(rank, ExchangeError) for rank in found)
    assert "rank 1: MemoryError during agree of bucket 0, step 0: no room" in str(found[1])
    assert all("Rank 1 stopped first" in str(found[rank]) for rank in (0, 2, 3))
