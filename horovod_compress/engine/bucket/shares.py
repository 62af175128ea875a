"""A bucket whose ranks share hosts: averaged within each host, and the shares of its ranks exchanged between hosts.

Every tensor is cut into one share for each rank of a host, between rows, so that a share is a tensor of its own for any
method: whole rows, and whole groups of short ones. The cut does not depend on buckets, so what a rank keeps for its
share stays valid when buckets change.

A bucket passes these stages:

    put       each rank copies its gradients into memory that its host shares           offering thread
    average   when all have, each writes the mean of its own share                       exchange thread
              the method works on that, among the ranks that own this share on all hosts
    agree     the ranks of a host compare whether the bucket is good                     exchange thread
    deliver   when all have decoded, each copies the shares of all over its gradients,   decoding thread
              and empties its momenta where the host sent something

Stages end with a small message from each rank of a host to each other one, so a rank that is gone or frozen is noticed
as in any exchange. They also keep ranks from overwriting what others still read: a gradient of the next step is put
when this rank has the results of this one, and so all others have read its gradients; a mean is written when all
gradients of the next step are there, and so all others have copied its results. What a rank has sent of its share is
shown as its results are, where its gradients of this share would be: nobody else reads these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...codecs.shared.signs import MIN_STEP_GROUP
from ...exchange import everywhere
from ...exchange.collective import Exchange, FramePool
from ...exchange.device import Deadline
from ...exchange.hosts import Group, LocalHost
from ...exchange.wire import HEADER_BYTES, NonFiniteCount
from ...observe.metrics import Metrics
from ...schedule.plan import Bucket, TensorSpec
from .pruned import PrunedBucket

_ALIGNED = 64
#: Elements that are averaged at a time, so that they stay in the cache.
_BLOCK = 1 << 16
_NO_DATA = torch.zeros(0, dtype=torch.uint8, device="cpu")
_HALVES = (torch.float16, torch.bfloat16)


# ---- shares --------------------------------------------------------------------------------------


class OwnedPart(NamedTuple):
    """One rank's share of a tensor: where it lies in the flat tensor, and as a tensor of its own."""

    where: slice
    tensor: TensorSpec


def cut(tensor: TensorSpec, ranks: int) -> list[OwnedPart]:
    """Return the shares of the ranks of a host, one after the other; small tensors may leave some empty."""
    rows = tensor.shape[0] if tensor.shape else 1
    row = tensor.count // rows if rows else 0
    if len(tensor.shape) < 2 or not tensor.count:
        rows, row = tensor.count, 1
    unit = math.ceil(MIN_STEP_GROUP / row) if row else 1  # so many rows are joined, where they are short
    units = -(-rows // unit)
    ends = [min(rows, units * number // ranks * unit) for number in range(ranks + 1)]
    found = []
    for first, last in itertools.pairwise(ends):
        shape = (last - first, *tensor.shape[1:]) if last > first and tensor.shape else (last - first,)
        found.append(OwnedPart(slice(first * row, last * row), replace(tensor, shape=shape)))
    return found


def share_of(bucket: Bucket, place: int, ranks: int) -> Bucket:
    """Return the bucket of one rank's shares; tensors keep their positions."""
    return replace(bucket, tensors=tuple(cut(tensor, ranks)[place].tensor for tensor in bucket.tensors))


# ---- the memory of a host ------------------------------------------------------------------------


def _nbytes(tensor: TensorSpec) -> int:
    return -(-tensor.count * getattr(torch, tensor.dtype).itemsize // _ALIGNED) * _ALIGNED


def nbytes_of(tensors: Iterable[TensorSpec], place: int, ranks: int) -> int:
    """Return what one rank shares: its gradients, and the means of its shares."""
    return sum(_nbytes(tensor) + _nbytes(cut(tensor, ranks)[place].tensor) for tensor in tensors)


class HostMemory:
    """What the ranks of a host share, by tensor; laid out alike whatever the buckets are."""

    def __init__(self, host: LocalHost, tensors: Sequence[TensorSpec]) -> None:
        #: By name, the gradients of all ranks of the host, flat.
        self.given: dict[str, list[Tensor]] = {tensor.name: [] for tensor in tensors}
        #: By name, the shares of all of them: their means over the host, and then results.
        self.shares: dict[str, list[Tensor]] = {tensor.name: [] for tensor in tensors}
        for place, memory in enumerate(host.memories):
            at = 0
            for tensor in tensors:
                share = cut(tensor, host.within.size)[place].tensor
                for held, what in ((self.given, tensor), (self.shares, share)):
                    dtype = getattr(torch, what.dtype)
                    held[tensor.name].append(memory[at : at + what.count * dtype.itemsize].view(dtype))
                    at += _nbytes(what)


# ---- one bucket ----------------------------------------------------------------------------------


#: Begins an exchange.
Begin = Callable[[int, str, NonFiniteCount, Deadline, Group], Exchange]


class HostBucket:
    """One bucket on one host, as one of its ranks sees it.

    Args:
        begin: begins an exchange, see :meth:`..context.Context.exchange`.
        metrics: counts what is sent, on the exchange thread.

    Attributes:
        share: the bucket of what this rank owns.
        grads: this step's gradients of this rank, flat, which its results are written over.
        alone: there is no other host, so that the mean over this one is the result.
    """

    def __init__(self, host: LocalHost, memory: HostMemory, bucket: Bucket, begin: Begin, metrics: Metrics) -> None:
        self._host, self._memory, self._bucket, self._begin = host, memory, bucket, begin
        self._metrics = metrics
        self._place, ranks = self._host.within.rank, self._host.within.size
        self._cuts = [cut(tensor, ranks) for tensor in bucket.tensors]
        self.share = share_of(bucket, self._place, ranks)
        self.grads: list[Tensor | None] = [None] * len(bucket.tensors)
        self.alone = self._host.between.size == 1
        self._momenta: dict[int, list[Tensor]] = {}  # by position, see empty_later()
        self._pool = FramePool()  # of the decoding thread
        self._indices: dict[int, tuple[Tensor, Tensor]] = {}

    def own(self, position: int) -> slice:
        """Return which elements of a flat tensor this rank owns."""
        return self._cuts[position][self._place].where

    def own_indices(self, position: int, index: Tensor | None) -> Tensor | None:
        """Return those of some indices into a flat tensor, rising, that this rank owns, in its share; None for none.

        For the same object it is the same object.
        """
        if index is None:
            return None
        known = self._indices.get(position)
        if known is None or known[0] is not index:
            own = self.own(position)
            known = self._indices[position] = index, index[(index >= own.start) & (index < own.stop)] - own.start
        return known[1] if known[1].numel() else None

    def empty_later(self, position: int, momenta: list[Tensor]) -> list[Tensor]:
        """Empty these with the results of a tensor, wherever this host has sent something of it: momentum masking.

        Args:
            momenta: of this rank, flat and whole.

        Returns:
            What the method is to empty of this rank's share, as if it were momentum; the host sees it.
        """
        self._momenta[position] = momenta
        return [self._sent(position, self._place)]

    def _sent(self, position: int, place: int) -> Tensor:
        """Return where a rank of the host shows what it has sent of its share, by 0, and what it has not."""
        return self._memory.given[self._bucket.tensors[position].name][place][self._cuts[position][place].where]

    def put(self, position: int, grad: Tensor) -> int:
        """Show the other ranks of the host a gradient; return how many of its values are not finite."""
        shown = self._memory.given[self._bucket.tensors[position].name][self._place]
        own, ends = self.own(position), (slice(0, self.own(position).start), slice(self.own(position).stop, None))
        parts = [part for part in ends if grad[part].numel()]  # nobody else reads what this rank owns
        counts = ops.dense_offer_all([grad[part] for part in parts], None, [shown[part] for part in parts])
        return sum(int(count) for count in counts) + int(ops.count_nonfinite(grad[own]))

    def meet(self, bad: NonFiniteCount, deadline: Deadline) -> NonFiniteCount:
        """Wait until all ranks of the host have put their gradients; return what of them is not finite.

        Args:
            bad: of this rank's.

        Raises:
            PeerError: a rank of this host is gone or late.
        """
        exchange = self._begin(self._bucket.index, "host", bad, deadline, self._host.within)
        _, bad = everywhere.all_gather(exchange, _NO_DATA)
        self._metrics.bytes_sent += exchange.bytes_sent
        return bad

    def average(self, position: int) -> Tensor:
        """Return the mean over the host of what this rank owns of a tensor, flat; its result is written over it."""
        name, own = self._bucket.tensors[position].name, self.own(position)
        mean = self._memory.shares[name][self._place]
        given, grad = [theirs[own] for theirs in self._memory.given[name]], self.grads[position]
        assert grad is not None
        given[self._place] = grad[own]
        _average(given, mean)
        if position in self._momenta:
            self._sent(position, self._place).fill_(1)
        return mean

    def agree(self, bad: NonFiniteCount, deadline: Deadline) -> NonFiniteCount:
        """Return the count of a bucket that all ranks come to: one that is bad in some share is bad as a whole.

        Args:
            bad: of this rank's share, over all hosts.
        """
        exchange = self._begin(self._bucket.index, "host agrees", bad, deadline, self._host.within)
        mine = torch.tensor(bad, dtype=torch.int64, device="cpu")
        gathered, _ = everywhere.all_gather(exchange, mine.view(torch.uint8))
        found = max(NonFiniteCount(*values.view(torch.int64).tolist()) for values in gathered)
        self._metrics.bytes_sent += exchange.bytes_sent
        if not found.count:  # then results are delivered, on a thread that does not count
            self._metrics.bytes_sent += HEADER_BYTES * (self._host.within.size - 1)
        return found

    def deliver(self, step: int, deadline: Deadline) -> None:
        """Copy the results of all ranks of the host over this one's gradients, once all are there; empty its momenta.

        Raises:
            PeerError: a rank of this host is gone or late.
        """
        exchange = self._begin(self._bucket.index, "host delivers", NonFiniteCount(), deadline, self._host.for_decoding)
        exchange.pool, exchange.digest, exchange.step = self._pool, 0, step  # the exchange thread may be in another one
        everywhere.all_gather(exchange, _NO_DATA)
        for position, grad in ((p, grad) for p, grad in enumerate(self.grads) if grad is not None):
            results = self._memory.shares[self._bucket.tensors[position].name]
            for place, share in enumerate(self._cuts[position]):
                grad[share.where].copy_(results[place])
                for momentum in self._momenta.get(position, ()):
                    momentum[share.where].masked_fill_(self._sent(position, place) == 0, 0)


def _average(given: Sequence[Tensor], mean: Tensor) -> None:
    """Write the mean of some arrays; numbers of 16 bits are added up in float32 and rounded once."""
    for at in range(0, mean.numel(), _BLOCK):
        first, *others = (array[at : at + _BLOCK] for array in given)
        into = mean[at : at + _BLOCK]
        total = first.float() if mean.dtype in _HALVES else into
        if total is into:
            into.copy_(first) if not others else torch.add(first, others.pop(0), out=into)
        for other in others:
            total += other
        torch.div(total, len(given), out=total)
        if total is not into:
            into.copy_(total)


def owned(part: HostBucket | PrunedBucket | None, position: int, values: Tensor) -> Tensor:
    """Return what rounds of this rank see of a flat tensor: all, unless ranks share hosts or weights are pruned."""
    if part is None:
        return values
    own = part.own(position)
    return values[own if isinstance(own, slice) else own.to(values.device)]
