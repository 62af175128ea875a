"""What waited on four ranks counts on among two and among six, under every front; and the log says so."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import Job, needs_front, run_ranks

SECONDS = 150.0
BEFORE, AFTER = 4, (2, 6)
ROUNDING = 1e-5
METHODS: dict[str, dict[str, Any]] = {
    "marsit": {"method": "marsit", "options": {"compensation": "global"}},
    "ef_signsgd": {"method": "ef_signsgd"},
    "topk": {"method": "topk", "options": {"density": 0.1}},
    "onebit_adam": {"method": "onebit_adam"},
}
#: With AdamW, whose second moment is held, weights are not moved by sums of results.
ADAM = {"method": "marsit", "adam": True}
PATHS = {"horovod": ("stock", "attached", "update"), "torch": ("ddp", "plain", "update")}
#: Replicas and shards, saved as 2 x 2.
GRIDS = {2: [(1, 2), (2, 1)], 6: [(3, 2), (2, 3), (6, 1), (1, 6)]}

Cases = dict[str, dict[str, Any]]


def run(front: str, world: int, folder: Path, cases: Cases) -> Job:
    asked = {"folder": str(folder), "world": world, "cases": cases, "load": world != BEFORE}
    return run_ranks(world, "redistributed.py", timeout=SECONDS, arguments=asked, front=front)


def check_saved(job: Job, cases: Cases) -> None:
    for report in job.values():
        for name, case in cases.items():
            assert report[name]["norm"] > 1, (name, "nothing waits")
            assert report[name]["apart"] < ROUNDING or case.get("adam"), (name, report[name])


def check_loaded(job: Job, cases: Cases) -> None:
    """What waits is what waited; and in the end results and what waits are all that was ever offered."""
    reports = job.values()
    for name, case in cases.items():
        assert len({report[name]["weights"] for report in reports}) == 1, name
        for found in (report[name] for report in reports):
            assert found["far"] < ROUNDING, (name, found)
            assert found["apart"] < ROUNDING or case.get("adam"), (name, found)


def check_lost(job: Job, names: list[str]) -> None:
    for report in job.values():
        for name in names:
            assert report[name]["far"] > 0.9 and report[name]["apart"] > 0.1, (name, report[name])


def told(job: Job, before: int, after: int) -> int:
    """Return how often the log says that residuals were divided."""
    return sum(f"the residuals of {before} rank(s) were dealt out to {after}," in line for line in job.lines())


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 60)
@pytest.mark.parametrize("front", PATHS)
def test_nothing_that_waits_is_lost(front: str, tmp_path: Path) -> None:
    needs_front(front)
    cases = {f"{path} {name}": case | {"path": path} for path in PATHS[front] for name, case in METHODS.items()}
    cases |= {f"{path} adam": ADAM | {"path": path} for path in PATHS[front][:2]}
    if front == "horovod":  # where results may be sums
        cases |= {f"{path} sum": METHODS[name] | {"path": path, "sum": True}
                  for path, name in (("stock", "topk"), ("attached", "onebit_adam"))}  # fmt: skip
        cases["stock adam"] |= {"options": {"total_steps": 30}}  # a short warm-up, which only attach() takes as such
    check_saved(run(front, BEFORE, tmp_path, cases), cases)
    control = {f"{path} topk": cases[f"{path} topk"] for path in PATHS[front]}
    control = {f"{name} lost": case | {"from": name, "residuals": "reset"} for name, case in control.items()}
    for world in AFTER:
        job = run(front, world, tmp_path, cases | control)
        check_loaded(job, cases)
        check_lost(job, [*control])
        assert told(job, BEFORE, world) == len(cases), job.tail()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 60)
def test_nothing_that_waits_on_shards_is_lost(tmp_path: Path) -> None:
    """Loaded from the folder with as many shards, and by torch.distributed.checkpoint on any grid."""
    cases = {name: case | {"path": "fsdp", "grid": (2, 2)} for name, case in METHODS.items()}
    check_saved(run("torch", BEFORE, tmp_path, cases), cases)
    for world in AFTER:
        others: Cases = {}
        for grid in GRIDS[world]:
            changed = {name: case | {"grid": grid, "from": name} for name, case in cases.items()}
            others |= {f"{name} {grid} divided": case | {"replicas": 2} for name, case in changed.items()}
            others |= {f"{name} {grid}": case for name, case in changed.items() if grid[1] == 2}
        lost = {"lost": others[f"topk {(world // 2, 2)}"] | {"residuals": "reset"}}
        job = run("torch", world, tmp_path, others | lost)
        check_loaded(job, others)
        check_lost(job, [*lost])
        for replicas in {grid[0] for grid in GRIDS[world]}:  # of each shard one says so
            shards = [case["grid"][1] for case in others.values() if case["grid"][0] == replicas]
            dealt = sum(shards) if replicas != 2 else 0  # as many as before deal nothing out
            assert told(job, 2, replicas) == dealt, job.tail()


def test_it_is_not_lost_in_a_small_job() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases: Cases = {"kept": METHODS["topk"] | {"path": "plain"}}
        check_saved(run("torch", BEFORE, Path(folder), cases), cases)
        lost = {"lost": cases["kept"] | {"from": "kept", "residuals": "reset"}}
        job = run("torch", 2, Path(folder), cases | lost)
        check_loaded(job, cases)
        check_lost(job, [*lost])
        assert told(job, BEFORE, 2) == 1, job.tail()
