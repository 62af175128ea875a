"""Pruned weights and padding rows in real jobs: they stay exactly 0 under both fronts."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_compress.codecs.registry import methods
from tests.support.jobs import run_ranks
from tests.support.marks import slow

SECONDS = 280.0
FEW = {"second_moment": "shared", "warmup_steps": 3, "rebuild_every": 10}
#: With Adam, and with masks; in each the control is the same without what keeps zeros.
CASES: dict[str, dict[str, Any]] = {
    "held": {"method": "marsit", "adam": True, "attach": FEW, "steps": 14},
    "own": {"method": "marsit", "adam": True, "attach": {"second_moment": "own"}, "steps": 14},
    "masked": {"method": "signsgd", "masked": True, "steps": 6},
    "unmasked": {"method": "signsgd", "steps": 6},
    "late": {"method": "powersgd", "masked": True, "adam": True, "attach": FEW, "steps": 14, "late": 7},
    "late, unmasked": {"method": "powersgd", "adam": True, "attach": FEW, "steps": 14, "late": 7},
    "one bit": {"method": "marsit", "masked": True, "adam": True, "attach": FEW, "steps": 14, "late": 5},
    "resumed": {
        "method": "marsit", "masked": True, "adam": True, "attach": FEW, "steps": 14, "late": 5, "resumes": 9,
    },
    # The last one, as it ends with an error.
    "differs": {"method": "marsit", "masked": True, "steps": 8, "differs": 4},
}  # fmt: skip
LONG = 200


def run(front: str, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = run_ranks(2, "zeros.py", timeout=SECONDS, arguments={"cases": cases}, front=front).reports
    for name in cases:
        assert len({report[name].get("weights") for report in found}) == 1, name
    return found


@pytest.fixture(scope="module", params=[*slow("torch"), "horovod"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run(request.param, CASES)


def test_zeros_stay_zeros_under_both_fronts(found: list[dict[str, Any]]) -> None:
    for name in ("held", "masked", "late", "one bit"):
        assert found[0][name]["pruned"] == 0 and found[0][name]["padding"] == 0 and found[0][name]["others"] > 0.9, name
    for name in ("own", "unmasked", "late, unmasked"):  # the controls
        assert found[0][name]["pruned"] > 100, name


def test_a_job_that_resumes_has_the_same_bits(found: list[dict[str, Any]]) -> None:
    for report in found:
        assert report["resumed"]["weights"] == report["one bit"]["weights"] != report["late"]["weights"]


def test_a_mask_that_differs_is_refused(found: list[dict[str, Any]]) -> None:
    for report in found:
        assert "mask" in report["differs"]["refused"]


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("front", ["torch", "horovod"])
def test_every_method_for_long(front: str, adam: bool) -> None:
    cases = {name: {"method": name, "adam": adam, "masked": not adam, "steps": LONG} for name in methods()}
    ours, _ = run(front, cases)
    assert {name: (case["pruned"], case["padding"]) for name, case in ours.items()} == dict.fromkeys(cases, (0, 0))
