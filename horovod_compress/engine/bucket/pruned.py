"""A bucket of pruned weights, of which rounds see the elements that are left: nothing else is in payloads.

Masks are equal on all ranks, so no positions are sent. For its method, what is left of a tensor is a tensor of its own.
It has as many rows as the whole one, or fewer where these would be short, in which neighbours are joined. All are of
one length: the last elements of rows of which more is left fill those of which less is. So a scale of a row is for the
most part one of the same row still; in rows that are cut anywhere, methods of one bit learn worse.

    take      what is left of a gradient is copied for the method     offering thread, or training thread on a GPU
    deliver   its result is copied back, and all others are 0         decoding thread
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...codecs.shared.signs import MIN_STEP_GROUP
from ...schedule.plan import Bucket, TensorSpec

_ALL = slice(None)


def _rows(shape: tuple[int, ...], left: int) -> int:
    """Return how many rows there are where so many elements of a tensor are left."""
    most = left // MIN_STEP_GROUP
    if len(shape) < 2 or not most:
        return 1
    return shape[0] if most >= shape[0] else 1 << (most.bit_length() - 1)


def filled(shape: tuple[int, ...], left: int) -> int:
    """Return how many elements fill the rows where at least so many are left: at most a few hundredths more."""
    while short := -left % _rows(shape, left):
        left += short
    return left


def arranged(shape: tuple[int, ...], index: Tensor) -> Tensor:
    """Return the indices of what is left of a tensor, rising, in the order in which rounds see them."""
    rows, count = _rows(shape, index.numel()), index.numel()
    if rows < 2:
        return index
    length, whole = count // rows, math.prod(shape[1:])
    row = torch.div(index, whole, rounding_mode="floor") * rows // shape[0]
    counts = torch.bincount(row, minlength=rows)
    place = torch.arange(count, device=index.device) - (counts.cumsum(0) - counts)[row]
    fits, found = place < length, torch.full_like(index, -1)
    found[row[fits] * length + place[fits]] = index[fits]
    found[found < 0] = index[~fits]
    return found


def _left(tensor: TensorSpec, rest: Tensor | None) -> TensorSpec:
    if rest is None:
        return tensor
    count = rest.numel()
    rows = _rows(tensor.shape, count)
    return replace(tensor, shape=(rows, count // rows) if rows > 1 else (count,))


class PrunedBucket:
    """One bucket, of which elements are left out.

    Args:
        rest: by name, the indices of what is left of tensors that are pruned; so many that they fill rows, see
            :func:`filled`, and in the order of :func:`arranged`.

    Attributes:
        share: the bucket of what is left; tensors keep their positions.
        grads: this step's gradients, flat, which results are written over.
    """

    def __init__(self, bucket: Bucket, rest: Mapping[str, Tensor]) -> None:
        self._bucket = bucket
        self._rest = [rest.get(tensor.name) for tensor in bucket.tensors]
        self.share = replace(bucket, tensors=tuple(map(_left, bucket.tensors, self._rest)))
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
