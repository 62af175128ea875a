"""Saved states of earlier versions load, what is in them arrives, and what is saved then has the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_compress.codecs import registry
from horovod_compress.engine.methods import parse
from horovod_compress.engine.saved import checksums, state_folder
from horovod_compress.engine.saved.said import said
from horovod_compress.errors import CorruptFrameError
from tests.golden import states
from tests.golden.play import TORCH_ROUNDS_ALIKE, digest
from tests.support.jobs import needs_front
from tests.support.states import unsealed

pytestmark = pytest.mark.usefixtures("one_thread")  # the ranks are threads themselves

GOLDEN: dict[str, Any] = json.loads(states.FILE.read_text())
#: The options that states have of each method, by default: those of another would not load.
SAID = {
    "dgc": "clip density masking momentum ramp_steps",
    "ef_signsgd": "step_scale step_size",
    "global_qsgd": "across bits block dithering levels norm",
    "marsit": "compensation full_precision_every levels merge residual_decay step_scale step_size zeros",
    "onebit": "step_scale step_size",
    "onebit_adam": "block owner_scale scale step_scale",
    "powersgd": "error_feedback rank",
    "qsgd": "bits block coding norm",
    "randomk": "density scaled",
    "signsgd": "merge step_size ties zeros",
    "signum": "beta merge step_size ties zeros",
    "sketch_fusion": "candidates cells density error_feedback momentum rows",
    "spardl": "density value_bits",
    "sparse_binary": "density preset",
    "stc": "density",
    "terngrad": "bits clip",
    "topk": "density value_bits",
}
QUICK = ("marsit", "marsit-masked", "topk")


@pytest.mark.parametrize("name", states.FORMAT_2)
def test_states_of_format_2_load(name: str) -> None:
    """As the versions wrote them that had no later one, the first and the last of these; they are saved as format 3."""
    found, then, now = states.loaded_of_format_2(name)
    assert found == GOLDEN[f"format2/{name}"]
    for old, new in zip(then, now, strict=True):
        assert (old["format"], new["format"]) == (2, 3)
        for part in {"state", "tables", "carries"} & old.keys():
            assert _digest(old[part]) == _digest(new[part])


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
    before, _ = states.loaded(name, [unsealed(state) for state in given])  # the same as if it were of format 2
    assert {**before, "then": due["then"] and before["then"]} == due
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


@pytest.mark.parametrize("name", registry.built_in())
def test_states_say_no_option_that_came_later(name: str) -> None:
    """A new option is in ``_UNSAID`` of engine/saved/said.py; a new method has its own in ``SAID``."""
    assert sorted(said(parse(name, {})[0].config())) == SAID.get(name, "").split()


def test_the_files_hold_every_case() -> None:
    """Those of new cases are added with `python -m tests.golden.states`."""
    assert set(GOLDEN) == set(states.NAMES)
    there = {path.name for path in states.FOLDER.iterdir()}
    assert there == {*states.CHECKPOINTS, *states.JOBS, "format2"}
    assert {path.stem for path in (states.FOLDER / "format2").iterdir()} == set(states.FORMAT_2)
    kinds = {kind for found in GOLDEN.values() for kind in found.get("kept", ())}
    assert kinds == {"carry", "momentum", "residual", "server", "table", "waiting"}
    beside = {key for name in states.CHECKPOINTS for key in states.read(states.FOLDER / name)[0]}
    assert beside >= {"second_moment", "norms", "masks", "rates", "rates_seen", "waiting"}
