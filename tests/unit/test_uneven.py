"""Uneven batches: what a token's sum shows, and when a rank in hvd.join() is found out."""

from __future__ import annotations

from itertools import product

import pytest

from horovod_compress.engine.agreement.notes import Uneven, joined, refusal
from horovod_compress.errors import ConfigError
from horovod_compress.exchange.transports.local import Hub


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_sum_of_a_part_of_the_ranks_shows_who_is_missing(world: int, averaged: bool) -> None:
    values = [1.0, *[3.0] * (world - 1)]
    for here in product((False, True), repeat=world):
        token = sum(value for value, takes_part in zip(values, here, strict=True) if takes_part) / (
            world if averaged else 1
        )
        found = joined(token, values, averaged)
        missing = [rank for rank in range(world) if not here[rank]]
        if not missing:
            assert found is None
            continue
        assert found is not None and found.startswith("rank(s) 0") == (0 in missing)
        others = len(missing) - (0 in missing)
        assert (f"{others} of the ranks 1 to {world - 1}" in found) == (0 < others < world - 1)
        if others == world - 1:
            assert found.endswith(", ".join(map(str, missing)))


def test_other_sums_show_nothing() -> None:
    assert joined(2.5, [1.0, 3.0, 3.0], False) is None


def ranks(world: int) -> tuple[list[Uneven], set[int]]:
    """Return all ranks' parts, and the ranks that are in ``hvd.join()``: none yet."""
    joined: set[int] = set()
    made = [Uneven(t, lambda rank=t.rank: rank in joined) for t in Hub(world).transports()]
    return made, joined


def test_a_rank_in_join_that_others_wait_for_is_refused() -> None:
    (joining, waiting, other), joined = ranks(3)
    joined.add(0)
    joining.check(5)
    waiting.waits(5)
    other.waits(4)
    with pytest.raises(
        ConfigError, match=r"called hvd.join\(\) before step 5, in which rank\(s\) 1 are waiting"
    ) as caught:
        joining.check(5)
    assert isinstance(refusal({2: {"peer": 0}, 0: {"why": str(caught.value)}}), ConfigError)
    assert refusal({2: {"peer": 0}, 0: {"why": "another reason"}}) is None


def test_nothing_else_is() -> None:
    (idle, waiting), joined = ranks(2)
    waiting.waits(5)
    idle.check(5)  # slow, but not in join
    joined.add(0)
    idle.check(6)  # the other one is about to finish the step that this one has finished
    idle.resume()
    idle.check(5)  # what it said was before a resume
