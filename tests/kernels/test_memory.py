"""Memory that runs out is an exception, in whichever thread; what is called next works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from horovod_compress import ops
from horovod_compress.ops.keys import SKETCH, Key
from tests.support.sections import top_select

torch.set_num_threads(2)
KEY = Key(seed=1, step=1, bucket=0, rank=0, purpose=SKETCH)


def runs_out(spare: int, call: Callable[[], object]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        call()
    except MemoryError:
        print("MemoryError", flush=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def select(x: torch.Tensor, k: int) -> tuple[int, int]:
    return top_select(x, None, k, torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=x.dtype))


def sketch_top(count: int) -> None:
    table = torch.ones(3 * ops.sketch_columns(200_000))
    positions, estimates = torch.empty(count // 2, dtype=torch.int64), torch.empty(count // 2)
    limited = lambda: ops.sketch_top(table, 3, KEY, [(0, count)], count // 2, positions, estimates)
    runs_out(60 << 20, limited)


small, large = torch.ones(10_000, dtype=torch.float64), torch.ones(8_000_000, dtype=torch.float64)
sketch_top(16_000_000)
print(select(small, 10))
outputs = torch.empty(large.numel(), dtype=torch.int32), torch.empty_like(large)
runs_out(100 << 20, lambda: top_select(large, None, large.numel(), *outputs))
print(select(small, 10))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process as Linux tells it")
@pytest.mark.skipif("san" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers reserve what the limit forbids")
def test_memory_that_runs_out() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert result.stdout.splitlines() == ["MemoryError", "(10, 0)"] * 2
