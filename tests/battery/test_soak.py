"""Memory, threads and descriptors stay what they are, however long a job goes on and however often it begins."""

from __future__ import annotations

import gc
import threading
import time

import psutil
import pytest

from tests.support.connected import connected
from tests.support.local import Fleet, random_grads, spec

STEPS, CYCLES = 10_000, 200
TENSORS = [spec("a", 40, 50), spec("b", 700)]
#: Bytes a step; what Python's and torch's allocators keep in reserve comes in the first tenth.
MOST_SLOPE = 1000
SETTLE_SECONDS = 5.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["none", "marsit", "topk", "powersgd", "onebit_adam", "global_qsgd", "sparse_binary"]
)
def test_memory_does_not_grow(method: str) -> None:
    grads, process = random_grads(2, TENSORS), psutil.Process()
    with Fleet(2, TENSORS, method, schedule="layerwise", verify_every=100) as fleet:
        for _ in range(STEPS // 10):
            fleet.step(grads)
        gc.collect()
        before = process.memory_info().rss
        for _ in range(STEPS - STEPS // 10):
            fleet.step(grads)
        gc.collect()
        assert (process.memory_info().rss - before) / STEPS < MOST_SLOPE


def _held() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    gc.collect()
    return threading.active_count(), psutil.Process().num_fds()


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [CYCLES])
def test_connections_leave_no_thread_and_no_descriptor(cycles: int) -> None:
    def cycle() -> None:
        for transport in connected(2):
            transport.close()

    cycle()
    before = _held()
    for _ in range(cycles):
        cycle()
    end = time.monotonic() + SETTLE_SECONDS
    while any(now > then for now, then in zip(_held(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(_held(), before, strict=True)), (before, _held())


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [CYCLES])
def test_reducers_leave_no_thread(cycles: int) -> None:
    before = _held()
    for number in range(cycles):
        with Fleet(2, TENSORS, "topk") as fleet:
            fleet.step(random_grads(2, TENSORS, seed=number))
    end = time.monotonic() + SETTLE_SECONDS
    while any(now > then for now, then in zip(_held(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(_held(), before, strict=True)), (before, _held())
