"""What must change no bit: how chunks are cut into frames, and how many threads there are."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from horovod_compress.codecs.base import Algebra, Codec, variants_of
from horovod_compress.engine.bucket import memory
from horovod_compress.exchange import collective, fold
from horovod_compress.schedule.plan import Bucket
from tests.battery.cases import each_case
from tests.battery.kept import kept, same
from tests.support.local import all_same, one_tensor, random_grads, spec
from tests.support.samples import FEW, Sample

TENSORS = [spec("a", 5000), spec("b", 301, 7), spec("c", 1)]


def _cut(codec: Codec) -> bool:
    """Return whether chunks can be cut: a record goes whole."""
    layouts = [k.layout(Bucket(0, tuple(TENSORS)), 3) for k in variants_of(codec) if k.algebra is not Algebra.GATHER]
    return any(count // lay.records.get(n, 1) > 3 for lay in layouts for n, (_, count) in lay.regions.items())


@each_case(_cut, quick=FEW)
def test_segments(case: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preludes are folded here, as where they are large: those that go everywhere are one segment."""
    monkeypatch.setattr(memory, "for_prelude", lambda nbytes, world: fold)

    def run(exchange: str) -> tuple[list, int]:
        with case.fleet(3, TENSORS, exchange=exchange) as fleet:
            results = [fleet.step(random_grads(3, TENSORS, seed=number)) for number in range(3)]
            rounds = [r for s in fleet.reducers[0].buckets for r in s.rounds.kinds.values()]
            return [*chain.from_iterable(results), *kept(fleet)], max(r.layout.most_segments for r in rounds)

    for exchange in case.exchanges():
        whole, one = run(exchange)
        with monkeypatch.context() as patch:
            patch.setattr(collective, "MIN_SEGMENT_BYTES", 64)
            patch.setattr(collective, "MAX_SEGMENTS", 9)
            cut, several = run(exchange)
        assert one == 1 and several > 1
        assert same(whole, cut)


@each_case(quick=FEW)
def test_threads(case: Sample) -> None:
    tensors = [spec("a", 200_001), spec("b", 301, 70)]
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            with case.fleet(2, tensors) as fleet:
                results = [fleet.step(random_grads(2, tensors, seed=number)) for number in range(2)]
                found.append([*chain.from_iterable(results), *kept(fleet)])
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1]) and same(found[0], found[2])


@each_case()
def test_a_large_odd_length(case: Sample) -> None:
    """Long enough for several segments, and for decoding in parts where a method can."""
    count = 1_000_003
    grads = [{"a": grad} for grad in one_tensor(2, count, seed=9)]
    with case.fleet(2, [spec("a", count)]) as fleet:
        for _ in range(2):
            results = fleet.step(grads)
            assert all_same(results) and bool(results[0]["a"].isfinite().all())
