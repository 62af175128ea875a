"""What ranks compare before they exchange anything: their step, their buckets, and what else they are told to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from horovod_compress.engine.agreement.differences import explaining
from horovod_compress.engine.agreement.handshake import Document, check
from horovod_compress.errors import ConfigError, ExchangeError, MismatchError
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import Plan
from tests.support.local import Fleet, all_same, random_grads, spec

WORLD = 3
TENSORS = [spec("a", 40), spec("b", 9, 30), spec("c", 70)]


def _fleet() -> Fleet:
    return Fleet(WORLD, TENSORS, "marsit", schedule="layerwise", timeout=5.0)


def _replan(fleet: Fleet, rank: int, schedule: str | Plan) -> None:
    """Let one rank go on with other buckets, as a state of its own would; the order of tensors stays."""
    reducer = fleet.reducers[rank]
    reducer.replan(make_plan(schedule, fleet.tensors, 0, fleet.methods.number))
    reducer.resume(reducer.next_step())


def _texts(fleet: Fleet) -> list[str]:
    """Return what every rank says of a step that cannot be, at an offer already or at the result."""
    grads = random_grads(WORLD, TENSORS)

    def text(rank: int) -> str:
        reducer = fleet.reducers[rank]
        with pytest.raises(MismatchError) as caught:
            for index, tensor in enumerate(TENSORS):
                step = reducer.offer(index, grads[rank][tensor.name])
            reducer.result(0, step)
        return str(caught.value)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(text, range(WORLD)))


def test_buckets_that_differ_are_told_from_frames_that_are_corrupt() -> None:
    """The number of buckets differs too, and so does what the first one holds."""
    with _fleet() as fleet:
        _replan(fleet, 1, "single")
        for rank, text in enumerate(_texts(fleet)):
            assert f"rank {rank}: the buckets differ between ranks, on rank(s) 1 from the others" in text
            assert "schedule=" in text and "load_state_dict()" in text


def test_as_many_buckets_that_hold_other_tensors_differ() -> None:
    ours, other = (Plan.of([(TENSORS[:n], 1), (TENSORS[n:], 1)]) for n in (1, 2))
    with Fleet(WORLD, TENSORS, "none", schedule=ours, timeout=5.0) as fleet:
        _replan(fleet, 2, other)
        assert all("on rank(s) 2 from the others" in text for text in _texts(fleet))


def test_steps_that_differ_come_first() -> None:
    with _fleet() as fleet:
        _replan(fleet, 1, "single")
        fleet.reducers[1].resume(7)
        for text in _texts(fleet):
            assert "rank 0 at step 0, rank 1 at step 7, rank 2 at step 0" in text


def test_equal_buckets_are_accepted_again_after_a_resume() -> None:
    with _fleet() as fleet:
        for number in range(3):
            for rank in range(WORLD):
                assert fleet.reducers[rank].wait_idle(5.0)
                _replan(fleet, rank, "single" if number % 2 else "layerwise")
            assert all_same(fleet.step(random_grads(WORLD, TENSORS, seed=number)))


def test_an_error_says_what_differs_also_where_the_numbers_of_ranks_are_explained() -> None:
    differing = [Document({"world": 2, "parameter 0": f"weight [{rank}]"}) for rank in range(2)]
    with pytest.raises(MismatchError, match=r"agree on parameter 0: .*\. Rank 1 is rank 3\.$") as caught:
        with explaining("Rank 1 is rank 3."):
            check(differing)
    assert caught.value.about == "parameter 0"


def test_an_error_in_numbers_of_the_job_is_not_explained() -> None:
    error = ConfigError("rank 4 is late")
    error.of_job = True
    with pytest.raises(ConfigError, match=r"is late$"), explaining("Rank 1 is rank 3."):
        raise error


def test_a_rank_that_does_not_come_to_compare_is_told_of_with_the_step_that_it_misses() -> None:
    with Fleet(2, TENSORS, "none", schedule="layerwise", timeout=1.0) as fleet:
        fleet.step(random_grads(2, TENSORS))
        fleet.reducers[1].freeze([0])
        for index, tensor in enumerate(TENSORS):
            step = fleet.reducers[1].offer(index, torch.ones(tensor.shape))
        with pytest.raises(ExchangeError, match="during agree of bucket 0, step 1 "):
            fleet.reducers[1].result(0, step)
