"""A checkpoint folder holds the whole of a save or the whole of the one before; what is not intact changes nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from horovod_compress.engine.saved import checkpoint, state_folder
from horovod_compress.engine.saved.manifests import RankGroup
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import ConfigError, CorruptFrameError, HorovodCompressError, StateError
from horovod_compress.fronts import saving
from tests.battery.kept import kept, same
from tests.support.local import Fleet, all_same, random_grads, spec

WORLD = 2
TENSORS = [spec("a", 9, 30), spec("b", 70)]
REFUSALS = (CorruptFrameError, StateError)


class Team:
    """The ranks of a fleet, each on a thread, whose values all see.

    Args:
        group: which of a job's ranks these are.
    """

    def __init__(self, fleet: Fleet, group: RankGroup | None = None) -> None:
        self.fleet, self._barrier, self._group = fleet, Barrier(fleet.world), group
        self._values: list[Any] = [None] * fleet.world
        self.known = [state_folder.Known() for _ in range(fleet.world)]

    def _share(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = json.loads(json.dumps(value))  # as the network would bring it
        self._barrier.wait(20)
        found = [json.loads(json.dumps(value)) for value in self._values]
        self._barrier.wait(20)
        return found

    def each(self, call: Callable[[int], Any]) -> list[HorovodCompressError | None]:
        """Return what every rank's call raised."""

        def attempt(rank: int) -> HorovodCompressError | None:
            try:
                call(rank)
            except HorovodCompressError as error:
                return error
            return None

        with ThreadPoolExecutor(self.fleet.world) as pool:
            return list(pool.map(attempt, range(self.fleet.world)))

    def save(self, folder: Path) -> list[HorovodCompressError | None]:
        def call(rank: int) -> None:
            reducer = self.fleet.reducers[rank]
            saving.save(
                folder,
                lambda: checkpoint.save(reducer, self.fleet.methods),
                saving.Saver(rank, self.fleet.world, group=self._group),
                lambda value: self._share(rank, value),
                self.known[rank],
            )

        return self.each(call)

    def load(self, folder: Path, residuals: str = "refuse") -> list[HorovodCompressError | None]:
        fleet = self.fleet
        deal = partial(redistributed, owned=fleet.methods.folded(), coded=fleet.methods.coded())

        def call(rank: int) -> None:
            reducer = fleet.reducers[rank]
            state, way = saving.load(
                folder,
                residuals,
                saving.Saver(rank, fleet.world, group=self._group),
                deal,
                lambda state, way: checkpoint.check(reducer, fleet.methods, state, way),
                lambda value: self._share(rank, value),
                self.known[rank],
            )
            checkpoint.restore(reducer, state, way)

        return self.each(call)


def grads(seed: int, world: int = WORLD) -> list[dict[str, torch.Tensor]]:
    return random_grads(world, TENSORS, seed=seed)


def fleet_of(world: int = WORLD, method: str = "topk") -> Fleet:
    return Fleet(world, TENSORS, method, schedule="layerwise", **({"density": 0.05} if method == "topk" else {}))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with fleet_of() as made:
        for seed in range(2):
            made.step(grads(seed))
        yield made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_goes_on_with_the_same_bits(fleet: Fleet, tmp_path: Path) -> None:
    assert Team(fleet).save(tmp_path) == [None] * WORLD
    whole = fleet.step(grads(5))
    with fleet_of() as other:
        assert Team(other).load(tmp_path) == [None] * WORLD
        again = other.step(grads(5))
        assert all(torch.equal(a[n], b[n]) for a, b in zip(whole, again, strict=True) for n in a)
        assert other.reducers[0].step == 3
    names = set(files(tmp_path))
    assert len(names) == WORLD + 1 and "manifest.json" in names


def test_a_second_save_takes_the_place_of_the_first(fleet: Fleet, tmp_path: Path) -> None:
    team = Team(fleet)
    team.save(tmp_path)
    before = files(tmp_path)
    for name in ("manifest.json.tmp.0123456789abcdef", "rank1.0123456789abcdef.hvc", "notes.txt"):
        (tmp_path / name).write_text("of a save that was cut off long ago, and the user's own")
        os.utime(tmp_path / name, (0, 0))
    fleet.step(grads(5))
    assert team.save(tmp_path) == [None] * WORLD
    assert len(files(tmp_path)) == WORLD + 2 and not (set(files(tmp_path)) & set(before)) - {"manifest.json"}
    assert team.load(tmp_path) == [None] * WORLD and fleet.reducers[0].step == 3


def test_a_save_that_was_cut_off_anywhere_leaves_the_one_before(fleet: Fleet, tmp_path: Path) -> None:
    """New files without a manifest that names them, whole or torn, are no checkpoint."""
    team = Team(fleet)
    team.save(tmp_path)
    fleet.step(grads(5))
    state_folder.write(tmp_path, checkpoint.save(fleet.reducers[0], fleet.methods))
    (tmp_path / "rank1.0123456789abcdef.hvc").write_bytes(b"HVCST")
    (tmp_path / "manifest.json.tmp.0123456789abcdef").write_bytes(b"{")
    assert team.load(tmp_path) == [None] * WORLD
    assert fleet.reducers[0].step == 2


def changes(data: bytes, few: int = 60) -> Iterator[bytes]:
    """Return a file torn, cut, flipped and foreign."""
    yield b""
    yield data[:-1]
    yield data[: len(data) // 2]
    yield data + b"\0"
    yield b"\x80\x04K\x01."  # a pickle
    yield bytes(len(data))
    for at in range(0, len(data), max(1, len(data) // few)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def test_what_is_not_intact_is_refused_on_all_ranks_and_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    team = Team(fleet)
    team.save(tmp_path)
    fleet.step(grads(5))
    before, step = kept(fleet), fleet.reducers[0].step
    for name, good in files(tmp_path).items():
        for bad in changes(good):
            (tmp_path / name).write_bytes(bad)
            told = team.load(tmp_path)
            assert all(isinstance(error, REFUSALS) for error in told), (name, bad[:40], told)
            assert same(before, kept(fleet)) and fleet.reducers[0].step == step
        (tmp_path / name).unlink()
        assert all(isinstance(error, REFUSALS) for error in team.load(tmp_path))
        (tmp_path / name).write_bytes(good)
    assert same(before, kept(fleet))
    assert team.load(tmp_path) == [None] * WORLD  # the control


@pytest.mark.slow
def test_every_flipped_bit_of_a_checkpoint_is_found(fleet: Fleet, tmp_path: Path) -> None:
    Team(fleet).save(tmp_path)
    manifest = state_folder.manifest(tmp_path)

    def read() -> None:
        for entry in state_folder.manifest(tmp_path).files:
            state_folder.read(tmp_path, entry)

    read()
    for name in ("manifest.json", *(entry.name for entry in manifest.files)):
        good = bytearray((tmp_path / name).read_bytes())
        for bit in range(8 * len(good)):
            good[bit // 8] ^= 1 << bit % 8
            (tmp_path / name).write_bytes(good)
            with pytest.raises(REFUSALS):
                read()
            good[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(good)
    read()


def test_files_of_another_checkpoint_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    team, one, two = Team(fleet), tmp_path / "one", tmp_path / "two"
    team.save(one)
    fleet.step(grads(5))
    team.save(two)
    ours, theirs = (state_folder.manifest(folder).files[0] for folder in (one, two))
    shutil.copy(two / theirs.name, one / ours.name)
    assert all(isinstance(error, CorruptFrameError) for error in team.load(one))
    with Fleet(WORLD, TENSORS, "topk", schedule="layerwise", density=0.5) as other:
        assert all(isinstance(error, StateError) for error in Team(other).load(two))
    assert all("contains no saved compression" in str(error) for error in team.load(tmp_path / "nowhere"))
    assert all("should be one of" in str(error) for error in team.load(two, "restore"))


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so_on_all_ranks(fleet: Fleet, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the operating system refuses to write the rest."""
    team = Team(fleet)
    team.save(tmp_path)
    before = files(tmp_path)
    fleet.step(grads(5))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(len(data) for name, data in before.items() if name.endswith(".hvc"))
    for most in (0, 100, largest * 3 // 4):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            told = team.save(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert all(isinstance(error, ConfigError) and "File too large" in str(error) for error in told), told
        assert files(tmp_path) == before
    signal.signal(signal.SIGXFSZ, handler)
    assert team.save(tmp_path) == [None] * WORLD and files(tmp_path) != before


def test_a_manifest_that_cannot_be_written_leaves_no_new_files(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    told = Team(fleet).save(tmp_path)
    assert all(isinstance(error, ConfigError) for error in told)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_another_number_of_ranks_has_to_be_asked_for(fleet: Fleet, tmp_path: Path) -> None:
    Team(fleet).save(tmp_path)
    waits = torch.stack([mine["a"] for mine in fleet.residuals()]).mean(dim=0)
    for world in (1, 3):
        with fleet_of(world) as other:
            team = Team(other)
            assert all(isinstance(e, StateError) and "redistribute" in str(e) for e in team.load(tmp_path))
            assert team.load(tmp_path, "redistribute") == [None] * world
            found = torch.stack([mine["a"] for mine in other.residuals()]).mean(dim=0)
            torch.testing.assert_close(found, waits, rtol=1e-6, atol=1e-7)
            assert all_same(other.step(grads(5, world)))
            assert team.load(tmp_path, "reset") == [None] * world
            assert not any(bool(r.any()) for mine in other.residuals() for r in mine.values())
            assert other.reducers[0].step == 2
