"""Top-k at the positions of a leader: all ranks send the same elements, whose values add."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.shared import positions as written
from horovod_compress.codecs.work import Work
from horovod_compress.errors import CorruptFrameError, HorovodCompressError
from horovod_compress.exchange.wire import HEADER_BYTES
from horovod_compress.schedule.plan import Bucket
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import slow

WORLD, COUNT = 3, 700
TENSORS = [spec("a", 30, 5), spec("b", 70), spec("c", 3)]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_rule(share: float) -> None:
    residuals = np.zeros((WORLD, COUNT))
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float64)], "scalecom", density=0.05, filter=share) as fleet:
        for step in range(2 * WORLD):
            x = residuals + np.stack([grad.double().numpy() for grad in one_tensor(WORLD, COUNT, seed=step)])
            leader = x[step % WORLD]
            at = np.lexsort((np.arange(COUNT), -np.abs(leader)))[:35]
            sent = np.zeros((WORLD, COUNT))
            sent[:, at] = x[:, at]
            residuals = (1 - share) * residuals + share * (x - sent)
            results = fleet.step([{"w": grad.double()} for grad in one_tensor(WORLD, COUNT, seed=step)])
            assert all_same(results)
            assert np.allclose(results[0]["w"].numpy(), sent.mean(0), rtol=1e-12, atol=1e-14)
            for rank in range(WORLD):
                kept = fleet.reducers[rank].buckets[0].memory.state["residual"][:COUNT]
                assert np.allclose(kept.numpy(), residuals[rank], rtol=1e-12, atol=1e-14)


def test_nothing_is_lost() -> None:
    """To the bit, of whole numbers: results and what waits are what all ranks had. With a filter they are not."""
    for share in (1.0, 0.5):
        had, got = dict.fromkeys("abc", torch.zeros(1)), dict.fromkeys("abc", torch.zeros(1))
        with Fleet(4, TENSORS, "scalecom", density=0.1, filter=share) as fleet:
            for reducer in fleet.reducers:
                reducer.result_scale = 4.0
            for step in range(9):
                generator = torch.Generator().manual_seed(step)
                grads = [
                    {t.name: torch.randint(-99, 99, t.shape, generator=generator).float() for t in TENSORS}
                    for _ in range(4)
                ]
                had = {name: had[name] + sum(mine[name] for mine in grads) for name in had}
                got = {name: got[name] + result for name, result in fleet.step(grads)[0].items()}
            waits = [reducer.kept.residuals() for reducer in fleet.reducers]
        for tensor in TENSORS:
            left = sum(mine[tensor.name].view(tensor.shape) for mine in waits)
            assert torch.equal(got[tensor.name] + left, had[tensor.name]) == (share == 1)


@pytest.mark.parametrize("world", [4, *slow(16, 64)])
def test_bytes_do_not_grow_with_ranks(world: int) -> None:
    """The payload and its prelude as they are sent; without headers and gaps of frames, which large ones hide."""
    count = 1 << 21
    with Fleet(world, [spec("w", count)], "scalecom", density=0.01, verify_every=0) as fleet:
        grads = one_tensor(world, count, seed=1)
        assert all_same(fleet.step([{"w": grad} for grad in grads]))
        sent = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers) / world
    frames = 2 * 2 * (world - 1) * 1.5 * HEADER_BYTES
    assert 0.55 < 8 * (sent - frames) / count <= 0.8


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1000])
def test_bits_are_read_as_they_were_written(count: int) -> None:
    for density in (0.0, 0.1, 1.0):
        flags = torch.rand(count, generator=torch.Generator().manual_seed(count)) < density
        bits = torch.zeros(-(-count // 8), dtype=torch.uint8).copy_(written.packed(flags))
        assert torch.equal(written.set_bits(bits), flags.nonzero().view(-1))
        by_hand = [sum(int(flag) << at for at, flag in enumerate(flags[i : i + 8])) for i in range(0, count, 8)]
        assert bits.tolist() == by_hand


def test_positions_of_any_number_are_read_as_they_were_written() -> None:
    for most, count in [(0, 64), (1, 64), (64, 64), (5, 1 << 20), (100, 12_345), (1, 1)]:
        for number in {0, min(1, most), most // 2, most}:
            given = torch.randperm(count, generator=torch.Generator().manual_seed(number))[:number].sort().values
            out = torch.full((written.room(most, count),), 255, dtype=torch.uint8)
            written.write(given, most, count, out)
            found = written.read(out, most, count)
            assert found is not None and torch.equal(found, given)


@pytest.mark.parametrize("fault", [255, 0])
def test_malformed_positions_are_an_error_on_every_rank(fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One leader writes more positions than there can be; none at all are the control."""

    def broken(positions: Tensor, most: int, count: int, out: Tensor) -> None:
        out.fill_(fault)

    monkeypatch.setattr(written, "write", broken)
    with Fleet(WORLD, TENSORS, "scalecom", density=0.1, schedule="single") as fleet:
        step = fleet.offer(random_grads(WORLD, TENSORS))
        for reducer in fleet.reducers:
            if not fault:
                assert not bool(reducer.result(0, step).any())
                continue
            with pytest.raises(HorovodCompressError) as caught:
                reducer.result(0, step)
            assert isinstance(caught.value, CorruptFrameError) or "malformed" in str(caught.value)


@pytest.mark.parametrize("wrong", [160, 300, 195], ids=["between two tensors", "behind all", "of an absent one"])
def test_positions_lie_in_tensors_that_are_here(wrong: int) -> None:
    bucket = Bucket(0, (spec("a", 150), spec("b", 70)))
    assert bucket.offsets == (0, 192) and bucket.padded < 300 + 64
    work, among = Work(bucket, 2, [None, None]), [0] if wrong == 195 else [0, 1]
    right = torch.tensor([0, 149, *([192, 261] if len(among) == 2 else [])])
    position, _, inside = written.places(work, right, among)[0]
    assert (position, inside.tolist()) == (0, [0, 149])
    with pytest.raises(ValueError, match="none of the tensors"):
        written.places(work, torch.cat([right, torch.tensor([wrong])]).sort().values, among)
