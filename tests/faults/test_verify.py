"""`hvd-compress verify`: all is well here, every planted fault is found, and the table says where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

#: It takes less than one minute with two cores of its own.
SECONDS = 900.0
QUIET_SECONDS = 60.0
#: What is planted in the last rank, and what is said of it.
FOUND = {
    "corruption": "corrupt frame from rank {last}",
    "freeze": "No sign of life from rank(s) {last}",
    "mismatch": "do not agree on seed: ranks {others} = 0, rank {last} = 1",
    "drift": "parameter first on rank(s) {last} differs",
}


LAUNCHERS = ["horovodrun", "torchrun"]
WITHOUT_HOROVOD = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from horovod_compress.cli import main
status = main(sys.argv[1:])
assert "horovod" not in sys.modules
sys.exit(status)
"""


def run(
    folder: Path, *words: str, launcher: tuple[str, ...] = (), script: Path | str = "-mhorovod_compress.cli"
) -> tuple[int, str]:
    command = [*launcher, sys.executable, str(script), "verify", "--json", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_") and name != "RANK"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # In an empty folder nothing of the tests can be imported by chance.
    found = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    return found.returncode, found.stdout


def checks(document: str) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in json.loads(document)["checks"]}


def said_of(plant: str, last: int) -> str:
    return FOUND[plant].format(last=last, others=", ".join(map(str, range(last))))


@pytest.fixture
def without_horovod(tmp_path: Path) -> Path:
    """A script that is `hvd-compress` where Horovod is not installed."""
    path = tmp_path / "command.py"
    path.write_text(WITHOUT_HOROVOD)
    return path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_is_well(tmp_path: Path, launcher: str) -> None:
    status, output = run(tmp_path, "--np", "3", "--launcher", launcher)
    assert status == 0, output
    found = checks(output)
    assert {"corruption", "mismatch", "drift", "kill", "freeze"} < set(found)
    assert sum(name.startswith("same bits: ") for name in found) >= 20


FSDP = ("--launcher", "torchrun", "--front", "fsdp")


@pytest.mark.parametrize("ranks", ["3", "4"])
def test_all_is_well_where_replicas_are_divided(tmp_path: Path, ranks: str) -> None:
    status, output = run(tmp_path, "--np", ranks, *FSDP)
    assert status == 0, output
    found = checks(output)
    assert {"corruption", "mismatch", "drift", "kill", "freeze"} < set(found)
    assert sum(name.startswith("same bits: ") for name in found) >= 20
    assert json.loads(output)["front"] == "fsdp"


@pytest.mark.parametrize("plant", FOUND)
def test_a_planted_fault_is_found_where_models_are_divided(tmp_path: Path, plant: str) -> None:
    status, output = run(tmp_path, "--np", "4", "--plant", plant, *FSDP)
    assert status == 1, output
    failed = [check for check in checks(output).values() if not check["ok"]]
    assert [check["check"] for check in failed] == ["same bits: marsit"]
    assert said_of(plant, last=3) in failed[0]["detail"]


@pytest.mark.alone
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_ranks_take_a_minute_and_rows_come_as_they_are_done(tmp_path: Path, launcher: str) -> None:
    command = [sys.executable, "-m", "horovod_compress.cli", "verify", "--np", "4", "--launcher", launcher]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_") and name != "RANK"}
    began, came = time.monotonic(), []
    with subprocess.Popen(
        command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        came += [(time.monotonic() - began, line) for line in process.stdout]
    assert process.returncode == 0, came
    assert came[0][0] < 10 and came[2][0] < came[-1][0] - 5, came
    assert came[-1][0] < QUIET_SECONDS, came


@pytest.mark.parametrize("plant", FOUND)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_planted_fault_is_found(tmp_path: Path, plant: str, launcher: str) -> None:
    status, output = run(tmp_path, "--np", "3", "--plant", plant, "--launcher", launcher)
    assert status == 1, output
    failed = [check for check in checks(output).values() if not check["ok"]]
    assert [check["check"] for check in failed] == ["same bits: marsit"]
    assert said_of(plant, last=2) in failed[0]["detail"]


def test_in_a_job_of_horovodrun(tmp_path: Path) -> None:
    launcher = (sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2")
    status, output = run(tmp_path, launcher=launcher)
    assert status == 0, output
    line = next(line for line in output.splitlines() if '"checks"' in line)
    found = checks(line[line.index("{") :])
    assert "drift" in found and "kill" not in found


def test_without_horovod_ranks_are_those_of_torchrun(tmp_path: Path, without_horovod: Path) -> None:
    status, output = run(tmp_path, "--np", "2", script=without_horovod)
    assert status == 0, output
    assert json.loads(output)["launcher"] == "torchrun" and {"drift", "kill", "freeze"} < set(checks(output))


@pytest.mark.parametrize(("words", "expected"), [((), 0), (("--plant", "drift"), 1)])
def test_in_a_job_of_torchrun(tmp_path: Path, without_horovod: Path, words: tuple[str, ...], expected: int) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    status, output = run(tmp_path, *words, launcher=launcher, script=without_horovod)
    assert bool(status) == bool(expected), output
    found = checks(output[output.index('{"ranks"') :])
    assert ("drift" in found) is (expected == 0) and "kill" not in found
    assert [name for name, check in found.items() if not check["ok"]] == ["same bits: marsit"] * expected
