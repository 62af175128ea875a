"""What docker/compose_host.sh does when a host fails, with functions in place of ssh and torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "compose_host.sh"
LONG = 20


def run(ssh: str, torchrun: str) -> tuple[int, str]:
    """Return the exit status of a job on three hosts, and what it has written."""
    text = SCRIPT.read_text()
    function = text[text.index("torchrun_on() {") : text.index("\ncase ")]
    script = f"set -euo pipefail\nssh() {{ {ssh}; }}\ntorchrun() {{ {torchrun}; }}\n{function}\ntorchrun_on a b c\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=LONG, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("ssh", "torchrun", "status"),
    [
        ("if [ $1 = c ]; then return 7; else exec sleep 600; fi", "exec sleep 600", 7),
        ("exec sleep 600", "return 5", 5),
        ("if [ $1 = c ]; then sleep 1; return 7; fi", ":", 7),
    ],
)
def test_the_first_host_that_fails_ends_the_job(ssh: str, torchrun: str, status: int) -> None:
    assert run(ssh, torchrun)[0] == status


def test_all_hosts_are_waited_for() -> None:
    status, written = run("sleep 0.5; echo $1", "echo lead")
    assert status == 0 and sorted(written.split()) == ["b", "c", "lead"]
