"""What is kept for a parameter that no rank has used is put back after a step that changed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.engine.kept import Kept
from tests.support.local import Fleet, random_grads, spec

WORLD, UNUSED = 2, "b"
TENSORS = [spec("a", 16, 20), spec("b", 24, 8), spec("c", 70)]
METHODS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "powersgd": {},
    "qsgd": {"bits": 4, "rounding": "nearest", "feedback": "average"},
    "global_qsgd": {"rounding": "nearest", "feedback": "average"},
}


def kept_for(kept: Kept, bucket: int) -> list[torch.Tensor]:
    """Return copies of all that is kept for the unused parameter, which has a bucket of its own."""
    found = [value for kinds in kept.states().values() for name, value in kinds.items() if name == UNUSED]
    return [value.clone() for value in (*found, *(t for n, t in kept.tables().items() if n.startswith(f"{bucket} ")))]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_for_one_tensor_is_put_back(method: str) -> None:
    with Fleet(WORLD, TENSORS, method, schedule="layerwise", **METHODS[method]) as fleet:
        for seed in range(3):
            fleet.step(random_grads(WORLD, TENSORS, seed=seed))
        index = fleet.plan.names().index(UNUSED)
        each = [reducer.kept for reducer in fleet.reducers]
        before = [kept_for(kept, index) for kept in each]
        aside = [kept.set_aside(index) for kept in each]
        fleet.step([{**grads, UNUSED: torch.zeros(24, 8)} for grads in random_grads(WORLD, TENSORS, seed=3)])
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        changed = [kept_for(kept, index) for kept in each]
        for kept, saved in zip(each, aside, strict=True):
            kept.put_back(index, saved)
        for mine, then, now in zip(before, changed, (kept_for(kept, index) for kept in each), strict=True):
            assert mine and all(map(torch.equal, mine, now))
            assert not all(map(torch.equal, mine, then))  # the control: the step changed it
        fleet.step(random_grads(WORLD, TENSORS, seed=4))


@pytest.mark.parametrize("method", METHODS)
def test_each_tensor_has_its_own_part_of_a_table(method: str) -> None:
    """Of the size that it has in a bucket of its own."""
    found = {}
    for schedule in ("single", "layerwise"):
        with Fleet(1, TENSORS, method, schedule=schedule, **METHODS[method]) as fleet:
            kept, names = fleet.reducers[0].kept, fleet.plan.names()
            found[schedule] = {name: kept.of(index) for index, name in enumerate(names)}
    one, each = found["single"], found["layerwise"]
    sizes = [
        {(name, kind): part.numel() for name, parts in them.items() for kind, part in parts.items()}
        for them in (one, each)
    ]
    assert sizes[0] == sizes[1] != {}
    for kind in {kind for parts in one.values() for kind in parts}:
        places = [parts[kind].data_ptr() for parts in one.values() if kind in parts]
        assert len({*places}) == len(places)
