"""What one rank does with ResNet-50's gradients in a step but for the exchange, on any device; by Marsit and topk.

The 161 tensors are in four buckets, as MergeComp makes at most. Bucket states and codecs are the package's own, in a
world of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from horovod_compress.cli.plan import models
from horovod_compress.codecs.base import Algebra, Codec
from horovod_compress.codecs.marsit import Marsit
from horovod_compress.codecs.topk import TopK
from horovod_compress.engine.buckets import BucketState
from horovod_compress.engine.context import Context
from horovod_compress.engine.devices import Devices
from horovod_compress.engine.turn import Turn
from horovod_compress.exchange import ring
from horovod_compress.exchange.device import Device
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.options import Options
from horovod_compress.schedule.plan import Bucket, TensorSpec

#: Where a bucket ends, counted in tensors.
ENDS = (22, 75, 131, 161)
MARSIT = Marsit(full_precision_every=0)


@dataclass(frozen=True)
class LocalSteps:
    """What is timed: the bytes that a step reads and writes for an element, each array as often as kernels' cases say.

    With Marsit that is a gradient twice and a residual three times, and bits; with topk both to choose from them, then
    both read and written.
    """

    name: str
    codec: Codec
    bytes_of_element: float

    def on(self, device: Device) -> list[LocalStep]:
        """Return the steps of all buckets."""
        return [LocalStep(bucket, device, self.codec) for bucket in buckets()]

    @property
    def bytes_moved(self) -> int:
        """Bytes of all buckets."""
        return int(self.bytes_of_element * sum(bucket.count for bucket in buckets()))


STEPS = (
    LocalSteps("local step of marsit, resnet50", MARSIT, 24.25),
    LocalSteps("local step of topk, resnet50", TopK(), 24.0),
)


def buckets(shrink: int = 1) -> list[Bucket]:
    """Return ResNet-50's tensors in backward order, every side divided by a number."""
    tensors = [
        TensorSpec(tensor.name, tuple(-(-size // shrink) for size in tensor.shape), "float32")
        for tensor in models.load("resnet50").backward()
    ]
    return [Bucket(index, tuple(tensors[a:b])) for index, (a, b) in enumerate(pairwise((0, *ENDS)))]


class LocalStep:
    """One bucket on one device; calling it takes the gradients through a step.

    They are overwritten by the result, which is what the next step begins with.
    """

    def __init__(self, bucket: Bucket, device: Device, codec: Codec = MARSIT) -> None:
        # Nothing is exchanged, by whatever the codec would be.
        self.state = BucketState(bucket, codec, 0, 1, lambda *_: ring, device)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(bucket.index)
        self.grads = [torch.randn(tensor.shape, generator=generator).to(device.where) for tensor in bucket.tensors]
        (transport,) = Hub(1).transports()
        self._context = Context(transport, Options(seed=1), Devices([]))
        self._step = 0

    def __call__(self) -> None:
        turn = Turn(self.state, self._context, 1.0, 1.0)
        for position, grad in enumerate(self.grads):
            turn.claim(position)
            turn.count_in([position], turn.submit([position], [grad]))
        if turn.waits:
            turn.count_waiting(turn.submit_waiting())
        round_, key = turn.round, turn.key
        for number in range(len(round_.preludes)):
            round_.before(number, key)
        round_.encode(key)
        if round_.codec.algebra is Algebra.GATHER:
            round_.work.gathered = [round_.work.regions["payload"][: round_.work.used]]
        round_.decode(round_.whole(), key, 1.0)
        self.state.finish(self._step)
        self.state.grads[:] = [None] * len(self.grads)  # fetched, on the stream that they were decoded on
        self._step += 1

    def written(self) -> list[Tensor]:
        """Return all that a step writes."""
        sent = self.state.round(self._step).work.regions
        return [*self.grads, *sent.values(), *self.state.memory.state.values()]


def whole_step(steps: Sequence[LocalStep]) -> None:
    """Take all buckets through a step."""
    for step in steps:
        step()
