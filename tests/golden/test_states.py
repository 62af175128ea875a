"""Saved states load, what is in them arrives, and what is saved then has the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_compress.engine.saved import checksums, state_folder
from horovod_compress.errors import CorruptFrameError
from tests.golden import states
from tests.golden.play import TORCH_ROUNDS_ALIKE, digest
from tests.support.jobs import needs_front

pytestmark = pytest.mark.usefixtures("one_thread")  # the ranks are threads themselves

GOLDEN: dict[str, Any] = json.loads(states.FILE.read_text())
QUICK = ("marsit", "marsit-masked", "topk")


def _digest(part: dict[str, Any]) -> str:
    return digest(checksums.tensors(part))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in states.CHECKPOINTS],
)
def test_a_checkpoint_loads_and_is_saved_with_the_same_bytes(name: str) -> None:
    given = states.read(states.FOLDER / name)
    (found, again), due = states.loaded(name, given), GOLDEN[name]
    if not TORCH_ROUNDS_ALIKE:  # in the optimizer's steps, which later results depend on
        found, due = found | {"then": []}, due | {"then": []}
    assert found == due
    assert again == states.files(states.FOLDER / name) or name == "marsit-masked"
    assert states.packed(list(map(_less, map(_parsed, again)))) == states.packed(list(map(_less, given)))
    next(tensor for _, tensor in checksums.tensors(given[0]) if tensor.numel()).view(-1)[0] += 1  # the control
    with pytest.raises(CorruptFrameError):
        states.loaded(name, given)


def _parsed(data: bytes) -> dict[str, Any]:
    return checksums.parse(bytearray(data))


def _less(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the tensors for which zeros wait: which may wait is looked up before the next step."""
    rest = {name: part for name, part in state.items() if name not in ("waiting", checksums.KEY)}
    waiting = {name: tensor for name, tensor in state.get("waiting", {}).items() if bool(tensor.any())}
    return checksums.sealed(rest | ({"waiting": waiting} if waiting else {}))


@pytest.mark.slow
@pytest.mark.timeout(states.SECONDS + 30)
@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_a_front_loads_checkpoints_and_saves_them_with_the_same_bytes(front: str, tmp_path: Path) -> None:
    needs_front(front)
    names = states.of_front(front)
    states.played(front, "again", tmp_path, names)
    for name in names:
        given, again = states.FOLDER / name, tmp_path / name
        assert states.files(again) == states.files(given), name
        one, two = (state_folder.manifest(folder) for folder in (given, again))
        assert (one.plan, one.config, one.step, one.world) == (two.plan, two.config, two.step, two.world)
        assert sorted(path.suffix for path in again.iterdir()) == sorted(path.suffix for path in given.iterdir())
        for path in given.glob("*.pt"):  # of update mode's optimizers
            kept, saved = (torch.load(folder / path.name, weights_only=True) for folder in (given, again))
            assert checksums.outline(_plain(kept)) == checksums.outline(_plain(saved)), name
            assert _digest(_plain(kept)) == _digest(_plain(saved)), name


def _plain(value: Any) -> Any:
    """Return the state of an optimizer with names in the place of numbers."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", states.JOBS)
def test_what_a_front_has_saved_is_intact(name: str) -> None:
    given = states.read(states.FOLDER / name)
    assert [states.tensors_of(state) for state in given] == GOLDEN[name]["tensors"]
    assert states.packed(given) == states.files(states.FOLDER / name)
    assert {state["exchanged"] for state in given} == {"updates" if "updates" in name else "gradients"}


def test_the_files_hold_every_case() -> None:
    """Those of new cases are added with `python -m tests.golden.states`."""
    assert set(GOLDEN) == set(states.NAMES)
    there = {path.name for path in states.FOLDER.iterdir()}
    assert there == {*states.CHECKPOINTS, *states.JOBS}
    kinds = {kind for found in GOLDEN.values() for kind in found.get("kept", ())}
    assert kinds == {"carry", "momentum", "residual", "server", "table", "waiting"}
    beside = {key for name in states.CHECKPOINTS for key in states.read(states.FOLDER / name)[0]}
    assert beside >= {"second_moment", "norms", "masks", "rates", "rates_seen", "waiting"}
