"""Gradients are taken in by a thread of their own, which the backward pass does not wait for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from horovod_compress.errors import ExchangeError
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, random_grads, spec
from tests.support.turns import Turn

TENSORS = [spec("a", 70, 33), spec("b", 2001), spec("c", 5)]
SOON = 10.0


@pytest.mark.parametrize("accelerator", [False, True])
def test_which_thread_takes_gradients_in(accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where taking in is only queueing, it is the caller's, whose stream the gradient comes from."""
    names = set()
    offer = Turn.submit

    def noted(*given: object) -> object:
        names.add(threading.current_thread().name)
        return offer(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turn, "submit", noted)
    with everything_on_accelerator() if accelerator else nullcontext(), Fleet(2, TENSORS, "marsit") as fleet:
        fleet.step(random_grads(2, TENSORS))
    assert names == {threading.current_thread().name if accelerator else "hvc-offer"}


def test_the_caller_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    go, taken, offer = threading.Event(), [], Turn.submit

    def slow(*given: object) -> object:
        assert go.wait(SOON)
        taken.append(1)
        return offer(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turn, "submit", slow)
    grads = random_grads(2, TENSORS)
    with Fleet(2, TENSORS, "none") as fleet:
        step = fleet.offer([{name: grad.clone() for name, grad in mine.items()} for mine in grads])
        assert not taken and all(reducer.missing(step) == [] for reducer in fleet.reducers)
        go.set()
        found = [reducer.result(0, step) for reducer in fleet.reducers]
    assert torch.equal(*found) and torch.allclose(found[0], (grads[0]["a"] + grads[1]["a"]) / 2)


def test_an_error_in_taking_in_ends_the_step_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Turn.submit

    def fails(turn: Turn, position: int, *given: object) -> object:
        if turn.key.rank == 1 and turn.state.bucket.tensors[position].name == "c":  # the last one
            raise ValueError("no such gradient")
        return offer(turn, position, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turn, "submit", fails)
    with Fleet(3, TENSORS, "marsit") as fleet:
        began = time.monotonic()
        step = fleet.offer(random_grads(3, TENSORS))
        for reducer in fleet.reducers:
            with pytest.raises(
                ExchangeError,
                match="gradient of c, in bucket 0 of step 0, could not be processed: ValueError: no such gradient",
            ):
                reducer.result(0, step)
        assert time.monotonic() - began < SOON


def test_closing_leaves_out_what_was_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, taken = threading.Event(), threading.Event(), []

    def slow(turn: Turn, position: int, *given: object) -> int:
        begun.set()
        assert go.wait(SOON)
        taken.append(position)
        return 0

    monkeypatch.setattr(Turn, "submit", slow)
    with Fleet(1, TENSORS, "none") as fleet:
        fleet.offer(random_grads(1, TENSORS))
        assert begun.wait(SOON)
        fleet.reducers[0].close()
        go.set()
        fleet.reducers[0]._offering.drain()
    assert len(taken) == 1


def test_who_waits_while_another_thread_closes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(Turn, "submit", lambda *given: 0 * go.wait(SOON))
    with Fleet(1, TENSORS, "none") as fleet, ThreadPoolExecutor(1) as pool:
        step = fleet.offer(random_grads(1, TENSORS))
        waiting = pool.submit(fleet.reducers[0].result, 0, step)
        fleet.reducers[0].close()
        with pytest.raises(ExchangeError, match="was closed"):
            waiting.result(SOON)
        go.set()
