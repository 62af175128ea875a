"""A run that was saved and loaded goes on with the same bits; what does not fit is refused."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from horovod_compress.codecs.by_step import config_of
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError
from tests.battery.cases import CASES, each_case
from tests.battery.kept import anything, kept, same
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import each_value
from tests.support.samples import Sample, keeps_anything

WORLD = 2
TENSORS = [spec("a", 30, 50), spec("b", 7), spec("c", 300, dtype=torch.bfloat16), spec("d", 5, dtype=torch.float64)]
GRADS = [random_grads(WORLD, TENSORS, seed=number) for number in range(5)]


def _fleet(case: Sample, **common: Any) -> Fleet:
    return case.fleet(WORLD, TENSORS, **{"schedule": "layerwise"} | common)


def _saved(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the state of every rank, through a file."""
    found = []
    for reducer in fleet.reducers:
        file = io.BytesIO()
        torch.save(checkpoint.save(reducer, fleet.methods), file)
        file.seek(0)
        found.append(torch.load(file, weights_only=True))
    return found


@each_value
@each_case()
@pytest.mark.parametrize("at", [1, 2])
def test_resume_is_exact(case: Sample, at: int) -> None:
    """Five steps equal some steps, a file, new reducers and the other steps."""
    with _fleet(case) as fleet:
        for grads in GRADS[:at]:
            fleet.step(grads)
        states = _saved(fleet)
        whole, left = [fleet.step(grads) for grads in GRADS[at:]], kept(fleet)
    with _fleet(case) as fleet:
        fleet.load(states)
        assert [reducer.step for reducer in fleet.reducers] == [at] * WORLD
        again = [fleet.step(grads) for grads in GRADS[at:]]
        assert all(same(a, b) for a, b in zip(whole, again, strict=True)) and same(left, kept(fleet))


@each_case(keeps_anything)
def test_without_what_was_kept_the_run_goes_elsewhere(case: Sample) -> None:
    """The control; and "reset" empties every kind of state and every table."""
    with _fleet(case) as fleet:
        for grads in GRADS[:2]:
            fleet.step(grads)
        states = _saved(fleet)
        assert anything(kept(fleet))
        first = fleet.step(GRADS[2])
    with _fleet(case) as fleet:
        fleet.step(GRADS[0])  # something to be emptied
        fleet.load(states, "reset")
        assert not anything(kept(fleet)) and fleet.reducers[0].step == 2
        assert not same(first, fleet.step(GRADS[2]))


@each_case()
def test_the_state_of_another_method_or_sample_is_refused(case: Sample) -> None:
    with _fleet(case) as fleet:
        fleet.step(GRADS[0])
        states = _saved(fleet)
        before = kept(fleet)
        for other in CASES:
            if other == case:
                continue
            for reducer, state in zip(fleet.reducers, states, strict=True):
                foreign = state | {"method": other.method, "config": config_of(other.codec())}
                want = "a different method" if other.method != case.method else "a different configuration"
                with pytest.raises(ConfigError, match=want):
                    checkpoint.load(reducer, fleet.methods, foreign, "restore")
        assert same(before, kept(fleet))
        fleet.load(states)  # the control


@each_case(keeps_anything)
def test_state_that_lacks_a_part_is_refused(case: Sample) -> None:
    """Every kind of state and every table has to be there, and no other."""
    with _fleet(case) as fleet:
        fleet.step(GRADS[0])
        state, reducer = _saved(fleet)[0], fleet.reducers[0]
        for kind in state["state"]:
            less = {name: tensors for name, tensors in state["state"].items() if name != kind}
            with pytest.raises(ConfigError, match=f"list of what has a {kind}"):
                checkpoint.load(reducer, fleet.methods, state | {"state": less}, "restore")
        for name in state["tables"]:
            less = {other: table for other, table in state["tables"].items() if other != name}
            with pytest.raises(ConfigError, match="list of what has a table"):
                checkpoint.load(reducer, fleet.methods, state | {"tables": less}, "restore")
        more = state | {"state": state["state"] | {"surplus": {"a": torch.zeros(1500)}}}
        with pytest.raises(ConfigError, match="list of what has a surplus"):
            checkpoint.load(reducer, fleet.methods, more, "restore")


@each_case(keeps_anything)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_state_that_would_spoil_every_step_is_refused(case: Sample, value: float) -> None:
    with _fleet(case) as fleet:
        fleet.step(GRADS[0])
        state, reducer = _saved(fleet)[0], fleet.reducers[0]
        before = kept(fleet)
        parts = [*state["state"].items(), *({"table": state["tables"]} if state["tables"] else {}).items()]
        for kind, tensors in parts:
            numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
            if not numbers:
                continue  # only their checksum says that bytes are damaged
            name = next(iter(numbers))
            bad = numbers[name].clone()
            bad.view(-1)[0] = value
            changed = dict(tensors) | {name: bad}
            part = {"tables": changed} if kind == "table" else {"state": state["state"] | {kind: changed}}
            with pytest.raises(ConfigError, match=f"1 value.s. in the {kind} of {name} that are not finite"):
                checkpoint.load(reducer, fleet.methods, state | part, "restore")
        assert same(before, kept(fleet))
