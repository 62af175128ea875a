"""Steps in the steady state on a device: the timeline of one, and how often a step makes the host wait for the GPU."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.front import hvc, start, trained
from tests.support.jobs import ROOT
from tests.support.placing import count_ranks, place, staging
from tests.support.rank import arguments, check, folder, rank

sys.path.insert(0, str(ROOT / "examples"))
import tasks

ASKED = arguments()
WARM_UP, FEW, MANY = 8, 4, 12
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
start()
torch.set_num_threads(1)
WHERE = place(ASKED["device"])
TASK = tasks.TASKS[ASKED["task"]]()


def steps_of(method: str) -> tuple[Callable[[int], None], Any]:
    """Return what takes a number of steps, and the compression."""
    torch.manual_seed(0)
    model = TASK.model().to(WHERE)
    options = {"schedule": "size:1MB", "transport": "gloo"}
    compression = hvc.Compression.create(method, model.named_parameters(), **options)
    called, optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
    inputs, targets = (part.to(WHERE) for part in TASK.batch(0, 0, rank(), count_ranks(), 8))

    def take(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            F.cross_entropy(called(inputs).flatten(0, -2), targets.flatten()).backward()
            optimizer.step()

    return take, compression


def warned(take: Callable[[int], None], number: int) -> Counter[str]:
    """Count the calls of torch that wait for the GPU, on any thread, as torch itself notices them, by their lines."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            take(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in found if "synchroniz" in str(one.message)]
    return Counter(f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}" for one in waits)


def profiled(take: Callable[[int], None], number: int) -> dict[str, int]:
    """Count the calls of the CUDA runtime that wait for the GPU, on any thread: torch's and those of our kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        take(number)
    names = [event.name for event in profile.events()]
    return {wait: names.count(wait) for wait in WAITS}


def in_each(count: Callable[[int], Mapping[str, int]]) -> dict[str, float]:
    """Return counts of one step: those of many steps less those of a few, without what counting itself adds."""
    few, many = count(FEW), count(MANY)
    return {name: (many[name] - few.get(name, 0)) / (MANY - FEW) for name in many}


def run(method: str) -> dict[str, Any]:
    take, compression = steps_of(method)
    take(WARM_UP)
    recorded = hvc.trace(folder() / f"{method}.json", steps=1)
    take(2)
    recorded.close()
    found: dict[str, Any] = {"trace": Path(recorded.path).read_text()}
    if WHERE.type == "cuda":
        torch.cuda.synchronize()
        found["noticed by torch"] = in_each(lambda number: warned(take, number))
        found["runtime calls"] = in_each(lambda number: profiled(take, number))
    compression.close()
    return found


with staging(ASKED["device"]):
    for method in ASKED["methods"]:
        check(method, lambda: run(method))
