"""What waits on some ranks is dealt out to another number of ranks, and nothing of it is lost, with every method."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec, check_world
from horovod_compress.codecs.work import LAST, MOMENTA
from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.engine.saved.redistribute import (
    Carried,
    added,
    common_of,
    of_one_rank,
    pooled,
    redistributed,
    resized,
)
from horovod_compress.errors import ConfigError
from tests.battery.cases import each_case
from tests.support.local import Fleet, all_same, random_grads, spec
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


@each_case(_owes)
def test_nothing_that_waits_is_lost_to_other_ranks(case: Sample) -> None:
    epsilon = case.codec().properties().law.epsilon
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
            torch.testing.assert_close(_owed(now, name), owed, rtol=max(1e-5, epsilon), atol=1e-6)
        assert all_same(after.step(random_grads(AFTER, TENSORS, seed=7)))


@each_case(_owes)
def test_of_sums_over_ranks_each_new_one_has_a_smaller_share(case: Sample) -> None:
    """Each rank's residual counts whole there, and so does what owners keep, once for each rank."""
    with case.fleet(BEFORE, TENSORS, schedule="layerwise") as fleet:
        fleet.step(random_grads(BEFORE, TENSORS, seed=1))
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        assert not any("summed" in state for state in states)
        for reducer in fleet.reducers:
            reducer.kept.summed = True
        summed = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
    owned, epsilon = fleet.methods.folded(), case.codec().properties().law.epsilon
    mean, found = redistributed(states, 0, AFTER, owned)["state"], redistributed(summed, 0, AFTER, owned)["state"]
    for kind, tensors in found.items():
        times = 1.0 if kind in MOMENTA else BEFORE / AFTER
        for name, tensor in tensors.items():
            expected = mean[kind][name] * times
            torch.testing.assert_close(tensor, expected, rtol=max(1e-6, 2 * epsilon), atol=1e-6)


def test_sums_stay_sums_where_one_rank_goes_on_alone() -> None:
    """Its results are the same either way, and it may save again before it has any."""
    with Fleet(BEFORE, TENSORS, "topk", schedule="layerwise") as fleet:
        for reducer in fleet.reducers:
            reducer.kept.summed = True
        fleet.step(random_grads(BEFORE, TENSORS, seed=1))
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
    with Fleet(1, TENSORS, "topk", schedule="layerwise") as alone:
        checkpoint.load(alone.reducers[0], alone.methods, redistributed(states, 0, 1, set()), "restore")
        saved = checkpoint.save(alone.reducers[0], alone.methods)
    again = [redistributed([saved], rank, AFTER, set()) for rank in range(AFTER)]
    for name in ("a", "b"):
        before, now = (sum(state["state"]["residual"][name] for state in each) for each in (states, again))
        torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-6)


@each_case(_owes)
def test_all_ranks_together_come_to_what_a_checkpoint_is_dealt_out_as(case: Sample) -> None:
    epsilon = case.codec().properties().law.epsilon
    with case.fleet(BEFORE, TENSORS, schedule="layerwise") as fleet:
        for seed in range(3):
            fleet.step(random_grads(BEFORE, TENSORS, seed=seed))
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        owned, coded = fleet.methods.folded(), fleet.methods.coded()
    found = _pooled(states, owned, coded)
    expected = redistributed(states, 0, BEFORE, owned)
    for state in found:
        checksums.check(state)
        for kind, tensors in expected["state"].items():
            torch.testing.assert_close(state["state"][kind], tensors, rtol=max(1e-6, 2 * epsilon), atol=1e-6)


def test_what_waits_on_some_ranks_only_is_pooled_too() -> None:
    state: dict[str, Any] = {"state": {}, "tables": {}}
    states = [state | {"waiting": {"a": torch.tensor([1.0, 2.0])}}, state | {"waiting": {"b": torch.tensor([3.0])}}]
    for found in _pooled(states, (), (), b=1, a=2):
        assert {name: tensor.tolist() for name, tensor in found["waiting"].items()} == {"a": [0.5, 1.0], "b": [1.5]}


def test_a_last_result_is_pooled_as_it_is() -> None:
    """It is equal on all ranks: a mean of equal numbers would round them, and cost their bytes."""
    last = torch.tensor([0.1, 0.7])
    sums: list[Tensor] = []
    found = pooled({"state": {LAST: {"a": last}}, "tables": {}}, sums.append, AFTER, (), (), {})
    assert torch.equal(found["state"][LAST]["a"], last) and not sums


@pytest.mark.parametrize(
    ("there", "summed", "copied"), [((0, 1), False, False), ((1,), True, False), ((1,), False, True)]
)
@each_case(_owes)
def test_what_ranks_keep_counts_as_before_among_others(
    case: Sample, there: tuple[int, ...], summed: bool, copied: bool
) -> None:
    """Ranks that stay keep their part of the mean or the sum; new ones have nothing; what others had is lost."""
    epsilon = case.codec().properties().law.epsilon
    with case.fleet(BEFORE, TENSORS, schedule="layerwise") as before:
        for seed in range(3):
            before.step(random_grads(BEFORE, TENSORS, seed=seed))
        states = [checkpoint.save(reducer, before.methods) for reducer in before.reducers]
        owned, coded, kept_of = before.methods.folded(), before.methods.coded(), [*states]
    if copied:  # by the neighbour of the one that is gone
        kept_of[1] = added(states[1], checksums.parse(_bytes_of(of_one_rank(states[0]))))
    more, less = AFTER / BEFORE, BEFORE / AFTER
    with case.fleet(AFTER, TENSORS, schedule="layerwise") as after:
        for rank, reducer in enumerate(after.reducers):
            carried = Carried(1.0 if summed else more, less if summed else 1.0, owned, coded)
            mine = kept_of[there[rank]] if rank < len(there) else None
            fresh = checkpoint.save(reducer, after.methods)
            state = resized(fresh, mine, common_of(states[there[0]], coded), carried)
            checksums.check(state)
            checkpoint.load(reducer, after.methods, state, "restore")
        now = [reducer.kept.states() for reducer in after.reducers]
        for name in ("a", "b"):
            # Results are means, which a sum takes times the number of ranks.
            lasting = range(BEFORE) if copied else there
            owed = _owed([states[rank]["state"] for rank in lasting], name, BEFORE) * (BEFORE if summed else 1)
            kept = _owed(now, name, AFTER) * (AFTER if summed else 1)
            torch.testing.assert_close(kept, owed, rtol=1e-5, atol=max(1e-5, 2 * epsilon))
        assert any(bool(_owed([states[rank]["state"] for rank in there], name).any()) for name in ("a", "b"))
        assert {reducer.step for reducer in after.reducers} == {3}
        assert all_same(after.step(random_grads(AFTER, TENSORS, seed=7)))


def _has_momentum(codec: Codec) -> bool:
    return "momentum" in codec.layout(ANY_BUCKET, BEFORE).state


@each_case(_has_momentum)
def test_momentum_is_that_of_one_rank_whatever_their_number(case: Sample) -> None:
    """It is a running sum of a rank's gradients: nothing of it waits to be sent, and it needs no other factor."""
    with case.fleet(BEFORE, TENSORS, schedule="layerwise") as before:
        for seed in range(3):
            before.step(random_grads(BEFORE, TENSORS, seed=seed))
        states = [checkpoint.save(reducer, before.methods) for reducer in before.reducers]
    owned, coded = before.methods.folded(), before.methods.coded()
    momenta = [state["state"]["momentum"] for state in states]
    assert any(bool(momentum.any()) for momentum in momenta[1].values())
    with case.fleet(AFTER, TENSORS, schedule="layerwise") as after:
        fresh = [checkpoint.save(reducer, after.methods) for reducer in after.reducers]
    with_copy = added(states[1], checksums.parse(_bytes_of(of_one_rank(states[0]))))
    for mine in (states[1], with_copy):  # rank 0 has failed, and its neighbour may have a copy of what waited there
        failed = Carried(AFTER / BEFORE, 1.0, owned, coded)
        assert_equal(resized(fresh[0], mine, common_of(states[1], coded), failed)["state"]["momentum"], momenta[1])
    mean = {name: (momenta[0][name] + momenta[1][name]) / BEFORE for name in momenta[0]}
    for summed in (False, True):  # hosts change: every rank has what a rank had in the mean
        whole, scale = _pooled(states, owned, coded)[0], BEFORE / AFTER if summed else 1.0
        state = resized(fresh[2], whole, common_of(whole, coded), Carried(scale, 0.0, owned, coded))
        torch.testing.assert_close(state["state"]["momentum"], mean)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class _Together:
    """Adds tensors up over threads, each of which is a rank."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given, self.sums = threading.Barrier(ranks, timeout=20.0), list[Tensor](), 0

    def add_up(self, tensor: Tensor) -> None:
        self.sums += 1
        self._given.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._given).sum(dim=0))
        if not self._barrier.wait():
            self._given.clear()
        self._barrier.wait()


def _bytes_of(state: Mapping[str, Any]) -> bytearray:
    return bytearray(b"".join(checksums.parts(state)))


def _pooled(
    states: Sequence[Mapping[str, Any]], owned: Collection[str], coded: Collection[str], **waiting: int
) -> list[dict[str, Any]]:
    """Return what the ranks with these states pool: in one sum for each dtype, however many tensors there are."""
    together = _Together(BEFORE)
    with ThreadPoolExecutor(BEFORE) as pool:
        found = list(pool.map(lambda state: pooled(state, together.add_up, BEFORE, owned, coded, waiting), states))
    kinds = [tensors for kind, tensors in states[0]["state"].items() if kind != LAST]
    dtypes = {tensor.dtype for tensors in kinds for tensor in tensors.values()}
    assert together.sums == BEFORE * (len(dtypes) + bool(waiting)), together.sums
    return found


def _owed(states: Sequence[Mapping[str, Any]], name: str, ranks: int = 0) -> Tensor:
    """Return what waits: the mean of residuals, of so many ranks in all, and what owners have kept of means."""
    waits = torch.stack([state["residual"][name].double() for state in states]).sum(dim=0) / (ranks or len(states))
    return waits + sum(state["server"][name].double() for state in states if "server" in state)
