"""Jobs that save into one folder at the same time, and one that loads from it: roles, as threads or as processes.

Each role goes through the same rounds, and each round has a folder and jobs of its own. What came of it is left in a
file of the role.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_compress.engine.saved import state_folder
from horovod_compress.errors import ConfigError, StateError
from tests.unit.test_state_folder import WORLD, Team, fleet_of, grads

SAVES, READS, SECONDS = 3, 12, 60.0


def saver(name: str, folder: Path, rounds: int, barrier: Any, steps: int) -> None:
    """Save some times in each round; refusals have to say that another job saves there."""
    told: Counter[str] = Counter()
    with fleet_of() as fleet:
        for seed in range(steps):
            fleet.step(grads(seed))
        for number in range(rounds):
            team = Team(fleet)
            barrier.wait(SECONDS)
            for _ in range(SAVES):
                for error in team.save(folder / str(number)):
                    refused = isinstance(error, ConfigError) and "another job saves in" in str(error)
                    told["saved" if error is None else "refused" if refused else f"{error!r}"] += 1
            barrier.wait(SECONDS)
            barrier.wait(SECONDS)  # while the reader looks at what was left
    (folder / f"{name}.json").write_text(json.dumps(told))


def reader(name: str, folder: Path, rounds: int, barrier: Any) -> None:
    """Load while others save, and once more when they have."""
    told: Counter[str] = Counter()
    with fleet_of() as fleet:
        team = Team(fleet)
        for number in range(rounds):
            at = folder / str(number)
            barrier.wait(SECONDS)
            for _ in range(READS):
                for error in team.load(at):
                    early = type(error) is StateError and "contains no saved compression" in str(error)
                    told["loaded" if error is None else "early" if early else f"{error!r}"] += 1
                time.sleep(0.002)
            barrier.wait(SECONDS)
            for error in team.load(at):
                told["left whole" if error is None else f"left: {error!r}"] += 1
            told["leftovers"] += len([*at.glob("*.tmp.*")])
            state_folder.manifest(at)
            barrier.wait(SECONDS)
    (folder / f"{name}.json").write_text(json.dumps(told))


def played(folder: Path, rounds: int, barrier: Any, begin: Callable[..., Any]) -> Counter[str]:
    """Play all roles, and return what came of them, added up.

    Args:
        begin: a kind of thread or process.
    """
    roles = [
        begin(target=saver, args=("one", folder, rounds, barrier, 2)),
        begin(target=saver, args=("two", folder, rounds, barrier, 3)),
        begin(target=reader, args=("reader", folder, rounds, barrier)),
    ]
    for role in roles:
        role.start()
    for role in roles:
        role.join()
    told: Counter[str] = Counter()
    for name in ("one", "two", "reader"):
        told.update(json.loads((folder / f"{name}.json").read_text()))
    return told


def check(told: Counter[str], rounds: int) -> None:
    """See that every folder was whole in the end and whenever it was read, and that refusals had the right words."""
    known = {"saved", "refused", "loaded", "early", "left whole", "leftovers"}
    assert not set(told) - known, told
    assert told["left whole"] == WORLD * rounds and not told["leftovers"], told
    assert told["saved"] + told["refused"] == 2 * WORLD * SAVES * rounds and told["saved"] >= WORLD * rounds, told
    assert told["refused"] and told["loaded"], f"the jobs did not meet: {told}"
