"""The examples of models that `fully_shard` divides run as they are written, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.support.jobs import ROOT, run_ranks
from tests.support.marks import needs_sklearn

pytestmark = needs_sklearn

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
TRANSFORMER = "fsdp_transformer.py"


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"step \d+: loss ([\d.]+), norm [\d.]+, \d+ ms a step", printed)]


@pytest.mark.slow
def test_the_smallest_trains() -> None:
    given = {"name": "minimal_fsdp.py", "words": [], "instead": {"range(12)": "range(2)"}}
    first, *others = run_ranks(4, "example.py", arguments=given, front="torch").reports
    assert others == ["", "", ""]
    accuracies = [float(found) for found in re.findall(r"epoch \d: test accuracy ([\d.]+)", first)]
    assert len(accuracies) == 2 and accuracies[-1] > 0.4  # a guess: 0.1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_transformer_learns_as_with_what_torch_exchanges() -> None:
    words = ["--steps", "40", "--replicas", "2", "--batch", "4"]
    found = [
        losses(run_ranks(4, "example.py", arguments=given, front="torch", timeout=180).reports[0])
        for more in (["--native"], ["--method", "none"], ["--bfloat16"])
        for given in [{"name": TRANSFORMER, "words": [*words, *more], "instead": {}}]
    ]
    native, exact, marsit = found
    assert len(native) == 10 and native[-1] < native[0] - 0.5
    assert exact == pytest.approx(native, abs=0.002)
    assert marsit[-1] == pytest.approx(native[-1], abs=0.15) and marsit != exact


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_transformer_with_compiled_blocks() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(ROOT / "examples" / TRANSFORMER), "--steps", "4", "--compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4
