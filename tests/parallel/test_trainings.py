"""Random trainings find the same bits on all ranks, and whether or not they were saved and resumed on the way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.jobs import run_ranks

#: State that is cleared; resumes where an exact round is due that was not used, where elements have just been left out
#: for the last time, and, without Horovod, where one of two optimizers has used that round, and where a group whose
#: second moment was saved is added between load and first gradient.
QUICK = (32, 158, 160, 170, 31)
ALL, AT_ONCE = 240, 24
WAYS = [("torch", True), ("torch", False), ("horovod", False)]


def check(front: str, plain: bool, numbers: Sequence[int]) -> None:
    if front == "horovod":
        pytest.importorskip("horovod.torch")
    given = {"numbers": [*numbers], "plain": plain}
    one, other = run_ranks(2, "trainings.py", timeout=500.0, arguments=given, front=front).values()
    assert {number: found["differs"] for number, found in one.items() if found.get("differs")} == {}
    assert one == other
    trained = [found for found in one.values() if "weights" in found]
    assert len(trained) >= len(numbers) // 2, "most draws are not refused for their options"


@pytest.mark.parametrize(("front", "plain"), [WAYS[0], WAYS[-1]])
def test_a_few_find_the_same_bits(front: str, plain: bool) -> None:
    check(front, plain, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, ALL, AT_ONCE))
@pytest.mark.parametrize(("front", "plain"), WAYS)
def test_many_find_the_same_bits(front: str, plain: bool, first: int) -> None:
    check(front, plain, range(first, first + AT_ONCE))
