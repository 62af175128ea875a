"""What a method needs of memory in one bucket, and what it works with there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ops.keys import KEPT, Key
from ..schedule.plan import Bucket

T = TypeVar("T")

# ---- what merging leaves for the next round -----------------------------------------------------


class Carry:
    """Rows of one region's type that a rank keeps for the elements which it merges.

    A round reads ``kept`` and writes ``next``; only when its result is good on every rank does one become the other.
    So a round that is not finite leaves no trace, although ranks merge before they know.

    Args:
        first: the first element of the region that has a place here.
        kept: one row after the other, empty at first.
    """

    def __init__(self, first: int, kept: Tensor) -> None:
        self.first, self.kept, self.next = first, kept, torch.zeros_like(kept)

    def rows(self, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that were kept for some elements of the region, and those to be written."""
        here = slice(start - self.first, stop - self.first)
        return [row[here] for row in self.kept], [row[here] for row in self.next]

    def keep(self) -> None:
        """Take what the round wrote for what is kept."""
        self.kept, self.next = self.next, self.kept


def again(region: str) -> str:
    """Return the name of what merging keeps for elements of a region that it has merged before in the same round."""
    return f"{region} again"


def carries(
    rows: Mapping[str, int],
    regions: Mapping[str, Tensor],
    spans: Sequence[Mapping[str, tuple[int, int]]],
    device: torch.device,
) -> dict[str, Carry]:
    """Return an empty carry for every region that has rows.

    Args:
        rows: how many, by region.
        spans: the first element that this rank merges, and the end, by region; then of those that it merges again.
        device: where payloads are merged.
    """
    found = {}
    for name, number in rows.items():
        if not number:
            continue
        for key, (first, last) in zip((name, again(name)), (span[name] for span in spans), strict=False):
            found[key] = Carry(first, torch.zeros(number, last - first, dtype=regions[name].dtype, device=device))
    return found


# ---- one bucket ---------------------------------------------------------------------------------


#: State that is momentum times the last result, equal on all ranks. The last step moved weights by its learning rate
#: times that result, so the engine multiplies it by old / new when a rate changes.
LAST = "last_step"
#: State that does not wait to be sent.
MOMENTA = ("momentum", LAST)
#: Name, dtype and length of the arrays of a payload.
Regions = dict[str, tuple[torch.dtype, int]]
#: A number for each of some tensors, of which a GPU may hold one or all.
Counts = Tensor | Sequence[int | Tensor]


def dtype_of(bucket: Bucket) -> torch.dtype:
    """Return the dtype of a bucket's gradients."""
    return getattr(torch, bucket.dtype)


def work_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype of a bucket's arithmetic and residual."""
    return torch.float64 if bucket.dtype == "float64" else torch.float32


def together(counts: Sequence[int | Tensor]) -> list[int]:
    """Return numbers, those of a GPU after one wait for all of them."""
    there = [count.view(1) for count in counts if isinstance(count, Tensor)]
    alike = len({count.device for count in there}) == 1
    found = iter(torch.cat(there).tolist() if alike else map(int, there))
    return [next(found) if isinstance(count, Tensor) else count for count in counts]


def counts_of(found: Sequence[int | Tensor]) -> Counts:
    """Return the counts of some tensors, those of a GPU as one array: nothing waits."""
    there = [count for count in found if isinstance(count, Tensor)]
    return torch.cat(there) if there and len(there) == len(found) else found


def clamped_all(values: Sequence[Tensor], limits: Sequence[float]) -> list[Tensor | None]:
    """Clamp in place what a rank is going to send of some tensors. Waits once on CUDA.

    Args:
        limits: the largest value of each.

    Returns:
        What that takes away of each, or None if that is nothing.
    """
    # Most often nothing is to be clamped.
    largest = [torch.linalg.vector_norm(one, math.inf) if one.numel() else one.new_zeros(()) for one in values]
    sizes: list[float] = torch.stack(largest).tolist() if largest else []
    return [
        None if size <= limit else _clamped(one, limit) for one, size, limit in zip(values, sizes, limits, strict=True)
    ]


def _clamped(values: Tensor, limit: float) -> Tensor:
    rest = values.clone()
    rest -= values.clamp_(-limit, limit)
    return rest


def slices(sizes: list[int]) -> list[slice]:
    """Return where each of some parts lies, one after the other."""
    found, start = [], 0
    for size in sizes:
        found.append(slice(start, start + size))
        start += size
    return found


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor at ``position`` of a bucket."""

    position: int
    start: int
    stop: int


#: A chunk, of which a bucket has one for each rank, is decoded in at most about so many parts.
_PARTS = 8


@dataclass
class Work:
    """What a codec works on: one bucket's arrays on one rank. The reducer owns it.

    Attributes:
        grads: this step's gradients, contiguous, one per tensor of the bucket; ``grad`` returns one, flat. ``decode``
            overwrites them with the result.
        state: what is kept from step to step for every element, flat with the bucket's gaps.
        tables: what is kept from step to step for the bucket as a whole.
        regions: the arrays of the payload; after the exchange, the consensus bytes, where no ``results`` take their
            place.
        used: bytes of the payload that this round sends: ``encode`` says it where payloads are gathered, and ``before``
            where ``Layout.varies``.
        gathered: the payloads of all ranks in rank order, where payloads are gathered.
        shared: the arrays of the preludes; after its prelude, each is equal on every rank.
        local: arrays that stay on this rank.
        results: by region, arrays of what owners pass on in its place, see ``Layout.results``; none where payloads go
            round a ring.
        carry: by region, what merging left for this round, see ``Layout.carries``.
        memo: what ``Codec.prepare`` derived from the bucket.
        momenta: by position, momentum buffers of the optimizer, to be emptied where this rank's
            payload carried a value.
        divisors: by position, what gradients are divided by before they are encoded, flat and in the dtype of the
            arithmetic; see ``Properties.divides``.
        linear: the positions of tensors that SGD moves, whose steps are linear in the results.
        withheld: by position, the indices of elements that are left out: there all ranks submit 0, and whatever is
            decoded becomes 0. A mean over elements leaves them out too.
    """

    bucket: Bucket
    world: int
    grads: list[Tensor | None]
    state: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    regions: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    carry: dict[str, Carry] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)
    used: int = 0
    gathered: list[Tensor] = field(default_factory=list)
    momenta: dict[int, list[Tensor]] = field(default_factory=dict)
    divisors: dict[int, Tensor] = field(default_factory=dict)
    withheld: dict[int, Tensor] = field(default_factory=dict)
    linear: set[int] = field(default_factory=set)
    _pieces: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def present(self) -> list[int]:
        """Return the positions of the tensors that were submitted: sparse gradients are not."""
        return [position for position, grad in enumerate(self.grads) if grad is not None]

    def absent(self) -> list[int]:
        """Return those of the others."""
        return [position for position, grad in enumerate(self.grads) if grad is None]

    def grad(self, position: int) -> Tensor:
        """Return the gradient of one tensor, flat."""
        grad = self.grads[position]
        assert grad is not None
        return grad if grad.dim() == 1 else grad.view(-1)

    def grads_at(self, positions: Sequence[int]) -> list[Tensor]:
        """Return the gradients of some tensors, of any shape: operations on batches only ask how many elements."""
        grads = self.grads
        found = [grad for position in positions if (grad := grads[position]) is not None]
        assert len(found) == len(positions)
        return found

    def span(self, position: int) -> slice:
        """Return where one tensor lies in the flat buffer."""
        start = self.bucket.offsets[position]
        return slice(start, start + self.bucket.tensors[position].count)

    def place(self, part: Part) -> slice:
        """Return where a part lies in the flat buffer."""
        start = self.bucket.offsets[part.position]
        return slice(start + part.start, start + part.stop)

    def grads_of(self, parts: Sequence[Part]) -> list[Tensor]:
        """Return the gradients of some parts."""
        found = []
        for part in parts:
            grad = self.grad(part.position)
            found.append(grad if part.stop - part.start == grad.numel() else grad[part.start : part.stop])
        return found

    def remembered(self, what: str, given: Sequence[Any], make: Callable[[], T]) -> T:
        """Return what follows from positions or parts; they come in the same batches in most steps."""
        held: dict[tuple[Any, ...], T] = self.memo.setdefault(what, {})
        found = held.get(key := tuple(given))
        if found is None:
            # A backward pass may go another way in each step. What a usual one makes is at most a quarter of this.
            if len(key) + sum(map(len, held)) > 4 * (len(self.bucket.tensors) + _PARTS * self.world):
                held.clear()
            found = held[key] = make()
        return found

    def state_of(self, name: str, position: int) -> Tensor | None:
        """Return what is kept under a name for the elements of one tensor, or None."""
        kept = self.state.get(name)
        if kept is None:
            return None
        whole, piece = self._pieces.get((name, position), (None, None))
        if whole is not kept or piece is None:  # cut once: there are hundreds of tensors in every step
            piece = kept[self.span(position)]
            self._pieces[name, position] = kept, piece
        return piece

    def states_of(self, name: str, spans: Sequence[slice]) -> list[Tensor] | None:
        """Return what is kept under a name for some elements of the bucket, or None."""
        kept = self.state.get(name)
        return None if kept is None else [kept[span] for span in spans]

    def carry_of(self, region: str, weights: tuple[int, int]) -> Carry:
        """Return what a merge keeps, given of how many ranks the two payloads are.

        What was merged along a row of a torus is merged along its column once more, and both round off.
        """
        return self.carry[region if weights[0] == 1 else again(region)]

    def residual_of(self, position: int) -> Tensor | None:
        """Return the residual of one tensor."""
        return self.state_of("residual", position)

    def limit(self) -> float:
        """Return the largest value that a rank may send, so that the mean over ranks is not infinite."""
        if self.bucket.dtype == "float16":
            return torch.finfo(torch.float16).max
        return torch.finfo(work_dtype(self.bucket)).max / (2 * self.world)

    def by_divisor(self, positions: Sequence[int]) -> list[tuple[list[int], list[Tensor] | None]]:
        """Return which of these tensors have something to divide by, by their places in the list, and what it is.

        Those that have nothing, such as parameters that were never used, are a group of their own, and those that SGD
        moves are another; most often, all are of one kind.
        """
        by: dict[int, Tensor] = {}
        linear: list[int] = []
        plain: list[int] = []
        for place, position in enumerate(positions):
            if (divisor := self.divisors.get(position)) is not None:
                by[place] = divisor
            else:
                (linear if position in self.linear else plain).append(place)
        groups: list[tuple[list[int], list[Tensor] | None]] = [([*by], [*by.values()]), (linear, None), (plain, None)]
        return [group for group in groups if group[0]]

    def is_of_one_kind(self) -> bool:
        """Return whether nothing is divided, and SGD moves all tensors or none."""
        return not self.divisors and len(self.linear) in (0, len(self.bucket.tensors))

    def saturate(self, position: int, result_scale: float) -> None:
        """Let a sum over ranks that float16 cannot hold be its largest number; means of clamped values fit."""
        if self.bucket.dtype == "float16" and result_scale > 1:
            self.grad(position).clamp_(-self.limit(), self.limit())


# ---- what is needed of memory -------------------------------------------------------------------


@dataclass(frozen=True)
class Cutting:
    """How tensors may be cut, to be decoded or encoded while other chunks are on their way.

    Attributes:
        granules: by position, of how many elements parts are multiples; the last one of a tensor may be shorter.
        needs: returns what a part needs of the payload: for each region, the first index and the end.
        encoding: parts may be encoded one by one too, else they are only decoded so.
        ends: by position, where parts end, if that is not at multiples.
    """

    granules: Sequence[int]
    needs: Callable[[Work, Part], dict[str, tuple[int, int]]]
    encoding: bool = False
    ends: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Layout:
    """The arrays of one bucket: names, dtypes and lengths. The engine allocates them and puts them into ``Work``.

    Attributes:
        regions: the payload. Where payloads are gathered there is one array, "payload", of as many bytes as a payload
            may take.
        records: for regions that consist of records, how many elements make one. A record is handed to merging
            whole: a scale and its codes, for example.
        varies: the length of the payload, of one region that is reduced, follows from the preludes: ``before`` sets
            ``Work.used``, to the same on every rank, and no more is exchanged. The region is as long as it may become.
        results: by region, the array that the owner of a chunk passes on in its place, if it does: payloads then merge
            better where one rank sees all of them. What becomes of a record lies at its place: the array is as many
            times as long as the region everywhere. ``fold`` writes it, and every rank finds all of it in
            ``Work.results``.
        carries: by region, how many rows of its type merging keeps for the next round. They belong to the places that
            this rank merges, not to parameters: other buckets, another number of ranks or another collective begin with
            zeros. See :class:`Carry`.
        preludes: the arrays of each exchange before the payload's; names differ from the payload's. They are merged
            like the payload, with a key of rank 0: in rank order where they are small, else each chunk in its owner's
            order. If a gradient is not finite the rest of the round is left out on every rank.

        state: what is kept for every element from step to step. It is saved by parameter and follows the parameters to
            other buckets. A bucket that is not finite leaves it as it was.
        tables: what is kept from step to step for the bucket as a whole.
        local: what the codec needs beside the payload.
        scratch: likewise, where nothing is kept from one round to the next, so that other kinds of rounds may use the
            same memory; both are in ``Work.local``.
        cutting: how tensors may be cut; None where a bucket is encoded and decoded in one go.
        zero_groups: by position, of how many consecutive elements the result is 0 where all of them are, on every rank.
            1 where every exact zero stays one, and 0 where none does; that is so where nothing is said, but for methods
            that promise it, see ``Law.zeros``. Elements that have had no gradient yet are left out where some group has
            them among others.
    """

    regions: Regions = field(default_factory=dict)
    records: Mapping[str, int] = field(default_factory=dict)
    varies: bool = False
    results: Regions = field(default_factory=dict)
    carries: Mapping[str, int] = field(default_factory=dict)
    preludes: tuple[Regions, ...] = ()

    state: Mapping[str, torch.dtype] = field(default_factory=dict)
    tables: Regions = field(default_factory=dict)
    local: Regions = field(default_factory=dict)
    scratch: Regions = field(default_factory=dict)
    cutting: Cutting | None = None
    zero_groups: Sequence[int] = ()

    def __post_init__(self) -> None:
        whole_only = (self.records, self.results, self.carries, self.cutting)
        if self.varies and (len(self.regions) != 1 or any(whole_only)):
            raise ValueError("a payload whose length varies should be one region that is not cut, without records")


def per_element(bucket: Bucket, *names: str, short: bool = False) -> dict[str, torch.dtype]:
    """Return state of the dtype of the bucket's arithmetic, such as "residual"; or of bfloat16, if it may be short."""
    return dict.fromkeys(names, torch.bfloat16 if short else work_dtype(bucket))


def rounding_of(kept: Sequence[Tensor] | None, key: Key) -> Key | None:
    """Return the key of the numbers by which what is kept of tensors is rounded, None where it is not."""
    return key.at(purpose=KEPT) if kept and kept[0].dtype is torch.bfloat16 else None
