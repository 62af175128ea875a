"""Sign bits, and the steps that give them their size: what the methods that send them share.

The elements of a tensor that share a step are a step group: all of it, or output rows. A measured step
is the mean of |x| over the group and over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ... import ops
from ...errors import ConfigError
from ...ops.dispatch import Checked
from ...ops.keys import TIE, ZERO_SIGN, Key
from ...schedule.plan import Bucket, TensorSpec
from ..base import Codec, Divides, Law, Piece, Properties, check_choice
from ..work import Counts, Cutting, Layout, Part, Regions, Work, rounding_of, slices

#: A step group covers at least this many elements: its 32 bits then cost half a bit per element at most. No more than
#: that: rows that share a step should be alike, and those of an embedding are not.
MIN_STEP_GROUP = 64
#: Elements of one 64-bit word of the payload.
WORD = 64
#: Of so many ranks, each has the mean of signs by its own sign and one bit.
PAIR = 2
#: A measured step, in means of ``|x|``, where all that a bit does not say is kept and sent later. With a step of one
#: mean residuals follow their gradients slowly, which momentum does not bear.
LARGE_STEP = 1.5
#: The same where nothing is rounded off on the way, chosen by training: docs/sign_methods.md and choosing.md.
LARGER_STEP = 1.8
#: A step of two means feeds on its own residual, and grows.
MOST_STEP = 2.0
_FLOAT32 = torch.finfo(torch.float32)


def words(span: slice) -> slice:
    """Return the words that hold the bits of a tensor; tensors start at whole words."""
    return slice(span.start // WORD, -(-span.stop // WORD))


def group_length(tensor: TensorSpec, by_row: bool) -> int:
    """Return how many elements of a tensor share one step."""
    if not by_row or len(tensor.shape) < 2 or tensor.count == 0:
        return max(1, tensor.count)
    row = tensor.count // tensor.shape[0]
    return row * math.ceil(MIN_STEP_GROUP / row)


def group_count(tensor: TensorSpec, by_row: bool) -> int:
    """Return how many step groups a tensor has."""
    return -(-tensor.count // group_length(tensor, by_row))


def group_slices(bucket: Bucket, by_row: bool) -> list[slice]:
    """Return where the groups of each tensor lie among those of the bucket."""
    return slices([group_count(tensor, by_row) for tensor in bucket.tensors])


def fill_group_sizes(sizes: Tensor, bucket: Bucket, by_row: bool) -> None:
    """Write how many elements each group of the bucket has; the last one of a tensor may be shorter."""
    for tensor, own in zip(bucket.tensors, group_slices(bucket, by_row), strict=True):
        group, mine = group_length(tensor, by_row), sizes[own]
        mine.fill_(group)
        if mine.numel():
            mine[-1] = tensor.count - group * (mine.numel() - 1)


def left_out(work: Work, position: int, length: int, number: int) -> Tensor:
    """Return how many elements of each group of a tensor are left out; see ``Work.withheld``."""
    index, known = work.withheld[position], work.memo.setdefault("left out", {})
    if known.get(position, (None,))[0] is not index:
        known[position] = index, torch.bincount(index // length, minlength=number)
    counts: Tensor = known[position][1]
    return counts


def more_where_left_out(work: Work, position: int, length: int, number: int) -> Tensor:
    """Return what means over whole groups of a tensor are multiplied by, so that they are of what is sent."""
    size, counts = work.bucket.tensors[position].count, left_out(work, position, length, number)
    sizes = (size - length * torch.arange(number, device=counts.device)).clamp_(max=length)
    return (sizes.double() / (sizes - counts).clamp_(min=1)).float()


def check_step(step: object) -> None:
    """Refuse what is neither a way of measuring steps nor a step."""
    if step in ("tensor", "row"):
        return
    number = isinstance(step, (int, float)) and not isinstance(step, bool)
    if not number or not _FLOAT32.tiny <= step <= _FLOAT32.max:  # type: ignore[operator]
        raise ConfigError(f'step_size should be "tensor", "row" or a positive number of float32, got {step!r}')


def check_step_scale(scale: object) -> None:
    """Refuse what is no number of means of ``|x|``, or too many for error feedback."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < MOST_STEP:
        raise ConfigError(f"step_scale should be a number above 0 and below {MOST_STEP:g}, got {scale!r}")


def shaped_fold(work: Work, piece: Piece, others: Sequence[Tensor], *, ternary: bool = False) -> None:
    """Merge the bits of all ranks to one, or to three values, and keep what that rounds off.

    Each of two ranks has its own signs already, so it only has to know where the other one's differ: there the mean
    is 0, and nothing is rounded off.
    """
    if ternary and work.world == PAIR:
        torch.bitwise_xor(piece.values, others[0], out=piece.result)
        return
    before, after = work.carry[piece.region].rows(piece.start, piece.start + piece.values.numel())
    fold = ops.ternary_fold if ternary else ops.shaped_fold
    fold([piece.values, *others], piece.result, before, after)


@dataclass(frozen=True)
class _Columns:
    """What goes with the gradients of a batch, but for divisors: of each, where its bits are, and what it has of them.

    Attributes:
        positions: of the tensors, if all parts are whole ones.
        places: of the words.
        offsets: their first words, by which random bits are drawn.
        states: what is kept, if anything is.
        zeros: which elements are 0, if any may be.
    """

    positions: tuple[int, ...]
    places: tuple[slice, ...]
    bits: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    states: tuple[Tensor, ...] | None
    zeros: tuple[Tensor, ...] | None
    checked: Checked = field(default_factory=Checked)


class Signs(Codec):
    """One bit per element and one step per group; how bits merge is the method's own business."""

    step_size: str | float  # the fields of the methods
    zeros: str
    wire_version: ClassVar[int] = 2
    batched: ClassVar[bool] = True
    divides_itself: ClassVar[bool] = True
    #: Which part of an element's state the elements add to, and decoding renews.
    kept: ClassVar[str] = "residual"

    def properties(self) -> Properties:
        # A step that is given is in the units of gradients.
        divides: Divides = "before" if self._measured() else "never"
        return Properties(divides=divides)

    # ---- layout ----

    def _measured(self) -> bool:
        return isinstance(self.step_size, str)

    def step_group(self, tensor: TensorSpec) -> int:
        """Return how many elements of a tensor share one step."""
        return group_length(tensor, self.step_size == "row")

    def _ternary(self) -> bool:
        """Return whether an owner passes on three values."""
        return False

    def _words(self, bucket: Bucket) -> int:
        """Return how many words of bits there are: whole groups, where those are what owners pass on."""
        unit = ops.GROUP_WORDS if self._ternary() else 1
        return -(-bucket.padded // WORD // unit) * unit

    def layout(self, bucket: Bucket, world: int) -> Layout:
        number, ternary = self._words(bucket), self._ternary()
        groups = sum(group_count(tensor, self.step_size == "row") for tensor in bucket.tensors)
        steps: Regions = {"steps": (torch.float32, groups)} if self._measured() else {}
        zeros: Regions = {"zeros": (torch.int64, number)} if ternary and world != PAIR else {}
        passed_on = number if world == PAIR else number // ops.GROUP_WORDS * ops.PACKED_WORDS
        return Layout(
            {"bits": (torch.int64, number)} | steps,
            records={"bits": ops.GROUP_WORDS} if ternary else {},
            results={"bits": (torch.int64, passed_on)} if ternary else {},
            local=({} if self._measured() else {"fixed": (torch.float32, groups)}) | zeros,
            cutting=Cutting([self._granule(tensor) for tensor in bucket.tensors], self._needs),
            zero_groups=[self.step_group(tensor) if self._measured() else 0 for tensor in bucket.tensors],
        )

    def prepare(self, work: Work) -> None:
        work.memo["steps"] = group_slices(work.bucket, self.step_size == "row")
        work.memo["lengths"] = [self.step_group(tensor) for tensor in work.bucket.tensors]
        if not self._measured():
            work.local["fixed"].fill_(float(self.step_size))

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Write bits and steps: this rank's share in the mean over ranks, so that the exchange only has to add."""
        if work.is_of_one_kind():
            return self._submit(work, positions, key, None)
        counts: dict[int, int | Tensor] = {}
        for places, divisors in work.by_divisor(positions):
            found = self._submit(work, [positions[place] for place in places], key, divisors)
            if len(places) == len(positions):
                return found
            counts.update(zip(places, found, strict=True))
        return [counts[place] for place in range(len(positions))]

    def _submit(self, work: Work, positions: Sequence[int], key: Key, divisors: Sequence[Tensor] | None) -> Counts:
        found = work.remembered("offered", positions, lambda: self._offered(work, positions))
        return ops.sign_offer_all(
            work.grads_at(positions),
            found.states,
            found.bits,
            found.steps if self._measured() else None,
            found.lengths,
            ranks=work.world,
            scale=self._scale(work, positions),
            key=self._zero_key(key),
            word_offsets=found.offsets,
            divisors=divisors,
            checked_before=found.checked,
        )

    def _offered(self, work: Work, positions: Sequence[int]) -> _Columns:
        """Return what is submitted with some gradients."""
        parts = [Part(position, 0, work.bucket.tensors[position].count) for position in positions]
        return self._columns(work, parts)

    def _columns(self, work: Work, parts: Sequence[Part]) -> _Columns:
        """Return what goes with the gradients of some parts."""
        places, lengths = [self._places(work, part) for part in parts], work.memo["lengths"]
        steps, states = self._steps(work), work.states_of(self.kept, [work.place(part) for part in parts])
        zeros = work.results.get("bits") if work.world == PAIR else work.local.get("zeros")
        counts = [tensor.count for tensor in work.bucket.tensors]
        whole = all(part.stop - part.start == counts[part.position] for part in parts)
        return _Columns(
            positions=tuple(part.position for part in parts) if whole else (),
            places=tuple(bits for bits, _ in places),
            bits=tuple(work.regions["bits"][bits] for bits, _ in places),
            steps=tuple(steps[own] for _, own in places),
            lengths=tuple(lengths[part.position] for part in parts),
            offsets=tuple(bits.start for bits, _ in places),
            states=None if states is None else tuple(states),
            zeros=None if zeros is None else tuple(zeros[bits] for bits, _ in places),
        )

    def _steps(self, work: Work) -> Tensor:
        return work.regions["steps"] if self._measured() else work.local["fixed"]

    def before(self, number: int, work: Work, key: Key) -> None:
        behind = work.regions["bits"][work.bucket.padded // WORD :]
        if behind.numel():
            behind.zero_()  # what lay there before may not count
        if self._measured():
            for position in work.absent():
                work.regions["steps"][work.memo["steps"][position]].zero_()  # nothing was submitted: no old one is sent
        for position in work.withheld if self._measured() else ():
            mine = work.regions["steps"][work.memo["steps"][position]]
            mine.mul_(more_where_left_out(work, position, work.memo["lengths"][position], mine.numel()))

    def _scale(self, work: Work, positions: Sequence[int]) -> float:
        """Return what measured steps of tensors of one kind are multiplied by; decoding reads what was exchanged."""
        return 1.0

    def _granule(self, tensor: TensorSpec) -> int:
        group = self.step_group(tensor)
        return WORD if group >= tensor.count else math.lcm(WORD, group)

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        bits, steps = self._places(work, part)
        found = {"bits": (bits.start, bits.stop)}
        return found | {"steps": (steps.start, steps.stop)} if self._measured() else found

    def _places(self, work: Work, part: Part) -> tuple[slice, slice]:
        """Return where the words and the steps of a part lie."""
        first, length = work.memo["steps"][part.position].start, work.memo["lengths"][part.position]
        return words(work.place(part)), slice(first + part.start // length, first - (-part.stop // length))

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        if not work.divisors:
            self._decode(work, parts, key, result_scale, None)
            return
        for chosen, divisors in work.by_divisor([part.position for part in parts]):
            some = [parts[place] for place in chosen]
            cut = divisors and [by[part.start : part.stop] for by, part in zip(divisors, some, strict=True)]
            self._decode(work, some, key, result_scale, cut)

    def _decode(
        self, work: Work, parts: Sequence[Part], key: Key, result_scale: float, divisors: Sequence[Tensor] | None
    ) -> None:
        found = work.remembered("decoded", parts, lambda: self._columns(work, parts))
        ternary = self._unpack(work, found.places)
        ops.sign_decode_all(
            found.bits,
            found.steps,
            found.lengths,
            work.grads_at(found.positions) if found.positions else work.grads_of(parts),
            found.states,
            feedback=self._rule(),
            decay=self._decay(),
            scale=result_scale,
            key=self._zero_key(key),
            rounding=rounding_of(found.states, key),
            word_offsets=found.offsets,
            zeros=found.zeros if ternary else None,
            divisors=divisors,
            checked_before=found.checked,
        )

    def _unpack(self, work: Work, places: Sequence[slice]) -> bool:
        """Unpack some words, where three values are packed; return whether they have any, not bits alone."""
        packed = work.results.get("bits")
        if packed is None:
            return False
        if work.world == PAIR:
            return True
        bits, zeros, size = work.regions["bits"], work.local["zeros"], ops.GROUP_WORDS
        for first, last in _joined((place.start // size, -(-place.stop // size)) for place in places):
            source = packed[first * ops.PACKED_WORDS : last * ops.PACKED_WORDS]
            ops.ternary_unpack(source, bits[first * size : last * size], zeros[first * size : last * size])
        return True

    def _rule(self) -> ops.Feedback:
        """Return what decoding leaves in the state."""
        return "none"

    def _decay(self) -> float:
        """Return by what that is multiplied."""
        return 1.0

    def _zero_key(self, key: Key) -> Key | None:
        return key.at(purpose=ZERO_SIGN) if self.zeros == "random" else None


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges, with those that touch or overlap made one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


class Votes(Signs):
    """Signs of which each element takes that of more than half of the ranks; a tie is a coin's, or 1.

    Or, shaped, the sign of their sum and of what the last such merge rounded off: then the mean of the ranks' signs
    arrives over the steps, not their median.
    """

    ties: str  # the fields of the methods
    merge: str
    #: What the ranks vote with.
    voted: ClassVar[str] = "signs"

    def __post_init__(self) -> None:
        check_step(self.step_size)
        check_choice("zeros", self.zeros, "random", "positive")
        check_choice("ties", self.ties, "random", "positive")
        check_choice("merge", self.merge, "shaped", "majority")

    def properties(self) -> Properties:
        if self.merge == "shaped":
            bound = f"sum over steps of result / step = that of the mean of {self.voted}"
        else:
            tie = "a random sign" if self.ties == "random" else "+"
            bound = f"result = step * majority of {self.voted}; a tie is {tie}"
        return replace(super().properties(), law=Law(bound=bound))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        carries = {"bits": ops.count_rows(world)} if self.merge == "shaped" else {}
        return replace(super().layout(bucket, world), carries=carries)

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        into = piece.values
        if piece.region == "steps":
            for other in others:
                ops.dense_add(into, other)
        elif self.merge == "shaped":
            shaped_fold(work, piece, others)
        else:
            parts = [into, *others]
            if self.ties == "random" and len(parts) % 2 == 0:
                parts.append(self._coins(piece.start, into, key))  # one vote more: no tie, and no majority overturned
            ops.majority_fold(parts, into, into.numel() * WORD)

    def _coins(self, start: int, like: Tensor, key: Key) -> Tensor:
        """Return random words that depend on the place in the region only, whoever folds, and in whatever pieces."""
        coins = torch.empty_like(like)
        ops.bernoulli_words(coins, 1, 2, key.at(rank=0, hop=0, purpose=TIE), word_offset=start)
        return coins

    def _zero_key(self, key: Key) -> Key | None:
        """Name one coin for all ranks: a tie of coins would be 1, and what is zero everywhere would drift."""
        return super()._zero_key(key.at(rank=0))
