"""Several jobs and readers in one checkpoint folder: it always loads, and a job whose folder was taken over is told."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import horovod_compress.ddp as hvc
from horovod_compress.engine import state_folder
from horovod_compress.engine.state_folder import MANIFEST
from horovod_compress.errors import ConfigError, CorruptFrameError
from tests.support.saving_jobs import check, played
from tests.unit.test_one_rank_ddp import group as group
from tests.unit.test_state_folder import WORLD, Team, files, fleet_of, grads

ROUNDS, QUICK_ROUNDS = 500, 6


@pytest.fixture
def jobs() -> Iterator[list[Team]]:
    """Two jobs that train the same model; the second is a step further."""
    with fleet_of() as one, fleet_of() as two:
        for seed in range(2):
            one.step(grads(seed))
        for seed in range(3):
            two.step(grads(seed))
        yield [Team(one), Team(two)]


def step_in(folder: Path) -> int:
    """Return the step of the checkpoint in a folder, all of whose files are intact."""
    manifest = state_folder.manifest(folder)
    assert {state_folder.read(folder, entry)["step"] for entry in manifest.files} == {manifest.step}
    return manifest.step


def test_a_job_whose_folder_another_one_has_taken_over_is_refused(
    jobs: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = jobs
    assert one.save(tmp_path) == [None] * WORLD and not caplog.records
    assert two.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 3
    before = files(tmp_path)
    for _ in range(2):
        for error in one.save(tmp_path):
            assert isinstance(error, ConfigError) and "another job saves in" in str(error) and "step 3" in str(error)
    assert files(tmp_path) == before
    assert two.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 3  # the control
    assert one.load(tmp_path) == [None] * WORLD and one.save(tmp_path) == [None] * WORLD
    assert all("another job saves in" in str(error) for error in two.save(tmp_path))


def test_a_checkpoint_that_was_not_loaded_stays_and_is_spoken_of_once(
    jobs: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a job is started again, and load() was forgotten."""
    one, two = jobs
    one.save(tmp_path)
    for _ in range(3):
        assert two.save(tmp_path) == [None] * WORLD
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "call load() before the first step" in record.getMessage()
    assert "of step 2 that this job has neither loaded nor saved" in record.getMessage()
    assert len(files(tmp_path)) == 2 * (WORLD + 1) and step_in(tmp_path) == 3
    (tmp_path / "manifest.step2.json").rename(tmp_path / MANIFEST)
    assert step_in(tmp_path) == 2 and two.load(tmp_path) == [None] * WORLD


def test_a_checkpoint_that_was_loaded_is_replaced_without_a_word(
    jobs: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = jobs
    one.save(tmp_path)
    assert two.load(tmp_path) == two.save(tmp_path) == two.save(tmp_path) == [None] * WORLD
    assert len(files(tmp_path)) == WORLD + 1 and not caplog.records


def test_a_job_that_saves_in_two_folders_owns_both(jobs: list[Team], tmp_path: Path) -> None:
    for _ in range(2):
        assert jobs[0].save(tmp_path / "one") == jobs[0].save(tmp_path / "two") == [None] * WORLD


def test_a_job_that_is_started_again(group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As users see it: once with load(), once without."""
    folder = tmp_path / "checkpoint"

    def compression() -> hvc.Compression:
        return hvc.Compression.topk(nn.Linear(4, 4).named_parameters())

    with contextlib.closing(compression()) as one:
        one.save(folder)
        one.save(folder)
    with contextlib.closing(compression()) as two:
        two.load(folder)
        two.save(folder)
    assert len(files(folder)) == 2 and "neither loaded nor saved" not in caplog.text
    with contextlib.closing(compression()) as three:
        three.save(folder)
        three.save(folder)
    assert caplog.text.count("neither loaded nor saved") == 1 and len(files(folder)) == 4


def test_what_is_young_is_not_removed(jobs: list[Team], tmp_path: Path) -> None:
    """Another job may be about to name it."""
    one = jobs[0]
    one.save(tmp_path)
    theirs = state_folder.write(tmp_path, {"rank": 0})
    os.utime(tmp_path / theirs.name, (time.time() - 60.0,) * 2)
    assert one.save(tmp_path) == [None] * WORLD
    assert (tmp_path / theirs.name).exists()


@pytest.mark.parametrize("first", [True, False])
def test_files_that_vanish_while_the_manifest_is_written(
    jobs: list[Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The checkpoint of before is there again, or none: never one without its files."""
    one = jobs[0]
    if not first:
        one.save(tmp_path)
    before, write = files(tmp_path), state_folder._write

    def harmed(path: Path, pieces: object) -> tuple[int, int]:
        found = write(path, pieces)  # type: ignore[arg-type]
        if path.name == MANIFEST:
            monkeypatch.undo()
            for entry in state_folder.manifest(tmp_path).files[1:]:
                (tmp_path / entry.name).unlink()
        return found

    monkeypatch.setattr(state_folder, "_write", harmed)
    assert all(isinstance(error, ConfigError) and "No such file" in str(error) for error in one.save(tmp_path))
    assert files(tmp_path) == before
    assert one.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 2


def test_a_reader_looks_again_where_another_save_came_between(jobs: list[Team], tmp_path: Path) -> None:
    one, _ = jobs
    one.save(tmp_path)
    seen = []

    def take(manifest: state_folder.Manifest) -> int:
        seen.append(manifest)
        if len(seen) == 1:
            one.save(tmp_path)  # which removes the files of the first
        return sum(state_folder.read(tmp_path, entry)["step"] for entry in manifest.files)

    assert state_folder.of_one_look(tmp_path, take) == 2 * WORLD and len(seen) == 2
    (tmp_path / seen[-1].files[0].name).unlink()
    with pytest.raises(CorruptFrameError, match="is missing"):
        state_folder.of_one_look(tmp_path, take)
    assert len(seen) == 3  # the manifest is the same: no third look


def test_two_jobs_that_save_at_once_and_a_reader(tmp_path: Path) -> None:
    """Whatever comes between, the folder loads, and a job that is refused is told why."""
    check(played(tmp_path, QUICK_ROUNDS, threading.Barrier(3), threading.Thread), QUICK_ROUNDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_rounds_of_two_jobs_and_a_reader(tmp_path: Path) -> None:
    """The same with processes."""
    context = multiprocessing.get_context("spawn")
    told = played(tmp_path, ROUNDS, context.Barrier(3), context.Process)
    print(dict(told))
    check(told, ROUNDS)
