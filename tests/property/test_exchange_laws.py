"""What holds for every method: equal bits on every rank, whatever the shapes, types and order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from horovod_compress.schedule.plan import TensorSpec
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import each_value
from tests.support.samples import samples

SAMPLES = list(samples())
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Roundings on the way: one per addition, one in the cast at the start, one in the last scaling.
_EPSILON = {"none": None, "fp16": 2.0**-11, "bf16": 2.0**-8}


@settings(max_examples=30)
@given(data=st.data())
def test_every_rank_holds_the_same_bits(data: st.DataObject) -> None:
    draw = data.draw
    world = draw(st.integers(1, 4))
    tensors = [
        spec(f"t{i}", *draw(st.sampled_from([(), (0,), (1,), (3,), (63,), (64,), (65,), (5, 7), (2, 3, 4, 5), (700,)])),
             dtype=draw(st.sampled_from(DTYPES)))
        for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    sample = draw(st.sampled_from(SAMPLES))
    options = dict(
        exchange=draw(st.sampled_from(sample.exchanges())),
        schedule=draw(st.sampled_from(["single", "layerwise", "size:1KB"])),
        min_elements=draw(st.sampled_from([0, 4, 100, 10_000])),
    )
    order = draw(st.permutations([t.name for t in tensors]))
    with sample.fleet(world, tensors, **options) as fleet:
        for number in range(3):
            copies = random_grads(world, tensors, seed=number)
            originals = [{name: grad.clone() for name, grad in mine.items()} for mine in copies]
            step = fleet.offer(copies, order)
            results = [
                {name: reducer.result(fleet._index[name], step) for name in reversed(order)}
                for reducer in fleet.reducers
            ]
            assert all_same(results)
            assert all(results[0][t.name].shape == t.shape for t in tensors)
            assert all(f"torch.{t.dtype}" == str(results[0][t.name].dtype) for t in tensors)
            assert all(result is copies[0][name] for name, result in results[0].items())
            assert all(bool(torch.isfinite(result).all()) for result in results[0].values())
            if sample.method == "none" and world == 1:
                assert all(same_bits(originals[0][n], r) for n, r in results[0].items())
        assert all(reducer.metrics.verified == (3 if world > 1 else 0) for reducer in fleet.reducers)


@each_value
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("exchange", ["ring", "fold"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["none", "fp16", "bf16"])
def test_mean_within_the_bound(method: str, dtype: torch.dtype, exchange: str, world: int) -> None:
    """|result - mean| <= (M + 1) roundings of the sum of magnitudes, in the coarsest type met."""
    tensors = [spec("a", 1001, dtype=dtype)]
    grads = random_grads(world, tensors, seed=3)
    exact = torch.stack([mine["a"].double() for mine in grads])
    with Fleet(world, tensors, method, exchange=exchange) as fleet:
        result = fleet.step(grads)[0]["a"].double()
    unit = max(torch.finfo(dtype).eps / 2, _EPSILON[method] or 0.0)
    bound = (world + 1) * unit * (1 + unit) ** world * exact.abs().mean(0) + 2.0**-24 * (method == "fp16")
    bound = bound + torch.finfo(dtype).tiny
    error = (result - exact.mean(0)).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
    assert float((error / bound).max()) > 0.02 or float(error.max()) == 0  # the bound says something


def test_buckets_do_not_mix() -> None:
    """A tensor's result depends on its bucket's key and its own values, not on its neighbours."""
    tensors = [spec("a", 100), spec("b", 100)]
    grads = random_grads(2, tensors)
    other = [{"a": mine["a"], "b": -3 * mine["b"]} for mine in grads]
    for schedule in ("single", "layerwise"):
        got = []
        for given in (grads, other):
            with Fleet(2, tensors, schedule=schedule, full_precision_every=0) as fleet:
                got.append(fleet.step(given)[0])
        assert same_bits(got[0]["a"], got[1]["a"]) and not same_bits(got[0]["b"], got[1]["b"])


def test_small_tensors_travel_uncompressed() -> None:
    tensors = [spec("big", 1000), spec("small", 10)]
    grads = random_grads(3, tensors)
    with Fleet(3, tensors, min_elements=11, full_precision_every=0) as fleet:
        result = fleet.step(grads)[0]
        assert set(fleet.residuals()[0]) == {"big"}
    mean = torch.stack([mine["small"] for mine in grads]).mean(0)
    torch.testing.assert_close(result["small"], mean)
    assert float((result["big"] - torch.stack([m["big"] for m in grads]).mean(0)).abs().max()) > 0.1


def test_bytes_sent_is_the_formula() -> None:
    """2(M-1)/M of the payload, one header per segment, and the step's number to each peer at the start."""
    for world in (2, 3, 4):
        count = 64 * 12 * 50
        for method, nbytes in (("none", 4 * count), ("fp16", 2 * count), ("marsit", count // 8)):
            options = {"full_precision_every": 0, "step_size": 0.1} if method == "marsit" else {}
            with Fleet(world, [TensorSpec("a", (count,), "float32")], method, exchange="ring", **options) as fleet:
                fleet.step(random_grads(world, fleet.tensors))
                for reducer in fleet.reducers:
                    sent = 2 * (world - 1) * (nbytes // world + 64) + (world - 1) * (64 + 48)
                    assert reducer.metrics.document()["bytes_sent"] == sent
                    assert reducer.metrics.document()["bytes_dense"] == 8 * count * (world - 1) // world
