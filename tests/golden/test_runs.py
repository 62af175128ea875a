"""Whole runs find what they have always found: results, all that is kept, bytes sent, weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.golden import runs
from tests.golden.play import TORCH_ROUNDS_ALIKE

pytestmark = pytest.mark.usefixtures("one_thread")  # the ranks are threads themselves

GOLDEN: dict[str, Any] = json.loads(runs.FILE.read_text())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if run.quick else [pytest.mark.slow]) for name, run in runs.RUNS.items()],
)
def test_a_run_finds_what_it_always_found(name: str) -> None:
    run = runs.RUNS[name]
    if run.by_torch and not TORCH_ROUNDS_ALIKE:
        pytest.skip("torch rounds differently on this processor")
    assert run.play() == GOLDEN[name]


def test_the_file_holds_every_case() -> None:
    """Those of a new codec are added with `python -m tests.golden.runs`."""
    assert set(GOLDEN) == set(runs.RUNS)


def test_runs_can_differ() -> None:
    """The control: what differs in a run shows in what is written down."""
    others = [sample for sample in runs.FIRST if sample.method != "homomorphic"]  # its results are those of none
    results = [json.dumps(GOLDEN[f"{sample.name} | float32"]["results"]) for sample in others]
    assert len(set(results)) == len(results)
    kinds = {kind for found in GOLDEN.values() for kind in found.get("kept", ())}
    assert kinds == {"carry", "last_step", "momentum", "residual", "server", "table", "waiting"}
    first = next(sample.name for sample in runs.FIRST if sample.method == "marsit")
    for other in ("sum", "frozen", "sparse", "nonfinite zero", "other buckets", "plain bucket", "warm-up"):
        assert GOLDEN[f"{first} | {other}"]["results"] != GOLDEN[f"{first} | float32"]["results"], other


@pytest.mark.parametrize(
    "name",
    [
        "onebit_adam scale=l2 block=2048 owner_scale=own | AdamW, masked",
        "marsit merge=shaped step_size=row full_precision_every=3 levels=2 | AdamW, masked",
    ],
)
def test_a_run_does_not_depend_on_torchs_default_type(name: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = runs.RUNS[name].play()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {k: v for k, v in found.items() if k != "weights"} == {
        k: v for k, v in GOLDEN[name].items() if k != "weights"
    }
