"""What a bucket on a device costs in launches, counted where the emulated runtime starts kernels.

The step is the bucket's and the codec's own, with the CPU as the device. Torch's own operations are counted
too: on a GPU each is a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_steps import LocalStep, buckets
from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.dgc import Dgc
from horovod_compress.codecs.global_qsgd import Exponential, Standard
from horovod_compress.codecs.marsit import Marsit
from horovod_compress.codecs.natural import Natural
from horovod_compress.codecs.onebit import EfSignSgd, OneBit
from horovod_compress.codecs.qsgd import Packed
from horovod_compress.codecs.sparse_binary import SparseBinary
from horovod_compress.codecs.terngrad import TernGrad
from horovod_compress.codecs.topk import TopK
from horovod_compress.codecs.work import Counts, Part, Work
from horovod_compress.exchange.device import Deadline, Device
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket
from tests.support.local import same_bits
from tests.support.marks import each_value, slow
from tests.support.turns import put, turn_of

from . import emulator
from .parity import Target

pytestmark = pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")

BUCKETS = buckets(shrink=6)
#: Elements of a row that is added up in one launch.
MOST_OF_GROUP = 8192
#: Views, memory that is not written, and numbers of the host: counts are these where the CPU is the device.
FREE = {"lift_fresh", "view", "slice", "empty", "alias", "detach", "select", "as_strided"}


class FakeGpu(Device):
    """The CPU as a device: gradients wait there until all of a bucket have come."""

    is_accelerator = True


class Operations(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if (name := function.overloadpacket.__name__) not in FREE:
            self.names.append(name)
        return function(*given, **(named or {}))


@dataclass
class Started:
    """What a step started."""

    kernels: int
    memsets: int
    operations: list[str]


def two_steps(codec: Codec, bucket: Bucket, device: Device) -> tuple[list[Tensor], Started]:
    """Take a bucket through two steps; return all that was written, and what the second one started."""
    step = LocalStep(bucket, device, codec)
    with torch.no_grad():
        step()
        before = emulator.started()
        with Operations() as operations:
            step()
        kernels, memsets = (b - a for a, b in zip(before, emulator.started(), strict=True))
    return step.written(), Started(kernels, memsets, operations.names)


def on_a_device(codec: Codec, bucket: Bucket) -> tuple[list[Tensor], Started]:
    with Target("emulated", "cpu").chosen():
        return two_steps(codec, bucket, FakeGpu())


class OneByOne(Marsit):
    """Marsit as if it took every tensor by itself."""

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [super(OneByOne, self).submit(work, [position], key)[0] for position in positions]

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for part in parts:
            super().decode(work, [part], key, result_scale)


class StandardOneByOne(Standard):
    """The same for the norms and codes of Global-QSGD."""

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [super(StandardOneByOne, self).submit(work, [position], key)[0] for position in positions]

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        for part in parts:
            super().encode(work, [part], key)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for part in parts:
            super().decode(work, [part], key, result_scale)


class PackedOneByOne(Packed):
    """The same for the records of QSGD."""

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [super(PackedOneByOne, self).submit(work, [position], key)[0] for position in positions]

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for part in parts:
            super().decode(work, [part], key, result_scale)


def longest_row(bucket: Bucket, step_size: str | float) -> int:
    """Return the elements of the longest row."""
    return max(rows_of(tensor.shape, step_size)[1] for tensor in bucket.tensors)


def shares_words(bucket: Bucket, step_size: str | float) -> bool:
    """Return whether a row ends within 32 bits that another one goes on in."""
    found = [rows_of(tensor.shape, step_size) for tensor in bucket.tensors]
    return any(rows > 1 and length % 32 for rows, length in found)


def rows_of(shape: Sequence[int], step_size: str | float) -> tuple[int, int]:
    """Return rows and elements of one: those of the first dimension of matrices and more."""
    count = math.prod(shape)
    rows = shape[0] if step_size == "row" and len(shape) > 1 else 1
    return rows, count // rows


def started_for(bucket: Bucket, step_size: str | float, operations: list[str]) -> Started:
    """Return what Marsit starts.

    A launch each for bits and results, and one for the sums of rows of more than eight blocks. Bits are cleared where
    rows share words.
    """
    kernels = 2 + (isinstance(step_size, str) and longest_row(bucket, step_size) > MOST_OF_GROUP)
    return Started(kernels, int(shares_words(bucket, step_size)), operations)


@each_value
@pytest.mark.parametrize("zeros", ["random", "positive"])
@pytest.mark.parametrize("step_size", ["row", *slow("tensor", 0.01)])
def test_a_step_of_marsit(step_size: str | float, zeros: str) -> None:
    assert sum(len(bucket.tensors) for bucket in BUCKETS) == 161 and len(BUCKETS) == 4
    for bucket in BUCKETS:
        codec = Marsit(full_precision_every=0, step_size=step_size, zeros=zeros)
        expected, _ = two_steps(codec, bucket, Device())
        found, started = on_a_device(codec, bucket)
        assert all(map(same_bits, expected, found))
        assert started == started_for(bucket, step_size, cleared(bucket)) and started.kernels <= 3


def cleared(bucket: Bucket) -> list[str]:
    """Return what clears the words after the last tensor, which fill up a group."""
    return ["zero_"] if bucket.padded // 64 % 5 else []


def test_a_step_with_long_rows() -> None:
    """The most launches there are."""
    bucket = Bucket(0, buckets(shrink=3)[0].tensors[:3])
    assert max(tensor.count for tensor in bucket.tensors) > 65_536
    codec = Marsit(full_precision_every=0, step_size="tensor")
    expected, _ = two_steps(codec, bucket, Device())
    found, started = on_a_device(codec, bucket)
    assert all(map(same_bits, expected, found)) and started == started_for(bucket, "tensor", cleared(bucket))
    assert (started.kernels, started.memsets) == (3, 0)


def test_a_step_in_full_precision() -> None:
    for bucket in BUCKETS:
        expected, _ = two_steps(Marsit(full_precision_every=1), bucket, Device())
        found, started = on_a_device(Marsit(full_precision_every=1), bucket)
        assert all(map(same_bits, expected, found)) and started == Started(2, 0, [])


@pytest.mark.parametrize(("codec", "operations"), [(EfSignSgd("row"), 2), *slow((OneBit("row"), 12))])
def test_a_step_of_gathered_signs(codec: Codec, operations: int) -> None:
    """Torch's operations are on all values of a bucket at once."""
    for bucket in BUCKETS:
        expected, _ = two_steps(codec, bucket, Device())
        found, started = on_a_device(codec, bucket)
        assert all(map(same_bits, expected, found))
        assert (started.kernels, started.memsets, len(started.operations)) == (2, 1, operations)


#: Codecs with the kernels of a step where every row is of eight blocks or less, and the elements of a row, 0 for all.
QUANTISED = [
    (Standard(8, "max", 2048), 3, 2048),
    (Exponential(4, "max", 0), 3, 0),
    (TernGrad(), 3, 0),
    (Packed(8, 512, "max"), 2, 1),
    *slow(
        (Standard(4, "max", 0), 3, 0),
        (Standard(16, 2, 256), 3, 256),
        (Exponential(8, "max", 2048), 3, 2048),
        (Natural(), 3, 0),
        (TernGrad(clip=0, bits=4), 3, 0),
        (Packed(5, 320, 2), 2, 1),
    ),
]


#: Codecs that send positions, with the kernels and the memsets of a step. Choosing takes a kernel for each of three
#: digits, tallies and what is kept; writing two; reading one for places, for lists and for results. Sides of
#: sparse_binary take three more, and the norms of stc one or two.
POSITIONS = [
    (TopK(), 10, 3),
    (SparseBinary(), 13, 4),
    *slow(
        (TopK(chunk=64, density=0.1), 7, 2),
        (TopK(value_bits=16), 10, 3),
        (Dgc(density=0.01), 10, 3),
        (Dgc(density=0.01, momentum=0.0), 10, 3),
    ),
]


@pytest.mark.parametrize(("codec", "kernels", "memsets"), POSITIONS, ids=repr)
def test_a_step_of_positions(codec: Codec, kernels: int, memsets: int) -> None:
    """As many launches for a bucket whatever the number of its tensors, and as many of torch's operations."""
    seen = set()
    for bucket in buckets(shrink=24):
        expected, _ = two_steps(codec, bucket, Device())
        found, started = on_a_device(codec, bucket)
        assert all(map(same_bits, expected, found))
        assert (started.kernels, started.memsets) == (kernels, memsets)
        # The CPU's numbers are read one by one: what is read of a GPU is copied at once.
        seen.add(tuple(name for name in started.operations if name != "_local_scalar_dense"))
    assert len(seen) == 1 and len(*seen) <= 12, seen


def norms_of(bucket: Bucket, row: int) -> int:
    """Return the kernels that norms of longer rows take."""
    return int(max(min(row or tensor.count, tensor.count) for tensor in bucket.tensors) > MOST_OF_GROUP)


@pytest.mark.parametrize(("codec", "kernels", "row"), QUANTISED, ids=repr)
def test_a_step_of_quantised_numbers(codec: Codec, kernels: int, row: int) -> None:
    """A launch each for blocks, norms of many blocks, codes and results; nothing is cleared.

    Torch's operations are on the norms of a bucket, as many whatever the number of tensors.
    """
    seen = set()
    for bucket in [*BUCKETS, Bucket(0, BUCKETS[0].tensors[:1]), Bucket(0, buckets(shrink=3)[0].tensors[:3])]:
        expected, _ = two_steps(codec, bucket, Device())
        found, started = on_a_device(codec, bucket)
        assert all(map(same_bits, expected, found))
        assert (started.kernels, started.memsets) == (kernels + norms_of(bucket, row), 0)
        seen.add(tuple(started.operations))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("codec", "one_by_one", "kernels"),
    [
        (Standard(8, "max", 256), StandardOneByOne(8, "max", 256), 3),
        (Packed(8, 512, "max"), PackedOneByOne(8, 512, "max"), 2),
    ],
    ids=["standard", "packed"],
)
def test_numbers_quantised_one_by_one_cost_launches_for_every_tensor(
    codec: Codec, one_by_one: Codec, kernels: int
) -> None:
    for bucket in BUCKETS[:2]:
        together, _ = on_a_device(codec, bucket)
        found, started = on_a_device(one_by_one, bucket)
        assert all(map(same_bits, together, found))
        assert started.kernels == kernels * len(bucket.tensors)


def test_one_by_one_costs_launches_for_every_tensor() -> None:
    """The control: what is counted is what is started. The bits are the same."""
    for bucket in BUCKETS[:2]:
        together, _ = on_a_device(Marsit(full_precision_every=0), bucket)
        found, started = on_a_device(OneByOne(full_precision_every=0), bucket)
        assert all(map(same_bits, together, found))
        alone = [started_for(Bucket(0, (tensor,)), "row", []) for tensor in bucket.tensors]
        assert started.kernels == sum(one.kernels for one in alone)
        assert started.memsets == sum(one.memsets for one in alone)
        assert started.operations == cleared(bucket)


def test_counts_of_a_bucket_come_in_one_piece() -> None:
    """Nothing has to be put together before they are copied to the host."""
    step = LocalStep(BUCKETS[0], FakeGpu())
    step.grads[3].view(-1)[5] = float("nan")
    turn = turn_of(step.state, Key(1, 0, 0, 0))
    for position, grad in enumerate(step.grads):
        put(turn, position, grad)
        assert not turn.full
    assert turn.waits
    turn.count_waiting(turn.submit_waiting())
    assert turn.full and not turn.waits
    with Operations() as operations:
        turn.take_over(Deadline(10.0))
    assert operations.names == ["copy_"]
    assert turn.nonfinite.bad.count == 1 and turn.nonfinite.names == [BUCKETS[0].tensors[3].name]
