"""Elastic jobs: a compression belongs to one run of Horovod, and says so once in the next, instead of failing again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.faults import JOBS
from tests.support.jobs import ROOT, kill_marked
from tests.support.marks import slow

SECONDS = 60.0


def run(folder: Path, path: str, anew: bool) -> tuple[int, str, list[list[str]]]:
    """Run the job; return its exit status, what it printed, and what each process has tried: numbers of ranks."""
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:2\n")
    hosts.chmod(0o700)
    mark = uuid.uuid4().hex
    settings = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HVC_TEST_JOB": mark, "HVC_TEST_FOLDER": str(folder),
        "HVC_TEST_ARGUMENTS": json.dumps({"path": path, "anew": anew}),
    }  # fmt: skip
    launcher = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
    sizes = ["-np", "3", "--min-np", "1", "--host-discovery-script", str(hosts)]
    try:
        found = subprocess.run(
            [*launcher, *sizes, sys.executable, str(JOBS / "elastic.py")],
            env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False,
        )  # fmt: skip
    finally:
        kill_marked(mark)
    return found.returncode, found.stdout + found.stderr, [p.read_text().split() for p in folder.glob("tries.*")]


@pytest.mark.parametrize("path", slow("attached", "stock", "update"))
def test_a_compression_of_another_run_is_refused_once(tmp_path: Path, path: str) -> None:
    status, output, tries = run(tmp_path, path, anew=False)
    assert status != 0
    assert "ConfigError" in output and "Elastic jobs are not supported yet" in output, output
    assert max(len(mine) for mine in tries) == 2, tries  # with three ranks, and once more with the one that is left


@pytest.mark.parametrize("path", slow("attached"))
def test_a_compression_made_anew_goes_on(tmp_path: Path, path: str) -> None:
    """The control: what the message advises works."""
    _, output, tries = run(tmp_path, path, anew=True)
    assert ["3", "1"] in tries, output
    assert list(tmp_path.glob("done.*")), output
