"""A disk that is full at any moment of a save: all ranks are told, and the checkpoint of before stays whole."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_compress.engine.saved import state_folder
from horovod_compress.errors import ConfigError
from tests.unit.test_state_folder import WORLD, Team, files, fleet_of, grads

KILOBYTES = 64
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system with room for some checkpoints."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={KILOBYTES}k", "tmpfs", str(tmp_path)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system takes root: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk(disk: Path) -> None:
    """With one page more room each time, until a save succeeds: every write of a save finds it full once."""
    folder, filler = disk / "saved", disk / "filler"
    with fleet_of() as fleet:
        team = Team(fleet)
        fleet.step(grads(1))
        assert team.save(folder) == [None] * WORLD
        before, failed = files(folder), 0
        fleet.step(grads(2))
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        for left in range(0, room, PAGE):
            filler.write_bytes(bytes(room - left))
            told = team.save(folder)
            filler.unlink()
            if told == [None] * WORLD:
                break
            failed += 1
            assert all(isinstance(error, ConfigError) and "No space left" in str(error) for error in told), told
            assert files(folder) == before
        assert failed >= 3, "the disk was not full for a file of each rank and the manifest"
        assert files(folder) != before and state_folder.manifest(folder).step == 2  # the control
