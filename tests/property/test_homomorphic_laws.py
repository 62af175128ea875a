"""The mean of gradients that are mostly zeros: exact at any density, in as many bytes as the union takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Piece
from horovod_compress.codecs.homomorphic import Homomorphic
from horovod_compress.codecs.work import Counts, Work
from horovod_compress.errors import ConfigError, CorruptFrameError
from horovod_compress.exchange.wire import HEADER_BYTES
from horovod_compress.ops.keys import Key
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import each_value

TENSORS = [spec("a", 13, 77), spec("b", 3), spec("c", 0), spec("d", 200), spec("e", 64)]
Grads = list[dict[str, Tensor]]


def _whole(world: int, density: float, seed: int) -> Grads:
    """Return whole numbers, whose sums are exact in any order; a share of them is not zero."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: Sequence[int]) -> Tensor:
        kept = torch.rand(shape, generator=generator) < density
        return torch.randint(-9, 10, shape, generator=generator) * kept + 0.0  # which leaves no negative zeros

    return [{t.name: one(t.shape) for t in TENSORS} for _ in range(world)]


@each_value
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("block", [1, 5, 64])
def test_results_are_those_without_compression(world: int, block: int) -> None:
    """To the bit, at every density, one after the other: payloads grow and shrink again."""
    with (
        Fleet(world, TENSORS, "homomorphic", block=block, verify_every=1) as fleet,
        Fleet(world, TENSORS, "none") as plain,
    ):
        for seed, density in enumerate((0.0, 0.01, 0.3, 1.0, 0.05, 0.0, 0.5)):
            grads = _whole(world, density, seed)
            results = fleet.step(grads)
            assert all_same(results)
            assert all(same_bits(results[0][name], exact) for name, exact in plain.step(grads)[0].items())


def test_the_bits_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where each rank's bits replace those of others, values are lost or ranks disagree."""

    def last(self: Homomorphic, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        (piece.values.copy_ if piece.region == "bitmap" else piece.values.add_)(other)

    monkeypatch.setattr(Homomorphic, "combine", last)
    grads = _whole(3, 0.1, seed=1)
    with Fleet(3, TENSORS, "homomorphic", verify_every=0) as fleet:
        result = fleet.step(grads)[0]["a"]
    assert not torch.equal(result, torch.stack([mine["a"] for mine in grads]).sum(0) * torch.tensor(1 / 3))


@pytest.mark.parametrize("exchange", ["ring", "fold", "torus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_as_those_of_a_full_precision_round(exchange: str, dtype: torch.dtype) -> None:
    """Where every element is sent, payloads are the same array; gradients of 16 bits add in float32, too."""
    tensors = [spec("w", 40, 64, dtype=dtype)]
    grads = random_grads(4, tensors)
    with (
        Fleet(4, tensors, "homomorphic", exchange=exchange) as fleet,
        Fleet(4, tensors, "scalecom", warmup_steps=2, exchange=exchange) as exact,
    ):
        assert same_bits(fleet.step(grads)[0]["w"], exact.step(grads)[0]["w"])


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.05, 0.2, 1.0])
def test_bytes_are_a_bit_for_each_block_and_the_values_of_the_union(block: int, density: float) -> None:
    """Two (M - 1) / M of them from each rank, whatever the number of ranks, without headers."""
    world, count = 4, 1 << 20
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(count, generator=generator) for _ in range(world)]
    for grad in grads:
        grad[torch.rand(count, generator=generator) >= density / world] = 0
    some = torch.stack(grads).ne(0).any(0).view(-1, block).any(1)
    payload = 4 * (count if int(some.sum()) > 7 / 8 * some.numel() else block * int(some.sum()))
    with Fleet(world, [spec("w", count)], "homomorphic", block=block, exchange="ring", verify_every=0) as fleet:
        before = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers)
        results = fleet.step([{"w": grad} for grad in grads])
        sent = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers) - before
    assert all_same(results)
    bitmap = count // 8 // block
    exchanged = 2 * (world - 1) * payload
    exchanged += world * (world - 1) * bitmap if bitmap * (world - 1) <= 1 << 18 else 2 * (world - 1) * bitmap
    assert 0 <= sent - exchanged <= 200 * HEADER_BYTES
    if density == 1.0 and block == 1:  # the control: four ranks leave out a third of the elements
        assert 0.6 < payload / (4 * count) < 0.72


@pytest.mark.parametrize("block", [1, 8])
def test_a_tensor_of_which_nearly_all_is_sent_is_sent_whole(block: int) -> None:
    """Of more than 7/8; at 7/8 it is not. Other tensors of the bucket keep their places."""
    tensors = [spec("before", 640), spec("w", 640), spec("behind", 640)]
    for kept, sent in ((560, 560), (560 + block, 640)):
        grads = random_grads(2, tensors, seed=3)
        for mine in grads:
            mine["before"][8:], mine["behind"][:-8], mine["w"][kept:] = 0, 0, 0
        exact = {name: (grads[0][name] + grads[1][name]) * 0.5 for name in grads[0]}
        with Fleet(2, tensors, "homomorphic", block=block, verify_every=1) as fleet:
            results = fleet.step(grads)
            assert all_same(results) and all(torch.equal(results[0][name], exact[name]) for name in exact)
            assert fleet.reducers[0].buckets[0].round(0).work.used == 4 * (8 + sent + 8)


def test_values_that_cancel_are_sent_as_zeros() -> None:
    """The sum may be 0 where gradients are not, and a negative zero is one."""
    grads = [{"w": torch.tensor([1.5, -0.0, 0.0, 2.0])}, {"w": torch.tensor([-1.5, -0.0, 0.0, 1.0])}]
    with Fleet(2, [spec("w", 4)], "homomorphic") as fleet:
        assert fleet.step(grads)[0]["w"].tolist() == [0.0, 0.0, 0.0, 1.5]
        assert fleet.reducers[0].buckets[0].round(0).work.used == 8


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("fault", [True, False])
def test_bits_of_no_gradient_are_an_error_on_every_rank(
    block: int, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks set the first bit behind a tensor's; the control sets the last one of the tensor."""
    submit, last = Homomorphic.submit, 4 if block == 1 else 1

    def submitting(self: Homomorphic, work: Work, positions: Sequence[int], key: Key) -> Counts:
        counts = submit(self, work, positions, key)
        for position in positions:
            if work.bucket.tensors[position].count == 3:
                work.memo["bits"][position][0] = 2 * last if fault else last
        return counts

    monkeypatch.setattr(Homomorphic, "submit", submitting)
    with Fleet(3, TENSORS, "homomorphic", block=block) as fleet:
        step = fleet.offer(_whole(3, 0.1, seed=2))
        for reducer in fleet.reducers:
            if not fault:
                reducer.result(0, step)
                continue
            with pytest.raises(
                CorruptFrameError, match=f"rank {reducer.rank}: the bitmap .* of no gradient .*bucket 0"
            ):
                reducer.result(0, step)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_among_zeros_is_not_lost(bad: float) -> None:
    """The control has a number there."""
    for value, refused in ((bad, 1), (2.0, 0)):
        with Fleet(3, TENSORS, "homomorphic") as fleet:
            grads = [{tensor.name: torch.zeros(tensor.shape) for tensor in TENSORS} for _ in range(3)]
            grads[1][TENSORS[0].name].view(-1)[1] = value
            fleet.step(grads)
            assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [refused] * 3


def test_blocks_are_whole_numbers() -> None:
    for wrong in (0, -1, 1.0, True, 1 << 17):
        with pytest.raises(ConfigError, match="block should be"):
            Homomorphic(block=wrong)  # type: ignore[arg-type]
