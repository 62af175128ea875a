"""What waits on some ranks is dealt out to another number of ranks, and nothing of it is lost, with every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec, check_world
from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import ConfigError
from tests.battery.cases import each_case
from tests.support.local import all_same, random_grads, spec
from tests.support.samples import ANY_BUCKET, Sample

TENSORS = [spec("a", 9, 30), spec("b", 70)]
BEFORE, AFTER = 2, 3


def _owes(codec: Codec) -> bool:
    """Return whether what waits is owed to the mean, and the numbers of ranks are possible."""
    try:
        check_world(codec, BEFORE)
        check_world(codec, AFTER)
    except ConfigError:
        return False
    found = codec.properties()
    return "residual" in codec.layout(ANY_BUCKET, BEFORE).state and (found.law.conserves or found.has_private_state)


@each_case(_owes, cheap=True)
def test_nothing_that_waits_is_lost_to_other_ranks(case: Sample) -> None:
    with case.fleet(BEFORE, TENSORS, schedule="layerwise") as before:
        for seed in range(3):
            before.step(random_grads(BEFORE, TENSORS, seed=seed))
        states = [checkpoint.save(reducer, before.methods) for reducer in before.reducers]
    owned = before.methods.folded()
    with case.fleet(AFTER, TENSORS, schedule="layerwise") as after:
        for rank, reducer in enumerate(after.reducers):
            state = redistributed(states, rank, AFTER, owned)
            checksums.check(state)
            checkpoint.load(reducer, after.methods, state, "restore")
        now = [reducer.kept.states() for reducer in after.reducers]
        assert any(bool(_owed([state["state"] for state in states], name).any()) for name in ("a", "b"))
        for name in ("a", "b"):
            owed = _owed([state["state"] for state in states], name)
            torch.testing.assert_close(_owed(now, name), owed, rtol=1e-5, atol=1e-6)
        assert all_same(after.step(random_grads(AFTER, TENSORS, seed=7)))


def _owed(states: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Return what waits: the mean of residuals, and what owners have kept of means."""
    waits = torch.stack([state["residual"][name].double() for state in states]).mean(dim=0)
    return waits + sum(state["server"][name].double() for state in states if "server" in state)
