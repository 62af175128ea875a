"""Several jobs and readers in one checkpoint folder: it always loads, and a job whose folder was taken over is told."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import horovod_compress.ddp as hvc
from horovod_compress.engine.saved import checkpoint, manifests, state_folder
from horovod_compress.engine.saved.manifests import RankGroup
from horovod_compress.engine.saved.state_folder import MANIFEST, Known
from horovod_compress.errors import ConfigError, CorruptFrameError, ExchangeError, StateError
from horovod_compress.fronts import saving
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
    [kept] = tmp_path.glob("manifest.step2.*.json")
    kept.rename(tmp_path / MANIFEST)
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


def test_a_job_that_is_started_again(
    group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users see it: in the same process, as after an elastic reset; in another one with load(), and without."""
    folder = tmp_path / "checkpoint"

    def compression() -> hvc.Compression:
        return hvc.Compression.topk(nn.Linear(4, 4).named_parameters())

    with contextlib.closing(compression()) as one:
        one.save(folder)
        one.save(folder)
    with contextlib.closing(compression()) as again:
        again.save(folder)
    assert len(files(folder)) == 2 and "neither loaded nor saved" not in caplog.text
    monkeypatch.setattr(saving, "_known", Known())
    with contextlib.closing(compression()) as two:
        two.load(folder)
        two.save(folder)
    assert len(files(folder)) == 2 and "neither loaded nor saved" not in caplog.text
    monkeypatch.setattr(saving, "_known", Known())
    with contextlib.closing(compression()) as three:
        three.save(folder)
        three.save(folder)
    assert caplog.text.count("neither loaded nor saved") == 1 and len(files(folder)) == 4


def test_several_checkpoints_of_one_step_stay(jobs: list[Team], tmp_path: Path) -> None:
    """As of a job that begins at step 0 each time."""
    for team in (jobs[0], Team(jobs[0].fleet), Team(jobs[0].fleet), jobs[1]):
        assert team.save(tmp_path) == team.save(tmp_path) == [None] * WORLD
    kept = [*tmp_path.glob("manifest.step2.*.json")]
    assert len(kept) == 3 and len(files(tmp_path)) == 4 * (WORLD + 1)
    for path in kept:
        path.rename(tmp_path / MANIFEST)
        assert step_in(tmp_path) == 2


def test_a_checkpoint_that_is_kept_already(jobs: list[Team], tmp_path: Path) -> None:
    one, two = jobs
    one.save(tmp_path)
    before = (tmp_path / MANIFEST).read_bytes()
    two.save(tmp_path)
    [kept] = tmp_path.glob("manifest.step2.*.json")
    os.utime(kept, (0, 0))
    (tmp_path / MANIFEST).write_bytes(before)  # somebody has copied it instead of renaming it
    assert Team(two.fleet).save(tmp_path) == [None] * WORLD
    assert kept.read_bytes() == before and not kept.stat().st_mtime


def test_another_rank_becomes_rank_0(jobs: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in elastic training, when the host of rank 0 has gone."""
    one, two = jobs
    one.save(tmp_path)
    one.known.reverse()
    assert one.save(tmp_path) == [None] * WORLD and len(files(tmp_path)) == WORLD + 1 and not caplog.records
    two.save(tmp_path)
    one.known.reverse()
    assert all("another job saves in" in str(error) for error in one.save(tmp_path))


def test_rank_0_that_goes_as_soon_as_it_has_saved(jobs: list[Team], tmp_path: Path) -> None:
    """The other one finds its own file in the manifest: it is of the same job."""
    one, _ = jobs
    one.save(tmp_path)
    known, shown = one.known[1], []
    ours, theirs = (checkpoint.save(reducer, one.fleet.methods) for reducer in one.fleet.reducers)

    def share(value: Any) -> list[Any]:
        shown.append(value)
        first = state_folder.write(tmp_path, ours)
        if len(shown) == 1:
            return [[None, asdict(first), ours["step"]], value]
        state_folder.commit(tmp_path, ours, [first, manifests.Entry(**shown[0][1])], one.known[0])
        raise ExchangeError("rank 0 is gone")

    with pytest.raises(ExchangeError):
        saving.save(tmp_path, lambda: theirs, saving.Saver(1, WORLD), share, known)
    one.known.reverse()
    assert one.save(tmp_path) == [None] * WORLD and not [*tmp_path.glob("manifest.step*")]


def test_a_kept_manifest_that_cannot_be_read(
    jobs: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files may be any: what was replaced goes, what is merely old stays."""
    one, _ = jobs
    one.save(tmp_path)
    (tmp_path / "manifest.step7.json").write_text("{")
    old = tmp_path / f"rank0.{'0' * 16}.hvc"
    old.touch()
    os.utime(old, (0, 0))
    for _ in range(2):
        assert one.save(tmp_path) == [None] * WORLD
    assert len(files(tmp_path)) == WORLD + 3 and old.exists()
    [record] = caplog.records
    assert "manifest.step7.json cannot be read" in record.getMessage()
    (tmp_path / "manifest.step7.json").unlink()
    one.save(tmp_path)
    assert len(files(tmp_path)) == WORLD + 1


def test_what_is_young_is_not_removed(jobs: list[Team], tmp_path: Path) -> None:
    """Another job may be about to name it."""
    one = jobs[0]
    one.save(tmp_path)
    theirs = state_folder.write(tmp_path, {"rank": 0})
    os.utime(tmp_path / theirs.name, (time.time() - 7200.0,) * 2)
    assert one.save(tmp_path) == [None] * WORLD
    assert (tmp_path / theirs.name).exists()


@pytest.mark.parametrize("before", ["none", "own", "foreign"])
def test_files_that_vanish_while_the_manifest_is_written(
    jobs: list[Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The checkpoint of before is there again, or none: never one without its files."""
    one = jobs[0]
    if before != "none":
        (one if before == "own" else jobs[1]).save(tmp_path)
    there, write = files(tmp_path), state_folder._write

    def harmed(path: Path, pieces: Any, **options: bool) -> tuple[int, int]:
        found = write(path, pieces, **options)
        if path.name == MANIFEST:
            monkeypatch.undo()
            for entry in state_folder.manifest(tmp_path).files[1:]:
                (tmp_path / entry.name).unlink()
        return found

    monkeypatch.setattr(state_folder, "_write", harmed)
    assert all(isinstance(error, ConfigError) and "No such file" in str(error) for error in one.save(tmp_path))
    assert files(tmp_path) == there
    assert one.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 2


def test_a_reader_looks_again_where_another_save_came_between(jobs: list[Team], tmp_path: Path) -> None:
    one, _ = jobs
    one.save(tmp_path)
    seen = []

    def take(manifest: manifests.Manifest) -> int:
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


# ---- groups of ranks of one job ----

FIRST, SECOND = RankGroup([0, 1], 4), RankGroup([2, 3], 4)


@pytest.fixture
def teams() -> Iterator[list[Team]]:
    """Two groups of one job, the first and the second half of its ranks."""
    with fleet_of() as one, fleet_of() as two:
        for fleet, steps in ((one, 2), (two, 3)):
            for seed in range(steps):
                fleet.step(grads(seed))
        yield [Team(one, FIRST), Team(two, SECOND)]


def test_another_group_is_refused(teams: list[Team], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = teams
    assert one.save(tmp_path) == [None] * WORLD
    before = files(tmp_path)
    for residuals in ("refuse", "reset", "redistribute"):
        for error in two.load(tmp_path, residuals):
            assert isinstance(error, StateError) and "is of rank(s) 0, 1, and this " in str(error), residuals
    for error in two.save(tmp_path):
        assert isinstance(error, ConfigError) and "use a separate folder for each group of ranks" in str(error)
    assert files(tmp_path) == before and not caplog.records
    assert one.load(tmp_path) == one.save(tmp_path) == [None] * WORLD  # the control


@pytest.mark.parametrize("group", [None, RankGroup([1, 2], 4), RankGroup([2, 3], 6)])
def test_ranks_that_need_not_be_another_group(teams: list[Team], tmp_path: Path, group: RankGroup | None) -> None:
    """Those of a job that is divided otherwise, or has another number of ranks, may go on with a checkpoint."""
    one, two = teams
    assert one.save(tmp_path) == [None] * WORLD
    other = Team(two.fleet, group)
    assert other.load(tmp_path) == other.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 2


def save_first(team: Team, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a team save when another one is about to create the first manifest of a folder."""
    create = state_folder._create

    def late(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(state_folder, "_create", create)
        assert team.save(folder) == [None] * WORLD
        create(temporary, path)

    monkeypatch.setattr(state_folder, "_create", late)


@pytest.mark.parametrize("links", [True, False])
def test_two_groups_that_are_first_at_once(
    teams: list[Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """The second writes its manifest when the first has found none. Without links, load() refuses what replaced it."""
    one, two = teams

    def unsupported(*_: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    save_first(two, tmp_path, monkeypatch)
    if not links:
        monkeypatch.setattr(os, "link", unsupported)
    errors = one.save(tmp_path)
    if links:
        assert all(isinstance(error, ConfigError) and "of rank(s) 2, 3, and" in str(error) for error in errors)
        assert two.load(tmp_path) == two.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 3
    else:
        assert errors == [None] * WORLD and step_in(tmp_path) == 2
        assert all(isinstance(error, StateError) for error in two.load(tmp_path))
        assert all(isinstance(error, ConfigError) for error in two.save(tmp_path))


def test_another_group_that_saves_just_after_the_first_look(
    teams: list[Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = teams
    found, looks = state_folder.found, list[Path]()

    def looked(folder: Path) -> Any:
        seen = found(folder)
        looks.append(folder)
        if len(looks) == 2:  # the first one is before anything is written
            monkeypatch.setattr(state_folder, "found", found)
            assert two.save(tmp_path) == [None] * WORLD
        return seen

    monkeypatch.setattr(state_folder, "found", looked)
    assert all(isinstance(error, ConfigError) and "of rank(s) 2, 3, and" in str(error) for error in one.save(tmp_path))
    assert two.load(tmp_path) == [None] * WORLD and step_in(tmp_path) == 3


def test_a_link_to_nowhere_is_no_manifest(jobs: list[Team], tmp_path: Path) -> None:
    (tmp_path / MANIFEST).symlink_to(tmp_path / "gone")
    assert jobs[0].save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 2


def test_two_jobs_that_are_first_at_once(
    jobs: list[Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of the one that was there first stays, as if it had been found."""
    one, two = jobs
    save_first(two, tmp_path, monkeypatch)
    assert one.save(tmp_path) == [None] * WORLD and step_in(tmp_path) == 2
    assert [*tmp_path.glob("manifest.step3.*.json")] and "neither loaded nor saved" in caplog.text
    assert all("another job saves in" in str(error) for error in two.save(tmp_path))
