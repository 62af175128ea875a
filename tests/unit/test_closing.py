"""A rank that closes in the middle of an exchange says so to the others, before it closes their connections."""

from __future__ import annotations

import contextlib
import time

import pytest

from horovod_compress.errors import ExchangeError
from tests.support.connected import connected
from tests.support.local import Fleet, random_grads, spec

WORLD, CLOSES = 3, 0
#: None of the others may wait for that long: they hear of it at once.
TIMEOUT = 20.0
TENSORS = [spec("a", 300)]


@pytest.mark.parametrize("offering", [[CLOSES], [CLOSES, 1]], ids=str)
def test_who_closes_in_an_exchange_is_named_by_all(offering: list[int]) -> None:
    """Whether they wait in it too, or come to it later."""
    transports = connected(WORLD)
    with Fleet(WORLD, TENSORS, "none", wrap=lambda local: transports[local.rank], timeout=TIMEOUT) as fleet:
        fleet.step(random_grads(WORLD, TENSORS))  # the control: a whole step
        grads = random_grads(WORLD, TENSORS, seed=1)
        steps = {rank: fleet.reducers[rank].offer(0, grads[rank]["a"]) for rank in offering}
        closing = fleet.reducers[CLOSES]
        while not closing.context.recorder.last().startswith("hop") or "step 1" not in closing.context.recorder.last():
            time.sleep(0.001)  # until it is in the exchange
        began = time.monotonic()
        closing.close()
        for rank in set(range(WORLD)) - {CLOSES}:
            reducer = fleet.reducers[rank]
            with pytest.raises(
                ExchangeError, match=rf"Rank {CLOSES} stopped first: rank {CLOSES} closed its compression during "
            ):
                reducer.result(0, steps[rank] if rank in steps else reducer.offer(0, grads[rank]["a"]))
        assert time.monotonic() - began < TIMEOUT


def test_who_closes_between_steps_is_named_by_those_that_go_on() -> None:
    """With the error that closed it, if it came to that by a ``finally``."""
    transports = connected(WORLD)
    with Fleet(WORLD, TENSORS, "none", wrap=lambda local: transports[local.rank], timeout=TIMEOUT) as fleet:
        fleet.step(random_grads(WORLD, TENSORS))
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("bad\ndata")
            finally:
                fleet.reducers[CLOSES].close()
        grads = random_grads(WORLD, TENSORS, seed=1)
        others = sorted(set(range(WORLD)) - {CLOSES})
        steps = [fleet.reducers[rank].offer(0, grads[rank]["a"]) for rank in others]
        for rank, step in zip(others, steps, strict=True):
            with pytest.raises(ExchangeError, match=r"Rank 0 stopped first: closed its .* of ValueError: bad data\."):
                fleet.reducers[rank].result(0, step)


def test_who_closes_between_steps_leaves_no_note() -> None:
    """Nothing has failed then."""
    transports = connected(2)
    with Fleet(2, TENSORS, "none", wrap=lambda local: transports[local.rank]) as fleet:
        fleet.step(random_grads(2, TENSORS))
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        fleet.reducers[0].close()
        assert transports[1].notes(0.5) == {} and not fleet.reducers[1].failure.failed()
