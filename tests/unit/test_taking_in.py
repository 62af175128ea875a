"""Gradients are taken in by a thread of their own, which the backward pass does not wait for."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.shared.signs import Signs
from horovod_compress.engine import exchanging
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

    def fails(turn: Turn, positions: list[int], *given: object) -> object:
        if turn.key.rank == 2 and 2 in positions:  # the last rank and its last one, c: all others are offered by then
            raise ValueError("no such gradient")
        return offer(turn, positions, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turn, "submit", fails)
    with Fleet(3, TENSORS, "marsit") as fleet:
        began = time.monotonic()
        step = fleet.offer(random_grads(3, TENSORS))
        for reducer in fleet.reducers:
            with pytest.raises(
                ExchangeError,
                match=r"gradients?,? of (a, )?(b, )?c, in bucket 0 of step 0, could not be processed: ValueError: no",
            ):
                reducer.result(0, step)
        assert time.monotonic() - began < SOON


def test_small_gradients_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there are enough bytes, or nothing more is to come of their bucket."""
    taken, submit = [], Turn.submit

    def noted(turn: Turn, positions: list[int], grads: list[Tensor]) -> object:
        taken.append([turn.state.bucket.tensors[position].name for position in positions])
        return submit(turn, positions, grads)

    monkeypatch.setattr(Turn, "submit", noted)
    tensors = [spec(name, 40) for name in "abcd"]
    grads = random_grads(1, tensors)[0]

    def taken_in(last: str = "offered") -> list[list[str]]:
        """Return what is taken in together; `last` says what becomes of d."""
        taken.clear()
        with Fleet(1, tensors, "none", schedule="single", min_elements=0) as fleet:
            reducer, place = fleet.reducers[0], {name: index for index, name in enumerate(fleet.plan.names())}
            reducer.freeze([place["d"]] if last == "frozen" else [])
            for name in "abc" if last == "skipped" else "abcd":
                step = reducer.offer(place[name], grads[name].clone())
                reducer._offering.worker.drain()
            if last == "skipped":
                reducer.skip(place["d"])
            assert all(torch.equal(reducer.result(place[name], step), grads[name]) for name in "abc")
        return taken.copy()

    assert taken_in() == [[*"abcd"]]
    assert taken_in("skipped") == taken_in("frozen") == [[*"abc"]]
    monkeypatch.setattr(exchanging, "ENOUGH", 2 * 40 * 4)
    assert taken_in() == [[*"ab"], [*"cd"]]


def test_gradients_that_wait_have_their_own_times_of_arrival() -> None:
    """Schedules are chosen by these."""

    class Watch:
        def __init__(self) -> None:
            self.offers: list[int] = []

        def offered(self, index: int) -> None:
            self.offers.append(index)

        def __getattr__(self, name: str) -> object:
            return lambda *given: None

    tensors = [spec(name, 40) for name in "abcd"]
    grads = random_grads(1, tensors)[0]
    with Fleet(1, tensors, "none", schedule="size:320B", min_elements=0) as fleet:  # two buckets
        reducer, names = fleet.reducers[0], fleet.plan.names()
        reducer.context.watch = watch = Watch()  # type: ignore[assignment]
        for number, index in enumerate([0, 2, 1, 3]):
            step = reducer.offer(index, grads[names[index]].clone())
            assert len(watch.offers) == number + 1  # at once
        assert all(torch.equal(reducer.result(index, step), grads[name]) for index, name in enumerate(names))
    assert watch.offers == [0, 2, 1, 3]


def test_what_waits_of_a_step_that_never_came_about_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, submit = [], Turn.submit

    def noted(turn: Turn, positions: list[int], grads: list[Tensor]) -> object:
        taken.append((turn.key.step, positions))
        return submit(turn, positions, grads)

    monkeypatch.setattr(Turn, "submit", noted)
    tensors = [spec(name, 40) for name in "abc"]
    grads = random_grads(1, tensors)[0]
    with Fleet(1, tensors, "none", schedule="single", min_elements=0) as fleet:
        reducer, names = fleet.reducers[0], fleet.plan.names()
        reducer.offer(0, torch.ones(40))
        reducer.resume(5)
        for index, name in enumerate(names[:2]):
            step = reducer.offer(index, grads[name].clone())
        reducer.skip(2)
        assert all(torch.equal(reducer.result(index, step), grads[name]) for index, name in enumerate(names[:2]))
    assert taken == [(5, [0, 1])]


def test_closing_leaves_out_what_was_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "ENOUGH", 0)
    go, begun, taken = threading.Event(), threading.Event(), []

    def slow(turn: Turn, positions: list[int], *given: object) -> list[int]:
        begun.set()
        assert go.wait(SOON)
        taken.append(positions)
        return [0] * len(positions)

    monkeypatch.setattr(Turn, "submit", slow)
    with Fleet(1, TENSORS, "none") as fleet:
        reducer, grads = fleet.reducers[0], random_grads(1, TENSORS)[0]
        reducer.offer(0, grads["a"])
        assert begun.wait(SOON)
        reducer.offer(1, grads["b"])
        reducer.close()
        go.set()
        reducer._offering.worker.drain()
    assert taken == [[0]]


@pytest.mark.parametrize("slow", [False, True])
def test_who_goes_together_depends_on_the_order_alone(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on what comes while the thread is busy: else each step would have batches of its own."""
    monkeypatch.setattr(exchanging, "ENOUGH", 2 * 40 * 4)
    go, begun, taken, submit = threading.Event(), threading.Event(), [], Turn.submit

    def noted(turn: Turn, positions: list[int], grads: list[Tensor]) -> object:
        begun.set()
        assert go.wait(SOON)
        taken.append((turn.key.bucket, positions))
        return submit(turn, positions, grads)

    monkeypatch.setattr(Turn, "submit", noted)
    tensors = [spec(name, 40) for name in "abcdef"]
    grads = random_grads(1, tensors)[0]
    with Fleet(1, tensors, "none", schedule="size:640B", min_elements=0) as fleet:  # of four tensors, and of two
        reducer, place = fleet.reducers[0], {name: index for index, name in enumerate(fleet.plan.names())}
        for number, name in enumerate("bacedf"):
            step = reducer.offer(place[name], grads[name].clone())
            if number == 1:
                assert begun.wait(SOON)
                if not slow:
                    go.set()
            if not slow and number:
                reducer._offering.worker.drain()
        go.set()
        assert all(torch.equal(reducer.result(place[name], step), grads[name]) for name in "abcdef")
    assert taken == [(0, [1, 0]), (0, [2]), (1, [0]), (0, [3]), (1, [1])]


@pytest.mark.parametrize("order", ["same", "another"])
def test_what_follows_from_a_batch_is_found_once(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each backward pass goes another way it cannot be; then no more of it stays than of a few steps."""
    made, columns = [0], Signs._columns

    def counted(*given: Any) -> Any:
        made[0] += 1
        return columns(*given)

    monkeypatch.setattr(Signs, "_columns", counted)
    tensors, generator = [spec(f"t{number}", 64) for number in range(12)], random.Random(0)
    with Fleet(2, tensors, "signsgd", schedule="single", min_elements=0) as fleet:
        indices = list(range(len(tensors)))
        for step in range(60):
            if order == "another":
                generator.shuffle(indices)
            if step == 3:
                made[0] = 0
            grads = random_grads(2, tensors, seed=step)
            for reducer, mine in zip(fleet.reducers, grads, strict=True):
                for index in indices:
                    reducer.offer(index, mine[tensors[index].name])
            for reducer in fleet.reducers:
                for index in indices:
                    reducer.result(index, step)
        memo = [round_.work.memo for state in fleet.reducers[0].buckets for round_ in state.rounds.kinds.values()]
    assert made == [0] if order == "same" else made[0] > 50
    assert all(sum(map(len, one.get("offered", ()))) <= 4 * (12 + 8 * 2) for one in memo)


def test_who_waits_while_another_thread_closes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(Turn, "submit", lambda turn, positions, grads: [0 * go.wait(SOON) for _ in positions])
    with Fleet(1, TENSORS, "none") as fleet, ThreadPoolExecutor(1) as pool:
        step = fleet.offer(random_grads(1, TENSORS))
        waiting = pool.submit(fleet.reducers[0].result, 0, step)
        fleet.reducers[0].close()
        with pytest.raises(ExchangeError, match="was closed"):
            waiting.result(SOON)
        go.set()


@pytest.mark.parametrize("method", ["none", "marsit", "topk", "ef_signsgd"])
def test_a_sign_that_torch_has_put_off_is_that_of_the_gradient(method: str) -> None:
    """A real parameter behind complex numbers may get such a gradient, on some ranks only."""
    scalar = [spec("scalar")]
    with Fleet(2, scalar, method) as fleet, Fleet(2, scalar, method) as other:
        for step in range(3):
            values = [torch.tensor(3.0 + step), torch.tensor(1.0)]
            grads = [{"scalar": value.neg()} for value in values]
            wanted = other.step(grads)
            grads[0]["scalar"] = torch.complex(values[1], values[0]).conj().imag
            assert grads[0]["scalar"].is_neg()
            at = fleet.offer(grads)
            found = [reducer.result(0, at) for reducer in fleet.reducers]
            assert [one.item() for one in found] == [one["scalar"].item() for one in wanted]
            assert found[0] is grads[0]["scalar"]
