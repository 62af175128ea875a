"""SparDL against its rule in plain NumPy; what it keeps, for any number of ranks; and its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.spardl import SparDL
from horovod_compress.codecs.topk import TopK
from horovod_compress.engine.buckets import BucketState
from horovod_compress.errors import ConfigError, HorovodCompressError
from horovod_compress.exchange.collective import chunk_bounds
from horovod_compress.schedule.plan import Bucket
from tests.property.test_sparse_methods_laws import largest
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import each_value, slow

F64 = torch.float64
WORLDS = [1, 2, 3, 4, 5]
#: Tensors of one owner and of several, fewer elements than ranks, and none.
SHAPES: list[tuple[str, tuple[int, ...]]] = [("a", (700,)), ("b", (3,)), ("empty", (0,)), ("c", (9, 40)), ("d", ())]


def tensors_of(dtype: torch.dtype) -> list:
    return [spec(name, *shape, dtype=dtype) for name, shape in SHAPES]


def stretches_of(state: BucketState) -> list:
    return state.round(0).work.memo["stretches"]


def kept_on(fleet: Fleet) -> list[dict[str, Tensor]]:
    return [{name: kept.double() for name, kept in mine.items()} for mine in fleet.residuals()]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_the_rule(density: float, world: int) -> None:
    tensors = tensors_of(F64)
    residuals = [{t.name: np.zeros(t.count) for t in tensors} for _ in range(world)]
    with Fleet(world, tensors, "spardl", density=density) as fleet:
        stretches = stretches_of(fleet.reducers[0].buckets[0])
        for step in range(4):
            grads = random_grads(world, tensors, seed=step)
            results = fleet.step(grads)
            assert all_same(results)
            for s in stretches:
                name, here = tensors[s.position].name, slice(s.start, s.stop)
                xs = [
                    kept[name][here] + mine[name].flatten().numpy()[here]
                    for kept, mine in zip(residuals, grads, strict=True)
                ]
                sent = [np.where(np.isin(np.arange(s.count), largest(x, s.most)), x, 0) for x in xs]
                total = np.sum(sent, axis=0)
                final = np.isin(np.arange(s.count), largest(total, s.most))
                result = np.where(final, total, 0)
                assert np.allclose(results[0][name].flatten()[here], result / world, rtol=1e-12, atol=1e-14)
                for kept, x, mine in zip(residuals, xs, sent, strict=True):
                    kept[name][here] = np.where(final, x - mine, x)
        for found, wanted in zip(kept_on(fleet), residuals, strict=True):
            assert all(np.allclose(found[name], kept, rtol=1e-12, atol=1e-14) for name, kept in wanted.items())


@each_value
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("value_bits", "dtype"), [(32, torch.float32), (16, torch.float32), (16, F64), *slow((32, F64))], ids=str
)
def test_results_and_residuals_are_the_inputs_to_the_bit(world: int, value_bits: int, dtype: torch.dtype) -> None:
    """Of whole numbers, whose sums are exact: 16 bits round them, and what that takes is kept as well."""
    tensors = tensors_of(dtype)
    generator, rounded = torch.Generator().manual_seed(world), False
    with Fleet(world, tensors, "spardl", density=0.05, value_bits=value_bits) as fleet:
        for reducer in fleet.reducers:
            reducer.result_scale = float(world)
        for _ in range(6):
            before = kept_on(fleet)
            grads = [
                {t.name: torch.randint(-9999, 9999, t.shape, generator=generator).to(dtype) for t in tensors}
                for _ in range(world)
            ]
            results, after = fleet.step(grads), kept_on(fleet)
            for t in tensors:
                given = sum(g[t.name].double().flatten() + kept[t.name] for g, kept in zip(grads, before, strict=True))
                waits = torch.stack([kept[t.name] for kept in after])
                result = results[0][t.name].double().flatten()
                assert torch.equal(result + waits.sum(0), given)
                rounded = rounded or bool(((result != 0) & (waits != 0)).any())
                assert int((result != 0).sum()) <= max(1, -(-t.count // 20)) and (not t.count or result.any())
    assert rounded == (value_bits == 16 or world > 1)


@pytest.mark.parametrize("world", [2, 3, 5, 16, 64])
def test_a_rank_sends_twice_its_share_and_no_more_with_more_ranks(world: int) -> None:
    """At most 2 (M-1) records, each of the bytes of k/M entries."""
    bucket = Bucket(0, (spec("w", 1000, 1000), spec("b", 1000)))
    for codec, gathered in ((SparDL(), TopK()), (SparDL(value_bits=16), TopK(value_bits=16))):
        layout = codec.layout(bucket, world)
        (_, total), record = layout.regions["records"], layout.records["records"]
        chunks = [stop - start for start, stop in (chunk_bounds(total, rank, world, record) for rank in range(world))]
        assert chunks == [record] * world
        payload = gathered.layout(bucket, 1).regions["payload"][1]
        assert total <= 1.02 * payload + 64 * world


def test_more_ranks_than_entries_leave_some_without_a_chunk() -> None:
    layout = SparDL(density=0.01).layout(Bucket(0, (spec("w", 200), spec("b", 1))), 5)
    assert layout.regions["records"][1] == 3 * layout.records["records"]
    assert SparDL().layout(Bucket(0, (spec("nothing", 0),)), 3).regions["records"][1] == 0


def test_what_cancels_stays_with_its_ranks_and_does_not_keep_others_from_being_sent() -> None:
    """Opposite values on two ranks are sent, but their sum is not among the largest."""
    mine = torch.tensor([100.0, 3, 0, 0, 0, 0, 0, 0])
    other = torch.tensor([-100.0, 0, 4, 0, 0, 0, 0, 0])
    with Fleet(2, [spec("w", 8)], "spardl", density=0.5) as fleet:
        results = fleet.step([{"w": mine}, {"w": other}], 2.0)
        assert results[0]["w"].tolist() == [0, 3, 4, 0, 0, 0, 0, 0]
        assert [float(kept["w"][0]) for kept in fleet.residuals()] == [100, -100]


def test_an_owner_refuses_what_no_rank_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = SparDL.encode

    def broken(self: SparDL, work: object, parts: object, key: object) -> None:
        encode(self, work, parts, key)  # type: ignore[arg-type]
        work.regions["records"][4:8] = 255  # type: ignore[attr-defined]  # the number of the first range's values

    tensors = [spec("a", 100)]
    grads = random_grads(2, tensors)
    with Fleet(2, tensors, "spardl", density=0.1) as fleet:
        assert all_same(fleet.step(grads))  # the control
        monkeypatch.setattr(SparDL, "encode", broken)
        step = fleet.offer(grads)
        for reducer in fleet.reducers:
            with pytest.raises(HorovodCompressError, match="malformed"):
                reducer.result(0, step)


@pytest.mark.parametrize("options", [{"density": 0}, {"density": 1.5}, {"density": True}, {"value_bits": 3}])
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SparDL(**options)  # type: ignore[arg-type]
