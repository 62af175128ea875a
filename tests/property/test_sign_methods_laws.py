"""signSGD, Signum, EF-signSGD and 1-bit SGD against their rules, through the real reducer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Piece
from horovod_compress.codecs.onebit import EfSignSgd, GatheredSigns, OneBit
from horovod_compress.codecs.signsgd import SignSgd, Signum
from horovod_compress.codecs.work import Work
from horovod_compress.errors import ConfigError, CorruptFrameError, HorovodCompressError
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket
from tests.support.local import Fleet, all_same, one_tensor, random_grads, same_bits, spec

F64 = torch.float64


# ---- votes ----


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_the_majority_is_the_sign_of_the_sum_of_signs(world: int) -> None:
    """A tie, which happens with an even number of ranks only, is +1 or a coin's, and no coin overturns a majority."""
    grads = one_tensor(world, 5000, seed=world)
    votes = torch.stack(grads).sign().sum(0)
    assert bool((votes == 0).any()) == (world % 2 == 0)
    for ties in ("positive", "random"):
        with Fleet(world, [spec("a", 5000)], "signsgd", step_size=0.5, ties=ties) as fleet:
            results = fleet.step([{"a": grad} for grad in grads])
        assert all_same(results)
        found = results[0]["a"]
        assert torch.equal(found[votes != 0], 0.5 * votes[votes != 0].sign())
        if world % 2 == 0 and ties == "random":
            assert abs(float(found[votes == 0].mean())) < 0.5 * 5 / math.sqrt(int((votes == 0).sum()))
        else:
            assert bool((found[votes == 0] == 0.5).all())


@pytest.mark.parametrize("method", ["signsgd", "signum"])
@pytest.mark.parametrize("world", [2, 4])
def test_votes_on_noise_have_no_direction(method: str, world: int) -> None:
    """With ties that are all positive the mean is half a step, or 3/8 of one."""
    count, means = 1 << 16, {}
    for ties in ("random", "positive"):
        with Fleet(world, [spec("a", count)], method, step_size=1.0, ties=ties) as fleet:
            means[ties] = float(fleet.step([{"a": grad} for grad in one_tensor(world, count, seed=3)])[0]["a"].mean())
    assert abs(means["random"]) < 5 / math.sqrt(count)
    assert abs(means["positive"] - {2: 0.5, 4: 0.375}[world]) < 5 / math.sqrt(count)


def test_coins_do_not_depend_on_who_folds_or_in_what_pieces() -> None:
    parts = [torch.randint(-(1 << 62), 1 << 62, (40,), generator=torch.Generator().manual_seed(r)) for r in range(2)]
    codec, key, whole = SignSgd(), Key(5, 6, 7, 0), parts[0].clone()
    work = Work(Bucket(0, ()), 2, [])
    codec.fold(work, Piece("bits", 100, whole, whole), [parts[1]], key)
    cut, other = parts[0].clone(), key.at(rank=1, hop=3)
    codec.fold(work, Piece("bits", 100, cut[:13], cut[:13]), [parts[1][:13]], other)
    codec.fold(work, Piece("bits", 113, cut[13:], cut[13:]), [parts[1][13:]], other)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("step_size", ["tensor", "row"])
def test_the_step_is_the_mean_magnitude(step_size: str) -> None:
    grads = one_tensor(3, 1200, seed=1)
    with Fleet(3, [spec("a", 4, 300)], "signsgd", step_size=step_size) as fleet:
        found = fleet.step([{"a": grad.view(4, 300)} for grad in grads])[0]["a"].abs()
    size = torch.stack(grads).abs().double().mean(0)
    means = size.view(4, 300).mean(1, keepdim=True).expand(4, 300) if step_size == "row" else size.mean().expand(4, 300)
    assert torch.allclose(found.double(), means, rtol=1e-6)


def test_zeros_of_all_ranks_vote_alike() -> None:
    """With coins of their own two ranks would come to +1 in three of four elements."""
    count = 1 << 16
    with Fleet(2, [spec("a", count)], "signsgd", step_size=1.0) as fleet:
        random = fleet.step([{"a": torch.zeros(count)}] * 2)[0]["a"]
        other = fleet.step([{"a": torch.zeros(count)}] * 2)[0]["a"]
    with Fleet(2, [spec("a", count)], "signsgd", step_size=1.0, zeros="positive") as fleet:
        positive = fleet.step([{"a": torch.zeros(count)}] * 2)[0]["a"]
    assert abs(float(random.mean())) < 5 / math.sqrt(count) and not torch.equal(random, other)
    assert bool((positive == 1).all())


# ---- momentum ----


@pytest.mark.parametrize(
    "options", [{"step_size": "row"}, {"step_size": "tensor", "zeros": "positive"}, {"step_size": 0.1}]
)
@pytest.mark.parametrize("world", [2, 3])
def test_signum_without_momentum_is_signsgd(options: dict, world: int) -> None:
    tensors = [spec("a", 40, 30), spec("b", 77)]
    with (
        Fleet(world, tensors, "signsgd", **options) as plain,
        Fleet(world, tensors, "signum", beta=0, **options) as other,
    ):
        for number in range(4):
            grads = random_grads(world, tensors, seed=number)
            for grad in grads:
                grad["a"][::3] = 0
            for mine, theirs in zip(plain.step(grads), other.step(grads), strict=True):
                assert all(same_bits(mine[name], theirs[name]) for name in mine)
        assert not other.reducers[0].kept.states().get("momentum")


def test_signum_votes_with_the_momentum() -> None:
    """Against the rule in float64; a control without momentum gives other signs."""
    world, count, beta = 3, 2000, 0.75
    momenta, differ = [torch.zeros(count, dtype=F64)] * world, 0
    with Fleet(world, [spec("a", count, dtype=F64)], "signum", beta=beta, step_size="tensor") as fleet:
        for step in range(6):
            grads = one_tensor(world, count, seed=step, dtype=F64)
            result = fleet.step([{"a": grad} for grad in grads])[0]["a"]
            momenta = [beta * m + (1 - beta) * grad for m, grad in zip(momenta, grads, strict=True)]
            votes = torch.stack(momenta).sign().sum(0)
            size = torch.stack(momenta).abs().mean()
            assert torch.allclose(result, votes.sign() * size, rtol=1e-6)
            differ += int((torch.stack(grads).sign().sum(0).sign() != votes.sign()).sum())
            kept = [reducer.kept.states()["momentum"]["a"] for reducer in fleet.reducers]
            for mine, m in zip(kept, momenta, strict=True):
                assert torch.allclose(mine * (1 - beta) / beta, m, rtol=1e-9, atol=1e-12)
    assert differ > 100


# ---- error feedback ----


def _rule(codec: str, p: Tensor, scale: float) -> Tensor:
    """Return what a rank sends for one step group."""
    if codec == "ef_signsgd":
        size = (p.abs().mean().float() * scale).double()
        return torch.where(p >= 0, size, -size)
    sides = [p[p >= 0], p[p < 0]]
    means = (side.mean().float() if side.numel() else torch.zeros(()) for side in sides)
    high, low = ((mean * scale).double() for mean in means)
    return torch.where(p >= 0, high, low)


@pytest.mark.parametrize("codec", ["ef_signsgd", "onebit"])
@pytest.mark.parametrize("step_size", ["tensor", "row"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_result_and_residual_are_those_of_the_rule(codec: str, step_size: str, world: int, scale: float) -> None:
    """And the sum of all results is that of the mean gradients but for the mean residual."""
    rows, row = 5, 300
    residuals, total = [torch.zeros(rows * row, dtype=F64)] * world, torch.zeros(rows * row, dtype=F64)
    options: dict[str, Any] = {"step_size": step_size, "step_scale": scale}
    with Fleet(world, [spec("a", rows, row, dtype=F64)], codec, **options) as fleet:
        for step in range(5):
            grads = [grad + 0.3 for grad in one_tensor(world, rows * row, seed=step, dtype=F64)]
            results = fleet.step([{"a": grad.view(rows, row)} for grad in grads])
            assert all_same(results)
            offered = [grad + residual for grad, residual in zip(grads, residuals, strict=True)]
            length = row if step_size == "row" else rows * row
            sent = [torch.cat([_rule(codec, group, scale) for group in p.split(length)]) for p in offered]
            residuals = [p - s for p, s in zip(offered, sent, strict=True)]
            result = results[0]["a"].flatten()
            assert torch.allclose(result, torch.stack(sent).mean(0), rtol=1e-6, atol=1e-9)
            for kept, expected in zip(fleet.residuals(), residuals, strict=True):
                assert torch.allclose(kept["a"].flatten(), expected, rtol=1e-6, atol=1e-6)
            total += torch.stack(grads).mean(0) - result
    assert torch.allclose(total, torch.stack([k["a"].flatten() for k in fleet.residuals()]).mean(0), atol=1e-9)


@pytest.mark.parametrize("p", [one_tensor(1, 4000, seed=3, dtype=F64)[0], torch.full((4000,), -2.0, dtype=F64)])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_contraction_of_ef_signsgd(p: Tensor, scale: float) -> None:
    """|p - C(p)|^2 = |p|_2^2 - c (2 - c) |p|_1^2 / d; with c = 1, of equal magnitudes nothing is left."""
    with Fleet(1, [spec("a", p.numel(), dtype=F64)], "ef_signsgd", step_scale=scale) as fleet:
        fleet.step([{"a": p}])
        left = float(fleet.residuals()[0]["a"].square().sum())
    whole = float(p.square().sum())
    share = float(p.abs().sum()) ** 2 / (p.numel() * whole)
    assert left == pytest.approx((1 - scale * (2 - scale) * share) * whole, rel=1e-6, abs=1e-6)
    assert left < whole


def test_the_two_values_of_onebit_are_the_best() -> None:
    """No other pair for the same sides leaves a smaller sum of squares; a single magnitude leaves more."""
    p = one_tensor(1, 4000, seed=4, dtype=F64)[0] + 0.5
    left = {}
    for codec in ("ef_signsgd", "onebit"):
        with Fleet(1, [spec("a", p.numel(), dtype=F64)], codec, step_scale=1.0) as fleet:
            sent = fleet.step([{"a": p.clone()}])[0]["a"]
            left[codec] = float(fleet.residuals()[0]["a"].square().sum())
    high, low = float(sent.max()), float(sent.min())
    assert set(sent.tolist()) == {high, low}
    for wrong in (0.99, 1.01):
        for pair in ((high * wrong, low), (high, low * wrong)):
            others = p - torch.where(p >= 0, *(torch.tensor(value, dtype=F64) for value in pair))
            assert float(others.square().sum()) > left["onebit"]
    assert left["onebit"] < 0.97 * left["ef_signsgd"]


def test_a_side_without_elements_has_the_value_zero() -> None:
    with Fleet(2, [spec("a", 100)], "onebit", step_scale=1.0) as fleet:
        results = fleet.step([{"a": torch.full((100,), 3.0)}, {"a": torch.full((100,), -1.0)}])
        assert results[0]["a"].tolist() == [1.0] * 100
        assert all(not bool(kept["a"].any()) for kept in fleet.residuals())


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (SignSgd, {"step_size": 0}),
        (SignSgd, {"step_size": "column"}),
        (SignSgd, {"zeros": "negative"}),
        (Signum, {"ties": "negative"}),
        (Signum, {"beta": 1}),
        (Signum, {"beta": -0.1}),
        (Signum, {"beta": True}),
        (Signum, {"step_size": float("inf")}),
        (EfSignSgd, {"step_size": 0.1}),
        (OneBit, {"step_size": "column"}),
        (EfSignSgd, {"step_scale": 0}),
        (OneBit, {"step_scale": 2.0}),
    ],
)
def test_options(codec: type, options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        codec(**options)


@pytest.mark.parametrize("method", ["ef_signsgd", "onebit"])
def test_a_payload_of_another_length_is_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = GatheredSigns.encode

    def short(self: GatheredSigns, work: object, parts: object, key: Key) -> None:
        encode(self, work, parts, key)
        work.used -= 4 * (key.rank == 1)

    grads = random_grads(2, [spec("a", 100)])
    with Fleet(2, [spec("a", 100)], method) as fleet:
        assert all_same(fleet.step(grads))  # the control
        monkeypatch.setattr(GatheredSigns, "encode", short)
        step = fleet.offer(grads)
        for reducer in fleet.reducers:
            with pytest.raises(HorovodCompressError) as caught:
                reducer.result(0, step)
            assert isinstance(caught.value, CorruptFrameError) or "should have" in str(caught.value)
