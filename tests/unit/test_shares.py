"""Ranks that share hosts: how tensors are cut, what becomes of values that are not finite, states, and memory."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.bucket.shares import cut, share_of
from horovod_compress.engine.methods import parse
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import ConfigError, StateError
from horovod_compress.exchange.hosts import Shared, of_ranks, opened
from horovod_compress.exchange.transports.local import LocalTransport
from horovod_compress.exchange.transports.transport import Pending
from horovod_compress.fronts.sharing import groups_of
from horovod_compress.schedule import by_name
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.battery.kept import anything, kept, same
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.locks import is_free

HOSTS, RANKS = 2, 4
EACH = RANKS // HOSTS
TENSORS = [
    spec("rows", 37, 65),
    spec("short", 50, 3, 3),
    spec("flat", 1000),
    spec("few", 3),
    spec("one row", 1, 70),
    spec("scalar"),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tensor", [*TENSORS, spec("empty", 0, 5), spec("wide", 4, 1000), spec("long", 100_003)])
def test_shares_are_all_of_a_tensor_and_hold_whole_groups_of_rows(tensor: TensorSpec, ranks: int) -> None:
    shares = cut(tensor, ranks)
    assert [index for share in shares for index in range(tensor.count)[share.where]] == list(range(tensor.count))
    row = math.prod(tensor.shape[1:])
    for share in shares:
        assert share.tensor.count == share.where.stop - share.where.start
        if len(tensor.shape) > 1 and share.tensor.count:
            assert share.where.start % (row * math.ceil(64 / row)) == 0
            assert share.tensor.shape[1:] == tensor.shape[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_within_one_host_the_result_is_the_mean(dtype: torch.dtype) -> None:
    tensors = [spec("a", 30, 40, dtype=dtype), spec("b", 5, dtype=dtype)]
    grads = random_grads(3, tensors, seed=1)
    with Fleet(3, tensors, "marsit", hosts=1, verify_every=1) as fleet:
        results = fleet.step(grads)
        assert all_same(results)
        assert not any(bool(r.any()) for residuals in fleet.residuals() for r in residuals.values())
        for tensor in tensors:
            wide = dtype if dtype is torch.float64 else torch.float32
            mean = (sum(mine[tensor.name].to(wide) for mine in grads) / 3).to(dtype)
            torch.testing.assert_close(results[2][tensor.name], mean, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["marsit", "sketch_fusion", "topk", "powersgd"])
def test_one_value_that_is_not_finite_spoils_all_shares_and_no_residual(method: str) -> None:
    with Fleet(RANKS, TENSORS, method, hosts=HOSTS, verify_every=1) as fleet:
        fleet.step(random_grads(RANKS, TENSORS, seed=1))
        fleet.step(random_grads(RANKS, TENSORS, seed=2))
        before, grads = fleet.residuals(), random_grads(RANKS, TENSORS, seed=3)
        grads[2]["rows"][1, 1] = math.inf
        for results in fleet.step(grads):
            assert all(bool(result.isnan().all()) for result in results.values())
        for mine, theirs in zip(before, fleet.residuals(), strict=True):
            assert all(same_bits(mine[name], theirs[name]) for name in mine)
        assert all(bool(r.isfinite().all()) for r in fleet.step(random_grads(RANKS, TENSORS, seed=4))[1].values())


def test_a_sum_within_a_host_that_overflows_spoils_the_bucket_on_every_rank() -> None:
    """Each gradient is finite, so only the ranks that own this share find it."""
    with Fleet(RANKS, TENSORS, "none", hosts=HOSTS, verify_every=1) as fleet:
        grads = random_grads(RANKS, TENSORS, seed=3)
        for mine in grads[:EACH]:
            mine["flat"][999] = 3e38
        for results in fleet.step(grads):
            assert all(bool(result.isnan().all()) for result in results.values())


def test_values_that_are_not_finite_count_as_zero_where_that_is_asked() -> None:
    with Fleet(RANKS, TENSORS, "none", hosts=HOSTS, nonfinite="zero", verify_every=1) as fleet:
        grads = random_grads(RANKS, TENSORS, seed=3)
        clean = [{name: grad.clone() for name, grad in mine.items()} for mine in grads]
        grads[1]["flat"][0], clean[1]["flat"][0] = math.nan, 0.0
        torch.testing.assert_close(fleet.step(grads)[3]["flat"], sum(mine["flat"] for mine in clean) / RANKS)
        assert fleet.reducers[0].metrics.nonfinite == 1


def test_sums_are_the_mean_times_the_number_of_ranks() -> None:
    grads = random_grads(RANKS, TENSORS, seed=3)
    with Fleet(RANKS, TENSORS, "none", hosts=HOSTS) as fleet:
        results = fleet.step(grads, result_scale=float(RANKS))
    torch.testing.assert_close(results[1]["rows"], sum(mine["rows"] for mine in grads))


def test_other_buckets_take_residuals_along() -> None:
    with Fleet(RANKS, TENSORS, "ef_signsgd", hosts=HOSTS) as fleet:
        fleet.step(random_grads(RANKS, TENSORS, seed=1))
        before = fleet.residuals()
        plan = Plan.of([([tensor], 1) for tensor in TENSORS])
        for reducer in fleet.reducers:
            reducer.replan(plan)
        for mine, theirs in zip(before, fleet.residuals(), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(same_bits(mine[name], theirs[name]) for name in mine)
        assert all_same(fleet.step(random_grads(RANKS, TENSORS, seed=2)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("marsit", {"full_precision_every": 0}),
        ("powersgd", {}),  # these have tables, which are as large as the shares need
        ("loco", {}),
        ("sketch_fusion", {"error_feedback": "sketch", "density": 0.2, "cells": 0.5}),
    ],
)
def test_a_state_goes_on_with_the_same_bits_and_only_where_hosts_are_the_same(
    method: str, options: dict[str, Any]
) -> None:
    def fleet(hosts: int, schedule: str = "single") -> Fleet:
        return Fleet(RANKS, TENSORS, method, hosts=hosts, schedule=schedule, **options)

    with fleet(HOSTS) as first, fleet(HOSTS) as second, fleet(0) as flat, fleet(HOSTS, "layerwise") as layers:
        first.step(random_grads(RANKS, TENSORS, seed=1))
        states = [checkpoint.save(reducer, first.methods) for reducer in first.reducers]
        second.load(states)
        later = random_grads(RANKS, TENSORS, seed=2)
        assert all_same([*first.step(later), *second.step(later)])
        assert same(kept(first), kept(second))
        with pytest.raises(StateError, match="hierarchical"):
            checkpoint.load(flat.reducers[0], flat.methods, states[0], "restore")
        with pytest.raises(StateError, match="the same ranks on each host"):
            moved = states[1] | {"hosts": [2, 1, 0]}  # a launcher that counts by hosts, after one that counts by slots
            checkpoint.load(second.reducers[1], second.methods, moved, "restore")
        if states[0]["tables"]:
            with pytest.raises(StateError, match="plan"):
                checkpoint.load(layers.reducers[0], layers.methods, states[0], "restore")
        for other in (flat, second):
            other.load([*states[1:], states[0]], "reset")
            assert not anything(kept(other)) and all_same(other.step(later))
        with pytest.raises(StateError, match="hierarchical"):
            redistributed(states, 0, 2, ())


@pytest.mark.parametrize("finite", [True, False])
def test_all_bytes_are_counted_also_those_of_meetings_within_a_host(
    finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is exact and what is compressed is what goes between hosts."""
    sent, send = [0] * RANKS, LocalTransport.send

    def counted(self: LocalTransport, data: Tensor, to: int) -> Pending:
        sent[self.rank] += data.numel()
        return send(self, data, to)

    monkeypatch.setattr(LocalTransport, "send", counted)
    with Fleet(RANKS, TENSORS, "marsit", hosts=HOSTS, schedule="layerwise", verify_every=2) as fleet:
        for step in range(3):
            grads = random_grads(RANKS, TENSORS, seed=step)
            grads[1]["rows"][0, 0] *= 1.0 if finite else math.inf
            fleet.step(grads)
        assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
        counts = [reducer.metrics for reducer in fleet.reducers]
        assert [metrics.bytes_sent for metrics in counts] == sent
        between = [metrics.bytes_exact + metrics.bytes_compressed for metrics in counts]
        assert all(0 < less < all_ for less, all_ in zip(between, sent, strict=True))


def test_shares_have_random_bits_of_their_own_or_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, machines = Plan.of([(TENSORS[:1], 1)]).buckets[0], ["one", "one", "one", "two", "two", "two"]
    methods, options = parse("marsit", {"exchange": "hierarchical"})
    with pytest.raises(ConfigError, match=r"at most 21844 buckets where 3 ranks share a host, this one has 21845;"):
        groups_of(options, methods, Plan((bucket,) * 21845), machines)
    layers = Plan.of([([tensor], 1) for tensor in TENSORS])
    with Fleet(RANKS, TENSORS, "marsit", hosts=HOSTS) as fleet:
        keys = {(r.rank, at): r.context.coding_key(0, at) for r in fleet.reducers for at in (0, 1, 32765, 32766)}
        assert len(set(keys.values())) == len(keys)
        monkeypatch.setattr(by_name, "_PLACES", EACH * len(TENSORS))  # no room for so many buckets of each share
        with pytest.raises(ConfigError, match="where 2 ranks share a host, this one has 6"):
            fleet.reducers[0].check_replan(layers)
        monkeypatch.setattr(by_name, "_PLACES", EACH * (len(TENSORS) + 1))
        fleet.reducers[0].check_replan(layers)


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    assert of_ranks(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match=r"\[0, 1, 2\], \[3\]"):
        of_ranks(["a", "a", "a", "b"])


def test_shared_memory_is_one_and_is_recognised() -> None:
    own = Shared(1000)
    theirs = opened(own.shown())
    own.data[7] = 3
    assert theirs.numel() == 1000 and theirs[7] == 3
    with pytest.raises(ConfigError, match="another process"):
        opened(own.shown() | {"token": "00" * 16})
    own.close()
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(own.shown())
    own.data[8] = 4  # the memory stays
    assert theirs[8] == 4


def test_what_is_no_shared_memory_is_not_opened(tmp_path: Path) -> None:
    """A number may be another file's, even one that this process has locked: to close that releases the lock."""
    own = Shared(1000)
    path = tmp_path / "locked"
    path.write_bytes(bytes(1000) + bytes.fromhex(own.shown()["token"]))
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            opened(own.shown() | {"file": file.fileno()})
        assert not is_free(path)
        os.close(os.open(path, os.O_RDWR))
        assert is_free(path)  # the control
    own.close()


def test_a_bucket_of_shares_keeps_positions() -> None:
    (bucket,) = Plan.of([(TENSORS, 1)]).buckets
    for place in range(EACH):
        assert [tensor.name for tensor in share_of(bucket, place, EACH).tensors] == [tensor.name for tensor in TENSORS]
