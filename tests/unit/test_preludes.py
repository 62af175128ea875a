"""Exchanges before the payload's: any number, small or large, and nothing where a codec has none."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Algebra, Codec, Piece, variants_of
from horovod_compress.codecs.dense import Uncompressed
from horovod_compress.codecs.work import Layout, Part, Regions, Work
from horovod_compress.engine.reducer import time_exchange
from horovod_compress.errors import ExchangeError, NonFiniteError
from horovod_compress.exchange.choose import Choose, for_prelude
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.turns import decode_in_parts

COUNT = 100_000


@dataclass(frozen=True)
class Centred(Uncompressed):
    """Sends x minus the global minimum in units of the global sum: two rounds, the second one large."""

    name: ClassVar[str] = "centred"
    algebra: ClassVar[Algebra] = Algebra.SUM

    def layout(self, bucket: Bucket, world: int) -> Layout:
        preludes: tuple[Regions, ...] = (
            {"least": (torch.float32, 1), "ranks": (torch.float64, 2)},
            {"sums": (torch.float64, bucket.padded)},
        )
        return replace(super().layout(bucket, world), preludes=preludes)

    def before(self, number: int, work: Work, key: Key) -> None:
        x = work.grad(0).double()
        if number == 0:
            work.shared["least"][0] = x.min()
            work.shared["ranks"][:] = torch.tensor([1.0, key.rank])
        elif number == 1:
            assert work.shared["ranks"].tolist() == [work.world, sum(range(work.world))]
            work.shared["sums"][: x.numel()] = x - work.shared["least"].double()

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region == "least":
            torch.minimum(piece.values, other, out=piece.values)
        else:
            ops.dense_add(piece.values, other)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        super().decode(work, parts, key, result_scale)
        for part in parts:
            own = slice(part.start, part.stop)
            x = work.grad(0)[own]
            found = (work.shared["sums"][own] / work.world + work.shared["least"].double()).float()
            assert float((found - x).abs().max()) < 1e-5
            x.copy_(found)


@pytest.mark.parametrize("least", [0, COUNT + 1])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_two_preludes_in_a_row(world: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded in one go, or in parts: the chunks of a folded prelude make no part ready."""
    decode_in_parts(monkeypatch, least)
    grads = one_tensor(world, COUNT, seed=1)
    with Fleet(world, [spec("w", COUNT)], Centred(), verify_every=1) as fleet:
        for _ in range(3):
            results = fleet.step([{"w": grad} for grad in grads])
            assert all_same(results)
            torch.testing.assert_close(results[0]["w"], torch.stack(grads).mean(0), atol=1e-6, rtol=1e-5)
        if world > 1:
            names = [p.collective.name for p in fleet.reducers[0].buckets[0].round(0).preludes]
            assert names == ["everywhere", "fold"]
            assert bool(fleet.reducers[0].buckets[0].round(0).parts) == (least == 0)


def test_the_bytes_of_preludes_are_counted() -> None:
    sent = {}
    for codec in (Uncompressed(), Centred()):
        with Fleet(3, [spec("w", 6400)], codec, verify_every=0, exchange="fold") as fleet:
            fleet.step([{"w": grad} for grad in one_tensor(3, 6400)])
            sent[codec.name] = fleet.reducers[0].metrics.bytes_sent
    assert sent["centred"] - sent["none"] == 2 * (64 + 4 + 16) + 2 * (64 + 8 * 6400)


def test_small_arrays_go_everywhere_and_large_ones_are_folded() -> None:
    assert for_prelude(4, 64).name == "everywhere" and for_prelude(256 * 1024, 2).name == "everywhere"
    assert for_prelude(256 * 1024 + 1, 2).name == "fold" and for_prelude(8192, 64).name == "fold"


def test_a_bucket_that_is_not_finite_ends_with_the_first_prelude() -> None:
    grads = one_tensor(3, 6400)
    with Fleet(3, [spec("w", 6400)], Centred(), verify_every=0) as fleet:
        fleet.step([{"w": grad} for grad in grads])
        before = [reducer.metrics.bytes_sent for reducer in fleet.reducers]
        spoilt = [{"w": grad.clone()} for grad in grads]
        spoilt[1]["w"][5] = float("nan")
        results = fleet.step(spoilt)
        assert all(bool(mine["w"].isnan().all()) for mine in results)
        after = [reducer.metrics.bytes_sent for reducer in fleet.reducers]
        assert [b - a for a, b in zip(before, after, strict=True)] == [2 * (64 + 4 + 16)] * 3
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [1] * 3
        assert bool(fleet.step([{"w": grad} for grad in grads])[2]["w"].isfinite().all())


@pytest.mark.parametrize("choice", ["propagate", "raise"])
@pytest.mark.parametrize("method", ["marsit", "global_qsgd"])
def test_results_come_in_order_whether_a_payload_was_left_out_or_not(
    method: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the bucket that is not finite has no result; those before and after it are decoded in parts."""
    decode_in_parts(monkeypatch)
    names = ["a", "b", "c"]
    tensors = [spec(name, 6400) for name in names]
    with Fleet(3, tensors, method, schedule="layerwise", min_elements=0, nonfinite=choice, verify_every=1) as fleet:
        for number in range(6):
            grads = random_grads(3, tensors, seed=number)
            spoilt = names[number % 3] if number < 4 else ""
            if spoilt:
                grads[number % 2][spoilt][100] = float("inf")
            step = fleet.offer(grads)
            for reducer in fleet.reducers:
                for index, name in enumerate(fleet.plan.names()):
                    if name == spoilt and choice == "raise":
                        with pytest.raises(NonFiniteError, match=f"not finite in step {number}"):
                            reducer.result(index, step)
                    else:
                        found = reducer.result(index, step)
                        assert bool(found.isnan().all() if name == spoilt else found.isfinite().all())
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [4] * 3


@pytest.mark.parametrize("options", [{"exchange": "ring"}, {"bits": 4}, {"dithering": "exponential"}])
def test_the_time_of_an_exchange_is_that_of_the_payload(options: dict[str, Any]) -> None:
    count, ranks = 64 * 100, 2
    grads = random_grads(ranks, [spec("w", count)], seed=1)
    found = []
    for timed in (False, True):
        with Fleet(ranks, [spec("w", count)], "global_qsgd", verify_every=0, **options) as fleet:
            fleet.step(grads)
            if timed:
                before = fleet.reducers[0].metrics.bytes_sent
                with ThreadPoolExecutor(ranks) as pool:
                    seconds = list(pool.map(lambda reducer: time_exchange(reducer, 0), fleet.reducers))
                assert min(seconds) > 0
                payload = count * options.get("bits", 8) // 8
                assert fleet.reducers[0].metrics.bytes_sent - before == payload + 2 * 64
            found.append(fleet.step(grads)[0]["w"])
    assert torch.equal(*found)


def test_a_rank_that_is_gone_during_a_prelude_is_an_error() -> None:
    with Fleet(2, [spec("w", 64)], Centred(), timeout=5.0) as fleet:
        grads = one_tensor(2, 64)
        fleet.step([{"w": grad} for grad in grads])
        step = fleet.reducers[0].offer(0, grads[0].clone())
        fleet.reducers[1].context.transport.abort({"why": "a test"})
        with pytest.raises(ExchangeError, match=r"rank 0: .*\. Rank 1 stopped first: a test\."):
            fleet.reducers[0].result(0, step)


def test_a_silent_rank_is_late() -> None:
    with Fleet(2, [spec("w", 64)], Centred(), timeout=0.3) as fleet:
        grads = one_tensor(2, 64)
        fleet.step([{"w": grad} for grad in grads])
        step = fleet.reducers[0].offer(0, grads[0].clone())
        with pytest.raises(ExchangeError, match=r"rank 1 did not answer within 0.3 s during prelude 0"):
            fleet.reducers[0].result(0, step)


@pytest.mark.parametrize("method", ["none", "fp16", "bf16", "marsit"])
def test_other_methods_have_no_prelude(method: str) -> None:
    codec: Codec = registry.create(method)
    bucket = Fleet(1, [spec("w", 100)], method).plan.buckets[0]
    assert all(kind.layout(bucket, 2).preludes == () for kind in variants_of(codec))


@pytest.mark.parametrize(("world", "short"), [(2, 0), (3, 512 << 10), (4, 1 << 20), (8, 3 << 20)])
def test_payloads_are_folded_where_the_hops_of_a_ring_would_cost_more(world: int, short: int) -> None:
    choose, codec = Choose("auto", [torch.float32]), registry.create("none")
    for nbytes in {max(0, short - 1), short}:
        assert choose(codec, nbytes, world).name == ("fold" if nbytes < short else "ring")
    native = max(256 << 10, short // 2)
    assert choose(codec, native, world, [torch.float32]).name == "native"
    assert choose(codec, native - 1, world, [torch.float32]).name == ("ring" if world == 2 else "fold")
