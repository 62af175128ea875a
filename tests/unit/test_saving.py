"""Whatever goes wrong on one rank while ranks save or load, all hear of it, in its own words and as its own kind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_compress import errors
from horovod_compress.engine.saved import checkpoint, checksums, manifests, state_folder
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import (
    ConfigError,
    CorruptFrameError,
    ExchangeError,
    HorovodCompressError,
    MismatchError,
    NonFiniteError,
    StateError,
)
from horovod_compress.fronts import saving
from tests.unit.test_state_folder import WORLD, Team, files, fleet_of, grads

ODD = 1
KINDS = (ConfigError, CorruptFrameError, ExchangeError, MismatchError, NonFiniteError, StateError)


class Lost(dict[str, Any]):
    """A state that can be watched."""


def _saved(team: Team, folder: Path, spoil: Callable[[int], None]) -> list[HorovodCompressError | None]:
    """Save, after something was done to each rank's state; return what every rank's call raised."""
    fleet = team.fleet

    def call(rank: int) -> None:
        def state() -> Mapping[str, Any]:
            spoil(rank)
            return checkpoint.save(fleet.reducers[rank], fleet.methods)

        saving.save(folder, state, saving.Saver(rank, WORLD), lambda value: team._share(rank, value))

    return team.each(call)


def _raising(error: Exception) -> Callable[[int], None]:
    def spoil(rank: int) -> None:
        if rank == ODD:
            raise error

    return spoil


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError("no room"), ValueError("odd")], ids=repr)
def test_an_error_of_any_kind_is_told_to_all(tmp_path: Path, error: Exception) -> None:
    """None of them waits for a rank that has left."""
    with fleet_of() as fleet:
        team = Team(fleet)
        assert _saved(team, tmp_path, lambda rank: None) == [None] * WORLD  # the control
        before = files(tmp_path)
        for told in _saved(team, tmp_path, _raising(error)):
            assert type(told) is ConfigError and f"rank {ODD}: {type(error).__name__}: {error}" in str(told)
        assert files(tmp_path) == before


def test_an_error_names_the_rank_by_its_number_in_the_job(tmp_path: Path) -> None:
    with fleet_of() as fleet:
        team = Team(fleet)

        def save(rank: int) -> None:
            given, saver = "" if rank == ODD else tmp_path, saving.Saver(rank, WORLD, of_job=7 - rank)
            state = checkpoint.save(fleet.reducers[rank], fleet.methods)
            saving.save(given, lambda: state, saver, lambda value: team._share(rank, value))

        assert {str(told)[:8] for told in team.each(save)} == {f"rank {7 - ODD}: "}


@pytest.mark.parametrize("residuals", ["refuse", "redistribute", "reset"])
def test_a_checkpoint_of_models_in_other_parts_says_so(tmp_path: Path, residuals: str) -> None:
    with fleet_of() as fleet:
        assert Team(fleet).save(tmp_path) == [None] * WORLD
    mine = saving.Saver(0, 1, 1, 2)
    with pytest.raises(
        StateError, match=r"rank 1: the saved state is of shard \[0, 1\] .*: resume with as many shards"
    ):
        saving.load(
            tmp_path, residuals, mine, lambda states, *given: next(iter(states)),
            lambda state, way: checkpoint.check_shard({"shard": [1, 2]}, state), lambda value: [value],
        )  # fmt: skip


@pytest.mark.parametrize("folder", ["", None, 3], ids=repr)
def test_a_rank_without_a_folder_is_told_of_by_all(tmp_path: Path, folder: Any) -> None:
    """Such as that of a variable that is not set on its host; the others do not wait for it."""
    with fleet_of() as fleet:
        team = Team(fleet)
        assert team.save(tmp_path) == [None] * WORLD

        def save(rank: int) -> None:
            given, state = folder if rank == ODD else tmp_path, checkpoint.save(fleet.reducers[rank], fleet.methods)
            saving.save(given, lambda: state, saving.Saver(rank, WORLD), lambda value: team._share(rank, value))

        def load(rank: int) -> None:
            given, saver = folder if rank == ODD else tmp_path, saving.Saver(rank, WORLD)
            saving.load(
                given, "reset", saver, lambda *given: {}, lambda *given: None, lambda value: team._share(rank, value)
            )

        for call in (save, load):
            for told in team.each(call):
                assert type(told) is ConfigError and f"rank {ODD}: the folder of a checkpoint should be" in str(told)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_ours_is_of_the_same_kind_on_all_ranks(tmp_path: Path, kind: type[HorovodCompressError]) -> None:
    with fleet_of() as fleet:
        for told in _saved(Team(fleet), tmp_path, _raising(kind("as it is"))):
            assert type(told) is kind and str(told) == f"rank {ODD}: as it is"
        assert not files(tmp_path)


def test_every_kind_of_error_is_known_here() -> None:
    public = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HorovodCompressError)
    }
    assert set(saving._KINDS.values()) == public == {HorovodCompressError, *KINDS}


def test_a_rank_that_comes_too_late_may_name_the_files_of_those_that_gave_up(tmp_path: Path) -> None:
    """What they showed is still there for it to see; so is what they wrote, and the checkpoint is whole."""
    shown: dict[int, Any] = {}

    def given_up(value: Any) -> list[Any]:
        shown[1] = value
        raise ExchangeError("rank 0 did not come in time")

    with fleet_of(2) as fleet:
        ranks = [lambda reducer=reducer: checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        with pytest.raises(ExchangeError, match="did not come"):
            saving.save(tmp_path, ranks[1], saving.Saver(1, 2), given_up)
        saving.save(
            tmp_path, ranks[0], saving.Saver(0, 2), lambda value: [value, shown.get(1)] if len(shown) == 1 else [value]
        )
        manifest = state_folder.manifest(tmp_path)
        assert [state_folder.read(tmp_path, entry)["rank"] for entry in manifest.files] == [0, 1]


def test_a_file_that_is_gone_is_not_named(tmp_path: Path) -> None:
    """The checkpoint of before stays."""
    with fleet_of() as fleet:
        team = Team(fleet)
        team.save(tmp_path)
        before = (tmp_path / state_folder.MANIFEST).read_bytes()
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        entries = [state_folder.write(tmp_path, state) for state in states]
        (tmp_path / entries[-1].name).unlink()
        with pytest.raises(OSError, match=entries[-1].name):
            state_folder.commit(tmp_path, states[0], entries)
        assert (tmp_path / state_folder.MANIFEST).read_bytes() == before
        assert team.load(tmp_path) == [None] * WORLD


def test_a_rank_that_is_gone_after_the_manifest_leaves_the_checkpoint(tmp_path: Path) -> None:
    """It names the files by then, and they are whole."""
    with fleet_of(1) as fleet:
        calls = []

        def share(value: Any) -> list[Any]:
            calls.append(value)
            if len(calls) == 2:
                raise ExchangeError("rank 1 is gone")
            return [value]

        with pytest.raises(ExchangeError, match="is gone"):
            saving.save(tmp_path, lambda: checkpoint.save(fleet.reducers[0], fleet.methods), saving.Saver(0, 1), share)
        manifest = state_folder.manifest(tmp_path)
        assert state_folder.read(tmp_path, manifest.files[0])["step"] == 0


def test_an_error_of_any_kind_in_reading_is_told_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of() as fleet:
        team = Team(fleet)
        team.save(tmp_path)
        assert team.load(tmp_path) == [None] * WORLD  # the control
        odd = state_folder.manifest(tmp_path).files[ODD].name
        read = state_folder.read

        def reading(folder: Path, entry: manifests.Entry) -> dict[str, Any]:
            if entry.name == odd:
                raise MemoryError("no room")
            return read(folder, entry)

        monkeypatch.setattr(state_folder, "read", reading)
        for told in team.load(tmp_path):
            assert type(told) is ConfigError and f"rank {ODD}: MemoryError: no room" in str(told)


def test_states_are_dealt_out_one_at_a_time() -> None:
    """A model's state may take most of the memory: those of all ranks would not fit."""
    world, most = 4, 0
    with fleet_of(world) as fleet:
        fleet.step(grads(3, world))
        saved = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]

    def states() -> Iterator[Lost]:
        nonlocal most
        alive: list[weakref.ref[Lost]] = []
        for state in saved:
            most = max(most, sum(ref() is not None for ref in alive))
            made = Lost(state)
            alive.append(weakref.ref(made))
            yield made
            del made

    found = redistributed(states(), 0, 2, set())
    assert most == 0, f"{most} other state(s) were still there when one more was read"
    checksums.check(found)
    waits = torch.stack([state["state"]["residual"]["a"].double() for state in saved]).mean(dim=0).float()
    assert torch.equal(found["state"]["residual"]["a"], waits) and bool(waits.any())
