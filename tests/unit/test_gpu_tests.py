"""`pytest -m gpu` where there is no GPU: a folder of tests that is told there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import gpu

ROOT = Path(gpu.__file__).resolve().parents[1]
CONFTEST = """
import os
import pytest
from tests import gpu
from tests.support.marks import slow

gpu._gpu = lambda: os.environ.get("A_GPU", "")
gpu._GRACE = float(os.environ.get("A_GRACE", 60))
gpu.key = lambda: os.environ.get("A_KEY", "these sources")
gpu.ORDER = ("kernels/",)
pytest_addoption = gpu.add_options

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: x")
    config.pluginmanager.register(gpu.GpuTests(config), "gpu tests")
"""
FIRST = """
import os, time, pytest

@pytest.mark.gpu
def test_right(record_property):
    record_property("lost", 3)

@pytest.mark.gpu
def test_wrong():
    assert "FIXED" in os.environ, "a fault"

@pytest.mark.gpu
def test_other_gpus():
    pytest.skip("one GPU")

def test_of_the_cpu(): ...
"""
LONG = """
import pytest, time

@pytest.fixture(scope="module")
def job():
    time.sleep(SECONDS)

@pytest.mark.gpu
def test_long(job): ...

@pytest.mark.gpu
def test_after(): ...
"""


class Folder:
    """Tests of a GPU, and what is kept of them."""

    def __init__(self, root: Path, **files: str) -> None:
        self.root, self.results = root, root / "results.jsonl"
        (root / "conftest.py").write_text(CONFTEST)
        for name, text in files.items():
            path = root / "tests" / f"{name.replace('__', '/test_')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        """Return pytest's status and output."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--results", str(self.results), *words]
        given = {"A_GPU": "A GPU", "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [*command, "--rootdir", str(self.root), "-v", "tests"], cwd=self.root, env=os.environ | given,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def found(self) -> list[tuple[str, str]]:
        """Return test and outcome of each line that was kept, in order."""
        lines: list[dict[str, Any]] = [json.loads(line) for line in self.results.read_text().splitlines()]
        return [(line["test"].partition("::test_")[2], line["outcome"]) for line in lines]


@pytest.mark.slow
def test_results_are_kept_and_what_was_right_is_left_out(tmp_path: Path) -> None:
    folder = Folder(tmp_path, a__first=FIRST)
    status, said = folder.run("-m", "gpu")
    assert status == 1 and "A GPU: of 3 tests 1 passed, 1 failed, 1 not run" in said and "of_the_cpu" not in said
    ends = [one for one in folder.found() if one[1] != "started"]
    assert ends == [("right", "passed"), ("wrong", "failed"), ("other_gpus", "not run")]
    lines = [json.loads(line) for line in folder.results.read_text().splitlines()]
    assert lines[1]["lost"] == 3 and "a fault" in lines[3]["why"] and "one GPU" in lines[5]["why"]
    status, said = folder.run("-m", "gpu", FIXED="1")
    assert status == gpu.INCOMPLETE and "2 passed, 0 failed, 1 not run" in said and "test_right" not in said
    status, said = folder.run("-m", "gpu", "-k", "right or wrong", FIXED="1")
    assert status == 0 and "of 2 tests 2 passed, 0 failed, 0 not run" in said
    assert "test_right PASSED" in folder.run("-m", "gpu", "--again", FIXED="1")[1]
    assert "test_right PASSED" in folder.run("-m", "gpu", A_KEY="other sources")[1]


@pytest.mark.slow
def test_everything_right_is_success_also_where_nothing_runs(tmp_path: Path) -> None:
    folder = Folder(tmp_path, a__right="import pytest\n@pytest.mark.gpu\ndef test_right(): ...\n")
    assert folder.run("-m", "gpu")[0] == folder.run("-m", "gpu")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_the_limit_ends_what_runs_and_the_next_call_begins_with_the_rest(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    folder = Folder(tmp_path, kernels__long=LONG.replace("SECONDS", "100"), a__right=FIRST)
    began = time.monotonic()
    # Enough for workers to start on a machine that has much else to do.
    status, said = folder.run("-m", "gpu", "--limit", "20", "-rs", *workers, FIXED="1")
    assert time.monotonic() - began < 55 and "the time of --limit was over" in said
    first = folder.found()[: 1 + len(workers) // 2]  # of each process that starts one
    assert ("long", "started") in first, "the order is that of ORDER"
    assert ("long", "not run") in folder.found()
    assert status == gpu.INCOMPLETE
    (tmp_path / "tests/kernels/test_long.py").write_text(LONG.replace("SECONDS", "0"))
    status, said = folder.run("-m", "gpu", *workers, FIXED="1")
    assert "4 passed, 0 failed, 1 not run" in said


@pytest.mark.slow
def test_a_test_that_does_not_return_ends_the_run_and_comes_last(tmp_path: Path) -> None:
    """A signal is no use where Python does not come to run, as in a kernel that hangs."""
    hangs = "import pytest\n@pytest.mark.gpu\ndef test_hangs():\n    sum(range(10**12))\n"
    folder = Folder(tmp_path, kernels__hangs=hangs, a__right="import pytest\n@pytest.mark.gpu\ndef test_right(): ...\n")
    began = time.monotonic()
    status, said = folder.run("-m", "gpu", "--limit", "12", A_GRACE="2")
    assert status == 1 and time.monotonic() - began < 45 and "test_hangs" in said
    folder.run("-m", "gpu", "--limit", "12", A_GRACE="2")
    assert folder.found() == [("hangs", "started"), ("right", "started"), ("right", "passed"), ("hangs", "started")]


def test_without_a_gpu_one_line_says_what_is_left_out(tmp_path: Path) -> None:
    folder = Folder(tmp_path, a__first=FIRST)
    status, said = folder.run(A_GPU="")
    assert status == 0 and "3 tests that need a GPU were left out" in said and not folder.results.exists()
    assert folder.run("-m", "gpu", A_GPU="")[0] == 5


def test_with_other_tests_nothing_is_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, a__first=FIRST)
    assert "test_of_the_cpu PASSED" in folder.run()[1] and not folder.results.exists()


def test_the_files_of_the_order_are_there_and_results_hold_for_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all((ROOT / "tests" / name).exists() for name in gpu.ORDER)
    assert all((ROOT / name).exists() for name in gpu.SOURCES)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/sign.cu").write_text("a")
    keys = [gpu.key(tmp_path)]
    (tmp_path / "csrc/sign.o").write_text("made")
    assert gpu.key(tmp_path) == keys[0]
    (tmp_path / "csrc/sign.cu").write_text("b")
    keys.append(gpu.key(tmp_path))
    monkeypatch.setattr(gpu, "_gpu", lambda: "another")
    keys.append(gpu.key(tmp_path))
    assert len(set(keys)) == 3
