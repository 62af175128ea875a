"""What a method costs on a processor: measured by a short run of its codec in this process.

On one thread, a codec takes in, encodes, merges and decodes one tensor of each of two sizes; every part is
then taken to be affine in the elements. The least of a few runs counts, as what disturbs only makes them longer.
Gathered payloads are decoded for two numbers of ranks, as what that costs grows with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec, Piece
from ...codecs.work import Part, Regions, Work, carries
from ...exchange.wire import Address, FrameBuffer, NonFiniteCount
from ...ops.keys import Key
from ...ops.threads import on_one_thread
from ...schedule.costs import Affine, fitted
from ...schedule.plan import Bucket, TensorSpec

#: As square as can be: methods that look at rows or matrices get some.
_SHAPES = ((256, 512), (2048, 2048))
_RUNS = 5
_MOST_SECONDS = 0.25  # after which no further run of a size begins
#: Ranks whose gathered payloads are decoded. Of two, some methods pass on less than of more.
_FEW, _MANY = 3, 6
_FRAME_BYTES = 256 * 1024


@dataclass(frozen=True)
class Processor:
    """Seconds of a bucket on one core, affine in its elements, and what else was found.

    Attributes:
        offer: taking in a tensor's gradient, on a thread of its own.
        encode: preludes and payload, on the exchange thread.
        merge: reducing one further payload into an own one, on the exchange thread; 0 for gathered ones.
        decode: on the decoding thread; of gathered payloads without what each of them adds.
        decode_each: what every rank's gathered payload adds to that.
        copy: seconds for a byte that is sent and received: checksums and copies of frames.
        filled: which part is used of the room of a payload that is gathered, or whose length varies, for normally
            distributed gradients.
    """

    offer: Affine
    encode: Affine
    merge: Affine
    decode: Affine
    decode_each: Affine
    copy: float
    filled: float = 1.0

    def decoding(self, elements: float, ranks: int) -> float:
        """Return the seconds of decoding a bucket."""
        return self.decode(elements) + ranks * self.decode_each(elements)

    def scaled(self, factor: float) -> Processor:
        """Return the costs of a processor that is slower by this factor."""
        parts = {name: getattr(self, name) for name in ("offer", "encode", "merge", "decode", "decode_each")}
        scaled: dict[str, Any] = {name: Affine(factor * cost.fixed, factor * cost.each) for name, cost in parts.items()}
        return replace(self, copy=factor * self.copy, **scaled)


@cache
def measure_codec(method: Codec, codec: Codec) -> Processor:
    """Return what a round costs on this machine; takes less than a second, and once per process.

    Args:
        codec: of one kind of round, one of the method's variants.
    """
    with torch.no_grad(), on_one_thread():
        sizes = [_CodecRun(method, codec, shape, _FEW).measure() for shape in _SHAPES]
        each = Affine(0.0, 0.0)
        if codec.algebra is Algebra.GATHER:
            many = [_CodecRun(method, codec, shape, _MANY).measure() for shape in _SHAPES]
            each = fitted(
                [
                    (m["n"], max(0.0, m["decode"] - f["decode"]) / (_MANY - _FEW))
                    for m, f in zip(many, sizes, strict=True)
                ]
            )

    def cost(name: str) -> Affine:
        return fitted([(found["n"], found[name]) for found in sizes])

    decode = fitted([(found["n"], max(0.0, found["decode"] - _FEW * each(found["n"]))) for found in sizes])
    return Processor(cost("offer"), cost("encode"), cost("merge"), decode, each, _copying(), sizes[-1]["filled"])


class _CodecRun:
    """One codec with the arrays of one tensor, as rank 0 of some ranks that all hold the same."""

    def __init__(self, method: Codec, codec: Codec, shape: tuple[int, int], ranks: int) -> None:
        self._codec, self._ranks = codec, ranks
        bucket = Bucket(0, (TensorSpec("weight", shape, "float32"),))
        self._source = torch.randn(bucket.count, generator=torch.Generator().manual_seed(1), device="cpu")
        layout, whole = codec.layout(bucket, ranks), method.layout(bucket, ranks)
        self._preludes = [_zeros(arrays) for arrays in layout.preludes]
        state = {name: torch.zeros(bucket.padded, dtype=dtype, device="cpu") for name, dtype in whole.state.items()}
        self._work = Work(bucket, ranks, [self._source.clone()], state, _zeros(whole.tables))
        self._work.regions, self._work.local = _zeros(layout.regions), _zeros(layout.local | layout.scratch)
        self._work.shared = {name: array for arrays in self._preludes for name, array in arrays.items()}
        regions, two = self._work.regions, codec.layout(bucket, 2).carries
        spans = {name: (0, regions[name].numel()) for name in two}
        self._work.carry = carries(two, regions, [spans], self._source.device)
        self._work.results = _zeros(layout.results)
        codec.prepare(self._work)

    def measure(self) -> dict[str, float]:
        """Return the elements, the least seconds of every part, and how full the payload is."""
        found: list[dict[str, float]] = []
        began = time.perf_counter()
        while len(found) < 2 or (len(found) < _RUNS and time.perf_counter() - began < _MOST_SECONDS):
            found.append(self._once(len(found)))
        least = {name: min(run[name] for run in found) for name in found[0]}
        room = sum(array.nbytes for array in self._work.regions.values())
        return least | {"n": self._source.numel(), "filled": self._work.used / room if self._work.used else 1.0}

    def _once(self, step: int) -> dict[str, float]:
        work, key, codec = self._work, Key(0, step, 0, 0), self._codec
        work.grads[0].copy_(self._source)  # type: ignore[union-attr]
        whole = [Part(0, 0, self._source.numel())]
        found = {"offer": _seconds(lambda: codec.submit(work, [0], key)), "encode": 0.0, "merge": 0.0}
        for number, arrays in enumerate(self._preludes):
            found["encode"] += _seconds(lambda n=number: codec.before(n, work, key))  # type: ignore[misc]
            found["merge"] += self._merging(arrays, key)
        found["encode"] += _seconds(lambda: codec.before(len(self._preludes), work, key))
        found["encode"] += _seconds(lambda: codec.encode(work, whole, key))
        if codec.algebra is Algebra.GATHER:
            work.gathered = [work.regions["payload"][: work.used]] * self._ranks
        else:
            found["merge"] += self._merging(work.regions, key)
        found["decode"] = _seconds(lambda: codec.decode(work, whole, key, 1.0))
        return found

    def _merging(self, arrays: dict[str, Tensor], key: Key) -> float:
        """Reduce a second rank's arrays, equal to these, into them."""
        others = {name: array.clone() for name, array in arrays.items()}

        def reduce() -> None:
            for name, array in arrays.items():
                result = self._work.results.get(name, array)
                self._codec.fold(self._work, Piece(name, 0, array, result), [others[name]], key)

        return _seconds(reduce)


def _zeros(arrays: Regions) -> dict[str, Tensor]:
    return {name: torch.zeros(count, dtype=dtype, device="cpu") for name, (dtype, count) in arrays.items()}


def _seconds(action: Callable[[], object]) -> float:
    """Return the processor's seconds of this thread: those that other programs took do not count."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


@cache
def _copying() -> float:
    """Return the seconds that packing and checking a frame takes for each of its bytes."""
    frame, data = FrameBuffer(_FRAME_BYTES), torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
    address = Address(*[0] * len(Address._fields))

    def through() -> None:
        frame.pack(address, NonFiniteCount(), [data])
        frame.check(address, _FRAME_BYTES)
        data.copy_(frame.payload(0, _FRAME_BYTES))

    with on_one_thread():
        return min(_seconds(through) for _ in range(_RUNS)) / _FRAME_BYTES
