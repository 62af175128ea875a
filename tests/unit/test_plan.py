"""Plans and schedules: every tensor once, one dtype per bucket, whole words."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, strategies as st

from horovod_compress.errors import ConfigError, some_of
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import ALIGNMENT, Bucket, Plan, TensorSpec, parse_bytes
from tests.support.local import spec

_TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    ),
    max_size=12,
).map(lambda found: [TensorSpec(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(found)])
_SCHEDULES = st.sampled_from(["single", "layerwise", "size:1B", "size:100B", "size:1KB", "size:25MB"])


@given(tensors=_TENSORS, schedule=_SCHEDULES, min_elements=st.sampled_from([0, 1, 10, 1000]))
def test_plan_laws(tensors: list[TensorSpec], schedule: str, min_elements: int) -> None:
    plan = make_plan(schedule, tensors, min_elements)
    plan.check_covers(tensors)
    assert sorted(plan.names()) == sorted(t.name for t in tensors)
    assert plan.count == sum(t.count for t in tensors)
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index and bucket.tensors
        assert len({t.dtype for t in bucket.tensors}) == 1
        assert bucket.compressed == (bucket.tensors[0].count >= min_elements)
        ends = [offset + t.count for offset, t in zip(bucket.offsets, bucket.tensors, strict=True)]
        assert all(offset % ALIGNMENT == 0 for offset in (*bucket.offsets, bucket.padded))
        assert all(
            end <= start < end + ALIGNMENT
            for end, start in zip(ends, (*bucket.offsets[1:], bucket.padded), strict=True)
        )
    # Order is kept inside of buckets, and among those of each kind by their last tensors; small ones come last.
    place = {t.name: number for number, t in enumerate(tensors)}
    inside = [[place[t.name] for t in bucket.tensors] for bucket in plan.buckets]
    assert all(places == sorted(places) for places in inside)
    compressed = [bucket.compressed for bucket in plan.buckets]
    assert compressed == sorted(compressed, reverse=True)
    for kind in (True, False):
        last = [places[-1] for places, bucket in zip(inside, plan.buckets, strict=True) if bucket.compressed == kind]
        assert last == sorted(last)
    if schedule == "single":
        assert len(plan.buckets) == len({(t.dtype, t.count >= min_elements) for t in tensors})
    again = Plan.from_document(json.loads(json.dumps(plan.document())))
    assert again == plan and again.fingerprint() == plan.fingerprint()


def test_single_has_one_bucket_for_each_dtype() -> None:
    kinds = [torch.float32, torch.float32, torch.float16, torch.float32]
    plan = make_plan("single", [spec(str(i), 10, dtype=kind) for i, kind in enumerate(kinds)], 0)
    assert [[t.name for t in bucket.tensors] for bucket in plan.buckets] == [["2"], ["0", "1", "3"]]


def test_layerwise_and_size() -> None:
    tensors = [spec("a", 10), spec("b", 10), spec("c", 30), spec("d", 5)]

    def names(schedule: str) -> list[str]:
        return ["".join(t.name for t in b.tensors) for b in make_plan(schedule, tensors, 0).buckets]

    assert names("layerwise") == ["a", "b", "c", "d"]
    assert names("size:80B") == ["ab", "c", "d"]  # exactly full is not too full
    assert names("size:79B") == ["a", "b", "c", "d"]
    assert names("size:160B") == ["ab", "cd"]
    assert names("size:1KB") == ["abcd"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("25MB", 25_000_000), ("512kb", 512_000), ("1.5 GB", 1_500_000_000), (" 7B ", 7), ("9" * 400 + "GB", 1 << 62)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "25", "MB", "-1MB", "0MB", "0.1B", "1TB", "1e3KB", "25MB25MB", "1MiB", "nanMB"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(f"size:{text}", [spec("a", 1)], 0)
    assert "25MB" in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize("schedule", ["", "sizes:1MB", "Single", 7, None, ["a"]])
def test_unknown_schedules_are_refused(schedule: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(schedule, [spec("a", 1)], 0)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "schedule" in text and repr(schedule) in text and "layerwise" in text and "single" in text


@pytest.mark.parametrize("schedule", ["layerwise:3", "single:25MB"])
def test_arguments_where_there_are_none(schedule: str) -> None:
    with pytest.raises(ConfigError, match="takes no argument"):
        make_plan(schedule, [spec("a", 1)], 0)


def test_a_plan_of_the_user_is_taken_as_it_is() -> None:
    tensors = [spec("a", 10), spec("b", 10), spec("c", 10)]
    plan = Plan.of([([tensors[2], tensors[0]], True), ([tensors[1]], False)])
    assert make_plan(plan, tensors, 1000) is plan


def test_of_many_names_a_message_has_the_first_and_how_many_more_there_are() -> None:
    some = [spec(f"w{number}", 10) for number in range(8)]
    for names, told in (("w1", "w1"), ("w1 w2 w3 w4 w5", "w1, w2, w3, w4, w5")):
        assert some_of(names.split()) == told
    with pytest.raises(ConfigError, match="does not have: w1, w2, w3, w4, w5 and 2 more; make the plan from this"):
        make_plan(Plan.of([(some, True)]), some[:1], 0)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    a, b = spec("a", 10), spec("b", 10)
    for plan, tensors, part in (
        (Plan.of([([a], True)]), [a, b], "the model has b as [10] float32, the plan has no such tensor"),
        (Plan.of([([a, b], True)]), [a], "does not have: b; make the plan from"),
        (Plan.of([([a, spec("b", 11)], True)]), [a, b], "b as [10] float32, the plan has it as [11]"),
        (Plan.of([([a, spec("b", 10, dtype=torch.float64)], True)]), [a, b], "float64"),
        (Plan.of([([a, b, a], True)]), [a, b], "twice"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_plan(plan, tensors, 0)
        assert part in str(caught.value)


def test_fingerprints_see_every_field() -> None:
    base = Bucket(0, (spec("a", 10), spec("b", 3)))
    others = [
        Bucket(0, (spec("b", 3), spec("a", 10))),
        Bucket(0, (spec("a", 10), spec("c", 3))),
        Bucket(0, (spec("a", 10), spec("b", 3, 1))),
        Bucket(0, (spec("a", 10, dtype=torch.float64), spec("b", 3, dtype=torch.float64))),
        dataclasses.replace(base, method=0),
        dataclasses.replace(base, method=2),
    ]
    prints = {Plan((bucket,)).fingerprint() for bucket in (base, *others)}
    assert len(prints) == 1 + len(others)
    assert Plan((Bucket(0, (spec("a", 10),)), Bucket(1, (spec("b", 3),)))).fingerprint() not in prints
