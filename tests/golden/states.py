"""Saved states, as files: they load as long as the format stays the same, and what is saved now has the same bytes.

    states/NAME/                a checkpoint of ranks in one process, as save() leaves it
    states/FRONT-NAME/          one of a real job, with what the optimizer of update mode keeps beside it
    states.json                 what is found after each was loaded

They are written where they are missing; what is there stays as it is:

    python -m tests.golden.states
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import horovod_compress.codecs.by_step as methods
from horovod_compress.codecs.masked import masked
from horovod_compress.engine.methods import per_layer
from horovod_compress.engine.saved import checksums, state_folder
from horovod_compress.schedule.plan import TensorSpec
from tests.golden.play import Found, digest, grads, lines, what_is_left
from tests.golden.trained import HELD, Ranks, adamw, falling, sgd
from tests.support.jobs import run_ranks
from tests.support.local import Fleet

FOLDER = Path(__file__).with_name("states")
FILE = FOLDER.with_suffix(".json")
TOOLS = Path(__file__).parents[2] / "tools"  # which pytest has on its path
WORLD, STEPS, MORE, SECONDS = 2, 4, 2, 200.0
SPECS = [TensorSpec("a", (9, 7), "float32"), TensorSpec("b", (70,), "float32"), TensorSpec("c", (5,), "float64")]


@dataclass(frozen=True)
class Given:
    """A compression whose checkpoint is there.

    Attributes:
        by_torch: see :class:`~tests.golden.play.Run`.
    """

    method: Callable[[], Any]
    optimizer: Any = adamw
    meet: tuple[tuple[str, Any], ...] = tuple(HELD.items())
    options: tuple[tuple[str, Any], ...] = (("schedule", "layerwise"),)

    def ranks(self) -> Ranks:
        return Ranks(SPECS, self.method(), self.optimizer, dict(self.meet), world=WORLD, **dict(self.options))


CHECKPOINTS: dict[str, Given] = {
    "marsit": Given(partial(methods.method, "marsit", compensation="global")),
    "marsit-masked": Given(lambda: masked("marsit")),
    "topk": Given(partial(methods.method, "topk", density=0.05), options=(("schedule", "single"), ("seed", 7))),
    "onebit_adam": Given(partial(methods.method, "onebit_adam")),
    "ef_signsgd-rates": Given(
        partial(methods.method, "ef_signsgd"),
        sgd,
        (),
        (("schedule", "single"), ("follow_lr", True), ("total_steps", 20)),
    ),
    "ef_signsgd-fall": Given(
        partial(methods.method, "ef_signsgd"),
        falling,
        (("match_norm", False),),
        (("schedule", "single"), ("follow_lr", True), ("total_steps", 20)),
    ),
    "dgc": Given(partial(methods.method, "dgc", density=0.05), meet=(("second_moment", "own"),)),
    "powersgd": Given(partial(methods.method, "powersgd", rank=2)),
    "sketch_fusion": Given(
        partial(methods.method, "sketch_fusion", density=0.05, cells=0.5, error_feedback="sketch", momentum=0.5),
        meet=(),
    ),
    "per_layer": Given(lambda: per_layer({"a": "powersgd", "b": "topk", "*": "marsit"})),
    "by_step": Given(lambda: methods.by_step({0: "none", 2: "marsit"}), sgd, (("match_norm", False),)),
}

#: Jobs of a front: the launcher, and what is asked of the script.
JOBS: dict[str, dict[str, Any]] = {
    "horovod-held": {"method": "marsit", "optimizer": "adamw", "attach": HELD},
    "horovod-momentum": {"method": "topk", "optimizer": "sgd", "attach": {}},
    "horovod-updates": {"method": "sparse_binary", "optimizer": "sgd", "updates": {"communication_delay": 3}},
    "horovod-updates-held": {"method": "marsit", "optimizer": "adamw", "updates": HELD},
    "torch-held": {"method": "marsit", "optimizer": "adamw", "attach": HELD},
    "torch-layers": {"method": {"a": "powersgd", "*": "ef_signsgd"}, "optimizer": "sgd", "attach": {}},
}


def inputs(step: int) -> list[dict[str, Tensor]]:
    """Return gradients by rank, of which some are 0 in all exact rounds: those of later ones wait."""
    found = grads(step, SPECS, WORLD)
    for mine in found:
        mine["a"][:, 1] *= step >= STEPS - 1
    return found


# ---- in one process ----


def files(folder: Path) -> list[bytes]:
    """Return the files of a checkpoint, by rank."""
    return [(folder / entry.name).read_bytes() for entry in state_folder.manifest(folder).files]


def packed(states: list[dict[str, Any]]) -> list[bytes]:
    """Return states as files hold them."""
    return [b"".join(checksums.parts(state)) for state in states]


def read(folder: Path) -> list[dict[str, Any]]:
    return [state_folder.read(folder, entry) for entry in state_folder.manifest(folder).files]


def write(name: str) -> None:
    """Let ranks in one process leave a checkpoint."""
    with CHECKPOINTS[name].ranks() as ranks:
        for step in range(STEPS):
            ranks.step(inputs(step))
        states = ranks.save()
    folder = FOLDER / name
    state_folder.commit(folder, states[0], [state_folder.write(folder, state) for state in states])


def loaded(name: str, states: list[dict[str, Any]]) -> tuple[Found, list[bytes]]:
    """Load states; return hashes of what is kept then, and of later results, and what would be saved again."""
    with CHECKPOINTS[name].ranks() as ranks:
        has_stepped(ranks)
        ranks.load(states)
        kept, again = what_is_kept(ranks.fleet), packed(ranks.save())
        results = [digest_of(ranks.step(inputs(step))) for step in range(STEPS, STEPS + MORE)]
    return kept | {"then": results}, again


def has_stepped(ranks: Ranks) -> None:
    """Let AdamW be of the step that is loaded, or what is held would begin anew."""
    for mine, model in zip(ranks.optimizers, ranks.models, strict=True):
        for optimizer in mine if isinstance(mine, list) else [mine]:
            for _ in range(STEPS if isinstance(optimizer, torch.optim.AdamW) else 0):
                for parameter in model.values():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()


def what_is_kept(fleet: Fleet) -> Found:
    kept: Found = what_is_left(fleet)["kept"]
    return {"step": fleet.reducers[0].step, "kept": kept}


def digest_of(results: list[dict[str, Tensor]]) -> str:
    return digest((name, results[0][name]) for name in sorted(results[0]))


def tensors_of(state: dict[str, Any]) -> str:
    """Return a hash of all tensors in a state."""
    return digest(checksums.tensors(state))


# ---- real jobs ----


def played(front: str, what: str, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Let a job of real ranks write these checkpoints, or load and save them again; return what each rank reports."""
    asked = {
        "what": what,
        "steps": STEPS,
        "from": str(FOLDER),
        "into": str(folder),
        "cases": {n: JOBS[n] for n in names},
    }
    return run_ranks(WORLD, "golden_states.py", timeout=SECONDS, arguments=asked, front=front).reports


def of_front(front: str) -> list[str]:
    return [name for name in JOBS if name.split("-")[0] == front]


# ---- the file ----


def found_of(name: str) -> Found:
    """Return what is found after a checkpoint was loaded."""
    if name in CHECKPOINTS:
        return loaded(name, read(FOLDER / name))[0]
    return {"tensors": [tensors_of(state) for state in read(FOLDER / name)]}


NAMES = [*CHECKPOINTS, *JOBS]


def add_missing() -> None:
    """Write the checkpoints that are missing, and what is found in them; nothing that is there is changed."""
    for name in CHECKPOINTS:
        if not (FOLDER / name).exists():
            write(name)
    for front in ("horovod", "torch"):
        if missing := [name for name in of_front(front) if not (FOLDER / name).exists()]:
            played(front, "write", FOLDER, missing)
    held: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    added = [name for name in NAMES if name not in held]
    FILE.write_text(lines(held | {name: found_of(name) for name in added}))
    print(f"{FILE}: {len(added)} added, {len(held)} left as they were")


if __name__ == "__main__":
    sys.path.append(str(TOOLS))
    torch.set_num_threads(1)
    add_missing()
