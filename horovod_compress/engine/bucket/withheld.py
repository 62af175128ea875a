"""Values that are kept out: those that would spoil every later step, and elements that coded rounds leave out.

What waits in a residual is added to each gradient. One NaN there makes its bucket NaN on every rank, in every step, and
no step would take it away: a bucket that is not finite leaves what is kept as it was. So values that are not finite, or
so large that no sum with them is, are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...codecs.work import work_dtype
from ...schedule.plan import Bucket

# ---- values that would spoil later steps ---------------------------------------------------------

#: What decoding leaves is smaller, see csrc/rules/kept.h.
MOST = 2.0**96


def count(kept: Tensor) -> int:
    """Return how many values are not finite, or not below :data:`MOST`."""
    if kept.is_floating_point() and kept.numel() and bool(torch.stack(kept.aminmax()).abs().max() < _most(kept)):
        return 0  # as most often; without memory of the size of what is kept
    return int(_spoilt(kept).sum())


def drop(kept: Tensor) -> int:
    """Let such values be 0; return how many there were."""
    spoilt = _spoilt(kept)
    number = int(spoilt.sum())
    if number:
        kept.masked_fill_(spoilt, 0.0)
    return number


def _spoilt(kept: Tensor) -> Tensor:
    if not kept.is_floating_point():
        return torch.zeros_like(kept, dtype=torch.bool)
    return ~(kept.abs() < _most(kept))


def _most(kept: Tensor) -> float:
    return min(MOST, torch.finfo(kept.dtype).max)


# ---- elements that are left out ------------------------------------------------------------------

T = TypeVar("T")
#: What a weight is: something else than 0, 0 without ever having been pruned, masked, masked and in no payload.
LIVE, FIRST, MASKED, GONE = range(4)


@dataclass
class _Waiting:
    """What waits for some elements of a tensor.

    A round reads ``kept`` and writes ``next``; only when its result is good on every rank does one become the other.

    Attributes:
        leaves: they are coded from now on: the next round, of whatever kind, sends what is left, and later ones what it
            rounds off, or what stood beside a gradient that counted as zero. Only elements for which something waits
            are here, as after a resume.
    """

    index: Tensor
    kept: Tensor
    next: Tensor
    leaves: bool

    @classmethod
    def of(cls, index: Tensor, kept: Tensor, *, leaves: bool) -> _Waiting:
        return cls(index, kept, torch.zeros_like(kept), leaves)

    @classmethod
    def leaving(cls, kept: Tensor, index: Tensor | None = None) -> list[_Waiting]:
        """Return those of some elements that are coded from now on, if anything waits for any of them.

        Args:
            index: what these are; None for all of the tensor.
        """
        left = kept.nonzero().view(-1)
        return [cls.of(left if index is None else index[left], kept[left], leaves=True)] if left.numel() else []


class Withheld:
    """Chooses the elements of a bucket that coded rounds leave out, and keeps what waits for them.

    So what is exactly 0 on every rank stays so. A code of one bit has no zero: it would move an element whose gradient
    is always 0. Where the second moment that is held is exactly 0, no rank has had a gradient yet; there a coded round
    sends nothing and its result is 0. A gradient that comes all the same waits here, in units of gradients, for the
    next round of plain numbers, which sends it: then the second moment includes it, and the element is coded like any
    other. Nothing is lost.

    Masked elements are left out of every round, and nothing waits for them.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self._bucket, self._device, self._dtype = bucket, device, work_dtype(bucket)
        #: By position, the indices of all that coded rounds leave out, rising; codecs see it as ``Work.withheld``.
        self.index: dict[int, Tensor] = {}
        self._unmoved: dict[int, Tensor] = {}  # those for which gradients wait
        self._masked: dict[int, Tensor] = {}
        self._kinds: dict[int, Tensor] = {}
        self._waiting: dict[int, list[_Waiting]] = {}
        #: Whether anything is left out, or waits.
        self.any = False

    def _note(self) -> None:
        self.any = bool(self.index or self._waiting)

    # ---- between two steps, and on every rank alike ----

    def choose(self, position: int, unmoved: Tensor | None) -> bool:
        """Choose the elements for which gradients wait; return whether they are others than before."""
        if self._unmoved.get(position) is unmoved:
            return False
        _put(self._unmoved, position, unmoved)
        self._arrange(position)
        return True

    def mask(self, position: int, kinds: Tensor | None, own: slice | Tensor) -> bool:
        """Choose the elements that are masked; return whether they may be others than before.

        Args:
            kinds: what all elements of the whole tensor are; None where none is masked.
            own: those that are elements of this bucket.
        """
        if self._kinds.get(position) is kinds:
            return False
        _put(self._kinds, position, kinds)
        masked = None if kinds is None else (kinds[own] >= MASKED).nonzero().view(-1)
        _put(self._masked, position, masked if masked is not None and masked.numel() else None)
        self._arrange(position)
        return True

    def masked(self, position: int) -> Tensor | None:
        """Return the masked elements of a tensor, if there are any."""
        return self._masked.get(position)

    def _arrange(self, position: int) -> None:
        """Let what waits follow its elements."""
        values, unmoved, masked = self.dense(position), self._unmoved.get(position), self._masked.get(position)
        waits, out = unmoved, masked if unmoved is None else unmoved  # nobody writes to these
        if masked is not None:
            values[masked] = 0
        if masked is not None and unmoved is not None:
            chosen = torch.zeros(values.numel(), dtype=torch.bool, device=self._device)
            chosen[unmoved] = True
            chosen[masked] = False
            waits = chosen.nonzero().view(-1)
            chosen[masked] = True
            out = chosen.nonzero().view(-1)
        found = []
        if waits is not None:
            found.append(_Waiting.of(waits, values[waits], leaves=False))
            values[waits] = 0
        found += _Waiting.leaving(values)
        _put(self._waiting, position, found or None)
        _put(self.index, position, out)
        self._note()

    # ---- what waits, for whoever saves it or moves it to other buckets ----

    def positions(self) -> Iterable[int]:
        """Return the tensors for which something may wait."""
        return list(self._waiting)

    def dense(self, position: int) -> Tensor:
        """Return what waits for a tensor, 0 where nothing does."""
        values = torch.zeros(self._bucket.tensors[position].count, dtype=self._dtype, device=self._device)
        for some in self._waiting.get(position, ()):
            values[some.index] = some.kept
        return values

    def put(self, position: int, values: Tensor | None) -> None:
        """Let this wait for a tensor, and nothing else; None for nothing at all."""
        if values is None and position not in self._waiting:
            return
        withheld = [some for some in self._waiting.pop(position, ()) if not some.leaves]
        values = self.dense(position) if values is None else values.to(self._device, copy=True)
        for some in withheld:
            some.kept.copy_(values[some.index])
            values[some.index] = 0
        withheld += _Waiting.leaving(values)
        _put(self._waiting, position, withheld or None)
        self._note()

    def add(self, position: int, index: Tensor, values: Tensor) -> None:
        """Let more wait for elements for which gradients do, those of an index."""
        if bool(values.any()):
            waits = self.dense(position)
            waits[index] += values.to(waits.device)
            self.put(position, waits)

    def scale(self, position: int, factor: float) -> None:
        """Multiply what waits for a tensor."""
        for some in self._waiting.get(position, ()):
            some.kept.mul_(factor)

    # ---- a round ----

    def take(self, position: int, grad: Tensor, wire: torch.dtype | None) -> None:
        """Take out of a gradient what the round leaves out, or add what waits; values that are not finite stay.

        Args:
            grad: flat.
            wire: what the round sends numbers as; None if it codes them.
        """
        for some in self._waiting.get(position, ()):
            given = grad[some.index]
            good, total = given.isfinite(), some.kept + given.to(self._dtype)
            if wire is None and not some.leaves:
                some.next.copy_(torch.where(good, total, some.kept).clamp_(-MOST / 2, MOST / 2))
                continue
            kind = wire or grad.dtype
            most = min(torch.finfo(kind).max, torch.finfo(grad.dtype).max) / 2
            sent = total.clamp(-most, most).to(kind).to(grad.dtype)
            # What gradients of 16 bits round off of elements that leave is dropped: they would never be done.
            drops = some.leaves and kind.itemsize >= grad.element_size()
            rest = total - (total.clamp(-most, most) if drops else sent)
            some.next.copy_(torch.where(good, rest, some.kept))
            grad[some.index] = torch.where(good, sent, given)
        index = self._left_out(position, wire)
        if index is not None:
            given = grad[index]
            grad[index] = given.masked_fill_(given.isfinite(), 0)

    def keep(self, position: int, result: Tensor, state: Iterable[Tensor], wire: torch.dtype | None) -> None:
        """Finish a round that was good on every rank: let the result be 0 where nothing was sent.

        Args:
            result: flat.
            state: what the method keeps for the elements of the tensor: it had nothing to keep there.
        """
        index = self._left_out(position, wire)
        if index is not None:
            result.index_fill_(0, index, 0)
            for kept in state:
                kept.data.index_fill_(0, index.to(kept.device), 0)  # no change from outside, see onebit_adam
        waiting = self._waiting.get(position, ())
        for some in waiting:
            some.kept, some.next = some.next, some.kept
        if any(some.leaves for some in waiting):
            stays = list[_Waiting]()
            for some in waiting:
                stays += _Waiting.leaving(some.kept, some.index) if some.leaves else [some]
            _put(self._waiting, position, stays or None)
            self._note()

    def _left_out(self, position: int, wire: torch.dtype | None) -> Tensor | None:
        return (self.index if wire is None else self._masked).get(position)


def _put(held: dict[int, T], position: int, value: T | None) -> None:
    if value is None:
        held.pop(position, None)
    else:
        held[position] = value
