"""What the methods share that send positions: one section per tensor, gathered.

A payload is a table of int32, the bytes of each tensor's section, and then the sections, laid out as
``rules/values.h`` says. Each method says how values are written, and what is left of them; or how a section
is written and read, if it is of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ...errors import ConfigError, CorruptFrameError
from ...ops.keys import Key
from ...ops.sizes import levels_of
from ...schedule.plan import Bucket, TensorSpec
from ..base import Algebra, Codec, Law, Properties
from ..work import Counts, Layout, Part, Regions, Work, clamped_all, per_element, slices, together, work_dtype
from .forms import fitted, largest

NUMBERS = 3  # of a selection, as ops.top_select_all() writes them
LENGTH_BYTES = 4  # bytes of a section's length, in the table at the start of a payload


def check_share(name: str, value: object) -> None:
    """Refuse an option that is no share of a whole.

    Raises:
        ConfigError: says what would be one.
    """
    if type(value) not in (int, float) or not 0 < value <= 1:  # type: ignore[operator]
        raise ConfigError(f"{name} should be a number above 0, at most 1, got {value!r}")


def check_count(name: str, tensor: TensorSpec) -> None:
    """Refuse a tensor whose positions take more than 31 bits.

    Raises:
        ConfigError: names it.
    """
    if tensor.count >= 1 << 31:
        raise ConfigError(f"{name} takes tensors of fewer than 2^31 elements, {tensor.name} has {tensor.count}")


def share(density: float, count: int) -> int:
    """Return ``ceil(density * count)``, with the density that the user wrote and not the nearest binary fraction."""
    exact = Fraction(repr(density))
    return -(-count * exact.numerator // exact.denominator)


def parameter(most: int, count: int) -> int:
    """Return the parameter of the Golomb code of positions: how many bits of a gap are written plainly."""
    return ops.golomb_parameter(most, count) if count else 0


@dataclass(frozen=True)
class Sections(Codec):
    """The k elements of largest magnitude of each tensor, by position."""

    density: float = 0.01

    algebra: ClassVar[Algebra] = Algebra.GATHER
    batched: ClassVar[bool] = True
    #: What a section says, in words.
    said: ClassVar[str] = "positions and values"

    def __post_init__(self) -> None:
        check_share("density", self.density)

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: (1 - k/d) |x|^2", zeros=True)
        return Properties(law, feedback="own", divides="before", share_sent=self.share_sent())

    @property
    def select(self) -> Callable[..., None]:
        """How elements are chosen, of all tensors at once."""
        return ops.top_select_all

    def form(self, bucket: Bucket, tensor: TensorSpec) -> str:
        """Return how values of a tensor are written, one of ``ops.sizes.FORMS``."""
        return "full"

    # ---- layout ----

    def layout(self, bucket: Bucket, world: int) -> Layout:
        room = sum(LENGTH_BYTES + self._checked_room(tensor, bucket) for tensor in bucket.tensors)
        payload, scratch = {"payload": (torch.uint8, room)}, self._scratch(bucket)
        return Layout(payload, state=per_element(bucket, "residual"), scratch=scratch)

    def _checked_room(self, tensor: TensorSpec, bucket: Bucket) -> int:
        check_count(self.name, tensor)
        if (room := self._room(tensor, bucket)) >= 1 << 31:  # the table says lengths as int32
            raise ConfigError(
                f"{self.name} must stay below 2^31 bytes per tensor, but {tensor.name} with {tensor.count} elements "
                f"may need {room} at density {self.share_sent():g}; choose a lower density"
            )
        return room

    def _room(self, tensor: TensorSpec, bucket: Bucket) -> int:
        """Return the most bytes of a tensor's section."""
        most, count, wide = self.most(tensor), tensor.count, work_dtype(bucket).itemsize
        return ops.values_bound(most, count, parameter(most, count), wide, form=self.form(bucket, tensor))

    def share_sent(self) -> float:
        """Return of which share of a tensor's elements the positions are sent."""
        return self.density

    def most(self, tensor: TensorSpec) -> int:
        """Return k: of how many elements of a tensor the positions are sent at most."""
        return share(self.share_sent(), tensor.count)

    def _scratch(self, bucket: Bucket) -> Regions:
        number = sum(self.most(tensor) for tensor in bucket.tensors)
        found = {"positions": (torch.int32, number), "values": (work_dtype(bucket), number)} | numbers_of(bucket)
        levels = sum(levels_of(self.form(bucket, tensor)) for tensor in bucket.tensors)
        return found | {"levels": (torch.float32, levels)} if levels else found

    def prepare(self, work: Work) -> None:
        tensors = work.bucket.tensors
        places = slices([self.most(tensor) for tensor in tensors])
        work.memo["rooms"] = [self._room_of(work, position, own) for position, own in enumerate(places)]
        work.memo["numbers"] = [numbers_at(work, position) for position in range(len(tensors))]
        work.memo["parameters"] = [parameter(self.most(tensor), tensor.count) for tensor in tensors]
        work.memo["given"] = {}  # by position: what the selection of this step was given, until it is read
        work.memo["kept"] = {}
        work.memo["rest"] = {}  # by position: what a clamp took from the values, for the residual
        work.memo["forms"] = forms = [self.form(work.bucket, tensor) for tensor in tensors]
        work.memo["levels"] = slices([levels_of(form) for form in forms])

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Choose what is sent of tensors; return how many of the values of each are not finite.

        On CUDA nothing waits: ``encode`` reads what was found, on the exchange thread.
        """
        given = [self.given(work, position) for position in positions]
        work.memo["given"].update(zip(positions, given, strict=True))
        numbers = [work.memo["numbers"][position] for position in positions]
        choose(self.select, given, numbers)
        nonfinite = nonfinite_of(numbers)
        if work.bucket.dtype != "float64" or {"full", "signs"}.issuperset(work.memo["forms"]):
            return nonfinite
        # Of a value that the form does not have, every step could send only so little that it would wait forever.
        self.settle(work, positions)
        mosts = [largest(work.memo["forms"][position]) for position in positions]
        values = [self.values(work, position) for position in positions]
        large = together([torch.count_nonzero(one.abs() > most) for one, most in zip(values, mosts, strict=True)])
        counts = nonfinite.tolist() if isinstance(nonfinite, Tensor) else nonfinite
        return [count or found for count, found in zip(counts, large, strict=True)]

    def given(self, work: Work, position: int) -> tuple[Any, ...]:
        """Return what :attr:`select` takes of a tensor, but for the numbers that it finds."""
        room = work.memo["rooms"][position]
        return work.grad(position), self.waiting(work, position), room[0].numel(), *room

    def _room_of(self, work: Work, position: int, own: slice) -> tuple[Tensor, Tensor]:
        """Return where the positions go that are chosen of a tensor, and the values.

        Args:
            own: which of the bucket's.
        """
        return work.local["positions"][own], work.local["values"][own]

    def settle(self, work: Work, positions: Sequence[int]) -> None:
        """Learn how much was chosen of tensors, and let a sum over ranks of it not overflow."""
        self.learn(work, positions)
        work.memo["rest"].update(dict.fromkeys(positions))
        # Most often nothing is to be clamped: one look at all of them. After the values is what other rounds have left
        # in this scratch; where that is large or NaN, each tensor is looked at, which costs time and changes nothing.
        if len(positions) > 1 and largest_of(work.local["values"]) <= work.limit():
            return
        rests = clamped_all([self.values(work, position) for position in positions], [work.limit()] * len(positions))
        work.memo["rest"].update(zip(positions, rests, strict=True))

    def learn(self, work: Work, positions: Sequence[int]) -> None:
        """Learn how much was chosen of tensors, and do again where a sample has misled."""
        given = [work.memo["given"].pop(position) for position in positions]
        found = chosen(self.select, given, [work.memo["numbers"][position] for position in positions])
        work.memo["kept"].update(zip(positions, found, strict=True))

    def values(self, work: Work, position: int) -> Tensor:
        """Return the values that were chosen of a tensor."""
        found: Tensor = work.memo["rooms"][position][1]
        return found[: work.memo["kept"][position]]

    def waiting(self, work: Work, position: int) -> Tensor | None:
        """Return what is added to the gradient of a tensor before anything is chosen."""
        return work.residual_of(position)

    def _head(self, work: Work, position: int) -> Tensor | None:
        """Return what a section says of all values: the levels of codes."""
        form: str = work.memo["forms"][position]
        if not levels_of(form):
            return None
        return fitted(self.values(work, position), form, work.local["levels"][work.memo["levels"][position]])

    def heads(self, work: Work, positions: Sequence[int]) -> Sequence[Tensor | None]:
        """Return what each section says of all of its values: levels; or their mean, where only signs are sent."""
        return [self._head(work, position) for position in positions]

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        """Write one section per tensor after a table of the sections' lengths."""
        self.settle(work, [part.position for part in parts if part.position in work.memo["given"]])
        write_sections(work, [part.position for part in parts], self.write)

    def write(self, work: Work, positions: Sequence[int], ends: Tensor) -> None:
        """Write the sections of tensors into the payload; where is said as for :func:`ops.binary_encode_all`."""
        rooms = [work.memo["rooms"][position] for position in positions]
        ops.values_encode_all(
            [chosen_at for chosen_at, _ in rooms],
            [work.memo["kept"][position] for position in positions],
            [values for _, values in rooms],
            [work.memo["parameters"][position] for position in positions],
            [work.bucket.tensors[position].count for position in positions],
            ends,
            work.regions["payload"],
            forms=[work.memo["forms"][position] for position in positions],
            heads=self.heads(work, positions),
        )

    def keeps(self, work: Work, positions: Sequence[int]) -> dict[str, Any]:
        """Return what else :func:`ops.values_decode_all` has to know, such as momentum that is kept here."""
        return {}

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        of_ranks, scale = cut(work.gathered, len(work.bucket.tensors)), self.scale(work, result_scale)
        positions = [part.position for part in parts]
        sections = [[of_rank[position] for of_rank in of_ranks] for position in positions]
        wrong = self.read(work, positions, sections, key.rank, scale)
        check_well_formed(wrong, positions, self.said, work, key)
        for position, of_tensor in zip(positions, sections, strict=True):
            self._put_back(work, position)
            work.saturate(position, result_scale)
            if momenta := work.momenta.get(position):
                self._clear(work, position, momenta, of_tensor[key.rank])

    def scale(self, work: Work, result_scale: float) -> float:
        """Return what the sums that are decoded are multiplied by."""
        return result_scale / work.world

    def read(
        self, work: Work, positions: Sequence[int], sections: Sequence[list[Tensor]], rank: int, scale: float
    ) -> Counts:
        """Decode the sections of all ranks for tensors; return how many ranges of each are malformed.

        Args:
            rank: of this rank, whose own sections leave the residual.
            scale: what sums over ranks are multiplied by.
        """
        return ops.values_decode_all(
            sections,
            rank,
            [work.memo["parameters"][position] for position in positions],
            [work.grad(position) for position in positions],
            residuals_of(work, positions),
            scale,
            forms=[work.memo["forms"][position] for position in positions],
            **self.keeps(work, positions),
        )

    def _put_back(self, work: Work, position: int) -> None:
        """Return to the residual what a clamp or rounding took, where decoding leaves nothing of what was sent."""
        rest = work.memo["rest"].get(position)
        if rest is None or "momentums" not in self.keeps(work, []):
            return
        if (residual := work.residual_of(position)) is not None:
            residual.index_add_(0, work.memo["rooms"][position][0][: rest.numel()].long(), rest)

    def _clear(self, work: Work, position: int, momenta: list[Tensor], section: Tensor) -> None:
        """Empty an optimizer's momentum where this rank sent a value.

        Args:
            section: this rank's own.
        """
        sent = work.memo["rooms"][position][0][: work.memo["kept"][position]].long()
        for momentum in momenta:
            momentum.index_fill_(0, sent, 0)


# ---- sections of several tensors ----------------------------------------------------------------


def numbers_of(bucket: Bucket) -> Regions:
    """Return the regions for what selections find, and for where sections end."""
    number = len(bucket.tensors)
    return {"numbers": (torch.int64, NUMBERS * number), "ends": (torch.int64, number + 1)}


def numbers_at(work: Work, position: int) -> Tensor:
    """Return where the selection from a tensor says what it has found."""
    return work.local["numbers"][NUMBERS * position : NUMBERS * (position + 1)]


def largest_of(values: Tensor) -> float:
    """Return the largest magnitude, NaN if there is one. Waits on CUDA."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0


def residuals_of(work: Work, positions: Sequence[int]) -> list[Tensor] | None:
    """Return the residuals of tensors, if there are any."""
    return [kept for position in positions if (kept := work.residual_of(position)) is not None] or None


def choose(select: Callable[..., None], given: Sequence[tuple[Any, ...]], numbers: Sequence[Tensor]) -> None:
    """Choose from some tensors at once.

    Args:
        given: of each what ``select`` is given, but for the numbers.
    """
    if given:
        select(*_columns(given), numbers)


def chosen(select: Callable[..., None], given: Sequence[tuple[Any, ...]], numbers: Sequence[Tensor]) -> list[int]:
    """Return how much :func:`choose` has chosen of each tensor. Waits on CUDA, and does again what a sample misled."""
    return [kept for kept, _ in ops.selected(select, _columns(given), numbers)]


def _columns(given: Sequence[tuple[Any, ...]]) -> list[Any]:
    columns = [list(column) for column in zip(*given, strict=True)]
    return [None if column[0] is None else column for column in columns]


def nonfinite_of(numbers: Sequence[Tensor]) -> Counts:
    """Return how many elements selections found that are not finite. Slices are copied without a wait on CUDA."""
    found = [one[1:2] for one in numbers]
    return [int(count) for count in found] if not found or found[0].is_cpu else torch.cat(found)


def write_sections(work: Work, positions: Sequence[int], write: Callable[[Work, Sequence[int], Tensor], None]) -> None:
    """Write sections one after the other, and before them a table of their lengths. Waits once on CUDA."""
    number, ends = len(work.bucket.tensors), work.local["ends"][: len(positions) + 1]
    ends[0] = begin = LENGTH_BYTES * number
    write(work, positions, ends)
    lengths = work.regions["payload"][:begin].view(torch.int32)
    if positions == list(range(number)):
        torch.sub(ends[1:], ends[:-1], out=lengths)
    else:
        lengths.zero_()  # sparse gradients, which Horovod reduces itself, have no section
        for index, position in enumerate(positions):
            lengths[position : position + 1] = ends[index + 1] - ends[index]
    work.used = int(ends[-1])
    if work.used < 0:
        raise RuntimeError(f"bucket {work.bucket.index}: a section found no room in its payload")


def check_well_formed(wrong: Counts, positions: Sequence[int], said: str, work: Work, key: Key) -> None:
    """Refuse sections of which ranges say what no rank has written. Waits once on CUDA.

    Args:
        wrong: how many, of the tensor at each position.

    Raises:
        CorruptFrameError: names the first of these tensors.
    """
    counts = wrong.tolist() if isinstance(wrong, Tensor) else together(wrong)
    for position, count in zip(positions, counts, strict=True):
        if count:
            raise CorruptFrameError(
                f"rank {key.rank}: {count} malformed range(s) of {said} for {work.bucket.tensors[position].name} (step "
                f"{key.step}, bucket {key.bucket}); check that every rank runs the same version of horovod-compress"
            )


def cut(payloads: Sequence[Tensor], number: int) -> list[list[Tensor]]:
    """Cut payloads into the sections of as many tensors; what does not fit leaves them short. Waits once on CUDA."""
    table = LENGTH_BYTES * number
    # A payload without a whole table has no sections.
    tables = [one[:table] if one.numel() >= table else one.new_zeros(table) for one in payloads]
    lengths = torch.cat(tables).view(torch.int32).tolist()
    return [_cut(one, lengths[number * i : number * (i + 1)]) for i, one in enumerate(payloads)]


def _cut(payload: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    sections, at = [], LENGTH_BYTES * len(lengths)
    for length in lengths:
        sections.append(payload[at : at + max(0, length)])
        at += max(0, length)
    return sections
