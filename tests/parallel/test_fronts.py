"""Horovod, DistributedDataParallel and plain modules: the same weights, byte for byte, and the same saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_compress.codecs.registry import methods
from horovod_compress.options import FOR_UPDATES
from tests.support.jobs import run_ranks

FRONTS = ("torch", "horovod", "plain")
#: A model that is divided among one rank is whole.
DIVIDED = "fsdp"
STEPS = [0, 20]
SECONDS = 280.0  # for a job of all methods
FEW = ("marsit", "topk")
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
#: Local steps, saved with an exchange under way; then all of it is exchanged.
UPDATES: dict[str, Any] = {
    "method": "marsit",
    "steps": STEPS,
    "options": {"schedule": "size:4KB"},
    "updates": {"communication_delay": 4, "outer_optimizer": NESTEROV, "overlap": 2, "fragments": 2,
                "warmup_exchanges": 5, "clip": "median"},
}  # fmt: skip
ADAM = {"method": "marsit", "adam": {}, "options": {"full_precision_every": 4}}
#: A second moment that is held, in unusual company.
HELD: dict[str, dict[str, Any]] = {
    "plain": {"method": "marsit"},
    "own": {"method": "marsit", "attach": {"second_moment": "own"}},
    "fused": {"method": "marsit", "adam": {"fused": True}},
    "maximize": {"method": "marsit", "adam": {"maximize": True, "foreach": True, "weight_decay": 0.1}},
    "layerwise": {"method": "ef_signsgd", "options": {"schedule": "layerwise"}},
    "onebit_adam": {"method": "onebit_adam"},
    "per layer": {"method": {"0.*": "topk", "3.*": "powersgd", "*": "marsit"}},
    "by step": {"by step": [[0, "none"], [6, "marsit"]]},
    "thawed": {"method": "marsit", "thaws": 7, "ddp": {"find_unused_parameters": True}},
}
#: DDP's own ways must not change a bit either.
DDP_WAYS = ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


def run(front: str, cases: dict[str, dict[str, Any]], world: int = 2) -> list[dict[str, Any]]:
    """Return what every rank reports by case."""
    launched = "horovod" if front == "horovod" else "torch"
    asked = {"cases": cases, "front": front}
    job = run_ranks(world, "fronts.py", timeout=SECONDS, arguments=asked, front=launched)
    for name in cases:
        assert len({report[name]["weights"] for report in job.reports}) == 1, name
        assert len({report[name]["moments"] for report in job.reports}) == 1, name
    return job.reports


def steps_apart(reports: list[dict[str, Any]]) -> bool:
    """Return whether ranks had other weights before all was exchanged: the control of what is equal then."""
    return len({report["updates"]["updates"][0] for report in reports}) == len(reports)


def check_equal(cases: dict[str, dict[str, Any]], world: int = 2) -> None:
    control = {"control": next(iter(cases.values())) | {"steps": [0, STEPS[1] - 1]}}
    ours, *others = (run(front, cases | control, world) for front in FRONTS)
    divided = run(DIVIDED, {name: case for name, case in cases.items() if "updates" not in case}, world)
    for name in cases:
        for theirs in (*others, *([divided] if name in divided[0] else [])):
            assert [report[name] for report in ours] == [report[name] for report in theirs], name
        assert ours[0][name]["weights"] != ours[0]["control"]["weights"]
    assert "updates" not in cases or all(map(steps_apart, (ours, *others)))


def by_method(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: {"method": name, "steps": STEPS} for name in names}


def test_all_fronts_give_the_same_bytes() -> None:
    check_equal(by_method(FEW) | {"updates": UPDATES})


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4])
def test_they_do_with_every_method(world: int) -> None:
    check_equal(by_method(tuple(methods())) | {"adam": ADAM | {"steps": STEPS}}, world)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4])
def test_local_steps_of_every_method_end_with_the_same_bytes_too(world: int) -> None:
    """Where a preset brings no options of local steps, those of DiLoCo, with an overlap."""
    usual = {"communication_delay": 3, "outer_optimizer": NESTEROV, "overlap": 1}
    cases = {
        name: {"method": name, "steps": [0, 12], "updates": {} if name in FOR_UPDATES else usual}
        for name in (*methods(), *FOR_UPDATES)
    }
    ours, theirs = (run(front, cases, world) for front in ("torch", "horovod"))
    for name in cases:
        assert [report[name] for report in ours] == [report[name] for report in theirs], name


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
def test_a_second_moment_that_is_held() -> None:
    common = {
        "steps": [0, 14],
        "adam": {},
        "attach": {"second_moment": "shared", "warmup_steps": 4, "rebuild_every": 5},
    }
    ours, *others = (run(front, {name: common | case for name, case in HELD.items()}, 3) for front in FRONTS)
    for name in HELD:
        for theirs in others:
            assert [report[name] for report in ours] == [report[name] for report in theirs], name
        assert (ours[0][name]["weights"] == ours[0]["plain"]["weights"]) is (name == "plain")


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
def test_a_gradient_that_is_not_finite_on_any_rank() -> None:
    """The step is refused on all ranks, or its values count as zeros, and training goes on with the same bytes."""
    world, at = 4, 5
    policies = {"raise": {"nonfinite": "raise"}, "zero": {"nonfinite": "zero"}}
    cases = {f"{name} {bad}": (name, bad) for name in policies for bad in (None, *range(world))}
    asked = {
        key: {"method": "marsit", "steps": [0, 9], "options": policies[name], "nan": [at, bad]}
        for key, (name, bad) in cases.items()
    }
    ours, *others = (run(front, asked, world) for front in FRONTS)
    assert all(theirs == ours for theirs in others)
    for mine in ours:
        for key, (name, bad) in cases.items():
            raised = name == "raise" and bad is not None
            assert len(mine[key]["refused"]) == raised
            assert not raised or f"first on rank {bad}" in mine[key]["refused"][0]
            assert (mine[key]["weights"] == mine["raise None"]["weights"]) is (bad is None)  # the control


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["layerwise", "size:4KB", "mergecomp:2"])
def test_buckets_of_ours_have_nothing_to_do_with_those_of_ddp(schedule: str) -> None:
    many = {f"{number}": {"ddp": ddp} for number, ddp in enumerate(({}, *DDP_WAYS))}
    adaptive = schedule.startswith("mergecomp")
    # What an adaptive schedule chooses depends on measured times; `none` adds up the same two numbers whatever it is.
    case = {"method": "none" if adaptive else "marsit", "steps": STEPS, "options": {"schedule": schedule}}
    found = run("torch", {name: case | ddp for name, ddp in many.items()})[0]
    assert len({report["weights"] for report in found.values()}) == 1
    for front in FRONTS[1:]:
        assert run(front, {front: case})[0][front]["weights"] == found["0"]["weights"]


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("first", FRONTS)
def test_a_job_goes_on_under_the_other_front(first: str, world: int, tmp_path: Path) -> None:
    """With every method: ten steps under one front and ten under the next are twenty under the first."""
    second = FRONTS[FRONTS.index(first) - 1]
    cases = by_method(tuple(methods())) | {"adam": ADAM | {"steps": STEPS}}
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
