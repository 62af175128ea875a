"""What merging keeps belongs to places of the payload: it is saved, and begins anew where those change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.reducer import time_exchange
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError
from horovod_compress.schedule.by_name import make_plan
from tests.support.local import Fleet, random_grads, same_bits, spec
from tests.support.states import resealed

WORLD = 3
TENSORS = [spec("a", 30, 50), spec("b", 700)]
OPTIONS = {"merge": "shaped", "full_precision_every": 0, "compensation": "none", "exchange": "ring", "levels": 2}
GRADS = [random_grads(WORLD, TENSORS, seed=number) for number in range(5)]


def _fleet(**options: Any) -> Fleet:
    return Fleet(WORLD, TENSORS, **OPTIONS | options)


def _states(fleet: Fleet) -> list[dict[str, Any]]:
    return [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]


def _anything(fleet: Fleet) -> bool:
    return any(bool(kept.any()) for reducer in fleet.reducers for kept in reducer.kept.carries().values())


def _results(fleet: Fleet) -> list[dict[str, Tensor]]:
    return [fleet.step(grads)[0] for grads in GRADS[2:]]


def _same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(same_bits(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


@pytest.fixture(scope="module")
def saved() -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """The states of all ranks after two steps, and the results of the steps that follow."""
    with _fleet() as fleet:
        for grads in GRADS[:2]:
            fleet.step(grads)
        return _states(fleet), _results(fleet)


Saved = tuple[list[dict[str, Any]], list[dict[str, Tensor]]]


def test_it_is_saved_and_restored(saved: Saved) -> None:
    states, whole = saved
    for state in states:
        (kept,) = state["carries"].values()
        assert kept.shape == (2, 35) and kept.any()  # two bits for three ranks, in words of 64 elements
    with _fleet() as fleet:
        fleet.load(states)
        assert _same(whole, _results(fleet))


@pytest.mark.parametrize("change", ["nothing saved", "reset", "other buckets", "another collective"])
def test_it_begins_anew(change: str, saved: Saved) -> None:
    """Without an error, and not with what belonged to other places."""
    states, whole = saved
    options = {"other buckets": {"schedule": "layerwise"}, "another collective": {"exchange": "fold"}}.get(change, {})
    if change == "nothing saved":
        states = [resealed(state | {"carries": {}}) for state in states]
    with _fleet(**options) as fleet, _fleet(**options) as fresh:
        fleet.step(GRADS[4])
        assert _anything(fleet)
        fleet.load(states, "reset" if change == "reset" else "restore")
        assert not _anything(fleet)
        fresh.resume(2)
        again = _results(fleet)
        assert _same(again, _results(fresh)) and not _same(again, whole)


def test_other_merging_is_another_configuration(saved: Saved) -> None:
    with _fleet(merge="sampled") as fleet:
        assert fleet.reducers[0].kept.carries() == {}
        with pytest.raises(ConfigError, match="a different configuration"):
            fleet.load(saved[0])


def test_other_buckets_in_a_running_job_begin_anew() -> None:
    with _fleet() as fleet:
        fleet.step(GRADS[0])
        assert _anything(fleet)
        plan = make_plan("layerwise", TENSORS, 0, fleet.methods.number)
        for reducer in fleet.reducers:
            reducer.replan(plan)
        assert not _anything(fleet)


def test_measuring_an_exchange_leaves_no_trace() -> None:
    with _fleet() as fleet, _fleet() as other:
        for each in (fleet, other):
            each.step(GRADS[0])
        with ThreadPoolExecutor(WORLD) as pool:
            list(pool.map(lambda reducer: time_exchange(reducer, 0), fleet.reducers))
        assert _same(_results(fleet), _results(other))


def test_full_precision_rounds_leave_it_alone() -> None:
    with _fleet(full_precision_every=2) as fleet:
        fleet.step(GRADS[0])
        assert not _anything(fleet)
        fleet.step(GRADS[1])
        before = [{n: kept.clone() for n, kept in reducer.kept.carries().items()} for reducer in fleet.reducers]
        assert _anything(fleet)
        fleet.step(GRADS[2])
        after = [reducer.kept.carries() for reducer in fleet.reducers]
        assert all(torch.equal(x[name], y[name]) for x, y in zip(before, after, strict=True) for name in x)


def test_it_takes_as_few_bits_as_the_ranks_need() -> None:
    """In a fold of the own chunk only; and none where nothing is merged."""
    for world, rows in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3)):
        for exchange, share in (("ring", 1), ("fold", world)):
            with Fleet(world, [spec("w", 64 * 60)], **OPTIONS | {"exchange": exchange}) as fleet:
                for reducer in fleet.reducers:
                    assert [tuple(kept.shape) for kept in reducer.kept.carries().values()] == [(rows, 60 // share)] * (
                        rows > 0
                    )


def test_three_values_are_kept_in_whole_groups() -> None:
    with _fleet(exchange="fold", levels=3) as fleet:
        shapes = [tuple(kept.shape) for reducer in fleet.reducers for kept in reducer.kept.carries().values()]
    groups = -(-fleet.plan.buckets[0].padded // 64 // 5)
    assert [columns for _, columns in shapes] == [5 * (groups * (n + 1) // 3 - groups * n // 3) for n in range(3)]
    assert {rows for rows, _ in shapes} == {2}
