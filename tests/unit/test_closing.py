"""A rank that closes in the middle of an exchange says so to the others, before it closes their connections."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import horovod_compress.ddp as hvc
from horovod_compress.engine.agreement.notes import DROPPED
from horovod_compress.errors import ConfigError, ExchangeError
from horovod_compress.fronts.ending import await_dropped
from tests.support.connected import connected
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import slow
from tests.unit.test_one_rank_ddp import group as group

WORLD, CLOSES = 3, 0
#: None of the others may wait for that long: they hear of it at once.
TIMEOUT = 20.0
TENSORS = [spec("a", 300)]


@pytest.mark.parametrize("offering", [*slow([CLOSES]), [CLOSES, 1]], ids=str)
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


@pytest.mark.parametrize("failed", [True, False])
def test_who_has_failed_leaves_no_word(failed: bool) -> None:
    """Its note says why; what ends the program then comes of it."""
    with Fleet(2, TENSORS, "none") as fleet:
        fleet.step(random_grads(2, TENSORS))
        if failed:
            fleet.reducers[0].failure.give_up("a test")
        fleet.reducers[0].leave_word("ended because of ExchangeError")
        said = fleet.reducers[1].context.transport.said("left")
        assert said == ({} if failed else {0: "ended because of ExchangeError"})


def test_who_has_let_go_of_its_compression_has_not_closed_it() -> None:
    """The others hear what became of it; the control is above."""
    transports = connected(WORLD)
    with Fleet(WORLD, TENSORS, "none", wrap=lambda local: transports[local.rank], timeout=TIMEOUT) as fleet:
        fleet.step(random_grads(WORLD, TENSORS))
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        fleet.reducers[CLOSES].close(DROPPED)
        step = fleet.reducers[1].offer(0, random_grads(WORLD, TENSORS, seed=1)[1]["a"])
        with pytest.raises(ExchangeError, match=r"Rank 0 stopped first: dropped its compression, to which nothing ref"):
            fleet.reducers[1].result(0, step)


@pytest.mark.parametrize("closed", [True, False])
def test_whoever_goes_on_hears_how_it_was_closed(group: None, closed: bool) -> None:
    compression = hvc.Compression.none(nn.Linear(2, 2).named_parameters())
    session = compression._session
    assert session is not None
    if closed:
        compression.close()
    del compression
    gc.collect()
    await_dropped(TIMEOUT)
    how = r"closed by close\(\)" if closed else "closed by Python's garbage collector, as nothing referred to it"
    with pytest.raises(ConfigError, match=how):
        session.reducer.offer(0, torch.zeros(2))


def test_who_closes_between_steps_leaves_no_note() -> None:
    """Nothing has failed then."""
    transports = connected(2)
    with Fleet(2, TENSORS, "none", wrap=lambda local: transports[local.rank]) as fleet:
        fleet.step(random_grads(2, TENSORS))
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        fleet.reducers[0].close()
        assert transports[1].notes(0.5) == {} and not fleet.reducers[1].failure.failed()


ENDS = """
import atexit
from horovod_compress.fronts.ending import keep_open

class Front:
    def close(self): print("closed")
    def _leave_word(self, why): print(why)

front = Front()
atexit.register(print, "Horovod's first end")
keep_open(front)
atexit.register(print, "Horovod's end after a reset")
keep_open(front)
"""


def test_a_process_that_ends_says_so_before_horovod_does() -> None:
    """Connections are closed after that: other ranks see Horovod's end, and would not know whose it is."""
    found = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True, timeout=60.0)
    word = "came to the end of its program, or called sys.exit()"
    assert found.stdout.splitlines() == [word, "Horovod's end after a reset", "Horovod's first end", "closed"]
