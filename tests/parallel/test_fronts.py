"""Horovod and DistributedDataParallel: the same weights, byte for byte, and the same saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_compress.codecs.registry import available
from tests.support.jobs import run_ranks

FRONTS = ("torch", "horovod")
STEPS = [0, 20]
SECONDS = 280.0  # for a job of all methods
FEW = ("marsit", "topk")
ADAM = {"method": "marsit", "adam": True, "options": {"full_precision_every": 4}}
#: DDP's own ways must not change a bit either.
DDP_WAYS = ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


def run(front: str, cases: dict[str, dict[str, Any]], world: int = 2) -> list[dict[str, Any]]:
    """Return what every rank reports by case."""
    job = run_ranks(world, "fronts.py", timeout=SECONDS, arguments={"cases": cases}, front=front)
    for name in cases:
        assert len({report[name]["weights"] for report in job.reports}) == 1, name
        assert len({report[name]["moments"] for report in job.reports}) == 1, name
    return job.reports


def check_equal(cases: dict[str, dict[str, Any]], world: int = 2) -> None:
    control = {"control": next(iter(cases.values())) | {"steps": [0, STEPS[1] - 1]}}
    ours, theirs = (run(front, cases | control, world) for front in FRONTS)
    for name in cases:
        assert [report[name] for report in ours] == [report[name] for report in theirs], name
        assert ours[0][name]["weights"] != ours[0]["control"]["weights"]


def by_method(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: {"method": name, "steps": STEPS} for name in names}


def test_two_fronts_give_the_same_bytes() -> None:
    check_equal(by_method(FEW))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4])
def test_they_do_with_every_method(world: int) -> None:
    check_equal(by_method(tuple(available())) | {"adam": ADAM | {"steps": STEPS}}, world)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["layerwise", "size:4KB", "mergecomp:2"])
def test_buckets_of_ours_have_nothing_to_do_with_those_of_ddp(schedule: str) -> None:
    many = {f"{number}": {"ddp": ddp} for number, ddp in enumerate(({}, *DDP_WAYS))}
    adaptive = schedule.startswith("mergecomp")
    # What an adaptive schedule chooses depends on measured times; `none` adds up the same two numbers whatever it is.
    case = {"method": "none" if adaptive else "marsit", "steps": STEPS, "options": {"schedule": schedule}}
    found = run("torch", {name: case | ddp for name, ddp in many.items()})[0]
    assert len({report["weights"] for report in found.values()}) == 1
    theirs = run("horovod", {"horovod": case})[0]["horovod"]
    assert theirs["weights"] == found["0"]["weights"]


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("first", FRONTS)
def test_a_job_goes_on_under_the_other_front(first: str, world: int, tmp_path: Path) -> None:
    """With every method: ten steps under one front and ten under the other are twenty under the first."""
    second = FRONTS[1 - FRONTS.index(first)]
    cases = by_method(tuple(available())) | {"adam": ADAM | {"steps": STEPS}}
    for name in cases:
        (tmp_path / name).mkdir()

    def part(front: str, steps: list[int], what: str) -> list[dict[str, Any]]:
        more = {"steps": steps, what: True}
        return run(front, {n: case | more | {"folder": str(tmp_path / n)} for n, case in cases.items()}, world)

    saved = part(first, [0, STEPS[1] // 2], "save")
    rest = part(second, [STEPS[1] // 2, STEPS[1]], "load")
    whole = run(first, cases, world)
    for name in cases:
        assert [report[name] for report in rest] == [report[name] for report in whole], name
        assert saved[0][name]["weights"] != whole[0][name]["weights"]
