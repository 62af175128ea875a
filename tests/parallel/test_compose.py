"""The steps of docker/compose.yaml, on four hosts that docker/compose-local.sh makes: they train and check keys."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

SSHD = os.environ.get("SSHD", "/usr/sbin/sshd")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0 or not Path(SSHD).exists(), reason="needs root and sshd"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of what the hosts use, which a test may change."""
    for folder in ("docker", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


def train(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRAIN_ARGS": "--steps 3"} | environment
    command = [tree / "docker" / "compose-local.sh"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)


def test_four_hosts_train_under_horovodrun(tree: Path) -> None:
    done = train(tree)
    assert done.returncode == 0 and "ranks identical: yes" in done.stdout, done.stdout + done.stderr


def test_four_hosts_train_under_torchrun(tree: Path) -> None:
    done = train(tree, LAUNCHER="torchrun")
    assert done.returncode == 0 and "epoch 12: test accuracy" in done.stdout, done.stdout + done.stderr


def test_a_host_with_another_key_than_it_published_is_refused(tree: Path) -> None:
    script, given = tree / "docker" / "compose_host.sh", "-h ~/.ssh/host_key"
    text = script.read_text()
    assert text.count(given) == 1
    make_other = 'ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/other\n    exec /usr/sbin/sshd'
    script.write_text(text.replace("exec /usr/sbin/sshd", make_other).replace(given, "-h ~/.ssh/other"))
    done = train(tree)
    assert done.returncode == 1 and "Host key verification failed" in done.stdout + done.stderr, done.stdout
