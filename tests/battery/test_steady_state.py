"""After the first rounds nothing is allocated that stays: long-lived buffers keep their place."""

from __future__ import annotations

import psutil

from horovod_compress.codecs.base import variants_of
from horovod_compress.engine.bucket.round import Round
from horovod_compress.engine.buckets import BucketState
from tests.battery.cases import each_case
from tests.support.local import Fleet, random_grads, spec
from tests.support.samples import FEW, Sample

TENSORS = [spec("a", 300, 200), spec("b", 777), spec("c", 3)]
#: All kinds of rounds of a sample should come within so many steps.
WARM = 20
STEPS = 60


def _of_round(round_: Round) -> list[int]:
    work = round_.work
    arrays = [*work.regions.values(), *work.local.values(), *work.shared.values()]
    if round_.inbox:
        arrays += [frame.memory for frame in round_.inbox.frames.values()]
        arrays += [round_.inbox.out.memory] if round_.inbox.out else []
    return [array.data_ptr() for array in arrays]


def _of_state(state: BucketState) -> list[int]:
    found = [tensor.data_ptr() for tensor in [*state.memory.state.values(), *state.memory.tables.values()]]
    return found + [address for round_ in state.rounds.kinds.values() for address in _of_round(round_)]


def _addresses(fleet: Fleet) -> list[int]:
    """Return where every long-lived buffer of all ranks lies."""
    found: list[int] = []
    for reducer in fleet.reducers:
        found += [address for state in reducer.buckets for address in _of_state(state)]
        found += [frame.memory.data_ptr() for use in reducer.context.pool._buffers.values() for frame in use]
    return found


@each_case(quick=FEW)
def test_buffers_stay_and_memory_is_flat(case: Sample) -> None:
    codec = case.codec()
    assert {codec.for_step(step) for step in range(WARM)} == set(variants_of(codec)), "every kind of round comes soon"
    for exchange in case.exchanges():
        options = dict(exchange=exchange, schedule="layerwise", verify_every=3, min_elements=5)
        with case.fleet(2, TENSORS, **options) as fleet:
            grads = random_grads(2, TENSORS)
            for _ in range(WARM):
                fleet.step(grads)
            before, resident = _addresses(fleet), psutil.Process().memory_info().rss
            assert len(set(before)) > 10
            for _ in range(STEPS):
                fleet.step(grads)
            assert _addresses(fleet) == before
            # One float32 copy of the gradients per step and rank would be 29 MB by now.
            assert psutil.Process().memory_info().rss - resident < 10_000_000
