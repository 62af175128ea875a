"""Choices over tensors of several methods, dtypes and devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.trial import BucketCost, Choice, as_buckets
from tests.support.local import spec


def _model(draw: random.Random) -> tuple[list, dict[str, int]]:
    tensors = [
        replace(
            spec(f"p{n}", draw.randint(0, 50), dtype=draw.choice([torch.float32, torch.float16])),
            device=draw.choice(["cpu", "cuda:0"]),
        )
        for n in range(draw.randint(1, 15))
    ]
    return tensors, {tensor.name: draw.choice([1, 2]) for tensor in tensors}


def _choice(draw: random.Random, count: int) -> Choice:
    counts: list[int] = []
    while sum(counts) < count:
        counts.append(draw.randint(1, count - sum(counts)))
    return Choice(tuple(counts), frozenset(place for place in range(len(counts)) if draw.random() < 0.3))


@pytest.mark.parametrize("seed", range(100))
def test_a_group_is_one_bucket_for_each_of_its_kinds(seed: int) -> None:
    draw = random.Random(seed)
    tensors, methods = _model(draw)
    choice = _choice(draw, len(tensors))
    found = as_buckets(choice, tensors, methods.get, lambda method: method == 1, [[spec("small", 3)]])
    place = {tensor.name: number for number, tensor in enumerate(tensors)}
    assert [bucket for group in found.groups for bucket in group] == list(range(len(found.plan.buckets) - 1))
    assert [tensor.name for tensor in found.plan.buckets[-1].tensors] == ["small"]
    stop = 0
    for number, (group, count) in enumerate(zip(found.groups, choice.counts, strict=True)):
        start, stop = stop, stop + count
        buckets = [found.plan.buckets[bucket] for bucket in group]
        held = [tensor.name for bucket in buckets for tensor in bucket.tensors]
        assert sorted(held, key=place.get) == [tensor.name for tensor in tensors[start:stop]]
        kinds = [{(methods[t.name], t.dtype, t.device) for t in bucket.tensors} for bucket in buckets]
        assert all(len(kind) == 1 for kind in kinds) and len({frozenset(kind) for kind in kinds}) == len(kinds)
        assert all(bucket.method == methods[bucket.tensors[0].name] for bucket in buckets)
        assert all(bucket.plain == (number in choice.plain and bucket.method == 1) for bucket in buckets)
        last = [place[bucket.tensors[-1].name] for bucket in buckets]
        assert last == sorted(last) and all(
            [place[t.name] for t in bucket.tensors] == sorted(place[t.name] for t in bucket.tensors)
            for bucket in buckets
        )


def test_a_group_costs_what_its_buckets_cost() -> None:
    tensors = [spec("a", 10), spec("b", 20, dtype=torch.float16), spec("c", 30), spec("d", 40)]
    found = as_buckets(Choice((3, 1), frozenset({1})), tensors, lambda name: 1, lambda method: True)
    assert found.groups == (range(2), range(2, 3))
    shown = {0: BucketCost(20, 1.0, 0.5), 1: BucketCost(40, 2.0, 0.25), 2: BucketCost(40, 4.0, 1.0, True)}
    assert found.costs(shown) == [BucketCost(60, 3.0, 0.75), BucketCost(40, 4.0, 1.0, True)]
    assert found.costs({1: shown[1]}) == [BucketCost(40, 2.0, 0.25)]  # the others were never exchanged


def test_a_group_with_a_method_that_stays_counts_as_uncompressed_with_the_rest() -> None:
    tensors = [spec("a", 10), spec("b", 20)]
    found = as_buckets(Choice((2,), frozenset({0})), tensors, {"a": 1, "b": 2}.get, lambda method: method == 1)
    assert [bucket.plain for bucket in found.plan.buckets] == [True, False]
    assert found.costs({0: BucketCost(10, 1.0, 0.5, True), 1: BucketCost(20, 1.0, 0.5)}) == [
        BucketCost(30, 2.0, 1.0, True)
    ]


@pytest.mark.parametrize(("schedule", "buckets"), [("single", 2), ("auto", 2), ("layerwise", 100)])
def test_layers_that_alternate_in_dtype_share_buckets(schedule: str, buckets: int) -> None:
    pairs = [(spec(f"{n}.weight", 9, 9, dtype=torch.bfloat16), spec(f"{n}.norm", 9)) for n in range(50)]
    tensors = [tensor for pair in pairs for tensor in pair]
    assert len(make_plan(schedule, tensors, 0).buckets) == buckets
    small = make_plan(schedule, tensors, 10)
    assert [len(bucket.tensors) for bucket in small.buckets if not bucket.compressed] == [50]
