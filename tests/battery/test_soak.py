"""Memory, threads and descriptors stay what they are, however long a job goes on and however often it begins."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from tests.support.connected import connected
from tests.support.local import Fleet, random_grads, spec

STEPS, CYCLES = 10_000, 200
TENSORS = [spec("a", 40, 50), spec("b", 700)]
#: Bytes a step; what Python's and torch's allocators keep in reserve comes in the first tenth.
MOST_SLOPE = 1000
SETTLE_SECONDS = 5.0


def _slope(fleet: Fleet, steps: int) -> float:
    """Return by how many bytes a step this process grows."""
    grads, process = random_grads(fleet.world, TENSORS), psutil.Process()
    for _ in range(steps // 10):
        fleet.step(grads)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is kept may lie in memory that earlier tests have freed
    before = process.memory_info().rss
    for _ in range(steps - steps // 10):
        fleet.step(grads)
    gc.collect()
    return (process.memory_info().rss - before) / (steps - steps // 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("over", ["local", "gloo"])
@pytest.mark.parametrize(
    "method", ["none", "marsit", "topk", "powersgd", "onebit_adam", "global_qsgd", "sparse_binary"]
)
def test_memory_does_not_grow(method: str, over: str) -> None:
    transports = connected(2) if over == "gloo" else []
    options: dict[str, Any] = {"wrap": lambda local: transports[local.rank]} if transports else {}
    with Fleet(2, TENSORS, method, schedule="layerwise", verify_every=100, **options) as fleet:
        slope = _slope(fleet, STEPS)
        print(f"{method} over {over}: {slope:.0f} bytes a step")
        assert slope < MOST_SLOPE


@pytest.mark.slow
def test_a_leak_would_be_seen() -> None:
    """The negative: steps that keep a tensor each."""
    kept: list[Any] = []
    with Fleet(2, TENSORS, "none") as fleet:
        step = fleet.step
        fleet.step = lambda grads: kept.append(torch.ones(1 << 15)) or step(grads)  # type: ignore[assignment]
        assert _slope(fleet, 1000) > MOST_SLOPE


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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("over", ["local", "gloo"])
@pytest.mark.parametrize("cycles", [CYCLES])
def test_reducers_leave_no_thread_and_no_descriptor(cycles: int, over: str) -> None:
    def cycle(number: int) -> None:
        transports = connected(2) if over == "gloo" else []
        options: dict[str, Any] = {"wrap": lambda local: transports[local.rank]} if transports else {}
        with Fleet(2, TENSORS, "topk", **options) as fleet:
            fleet.step(random_grads(2, TENSORS, seed=number))

    cycle(0)
    before = _held()
    for number in range(cycles):
        cycle(number)
    end = time.monotonic() + SETTLE_SECONDS
    while any(now > then for now, then in zip(_held(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(_held(), before, strict=True)), (before, _held())
