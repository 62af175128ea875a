"""Top-k, sparse ternary, deep gradient compression and random-k against their rules, in plain NumPy once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from horovod_compress.codecs import sparse_binary
from horovod_compress.codecs.base import variants_of
from horovod_compress.codecs.dgc import Dgc
from horovod_compress.codecs.randomk import RandomK
from horovod_compress.codecs.shared import sections
from horovod_compress.codecs.shared.sections import Sections
from horovod_compress.codecs.stc import Stc
from horovod_compress.codecs.topk import TopK
from horovod_compress.codecs.work import Part, Work
from horovod_compress.errors import ConfigError, CorruptFrameError, HorovodCompressError
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec

WORLD, COUNT = 3, 700


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return where the k largest magnitudes are."""
    order = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.sort(order[x[order] != 0])


def kept_on(fleet: Fleet, rank: int, kind: str = "residual") -> np.ndarray:
    return fleet.reducers[rank].buckets[0].memory.state[kind][:COUNT].double().numpy()


@pytest.mark.parametrize("method", ["topk", "stc"])
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_the_rule(method: str, density: float) -> None:
    k = {0.01: 7, 0.3: 210}[density]
    residuals = np.zeros((WORLD, COUNT))
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float64)], method, density=density) as fleet:
        for step in range(4):
            grads = one_tensor(WORLD, COUNT, seed=step)
            grads = [grad.double() for grad in grads]
            total = np.zeros(COUNT)
            for rank, grad in enumerate(grads):
                x, sent = residuals[rank] + grad.numpy(), np.zeros(COUNT)
                at = largest(x, k)
                sent[at] = x[at] if method == "topk" else np.sign(x[at]) * np.abs(x[at]).mean()
                residuals[rank], total = x - sent, total + sent
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            assert all_same(results)
            assert np.allclose(results[0]["w"].numpy(), total / WORLD, rtol=1e-12, atol=1e-14)
            for rank in range(WORLD):
                assert np.allclose(kept_on(fleet, rank), residuals[rank], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("masking", [True, False])
def test_the_rule_of_dgc(masking: bool) -> None:
    """The state "residual" is v + momentum * u."""
    u, v, m = np.zeros((WORLD, COUNT)), np.zeros((WORLD, COUNT)), 0.75
    options = {"density": 0.05, "momentum": m, "masking": masking}
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float64)], "dgc", **options) as fleet:
        for step in range(6):
            grads = [grad.double() for grad in one_tensor(WORLD, COUNT, seed=step)]
            total = np.zeros(COUNT)
            for rank, grad in enumerate(grads):
                u[rank] = m * u[rank] + grad.numpy()
                v[rank] += u[rank]
                at = largest(v[rank], 35)
                total[at] += v[rank][at]
                v[rank][at] = 0
                if masking:
                    u[rank][at] = 0
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            assert np.allclose(results[0]["w"].numpy(), total / WORLD, rtol=1e-12, atol=1e-13)
            for rank in range(WORLD):
                assert np.allclose(kept_on(fleet, rank, "momentum"), u[rank], rtol=1e-12, atol=1e-13)
                assert np.allclose(kept_on(fleet, rank), v[rank] + m * u[rank], rtol=1e-12, atol=1e-13)


def test_dgc_of_everything_is_momentum_sgd() -> None:
    """With density 1 and no masking the result of every step is the mean of u; with masking it is not."""
    u, m = torch.zeros(WORLD, COUNT), 0.9
    options = {"density": 1.0, "momentum": m}
    with (
        Fleet(WORLD, [spec("w", COUNT)], "dgc", masking=False, **options) as fleet,
        Fleet(WORLD, [spec("w", COUNT)], "dgc", **options) as masked,
    ):
        for step in range(5):
            grads = one_tensor(WORLD, COUNT, seed=step)
            u = m * u + torch.stack(grads)
            mean = (u[0] + u[1] + u[2]) * torch.tensor(1 / WORLD)
            assert torch.equal(fleet.step([{"w": grad.clone()} for grad in grads])[0]["w"], mean)
            other = masked.step([{"w": grad.clone()} for grad in grads])[0]["w"]
            assert torch.equal(other, mean) == (step == 0)


def test_the_densities_of_a_warm_up() -> None:
    codec = Dgc(density=0.001, ramp_steps=8)
    assert [codec.for_step(step).density for step in range(0, 10, 2)] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert codec.for_step(7).density == 0.00390625 and codec.for_step(10**6) == Dgc(density=0.001)
    assert {codec.for_step(step) for step in range(9)} == set(variants_of(codec))
    assert variants_of(Dgc(density=0.3, ramp_steps=5)) == (Dgc(density=0.3),)
    assert {Dgc(ramp_steps=2).for_step(step) for step in range(5)} == set(variants_of(Dgc(ramp_steps=2)))


def test_the_places_of_randomk_are_those_of_all_ranks() -> None:
    """Result and residuals have no place in common; each block has one, and another in the next round."""
    places = []
    with Fleet(WORLD, [spec("w", COUNT)], "randomk", density=0.01) as fleet:
        for step in range(3):
            grads = [grad.abs() + 1 for grad in one_tensor(WORLD, COUNT, seed=step)]
            sent = fleet.step([{"w": grad} for grad in grads])[0]["w"].numpy() != 0
            assert sent.reshape(7, 100).sum(1).tolist() == [1] * 7
            for rank in range(WORLD):
                assert ((kept_on(fleet, rank) == 0) == sent).all()
            places.append(np.flatnonzero(sent).tolist())
    assert places[0] != places[1] != places[2]


def test_blocks_of_randomk_are_neighbours() -> None:
    """700 elements are 22 blocks of 32, the last of 28; three groups send one each, and what is not sent waits."""
    given, waits = np.zeros(COUNT), np.zeros(COUNT)
    with Fleet(WORLD, [spec("w", COUNT), spec("few", 40)], "randomk", density=0.1, block=32) as fleet:
        for step in range(5):
            grads = [grad.abs() + 1 for grad in one_tensor(WORLD, COUNT, seed=step)]
            given = sum(grad.double().numpy() for grad in grads) / WORLD
            results = fleet.step([{"w": grad, "few": torch.ones(40)} for grad in grads])
            assert all_same(results)
            sent = results[0]["w"].numpy() != 0
            blocks = np.pad(sent, (0, 4)).reshape(22, 32).sum(1)
            assert [int((part > 0).sum()) for part in np.split(blocks, [7, 14])] == [1, 1, 1]
            assert set(blocks.tolist()) <= {0, 32, 28} and blocks.sum() in (96, 92)
            assert int((results[0]["few"] != 0).sum()) == 4  # a block of what is sent
            waits = np.where(sent, 0, waits + given)
            kept = np.mean([kept_on(fleet, rank) for rank in range(WORLD)], axis=0)
            assert np.allclose(kept, waits, rtol=1e-5)
            assert np.allclose(results[0]["w"].double().numpy()[sent] > 0, True)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(count=st.integers(1, 400), percent=st.integers(1, 100), block=st.integers(1, 500), scaled=st.booleans())
def test_blocks_of_randomk_of_any_length(count: int, percent: int, block: int, scaled: bool) -> None:
    """What is sent are whole blocks, the same of all ranks; the mean of it and of what waits is all that was given."""
    most, waits = -(-percent * count // 100), np.zeros(count)
    block = min(block, most)
    groups = -(-percent * -(-count // block) // 100)  # each sends one
    options = {"density": percent / 100, "block": block, "scaled": scaled}
    with Fleet(2, [spec("w", count)], "randomk", min_elements=1, **options) as fleet:
        for step in range(3):
            grads = [grad.abs() + 1 for grad in one_tensor(2, count, seed=step)]
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            found, mean = results[0]["w"].numpy(), torch.stack(grads).double().mean(dim=0).numpy()
            sent = found != 0
            starts = range(0, count, block)
            assert all(len(set(sent[at : at + block])) == 1 for at in starts) and all_same(results)
            assert sum(bool(sent[at]) for at in starts) == groups
            if scaled:
                assert bool((found[sent] >= mean[sent] * (1 - 1e-6)).all())
                continue
            assert np.allclose(found, np.where(sent, mean + waits, 0), rtol=1e-5)
            waits = np.where(sent, 0, mean + waits)
            assert np.allclose(np.mean([kept_on(fleet, rank)[:count] for rank in range(2)], axis=0), waits, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 16])
def test_scaled_blocks_are_unbiased(block: int) -> None:
    """The mean of 400 results is within five standard deviations of the gradient; without scaling it is not."""
    grad, steps = torch.ones(130), 400
    found = {}
    for scaled in (True, False):
        with Fleet(1, [spec("w", 130)], "randomk", density=0.25, block=block, scaled=scaled) as fleet:
            total = torch.zeros(130)
            for _ in range(steps):
                total += fleet.step([{"w": grad.clone()}])[0]["w"] if scaled else 0
                if not scaled:  # what waits is put away, so that only this step's part is seen
                    fleet.reducers[0].buckets[0].memory.state["residual"].zero_()
                    total += fleet.step([{"w": grad.clone()}])[0]["w"]
            found[scaled] = float((total / steps - 1).abs().max())
    assert found[True] < 5 * (4 / steps) ** 0.5 < found[False]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {"density": density}) for kind in (TopK, Stc, Dgc, RandomK) for density in (0, 1.5, True, "1%")]
    + [
        (TopK, {"value_bits": 3}),
        (Dgc, {"value_bits": 5}),
        (Dgc, {"momentum": 1.0}),
        (Dgc, {"masking": 1}),
        (Dgc, {"ramp_steps": -1}),
    ]
    + [(RandomK, {"scaled": 1}), (RandomK, {"block": 0}), (RandomK, {"block": 1.0})],
)
def test_options_that_are_refused(kind: type, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        kind(**options)


@pytest.mark.parametrize("method", ["topk", "stc", "dgc", "sparse_binary"])
def test_malformed_sections_are_an_error_on_every_rank(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank claims more than it has, of the last tensor, and the first one is absent: the right one is named."""
    encode = Sections.encode

    def broken(self: Sections, work: Work, parts: Sequence[Part], key: Key) -> None:
        encode(self, work, parts, key)
        if key.rank == 1:
            payload, number = work.regions["payload"], len(tensors)
            begin = 4 * number + int(payload[: 4 * number].view(torch.int32)[:-1].sum())
            payload[begin : begin + 8] = 255  # the first numbers of a section: of bytes, and of values

    tensors = [spec("absent", 100), spec("whole", 120), spec("torn", 80)]
    grads = random_grads(2, tensors)
    with Fleet(2, tensors, method, density=0.1) as fleet:
        assert all_same(fleet.step(grads))
        for breaks in (False, True):  # the control first
            found = []
            if breaks:
                monkeypatch.setattr(Sections, "encode", broken)
            for reducer in fleet.reducers:
                reducer.skip(0)
            step = fleet.offer([{name: mine[name].clone() for name in ("whole", "torn")} for mine in grads])
            for reducer in fleet.reducers:
                if not breaks:
                    assert bool(reducer.result(2, step).any())
                    continue
                # A rank may hear of it from the other one before it sees it itself.
                told = r"malformed range\(s\) of positions.* for torn \(step 2"
                with pytest.raises(HorovodCompressError, match=told) as caught:
                    reducer.result(2, step)
                found.append(type(caught.value))
            assert not breaks or CorruptFrameError in found


def test_dgc_clips_each_rank_before_anything_waits() -> None:
    """Everything is sent, so the result is the mean of the ranks' gradients, each cut down for itself."""
    tensors = [spec("large", 40, 50), spec("small", 30), spec("empty", 0)]
    grads = random_grads(WORLD, tensors, seed=3)
    for mine in grads:
        mine["large"] *= 10
        mine["small"] *= 0.001
    with Fleet(WORLD, tensors, "dgc", density=1.0, momentum=0.0, clip=3.0) as fleet:
        found = fleet.step(grads)[0]
    most = 3.0 / WORLD**0.5
    want = sum(mine["large"] * (most / mine["large"].norm()) for mine in grads) / WORLD
    assert all(float(mine["large"].norm()) > most > float(mine["small"].norm()) for mine in grads)
    assert torch.allclose(found["large"], want, rtol=1e-5)
    assert torch.allclose(found["small"], sum(mine["small"] for mine in grads) / WORLD, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("scale", [1e100, 1e200])  # with squares beyond float64 the second time
def test_dgc_clips_what_has_no_squares(scale: float) -> None:
    tensors = [spec("w", 64, dtype=torch.float64)]
    grads = [{"w": grads["w"] * scale} for grads in random_grads(WORLD, tensors, seed=1)]
    with Fleet(WORLD, tensors, "dgc", density=1.0, momentum=0.0, clip=3.0) as fleet:
        due = torch.stack([one["w"] / scale / (one["w"] / scale).norm() for one in grads]).mean(0) * 3.0 / WORLD**0.5
        assert torch.allclose(fleet.step(grads)[0]["w"], due)


def test_sections_that_may_pass_what_their_table_can_say_are_refused() -> None:
    """Lengths are int32."""
    bucket = Bucket(0, (spec("w", 1 << 30),))
    TopK(density=0.01).layout(bucket, 2)
    for codec in (TopK(density=0.6), Dgc(density=0.6)):
        with pytest.raises(ConfigError, match="lower density"):
            codec.layout(bucket, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_randomk_empties_momentum_where_values_were_sent_and_only_with_a_residual(dtype: torch.dtype) -> None:
    for scaled in (False, True):
        with Fleet(1, [spec("w", COUNT, dtype=dtype)], "randomk", density=0.1, scaled=scaled) as fleet:
            for _ in range(2):
                momentum = torch.ones(COUNT, dtype=dtype)
                fleet.reducers[0].buckets.clear_where_sent(0, [momentum])
                sent = fleet.step([{"w": torch.ones(COUNT, dtype=dtype)}])[0]["w"] != 0
                assert int(sent.sum()) == 70
                assert torch.equal(momentum == 0, torch.zeros_like(sent) if scaled else sent)
                assert bool(((momentum == 0) | (momentum == 1)).all())


def test_sections_are_cut_once_for_a_bucket_also_where_momentum_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time waits for a GPU. What this rank has sent is emptied, of every tensor."""
    cuts, stock = [], sections.cut

    def cut(payloads: Any, number: int) -> Any:
        cuts.append(number)
        return stock(payloads, number)

    for module in (sections, sparse_binary):
        monkeypatch.setattr(module, "cut", cut, raising=False)
    tensors = [spec("w", COUNT), spec("v", 300)]
    with Fleet(2, tensors, "sparse_binary", density=0.1, min_elements=1, schedule="single") as fleet:
        momenta = [[torch.ones(tensor.shape) for tensor in tensors] for _ in fleet.reducers]
        for reducer, mine in zip(fleet.reducers, momenta, strict=True):
            for index, name in enumerate(reducer.plan.names()):
                reducer.buckets.clear_where_sent(index, [mine[["w", "v"].index(name)]])
        result = fleet.step(random_grads(2, tensors))[0]
    assert cuts == [2, 2], "once on each rank"
    for at, name in enumerate(("w", "v")):
        emptied = torch.stack([mine[at] == 0 for mine in momenta])
        assert torch.equal(emptied.any(dim=0), result[name] != 0) and not torch.equal(*emptied)
