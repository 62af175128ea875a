"""Random-k: values at random places that all ranks draw alike, so that payloads add and have no positions.

Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, arXiv:1809.07599, NeurIPS 2018; shared indices after Wangni
et al., arXiv:1710.09854, NeurIPS 2018.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = one element, at random, of each of k blocks whose sizes differ by one at most
    payload  = x at T, in order
    result   = mean over ranks at T, 0 elsewhere
    residual = 0 at T, x elsewhere

With ``block=n``, random-block of Eghlidi and Jaggi, *Sparse Communication for Training Deep Networks*,
arXiv:2009.09271, it is n neighbouring elements, at most k, instead of one: k / n blocks, each one of a group of blocks.

With ``scaled=True`` there is no residual: each value is multiplied by the size of its block, about
d / k (with ``block``, by the number of blocks in its group), so that the expectation of the result is the mean.

One element of each block instead of any k elements: the blocks need no search, all ranks find T in
one pass, and every element is still as likely as its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import SAMPLE, Key
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Law, Properties, check_choice, whole
from .registry import register
from .shared.sections import check_share, share
from .work import Counts, Layout, Part, Work, clamped_all, counts_of, per_element, slices, work_dtype

MOST_BLOCK = 1 << 20


@register
@dataclass(frozen=True)
class RandomK(Codec):
    """1 % of each tensor's elements, drawn at random, the same on all ranks; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        scaled: whether to scale values so that the result is unbiased, without a residual.
        block: of how many neighbouring elements each draw is, 1 to 1048576: longer ones are copied faster. A tensor of
            which fewer are sent has one block of these.
    """

    density: float = 0.01
    scaled: bool = False
    block: int = 1

    batched: ClassVar[bool] = True
    name: ClassVar[str] = "randomk"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "values at random positions, the same on all ranks"
    source: ClassVar[str] = "Stich et al., NeurIPS 2018, arXiv:1809.07599"
    page: ClassVar[str] = "sparse_methods.md#random-k"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.05},
        {"density": 0.5, "scaled": True},
        {"density": 0.3, "block": 32},
    )

    def __post_init__(self) -> None:
        check_share("density", self.density)
        check_choice("scaled", self.scaled, True, False)
        if not whole(self.block) or not 1 <= self.block <= MOST_BLOCK:
            raise ConfigError(f"block should be a number of elements in [1, {MOST_BLOCK}], got {self.block!r}")

    def properties(self) -> Properties:
        bound = f"({'d/k - 1' if self.scaled else '1 - k/d'}) |mean of x|^2"
        return Properties(
            Law(unbiased=self.scaled, conserves=not self.scaled, bound=bound, error=self._error, zeros=True),
            feedback="none" if self.scaled else "own",
            divides="before",
            share_sent=1.0 if self.scaled else self.density,
        )

    def _error(self, x: Sequence[Tensor]) -> float:
        count = x[0].numel()
        size = self._largest_group(count)
        factor = size - 1 if self.scaled else 1 - 1 / size
        return factor * float(torch.stack(tuple(x)).mean(0).square().sum())

    def layout(self, bucket: Bucket, world: int) -> Layout:
        for tensor in bucket.tensors:
            if tensor.count >= 1 << 31:
                raise ConfigError(
                    f"randomk takes tensors of fewer than 2^31 elements, {tensor.name} has {tensor.count}"
                )
        values = (work_dtype(bucket), sum(self._room(tensor.count) for tensor in bucket.tensors))
        return Layout({"values": values}, state={} if self.scaled else per_element(bucket, "residual"))

    def _block(self, count: int) -> int:
        """Return of how many elements a block of a tensor is."""
        return max(1, min(self.block, share(self.density, count)))

    def _groups(self, count: int) -> tuple[int, int]:
        """Return how many blocks a tensor has, and of how many groups of them one is sent each."""
        blocks = -(-count // self._block(count))
        return blocks, share(self.density, blocks)

    def _largest_group(self, count: int) -> int:
        blocks, groups = self._groups(count)
        return -(-blocks // groups)

    def _room(self, count: int) -> int:
        """Return how many values of a tensor are sent."""
        return self._block(count) * self._groups(count)[1]

    def prepare(self, work: Work) -> None:
        tensors = work.bucket.tensors
        work.memo["places"] = slices([self._room(tensor.count) for tensor in tensors])
        work.memo["blocks"] = [self._block(tensor.count) for tensor in tensors]
        work.memo["rest"] = {}  # by position: what a clamp took from the values, for the residual

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return counts_of([self._offer(work, position, key) for position in positions])

    def _offer(self, work: Work, position: int, key: Key) -> int | Tensor:
        own = work.memo["places"][position]
        given = (work.grad(position), work.residual_of(position), work.regions["values"][own])
        return ops.sample_offer(*given, _shared(key), first=own.start, block=work.memo["blocks"][position])

    def _limit(self, work: Work, position: int) -> float:
        """Return the largest value that a rank may send."""
        count = work.bucket.tensors[position].count
        if not self.scaled or not count:
            return work.limit()
        return work.limit() / self._largest_group(count)  # it is multiplied by the size of its group

    def before(self, number: int, work: Work, key: Key) -> None:
        for position, grad in enumerate(work.grads):
            if grad is None:  # a sparse gradient, which Horovod reduces itself
                work.regions["values"][work.memo["places"][position]] = 0

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        positions = [part.position for part in parts]
        values = [work.regions["values"][work.memo["places"][position]] for position in positions]
        rests = clamped_all(values, [self._limit(work, position) for position in positions])
        work.memo["rest"] = dict(zip(positions, rests, strict=True))

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for position in (part.position for part in parts):
            own = work.memo["places"][position]
            values, grad, residual = work.regions["values"][own], work.grad(position), work.residual_of(position)
            rule = {"first": own.start, "weighted": self.scaled, "block": work.memo["blocks"][position]}
            ops.sample_decode(values, grad, residual, _shared(key), result_scale / work.world, **rule)
            rest = work.memo["rest"][position]
            if rest is not None and residual is not None:  # what a clamp took from the values that were sent
                residual.add_(self._spread(work, position, rest, key))
            work.saturate(position, result_scale)
            if not self.scaled and (momenta := work.momenta.get(position)):  # else nothing waits that could be stale
                self._clear(work, position, momenta, key)

    def _clear(self, work: Work, position: int, momenta: list[Tensor], key: Key) -> None:
        """Empty an optimizer's momentum at the places that were sent."""
        if "zeros" not in work.memo:  # few jobs have momenta here
            longest = max(tensor.count for tensor in work.bucket.tensors)
            values = work.regions["values"]
            work.memo["zeros"] = (torch.zeros_like(values), values.new_zeros(longest))
        own, (values, nothing) = work.memo["places"][position], work.memo["zeros"]
        for momentum in momenta:
            if momentum.dtype is nothing.dtype:  # as if it were a residual: 0 at the places, unchanged elsewhere
                grad = nothing[: momentum.numel()]
                rule = {"first": own.start, "block": work.memo["blocks"][position]}
                ops.sample_decode(values[own], grad, momentum, _shared(key), 1.0, **rule)
            else:
                momentum.masked_fill_(self._spread(work, position, torch.ones_like(values[own]), key) != 0, 0)

    def _spread(self, work: Work, position: int, values: Tensor, key: Key) -> Tensor:
        """Return values at the places of this round, 0 elsewhere."""
        every = values.new_zeros(work.bucket.tensors[position].count)
        rule = {"first": work.memo["places"][position].start, "block": work.memo["blocks"][position]}
        ops.sample_decode(values, every, None, _shared(key), 1.0, **rule)
        return every


def _shared(key: Key) -> Key:
    """Return the key of the places: all ranks must draw alike."""
    return key.at(rank=0, purpose=SAMPLE)
