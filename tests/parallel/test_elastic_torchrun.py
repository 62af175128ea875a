"""The example for torchrun: a job that gets SIGTERM saves, and another number of ranks goes on with what waits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.saved import state_folder
from tests.support.jobs import ROOT, kill_marked
from tests.support.nursery import MARK, settings

EXAMPLE = ROOT / "examples" / "elastic_torchrun.py"
SECONDS = 120.0
#: torchrun ends ranks by SIGKILL after 30 seconds.
MOST_TO_SAVE = 10.0


def run(world: int, folder: Path, *words: str, stop: bool = False, kill: bool = False) -> str:
    """Run the example; return what it printed, also where it was stopped by SIGTERM, or one of its ranks killed."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["--max-restarts", "1"] if kill else []
    environment = os.environ | settings() | {MARK: mark, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(
        [*command, str(EXAMPLE), str(folder), *words], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        if kill:
            _await("latest", folder, process)
            (folder / "began").unlink()  # all ranks have left it
            os.kill(_a_rank_of(process.pid), signal.SIGKILL)
        if stop:
            _await("began", folder, process)  # until then a signal would end ranks
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        kill_marked(mark)
        process.wait(10)
    return output


def _await(name: str, folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the job has left a file."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None and not (folder / name).exists():
        time.sleep(0.05)


def _a_rank_of(launcher: int) -> int:
    """Return the process of one of the ranks."""
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[-1])


def waiting(folder: Path) -> dict[str, Tensor]:
    """Return the mean of all residuals of the last checkpoint, by tensor."""
    saved = folder / (folder / "latest").read_text() / "compression"
    states = [state_folder.read(saved, entry) for entry in state_folder.manifest(saved).files]
    residuals = [state["state"]["residual"] for state in states]
    return {name: torch.stack([each[name].double() for each in residuals]).mean(dim=0) for name in residuals[0]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_that_is_stopped_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    output = run(2, tmp_path, "--steps", "1000000", stop=True)
    found = re.search(r"saved after step (\d+) in ([\d.]+) s", output)
    assert found and float(found[2]) < MOST_TO_SAVE, output
    before, step = waiting(tmp_path), int(found[1])
    assert any(bool(residual.any()) for residual in before.values())
    output = run(3, tmp_path, "--steps", str(step))  # loads, and saves at once
    assert f"went on after step {step} with 3 ranks" in output, output
    torch.testing.assert_close(waiting(tmp_path), before, rtol=1e-6, atol=1e-7)
    output = run(1, tmp_path, "--steps", str(step + 5))
    assert f"saved after step {step + 5}" in output, output
    assert {path.name for path in tmp_path.glob("step*")} == {"steps", f"step{step + 5}"}, "it removes its own only"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_of_which_a_rank_is_killed_goes_on_from_the_last_save(tmp_path: Path) -> None:
    output = run(2, tmp_path, "--steps", "1000000", "--save-every", "20", stop=True, kill=True)
    saved = [int(step) for step in re.findall(r"saved after step (\d+) in", output)]
    found = re.search(r"went on after step (\d+) with 2 ranks", output)
    assert found and int(found[1]) in saved[:-1] and int(found[1]) % 20 == 0, output
    assert [path.name for path in tmp_path.glob("step*")] == [f"step{saved[-1]}"], output
