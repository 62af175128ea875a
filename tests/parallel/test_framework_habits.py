"""What Accelerate, Lightning and the Trainer do beside a plain loop: exchanged, or told of."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.jobs import run_ranks, values_of


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_ranks(2, "framework_habits.py", timeout=120.0, front="torch").reports


def test_a_wrapper_stands_for_the_optimizer_in_it(reports: list[dict[str, Any]]) -> None:
    first, second = values_of(reports, "wrapped optimizer")
    assert first == second
    *wrapped, alone = first
    assert all(one == alone for one in wrapped) and alone[0] == 4, "all four second moments are held"


def test_a_wrapper_for_updates_is_refused_by_name(reports: list[dict[str, Any]]) -> None:
    for *wrapped, alone in values_of(reports, "wrapped for updates"):
        assert all("of a wrapper, give the optimizer that it wraps" in text for text in wrapped)
        assert alone == "accepted"


def test_a_last_pass_within_the_closure_is_an_exchange(reports: list[dict[str, Any]]) -> None:
    first, second = values_of(reports, "accumulated")
    assert first == second
    assert [texts for texts, _ in first] == [[], []]


def test_steps_without_any_exchange_are_told_of(reports: list[dict[str, Any]]) -> None:
    """The control of the test above."""
    first, second = values_of(reports, "never exchanged")
    assert all(len(texts) == 1 for texts, _ in first) and not any(texts for texts, _ in second)
    assert all(mine != others for (_, mine), (_, others) in zip(first, second, strict=True))


def test_an_adapter_that_was_frozen_is_told_of_though_nothing_else_trains(reports: list[dict[str, Any]]) -> None:
    first, second = values_of(reports, "switched")
    assert [len(texts) for texts in first] == [1] * 4 and not any(second)
    assert all("1.weight, 1.bias" in text for (text,) in first)
    assert values_of(reports, "switched to another") == [[], []]


def test_a_wrapper_is_registered_once(reports: list[dict[str, Any]]) -> None:
    for report in values_of(reports, "registered again"):
        assert all("was registered before" in text and "wrap the model again" in text for text in report)
