"""Networks of equal shapes and names in one program, to whose gradients ranks come in another order: never swapped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import needs_front, run_ranks

WAYS = {"horovod": ("attached", "tokens"), "torch": ("plain", "ddp")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["horovod", "torch"])
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    needs_front(request.param)
    return request.param, run_ranks(2, "twins.py", timeout=300.0, front=request.param).values()


@pytest.mark.parametrize("case", ["twins", "other names", "another optimizer"])
def test_the_order_changes_nothing(found: tuple[str, list[dict[str, Any]]], case: str) -> None:
    front, reports = found
    for way in WAYS[front]:
        first, other = (report[f"{case}, {way}"] for report in reports)
        assert first["in order"] == first["crossed"] == other["in order"] == other["crossed"]


@pytest.mark.parametrize("case", ["buckets are chosen", "buckets are chosen, other names"])
def test_buckets_are_chosen_where_ranks_come_together(found: tuple[str, list[dict[str, Any]]], case: str) -> None:
    """In another order they would take each other's times, or wait for each other: the first buckets stay then."""
    front, reports = found
    for way in WAYS[front]:
        first, other = (report[f"{case}, {way}"] for report in reports)
        fixed = reports[0][f"{case.replace('buckets are chosen', 'twins').replace('twins, other', 'other')}, {way}"]
        assert all(first[order] == other[order] for order in ("in order", "crossed"))
        assert first["crossed"] == fixed["crossed"] and not any(first["chosen crossed"])
        assert all(first["chosen in order"]), "the control"
