"""One backward pass of DistributedDataParallel's: every future is completed, and the end never waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from horovod_compress.errors import CorruptFrameError, ExchangeError
from horovod_compress.fronts.torch_dist.backward import Backward

BOUND = 20.0
ALIVE, GONE = (lambda: True), (lambda: False)


def fetch(index: int, step: int) -> torch.Tensor:
    return torch.zeros(1)


def corrupt(index: int, step: int) -> torch.Tensor:
    raise CorruptFrameError("a field")


def interrupted(index: int, step: int) -> torch.Tensor:
    raise SystemExit(1)


def begun(result: Callable[[int, int], torch.Tensor], alive: Callable[[], bool] = ALIVE) -> tuple[Backward, list]:
    backward = Backward(result, alive)
    futures = [backward.add(torch.full((2,), float(at)), [(at, 1)]) for at in range(3)]
    backward.close()
    return backward, futures


def ends(backward: Backward) -> BaseException | None:
    """Return what the end of the pass raises; it has to come in time."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            found.append(backward.end())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND)
    assert found, "the end of the backward pass still waits"
    return found[0]


def test_futures_are_completed() -> None:
    backward, futures = begun(fetch)
    backward.complete()
    assert [future.value()[0].item() for future in futures] == [0.0, 1.0, 2.0]
    assert ends(backward) is None


@pytest.mark.parametrize(("result", "kind"), [(corrupt, CorruptFrameError), (interrupted, ExchangeError)])
def test_so_they_are_after_an_error(result: Callable[[int, int], torch.Tensor], kind: type[Exception]) -> None:
    backward, futures = begun(result)
    backward.complete()
    assert [future.value()[0].item() for future in futures] == [0.0, 1.0, 2.0]
    assert isinstance(ends(backward), kind)


def test_one_that_cannot_be_completed_does_not_keep_the_others() -> None:
    """As on a device in error, where each call raises; here a future refuses to be completed twice."""
    backward, futures = begun(fetch)
    futures[0].set_result(torch.zeros(2))
    backward.complete()
    assert all(future.done() for future in futures)
    error = ends(backward)
    assert isinstance(error, ExchangeError) and "fetching results failed" in str(error)


def test_the_end_does_not_wait_for_a_thread_that_is_gone() -> None:
    backward, _ = begun(fetch, GONE)
    error = ends(backward)
    assert isinstance(error, ExchangeError) and "thread that fetches results has ended" in str(error)


def test_nobody_to_fetch_is_an_error_and_futures_are_completed() -> None:
    backward, futures = begun(fetch, GONE)
    backward.give_up(ExchangeError("closed"))
    assert all(future.done() for future in futures)
    assert str(ends(backward)) == "closed"
