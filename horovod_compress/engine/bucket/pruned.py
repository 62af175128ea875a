"""A bucket of pruned weights, of which rounds see the elements that are left: nothing else is in payloads.

Masks are equal on all ranks, so no positions are sent. For its method, what is left of a tensor is a tensor of its own.
Where rows of a tensor have steps of their own, they keep them: rows of which nothing is left are gone, and all others
are as long as the one of which most is left, filled up with masked elements, which count as 0. Rows that were cut
anywhere would join elements that are not alike, and methods of one bit learn worse.

    take      what is left of a gradient is copied for the method     offering thread, or training thread on a GPU
    deliver   its result is copied back, and all others are 0         decoding thread
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...codecs.base import Codec, variants_of, zero_groups_of
from ...codecs.shared.signs import MIN_STEP_GROUP
from ...schedule.plan import Bucket, TensorSpec

_ALL = slice(None)


def rows_of(codec: Codec, bucket: Bucket, world: int) -> dict[str, int]:
    """Return, by tensor, how long rows are that share something; where its shape does not matter, that is all of it."""
    flat = replace(bucket, tensors=tuple(replace(tensor, shape=(tensor.count,)) for tensor in bucket.tensors))
    found = {tensor.name: tensor.count for tensor in bucket.tensors}
    for variant in variants_of(codec):
        groups, plain = (zero_groups_of(variant, each, world) for each in (bucket, flat))
        found |= {t.name: g for t, g, other in zip(bucket.tensors, groups, plain, strict=True) if g != other}
    return found


def having_room(masked: Tensor, row: int) -> Tensor:
    """Return which elements of a flat tensor payloads have, if these are masked.

    Args:
        row: see :func:`rows_of`; 0 for a tensor that is not pruned.
    """
    count = masked.numel()
    if row >= count:
        return ~masked
    if not row or count % row:  # short rows are joined, the last ones to fewer elements
        return torch.ones_like(masked)
    left = ~masked.view(-1, row)
    counts = left.sum(dim=1, keepdim=True)
    length = max(int(counts.max()), MIN_STEP_GROUP)
    filled = left | ((~left).cumsum(dim=1, dtype=torch.int32) <= length - counts)
    return (filled & (counts > 0)).view(-1)


@dataclass(frozen=True, eq=False)
class Rest:
    """What payloads have of a pruned tensor: the indices, rising, and in how many rows."""

    index: Tensor
    rows: int

    @classmethod
    def of(cls, left: Tensor, row: int) -> Rest:
        """Return the elements of :func:`having_room`."""
        index = left.nonzero().view(-1)
        several = 0 < row < left.numel() and not left.numel() % row
        rows = int(left.view(-1, row).any(dim=1).sum()) if several else 1
        return cls(index, rows if rows and not index.numel() % rows else 1)

    def share(self, tensor: TensorSpec) -> TensorSpec:
        """Return what is left of a tensor, as one of its own."""
        count = self.index.numel()
        return replace(tensor, shape=(self.rows, count // self.rows) if self.rows > 1 else (count,))


class PrunedBucket:
    """One bucket, of which elements are left out.

    Args:
        rest: by name, what is left of tensors that are pruned.

    Attributes:
        share: the bucket of what is left; tensors keep their positions.
        grads: this step's gradients, flat, which results are written over.
    """

    def __init__(self, bucket: Bucket, rest: Mapping[str, Rest]) -> None:
        self._bucket = bucket
        found = [rest.get(tensor.name) for tensor in bucket.tensors]
        shares = (each.share(tensor) if each else tensor for tensor, each in zip(bucket.tensors, found, strict=True))
        self.share = replace(bucket, tensors=tuple(shares))
        self._rest = [each.index if each else None for each in found]
        self.grads: list[Tensor | None] = [None] * len(bucket.tensors)
        dtype = getattr(torch, bucket.dtype)
        self._room = [index if index is None else index.new_empty(index.numel(), dtype=dtype) for index in self._rest]
        self._indices: dict[int, tuple[Tensor, Tensor]] = {}

    def own(self, position: int) -> slice | Tensor:
        """Return which elements of a flat tensor are left."""
        rest = self._rest[position]
        return _ALL if rest is None else rest

    def own_indices(self, position: int, index: Tensor | None) -> Tensor | None:
        """Return those of some indices into a flat tensor, rising, that are left, among what is left; None for none.

        For the same object it is the same object.
        """
        rest = self._rest[position]
        if index is None or rest is None:
            return index
        known = self._indices.get(position)
        if known is None or known[0] is not index:
            known = self._indices[position] = index, torch.isin(rest, index).nonzero().view(-1)
        return known[1] if known[1].numel() else None

    def take(self, position: int) -> Tensor:
        """Return what is left of a gradient."""
        grad, rest, room = self.grads[position], self._rest[position], self._room[position]
        assert grad is not None
        return grad if rest is None or room is None else torch.index_select(grad, 0, rest, out=room)

    def deliver(self, position: int, result: Tensor) -> None:
        """Write the result of what is left over a gradient."""
        grad, rest = self.grads[position], self._rest[position]
        if grad is not None and rest is not None:
            grad.zero_().index_copy_(0, rest, result)

    def spread(self, position: int, values: Tensor) -> Tensor:
        """Return values of what is left of a tensor, as ones of the whole tensor, 0 elsewhere."""
        rest = self._rest[position]
        if rest is None:
            return values
        whole = values.new_zeros(self._bucket.tensors[position].count)
        return whole.index_copy_(0, rest.to(values.device), values)
