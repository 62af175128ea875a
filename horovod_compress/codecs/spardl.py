"""SparDL: the largest sums over all ranks, chosen by the owners of chunks, so that bytes do not grow with the ranks.

Zhao et al., *Distributed Deep Learning Training with Efficient Sparse Communication*, ICDE 2024, arXiv:2304.00737.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = of each owner's d/M elements, the k/M largest |x|, exactly; the lower position among equals, never a zero
    record   = the positions of T, as gaps in Golomb code, and x there; below 32 value_bits rounded    to the owner
    a        = sum over ranks of the rank's values at its positions                                    on the owner
    F        = of the owner's elements, the k/M largest |a|, in the same way
    record   = the positions of F, and a there; below 32 value_bits rounded                            to everyone
    result   = a / M at F, 0 elsewhere
    residual = x - (own value, if this rank sent one) at F, x elsewhere
               and, on the owner, what rounding took from a

Nothing is lost. At F, the ranks' own values are in the result, and what else they have there stays with them; elsewhere
the result is 0, and every x stays whole, even of what arrived at the owner and was not among its largest. So the sum of
results and residuals over ranks is that of all x, to the bit where sums are exact.

An element is in F if the result is not 0 there: of numbers so small that it becomes 0, no rank gives any away.

A record has as many entries as any other: the k of all tensors of a bucket, one after the other, are shared out among
ranks, and with them the elements, so that a small tensor may be one owner's. Its sections take their greatest length.
The paper's owners get their values over log M hops that choose again at each one; here in one, so nobody but a sender
drops anything on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..ops.sizes import golomb_ranges, levels_of
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Law, Piece, Properties
from .registry import register
from .shared.forms import check_value_bits, fitted, largest, rounded, value_form
from .shared.sections import NUMBERS, check_share, check_well_formed, choose, chosen, parameter, share
from .work import Counts, Cutting, Layout, Part, Regions, Work, per_element, work_dtype

#: What a section says, in words.
SAID = "positions and values"


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of one tensor that one owner has.

    Attributes:
        number: which one of the bucket it is.
        start, stop: the elements.
        first, most: where its entries begin among those of the bucket, and how many there are.
        record: which one it is in.
        at, nbytes: where its section begins there, and the room for it.
        parameter: of the code of positions.
        form: how values are written.
    """

    number: int
    position: int
    start: int
    stop: int
    first: int
    most: int
    record: int
    at: int
    nbytes: int
    parameter: int
    form: str

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def entries(self) -> slice:
        return slice(self.first, self.first + self.most)


def _numbers(work: Work, name: str, stretch: Stretch) -> Tensor:
    """Return where a selection says what it has found."""
    return work.local[name][NUMBERS * stretch.number : NUMBERS * (stretch.number + 1)]


def _by_tensor(stretches: Sequence[Stretch], bucket: Bucket) -> list[list[Stretch]]:
    """Return the stretches of each tensor."""
    found: list[list[Stretch]] = [[] for _ in bucket.tensors]
    for stretch in stretches:
        found[stretch.position].append(stretch)
    return found


def _within(work: Work, part: Part) -> list[Stretch]:
    """Return the stretches of a part, which are whole."""
    own: list[Stretch] = work.memo["of"][part.position]
    return [stretch for stretch in own if part.start <= stretch.start < part.stop]


@register
@dataclass(frozen=True)
class SparDL(Codec):
    """1 % of the elements, those of the largest sums over ranks, for any number of ranks; the others wait.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        value_bits: bits per value: 32 (64 for float64 gradients); 16: float16 for float16 gradients, else bfloat16; 8,
            4 or 2: a sign and one of 128, 8 or 2 levels, which sender and owner fit to what they send.
    """

    density: float = 0.01
    value_bits: Literal[2, 4, 8, 16, 32] = 32

    name: ClassVar[str] = "spardl"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "the largest values, then the largest of their sums, and positions in Golomb code"
    source: ClassVar[str] = "Zhao et al., ICDE 2024, arXiv:2304.00737"
    page: ClassVar[str] = "sparse_methods.md#spardl"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.05},
        {"density": 0.3, "value_bits": 16},
        {"density": 0.3, "value_bits": 4},
    )
    folded: ClassVar[frozenset[str]] = frozenset({"sums", "chosen", "totals", "found", "own place", "own levels"})

    def __post_init__(self) -> None:
        check_share("density", self.density)
        check_value_bits(self.value_bits)

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="4 (1 - k/d) mean over ranks of |x|^2", error=self._error, zeros=True)
        return Properties(law, feedback="own", divides="before", share_sent=self.density)

    def _error(self, x: Sequence[Tensor]) -> float:
        """Bound it: what ranks leave out, and what owners do; both are at most the share left of what is there."""
        count, world = x[0].numel(), len(x)
        entries = share(self.density, count)
        longest = -(-count // entries)  # elements for an entry, in any stretch
        rounding = {32: 0.0, 16: 2.0**-16}.get(self.value_bits, 1 / longest)  # of a few levels: all that was sent
        left = 1 - 1 / longest + rounding
        return (4 if world > 1 else 1) * left * sum(float(mine.square().sum()) for mine in x) / world

    # ---- layout ----

    def _stretches(self, bucket: Bucket, world: int) -> tuple[list[Stretch], int]:
        """Return the stretches of a bucket, and the bytes of a record."""
        kept = [share(self.density, tensor.count) for tensor in bucket.tensors]
        entries, wide = -(-sum(kept) // world), work_dtype(bucket).itemsize
        found = list[Stretch]()
        sizes, first = [0] * world, 0
        for position, (tensor, k) in enumerate(zip(bucket.tensors, kept, strict=True)):
            begin = 0
            while begin < k:
                record = (first + begin) // entries
                end = min(k, (record + 1) * entries - first)
                start, stop, most = tensor.count * begin // k, tensor.count * end // k, end - begin
                b, form = parameter(most, stop - start), value_form(self.value_bits, bucket, most)
                nbytes = ops.values_bound(most, stop - start, b, wide, form=form)
                found.append(
                    Stretch(
                        len(found), position, start, stop, first + begin, most, record, sizes[record], nbytes, b, form
                    )
                )
                sizes[record] += nbytes
                begin = end
            first += k
        return found, max(sizes)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        for tensor in bucket.tensors:
            if tensor.count >= 1 << 31:
                raise ConfigError(f"spardl takes tensors of fewer than 2^31 elements, {tensor.name} has {tensor.count}")
        found, size = self._stretches(bucket, world)
        number, dtype = (found[-1].record + 1 if found else 0), work_dtype(bucket)
        entries = sum(stretch.most for stretch in found)
        folding: Regions = {}
        if world > 1:
            longest = max((stretch.count for stretch in found), default=0)
            folding = {"sums": (dtype, longest), "chosen": (torch.int32, entries), "totals": (dtype, entries)}
            folding |= {"found": (torch.int64, NUMBERS * len(found)), "own place": (torch.int64, 2)}
        levels = max((levels_of(stretch.form) for stretch in found), default=0)
        if levels and world > 1:
            folding["own levels"] = (torch.float32, levels)
        ranges = max((golomb_ranges(stretch.count, stretch.parameter) for stretch in found), default=0)
        return Layout(
            {"records": (torch.uint8, number * size)},
            {"records": max(1, size)},
            state=per_element(bucket, "residual"),
            local={"nothing": (torch.uint8, 4 * levels + 8 * ranges)} | folding,
            scratch={
                "positions": (torch.int32, entries),
                "values": (dtype, entries),
                "numbers": (torch.int64, NUMBERS * len(found)),
                "place": (torch.int64, 2),
            }
            | ({"levels": (torch.float32, levels)} if levels else {}),
            cutting=Cutting([], self._needs, ends=[[s.stop for s in own] for own in _by_tensor(found, bucket)]),
        )

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        places = [self._place(work, stretch) for stretch in _within(work, part)]
        return {"records": (places[0].start, places[-1].stop)}

    def prepare(self, work: Work) -> None:
        bucket, memo = work.bucket, work.memo
        memo["stretches"], memo["size"] = self._stretches(bucket, work.world)
        memo["of"] = _by_tensor(memo["stretches"], bucket)
        # Sums over ranks are made to fit in 16 bits, or in float32 levels, without rounding.
        memo["shrink"] = 1.0 if self.value_bits == 32 else 0.5 ** (work.world - 1).bit_length()
        memo["given"] = {}  # by the first entry of a stretch, what its selection was given, until that is read
        memo["kept"] = {}  # by the first entry of a stretch, how many there are
        memo["left"] = {}  # likewise, where an owner has rounded its sums, and what that took

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Choose what is sent of tensors. On CUDA nothing waits: ``encode`` reads what was found."""
        stretches = [stretch for position in positions for stretch in work.memo["of"][position]]
        for stretch in stretches:
            grad, residual = self._memory(work, stretch)
            room = work.local["positions"][stretch.entries], work.local["values"][stretch.entries]
            work.memo["given"][stretch.first] = grad, residual, stretch.most, *room
        numbers = [_numbers(work, "numbers", stretch) for stretch in stretches]
        choose(ops.top_select_all, [work.memo["given"][stretch.first] for stretch in stretches], numbers)
        nonfinite = work.local["numbers"].view(-1, NUMBERS)[:, 1]
        if work.bucket.dtype == "float64" and self.value_bits != 32:
            self._learn(work, stretches)
            for stretch in stretches:
                # Of a larger one every step could send only so little that it would wait forever.
                large = self._values(work, stretch).abs() > largest(stretch.form)
                nonfinite[stretch.number] += torch.count_nonzero(large)
        of = [work.memo["of"][position] for position in positions]
        none = nonfinite.new_zeros(())
        counts = [nonfinite[own[0].number : own[-1].number + 1].sum() if own else none for own in of]
        found = torch.stack(counts) if counts else nonfinite[:0]
        return cast(list[int], found.tolist()) if found.is_cpu else found

    def _learn(self, work: Work, stretches: Sequence[Stretch]) -> None:
        """Learn how much was chosen, and do again where a sample has misled."""
        given = [work.memo["given"].pop(stretch.first) for stretch in stretches]
        numbers = [_numbers(work, "numbers", stretch) for stretch in stretches]
        found = chosen(ops.top_select_all, given, numbers)
        work.memo["kept"].update((s.first, kept) for s, kept in zip(stretches, found, strict=True))

    def _values(self, work: Work, stretch: Stretch) -> Tensor:
        """Return the values that were chosen of some elements."""
        own: Tensor = work.local["values"][stretch.entries]
        return own[: work.memo["kept"][stretch.first]]

    def _memory(self, work: Work, stretch: Stretch) -> tuple[Tensor, Tensor]:
        """Return the gradient and the residual of some elements."""
        grad, residual = work.grad(stretch.position), work.residual_of(stretch.position)
        assert residual is not None
        return grad[stretch.start : stretch.stop], residual[stretch.start : stretch.stop]

    def _place(self, work: Work, stretch: Stretch) -> slice:
        """Return where the section of some elements lies."""
        start = stretch.record * work.memo["size"] + stretch.at
        return slice(start, start + stretch.nbytes)

    def before(self, number: int, work: Work, key: Key) -> None:
        for stretch in (stretch for position in work.absent() for stretch in work.memo["of"][position]):
            work.regions["records"][self._place(work, stretch)].zero_()  # no positions

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        stretches = [stretch for part in parts for stretch in work.memo["of"][part.position]]
        self._learn(work, [stretch for stretch in stretches if stretch.first in work.memo["given"]])
        for stretch in stretches:
            values = self._values(work, stretch)
            values.clamp_(-work.limit(), work.limit())
            chosen, out = work.local["positions"][stretch.entries], work.regions["records"][self._place(work, stretch)]
            values.copy_(self._write(work, stretch, chosen, values, out))

    def _write(self, work: Work, stretch: Stretch, chosen: Tensor, values: Tensor, out: Tensor, of: str = "") -> Tensor:
        """Write the section of some elements, and 0 into what it does not need of its room; return what it says.

        Args:
            of: "own " for the arrays that an owner has for it.
        """
        out.zero_()
        place, room = work.local[f"{of}place"].zero_(), work.local.get(f"{of}levels", values)
        levels = fitted(values, stretch.form, room)
        sent = rounded(values, stretch.form, levels)
        given = [chosen[: values.numel()]], [values.numel()], [sent if levels is None else values]
        of_code = [stretch.parameter], [stretch.count]
        ops.values_encode_all(*given, *of_code, place, out, forms=[stretch.form], heads=[levels])
        return sent

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        ranks, size = [*others[: key.rank], piece.values, *others[key.rank :]], work.memo["size"]
        first, last = piece.start // size, (piece.start + piece.values.numel()) // size
        for stretch in work.memo["stretches"]:
            if first <= stretch.record < last:
                start = self._place(work, stretch).start - piece.start
                self._choose(work, stretch, [one[start : start + stretch.nbytes] for one in ranks], key)

    def _choose(self, work: Work, stretch: Stretch, sections: list[Tensor], key: Key) -> None:
        """Add up what all ranks have sent of some elements, and let the largest sums be what this rank has."""
        sums, own = work.local["sums"][: stretch.count], stretch.entries
        into = [sums], None, work.memo["shrink"]
        wrong = ops.values_decode_all([sections], 0, [stretch.parameter], *into, forms=[stretch.form])
        check_well_formed(wrong, [stretch.position], SAID, work, key)
        given = sums, None, stretch.most, work.local["chosen"][own], work.local["totals"][own]
        numbers = [_numbers(work, "found", stretch)]
        choose(ops.top_select_all, [given], numbers)
        (kept,) = chosen(ops.top_select_all, [given], numbers)
        places, totals = (room[:kept] for room in given[3:])
        sent = self._write(work, stretch, places, totals, sections[key.rank], "own ")
        if stretch.form != "full":
            totals.sub_(sent).div_(work.memo["shrink"])
            work.memo["left"][stretch.first] = places, totals

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        stretches = [stretch for part in parts for stretch in _within(work, part)]
        scale = result_scale / work.world / work.memo["shrink"]
        check_well_formed(
            self._read(work, stretches, scale), [stretch.position for stretch in stretches], SAID, work, key
        )
        for stretch in stretches:
            self._leave(work, stretch)
        for part in parts:
            work.saturate(part.position, result_scale)

    def _read(self, work: Work, stretches: Sequence[Stretch], scale: float) -> Counts:
        """Write the result of some elements; return how many ranges are malformed.

        The residual becomes x, as if this rank had sent nothing: which of its values arrived is known afterwards.
        """
        records, nothing = work.regions["records"], work.local["nothing"]
        memory = [self._memory(work, stretch) for stretch in stretches]
        return ops.values_decode_all(
            [[records[self._place(work, stretch)], nothing] for stretch in stretches],
            1,
            [stretch.parameter for stretch in stretches],
            [grad for grad, _ in memory],
            [residual for _, residual in memory],
            scale,
            forms=[stretch.form for stretch in stretches],
        )

    def _leave(self, work: Work, stretch: Stretch) -> None:
        """Leave in the residual of some elements what is not in the result."""
        grad, residual = self._memory(work, stretch)
        values = self._values(work, stretch)
        mine = work.local["positions"][stretch.entries][: values.numel()].long()
        arrived = grad.index_select(0, mine) != 0
        residual.scatter_add_(0, mine, torch.where(arrived, -values, 0))
        if stretch.first in work.memo["left"]:
            chosen, left = (array.to(residual.device) for array in work.memo["left"].pop(stretch.first))
            final = chosen.long()
            residual.scatter_add_(0, final, torch.where(grad.index_select(0, final) != 0, left, 0))
        for momentum in work.momenta.get(stretch.position, ()):
            momentum[stretch.start : stretch.stop].index_fill_(0, mine[arrived], 0)
