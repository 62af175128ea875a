"""Equal gradients on a CPU and on a device: the same payloads in every step, and states that load on either."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import needs_front, run_ranks

WORLD, STEPS, SAVED_AFTER = 2, 6, 3
SECONDS = 290.0
FRONTS = ("torch", "horovod")
gpu, slow = pytest.mark.gpu, pytest.mark.slow
Steps = list[dict[str, Any]]
Record = Callable[[str, object], None]

#: Front, device, and which samples: two methods, one of each kind, or all of them.
PLACES = [
    ("torch", "staged", "two"),
    *(pytest.param((front, "staged", "few"), marks=slow) for front in FRONTS),
    *(pytest.param((front, "cuda:0", "all"), marks=gpu) for front in FRONTS),
]


def job(front: str, which: str, world: int = WORLD, env: dict[str, str] | None = None, **given: Any) -> list[Any]:
    given = {"steps": [0, STEPS], "which": which, "transport": "gloo"} | given
    return run_ranks(world, "given.py", timeout=SECONDS, arguments=given, front=front, env=env).values()


def parts(report: dict[str, Steps], device: str) -> dict[str, Steps]:
    """Return a rank's cases on a device, by sample."""
    return {
        name.removesuffix(f" on {device}"): steps for name, steps in report.items() if name.endswith(f"on {device}")
    }


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_payloads_are_the_same_bytes_in_every_step(place: tuple[str, str, str], record_property: Record) -> None:
    """So are results, weights and what is kept."""
    front, device, which = place
    needs_front(front)
    reports = job(front, which, devices=["cpu", device])
    wrong = []
    for rank, report in enumerate(reports):
        here, there = parts(report, "cpu"), parts(report, device)
        assert len(here) == len(there) >= {"two": 2, "few": 9, "all": 20}[which]
        for name, steps in here.items():
            assert all(step["sent"] for step in steps)
            assert len({str(step["sent"]) for step in steps}) == STEPS, f"{name} always sends the same"
            wrong += differing(f"rank {rank}, {name}", steps, there[name])
    record_property(
        f"payloads {front} {device}", {"samples": len(here), "steps": STEPS, "ranks": WORLD, "differing": wrong}
    )
    assert not wrong


def differing(name: str, here: Steps, there: Steps) -> list[str]:
    """Return where two runs differ."""
    return [
        f"{name}, step {step}: {what}"
        for step, (a, b) in enumerate(zip(here, there, strict=True))
        for what in a
        if a[what] != b[what]
    ]


def without_sent(steps: Steps) -> Steps:
    return [{what: value for what, value in step.items() if what != "sent"} for step in steps]


RESUMED = [
    pytest.param(("torch", "staged", "few"), marks=slow),
    *(pytest.param((front, "cuda:0", "all"), marks=gpu) for front in FRONTS),
]


@cache
def whole(front: str, device: str, which: str, folder: str) -> list[Any]:
    """Return the reports of whole runs on both, which have saved after some steps."""
    return job(front, which, devices=["cpu", device], save=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("place", RESUMED, ids=" ".join)
@pytest.mark.parametrize("back", [False, True], ids=["here", "there"])
def test_a_state_resumes_on_the_other_device(
    place: tuple[str, str, str], back: bool, saved: Path, record_property: Record
) -> None:
    """On the CPU, in processes that see no GPU, what was saved on the device; and on the device what the CPU saved."""
    front, device, which = place
    needs_front(front)
    folder = str(saved / front / device.replace(":", ""))
    before = whole(front, device, which, folder)
    frm, to = ("cpu", device) if back else (device, "cpu")
    hidden = {} if back else {"CUDA_VISIBLE_DEVICES": ""}
    load = {"folder": folder, "device": frm}
    after = job(front, which, devices=[to], steps=[SAVED_AFTER, STEPS], load=load, env=hidden)
    wrong = []
    for rank, (report, resumed) in enumerate(zip(before, after, strict=True)):
        for name, steps in parts(resumed, to).items():
            # Payloads may differ once, in padding that nothing reads: its memory is new here, and not in the whole run.
            here, there = map(without_sent, (parts(report, frm)[name][SAVED_AFTER:], steps))
            wrong += differing(f"rank {rank}, {name}", here, there)
    record_property(f"resume {front} {frm} to {to}", {"samples": len(parts(after[0], to)), "differing": wrong})
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("front", FRONTS)
def test_results_over_nccl_are_those_of_cpus(front: str) -> None:
    """With a rank for each GPU."""
    needs_front(front)
    world = torch.cuda.device_count()
    if world < 2:
        pytest.skip("one GPU: ranks that share it cannot use NCCL; test_nccl.py has a communicator of one rank")
    here = job(front, "few", world, devices=["cpu"])
    there = job(front, "few", world, devices=["cuda"], transport="nccl")
    wrong = []
    for report, on_gpu in zip(here, there, strict=True):
        for name, steps in parts(on_gpu, "cuda").items():
            wrong += differing(name, without_sent(parts(report, "cpu")[name]), without_sent(steps))
    assert not wrong
