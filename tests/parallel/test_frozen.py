"""A frozen parameter does not move, and all ranks freeze, or load a state, in the same step or are told."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.marks import slow

PATHS = ("stock", "attached", "update")
METHODS = (("topk", "plain"), ("topk", "momentum"), ("marsit", "plain"), ("marsit", "adam"))
CHANGES = ("load", "freeze")
QUICK: dict[str, Any] = {
    "kinds": [("stock", "topk", "momentum"), ("attached", "marsit", "adam"), ("update", "topk", "plain")],
    "left over": ["stock"],
    "rest": False,
    "alone": {"attached": ["nothing", "load"]},
}
ALL: dict[str, Any] = {
    "kinds": [(path, *method) for path, method in product(PATHS, METHODS)],
    "left over": PATHS,
    "rest": True,
    "alone": {path: ["nothing", *CHANGES] for path in PATHS},
}


@cache
def job(quick: bool) -> list[dict[str, Any]]:
    return run_ranks(2, "frozen.py", timeout=280, arguments=QUICK if quick else ALL).values()


@pytest.mark.parametrize(
    ("quick", "case"),
    [*((True, case) for case in QUICK["kinds"]), *slow(*((False, case) for case in ALL["kinds"]))],
    ids=str,
)
def test_a_frozen_parameter_does_not_move(quick: bool, case: tuple[str, str, str]) -> None:
    for report in job(quick):
        rests, control = report[f"{' '.join(case)} frozen"], report[f"{' '.join(case)} free"]
        assert rests["moved"] == 0.0 and rests["waits as before"] and rests["others move"], rests
        assert rests["moves again"] > 1e-5 and rests["same ranks"], rests
        assert control["moved"] > 1e-5 and control["same ranks"], control


@pytest.mark.parametrize(
    ("quick", "case"),
    [(True, "stock left over"), *slow(*((False, f"{path} left over") for path in PATHS), (False, "searching"))],
)
def test_neither_old_gradients_nor_a_search_move_it(quick: bool, case: str) -> None:
    for report in job(quick):
        rests = report[case]
        assert rests["moved"] == 0.0 and rests["others move"] and rests["same ranks"], rests


@pytest.mark.slow
def test_it_rests_after_a_resume_between_two_exchanges() -> None:
    for report in job(False):
        assert report["resumed"] == [True, True, True]


@pytest.mark.parametrize(
    ("quick", "path", "change"),
    [(True, "attached", "load"), *slow(*((False, path, change) for path, change in product(PATHS, CHANGES)))],
)
def test_a_change_on_one_rank_alone_is_told_on_all(quick: bool, path: str, change: str) -> None:
    for report in job(quick):
        text = report[f"alone {change} {path}"]
        assert text.startswith("MismatchError") and "on every rank, between the same two steps" in text, text
        assert report[f"alone nothing {path}"] == "accepted"
