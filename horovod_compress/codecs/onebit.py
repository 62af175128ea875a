"""Signs with the values they stand for, gathered from all ranks, with error feedback: ``onebit`` and ``ef_signsgd``.

    p = gradient + residual                         on each rank
    payload = [p >= 0], one bit each, and for each step group
              onebit:      high = c times the mean of p where it is >= 0, low = c times that below 0; 0 where there is
                           none
              ef_signsgd:  s = c times the mean of |p|
    result = mean over ranks of (high where the bit is 1, low where it is 0; or s * (2 bit - 1))    payloads gathered
    residual = p - (own high or low, or s * (2 bit - 1))

1-bit SGD (Seide et al., Interspeech 2014): for sides cut at zero the means, c = 1, are the two best values: no others
leave a smaller sum of squares. With c = 1.5 a residual follows its gradient sooner, and training is better. The paper
has means for each column of a weight matrix, which is an output row here.

EF-signSGD (Karimireddy et al., ICML 2019, arXiv:1901.09847): for a group of d elements |residual|^2 =
|p|_2^2 - c (2 - c) |p|_1^2 / d, so signs need no coins for zeros and lose nothing for good. The paper's c = 1 makes it
smallest; with 1.8 a residual follows its gradient sooner, and training is better.

A payload holds the bits of the bucket, then the values of all step groups: one or two arrays of float32. Its length
depends on the bucket alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import CorruptFrameError
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Law, Properties, check_choice
from .registry import register
from .shared.residual_dtype import ResidualDtype, check_residual_dtype, epsilon_of, residual_state
from .shared.signs import (
    LARGE_STEP,
    LARGER_STEP,
    WORD,
    check_step_scale,
    fill_group_sizes,
    group_count,
    group_length,
    group_slices,
    left_out,
    more_where_left_out,
    words,
)
from .work import Counts, Layout, Part, Regions, Work, rounding_of

_WORD_BYTES, _VALUE_BYTES = 8, 4
_LARGEST = torch.finfo(torch.float32).max


class GatheredSigns(Codec):
    """Every rank decodes the payloads of all, and keeps what its own did not say."""

    step_size: str
    step_scale: float
    residual_dtype: str
    algebra: ClassVar[Algebra] = Algebra.GATHER
    wire_version: ClassVar[int] = 2
    batched: ClassVar[bool] = True
    exact_first: ClassVar[bool] = True
    #: How many values a step group has: one, of which the bit 0 means the negative, or two.
    values: ClassVar[int]
    #: How much of |x|^2 a payload whose values are means takes away, as a formula.
    taken: ClassVar[str]

    def __post_init__(self) -> None:
        check_choice("step_size", self.step_size, "tensor", "row")
        check_step_scale(self.step_scale)
        check_residual_dtype(self.residual_dtype)

    def properties(self) -> Properties:
        factor = "" if self.step_scale == 1 else f"{self.step_scale * (2 - self.step_scale):g} "
        epsilon, bound = epsilon_of(self.residual_dtype), f"own: |x|^2 - {factor}{self.taken}"
        law = Law(conserves=True, epsilon=epsilon, bound=bound)
        return Properties(law, feedback="own", divides="before")

    # ---- layout ----

    def _by_row(self) -> bool:
        return self.step_size == "row"

    def _groups(self, bucket: Bucket) -> int:
        return sum(group_count(tensor, self._by_row()) for tensor in bucket.tensors)

    def _nbytes(self, bucket: Bucket) -> int:
        return bucket.padded // WORD * _WORD_BYTES + self.values * self._groups(bucket) * _VALUE_BYTES

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return Layout(
            {"payload": (torch.uint8, self._nbytes(bucket))},
            state=residual_state(bucket, self.residual_dtype),
            local=self._local(self._groups(bucket)),
            zero_groups=[group_length(tensor, self._by_row()) for tensor in bucket.tensors],
        )

    def _local(self, groups: int) -> Regions:
        """Return what is measured of every group, where that is not written into the payload."""
        return {}

    def prepare(self, work: Work) -> None:
        work.memo["groups"] = group_slices(work.bucket, self._by_row())
        work.memo["number"] = self._groups(work.bucket)
        work.memo["lengths"] = [group_length(tensor, self._by_row()) for tensor in work.bucket.tensors]
        own = work.regions["payload"]
        work.memo["bits"] = self._bits(work, own)
        work.memo["values"] = [self._values(work, own, number) for number in range(self.values)]

    def _bits(self, work: Work, payload: Tensor) -> Tensor:
        """Return the bits in a payload."""
        return payload[: work.bucket.padded // WORD * _WORD_BYTES].view(torch.int64)

    def _values(self, work: Work, payload: Tensor, number: int) -> Tensor:
        """Return one of the arrays of values in a payload."""
        size = work.memo["number"] * _VALUE_BYTES
        start = work.bucket.padded // WORD * _WORD_BYTES + number * size
        return payload[start : start + size].view(torch.float32)

    # ---- one round ----

    def before(self, number: int, work: Work, key: Key) -> None:
        absent = set(range(len(work.grads))) - set(work.present())
        for values in work.memo["values"]:
            for position in absent:
                values[work.memo["groups"][position]] = 0  # nothing was submitted: no old one is sent
            for position in work.withheld if self.values == 1 else ():
                mine = values[work.memo["groups"][position]]
                mine.mul_(more_where_left_out(work, position, work.memo["lengths"][position], mine.numel()))
            if self.step_scale != 1 or work.withheld:
                values.mul_(self.step_scale).clamp_(-_LARGEST, _LARGEST)

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        work.used = work.regions["payload"].numel()

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        nbytes = self._nbytes(work.bucket)
        for rank, payload in enumerate(work.gathered):
            if payload.numel() != nbytes:
                raise CorruptFrameError(
                    f"rank {key.rank}: the payload of rank {rank} should have {nbytes} bytes, got {payload.numel()} "
                    f"(step {key.step}, bucket {key.bucket}); check that every rank runs the same version of "
                    f"horovod-compress"
                )
        arrays = [[self._values(work, payload, n) for payload in work.gathered] for n in range(self.values)]
        present = [part.position for part in parts]
        highs, *lows = arrays
        residuals = [work.state["residual"][work.span(position)] for position in present]
        ops.two_value_decode_all(
            [self._bits(work, payload) for payload in work.gathered],
            highs,
            lows[0] if lows else None,
            [work.memo["lengths"][position] for position in present],
            key.rank,
            [work.grad(position) for position in present],
            residuals,
            first_words=[work.span(position).start // WORD for position in present],
            first_rows=[work.memo["groups"][position].start for position in present],
            scale=result_scale / work.world,
            rounding=rounding_of(residuals, key),
        )

    def _submitted(self, work: Work, positions: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return gradients, residuals and bits of some tensors."""
        spans = [work.span(position) for position in positions]
        bits, residual = work.memo["bits"], work.state["residual"]
        grads = [work.grad(position) for position in positions]
        return grads, [residual[span] for span in spans], [bits[words(span)] for span in spans]


@register
@dataclass(frozen=True)
class EfSignSgd(GatheredSigns):
    """One bit per element and a mean magnitude, with error feedback.

    Args:
        step_size: "row" for one magnitude per output row (short rows are joined until they hold 64 elements), or
            "tensor" for one per tensor, as in the paper.
        step_scale: c, the magnitude in units of the mean of |p|, above 0 and below 2; 1 in the paper.
        residual_dtype: "float32" (float64 for float64 gradients), or "bfloat16" for 2 bytes an element, rounded at
            random and so right on average.
    """

    step_size: Literal["tensor", "row"] = "row"
    step_scale: float = LARGER_STEP
    residual_dtype: ResidualDtype = "float32"

    name: ClassVar[str] = "ef_signsgd"
    summary: ClassVar[str] = "1 bit: signs times the mean magnitude, with error feedback"
    source: ClassVar[str] = "Karimireddy et al., ICML 2019, arXiv:1901.09847"
    page: ClassVar[str] = "sign_methods.md#ef_signsgd"
    values: ClassVar[int] = 1
    taken: ClassVar[str] = "|x|_1^2 / d"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "row", "step_scale": 1.0},
        {"step_size": "tensor", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.5},
        {"step_size": "row", "step_scale": LARGER_STEP},
        {"residual_dtype": "bfloat16"},
    )

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        values, groups = work.memo["values"][0], work.memo["groups"]
        steps = [values[groups[position]] for position in positions]
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.sign_offer_all(*self._submitted(work, positions), steps, lengths)


@register
@dataclass(frozen=True)
class OneBit(GatheredSigns):
    """One bit per element and the means of both sides, with error feedback.

    Args:
        step_size: "row" for two values per output row (short rows are joined until they hold 64
            elements), or "tensor" for two per tensor.
        step_scale: c, both values in units of their means, above 0 and below 2; 1 in the paper.
        residual_dtype: "float32" (float64 for float64 gradients), or "bfloat16" for 2 bytes an element, rounded at
            random and so right on average.
    """

    step_size: Literal["tensor", "row"] = "row"
    step_scale: float = LARGE_STEP
    residual_dtype: ResidualDtype = "float32"

    name: ClassVar[str] = "onebit"
    summary: ClassVar[str] = "1 bit: the means of both sides of zero, with error feedback"
    source: ClassVar[str] = "Seide et al., Interspeech 2014"
    page: ClassVar[str] = "sign_methods.md#onebit"
    values: ClassVar[int] = 2
    taken: ClassVar[str] = "(d1 high^2 + d0 low^2)"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "tensor", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.5},
        {"residual_dtype": "bfloat16"},
    )

    def _local(self, groups: int) -> Regions:
        return dict.fromkeys(("highs", "lows", "sizes"), (torch.float64, groups)) | {"ones": (torch.int64, groups)}

    def prepare(self, work: Work) -> None:
        super().prepare(work)
        fill_group_sizes(work.local["sizes"], work.bucket, self._by_row())

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        groups = [work.memo["groups"][position] for position in positions]
        highs, lows, ones = ([work.local[name][own] for own in groups] for name in ("highs", "lows", "ones"))
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.two_value_offer_all(*self._submitted(work, positions), highs, lows, ones, lengths)

    def before(self, number: int, work: Work, key: Key) -> None:
        highs, lows, ones = (work.local[name] for name in ("highs", "lows", "ones"))
        zeros = work.local["sizes"] - ones
        for position in work.withheld:  # there p is 0, which has the bit 1
            mine = ones[work.memo["groups"][position]]
            mine.sub_(left_out(work, position, work.memo["lengths"][position], mine.numel()))
        # An empty side has the sum 0, so any divisor gives 0.
        means = (highs.div_(ones.clamp(min=1)), lows.div_(zeros.clamp_(min=1)).neg_())
        for values, mean in zip(work.memo["values"], means, strict=True):
            values.copy_(mean)
        super().before(number, work, key)
