"""Every method learns the two tasks, with its defaults, on four ranks; a new codec is tested by being there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.codecs import registry
from tests.support.jobs import ROOT

#: How much worse than without compression a method's defaults may be after so few steps: a share of
#: the accuracy, or of the loss. Not what a method is chosen by: that is in the methods' pages.
TASKS = {"digits": 0.03, "text": 0.15}

pytestmark = pytest.mark.slow


def final(task: str, method: str) -> float:
    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), "--task", task, "--seeds", "1", "--json"]
    done = subprocess.run([*command, "--run", method], capture_output=True, text=True, timeout=600, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["ranks_identical"]
    return float(record["mean"])


@pytest.fixture(scope="module")
def uncompressed() -> dict[str, float]:
    return {task: final(task, "none") for task in TASKS}


@pytest.mark.parametrize("method", [name for name in registry.available() if name != "none"])
@pytest.mark.parametrize("task", TASKS)
def test_learns(uncompressed: dict[str, float], task: str, method: str) -> None:
    worse = uncompressed[task] - final(task, method)
    assert (worse if task == "digits" else -worse) <= TASKS[task] * uncompressed[task]
