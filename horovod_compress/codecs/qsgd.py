"""QSGD: quantised gradients on a scale of each rank's own (Alistarh et al., NeurIPS 2017, arXiv:1610.02132).

    N = the norm of a block of elements on this rank: the largest |x|, or the root of the sum of squares
    s = 2^(bits-1) - 1;  code = x / N * s rounded up or down at random without bias
    packed: payload = N and the codes of each block
            fold: the mean of all ranks' numbers, rounded in the same way by the owner of the chunk
            result = N / s * code
    elias:  payload = N of each block, and Elias codes of the levels that are not 0 and of the zeros between
            result = mean over ranks of N / s * code        payloads gathered

All roundings are unbiased, so there is no residual. A payload is complete when its last gradient is. With feedback,
roundings are to the nearest level, and ranks and owners keep errors: see :mod:`.shared.rounding`.

With ``error`` it is sparse dithering in Elias codes, with a residual: see :mod:`.shared.elias`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import DITHER, Key
from ..ops.sizes import BLOCK_UNIT, MOST_BLOCK
from ..schedule.plan import Bucket
from .base import Algebra, ByForm, Piece, Properties, check_choice, whole
from .registry import register
from .shared.averaging import Remembering
from .shared.elias import Bounded, Elias, Quantised
from .shared.rounding import PLAIN, Average, average_of, check_feedback, key_of
from .work import Counts, Cutting, Layout, Part, Work


@dataclass(frozen=True)
class Packed(Quantised):
    """Codes of a fixed width in records, which the owner of a chunk averages and rounds again."""

    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "integers on each rank's own scale, averaged and rounded again"
    batched: ClassVar[bool] = True

    def _record(self) -> int:
        return ops.qsgd_record_bytes(self.bits, self.block)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        size, number = self._record(), sum(self._blocks(tensor) for tensor in bucket.tensors)
        cutting = Cutting([self.block] * len(bucket.tensors), self._needs)
        return Layout({"records": (torch.uint8, size * number)}, {"records": size}, cutting=cutting)

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Write the records at once: nothing of other ranks has to be known."""
        size, blocks = self._record(), work.memo["blocks"]
        spans = [slice(blocks[p].start * size, blocks[p].stop * size) for p in positions]
        return ops.qsgd_encode_all(
            [work.grad(position) for position in positions],
            [work.regions["records"][span] for span in spans],
            key_of(key, work.world, self.correlated),
            **self._rule(),
            norm=self._power(),
            offsets=[self._offset(work, position) for position in positions],
        )

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        ranks = [*others[: key.rank], piece.values, *others[key.rank :]]
        offset = piece.start // self._record() * self.block
        again = key.at(hop=1, purpose=DITHER)
        ops.qsgd_fold(ranks, piece.values, again, **self._rule(), norm=self._power(), offset=offset)

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        own = self._place(work, part)
        return {"records": (own.start, own.stop)}

    def _place(self, work: Work, part: Part) -> slice:
        """Return where the records of a part lie."""
        first, size = work.memo["blocks"][part.position].start, self._record()
        return slice((first + part.start // self.block) * size, (first - (-part.stop // self.block)) * size)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        records = [work.regions["records"][self._place(work, part)] for part in parts]
        ops.qsgd_decode_all(records, work.grads_of(parts), **self._rule(), scale=result_scale / self.levels)

    def _error(self, x: Sequence[Tensor]) -> float:
        """Bound both roundings; the mean of the rounded blocks has a norm and magnitudes no larger than given here."""
        world, total = len(x), 0.0
        for blocks in zip(*(one.split(self.block) for one in x), strict=True):
            size, norms = blocks[0].numel(), [self._norm_of(block) for block in blocks]
            magnitudes = [float(block.abs().sum()) for block in blocks]
            first = self.variance_of_mean(blocks)
            mean = torch.stack(blocks).mean(0)
            if self.norm == "max":
                norm, size_of_mean = sum(norms) / world, sum(magnitudes) / world
            else:  # rounding may make it larger, its square by no more than the error on average
                norm = float((mean.square().sum() + first).sqrt())
                size_of_mean = norm * math.sqrt(size)
            second = self.variance(size, norm, size_of_mean)
            total += first + (second if world > 1 else 0.0)
        return total


@dataclass(frozen=True)
class Averaged(Remembering, Packed):
    """Codes to the nearest level, of gradients and what is kept of earlier errors; owners keep theirs too."""

    average: Average = PLAIN

    summary: ClassVar[str] = "integers on each rank's own scale, to the nearest, with averages of errors"

    @property
    def errors_block(self) -> int:
        return self.block

    def properties(self) -> Properties:
        return self.remembering(self._divides())

    def layout(self, bucket: Bucket, world: int) -> Layout:
        rows = -(-self.errors_size // self._record())  # of bytes, in which an owner keeps its own records
        return replace(self.remembered_in(super().layout(bucket, world), bucket), carries={"records": rows})

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        places = [work.memo["errors"][position] for position in positions]
        records = [self._place(work, Part(p, 0, work.bucket.tensors[p].count)) for p in positions]
        return ops.loco_encode_all(
            [work.grad(position) for position in positions],
            None if self.average.forgets(key) else [work.tables["errors"][place] for place in places],
            [work.regions["records"][place] for place in records],
            [work.local["left"][place] for place in places],
            **self._rules(),
        )

    def _rules(self) -> dict[str, Any]:
        return self._rule() | self.average.rule() | {"norm": self._power()}

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        ranks = [*others[: key.rank], piece.values, *others[key.rank :]]
        carry, size, of_errors = work.carry["records"], self._record(), self.errors_size
        first, number = (piece.start - carry.first) // size, piece.values.numel() // size
        own = slice(first * of_errors, (first + number) * of_errors)
        kept, left = (rows.view(-1)[own] for rows in (carry.kept, carry.next))
        forgets, begin = self.average.forgets(key), piece.start // size
        ops.loco_fold(ranks, None if forgets else kept, piece.values, left, **self._rules())
        for records in (work.memo["blocks"][position] for position in work.absent()):
            # Nothing of it was sent: its records are those of an earlier step.
            low, high = max(records.start - begin, 0), min(records.stop - begin, number)
            if low < high:
                same = slice(low * of_errors, high * of_errors)
                left[same] = 0 if forgets else kept[same]

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        super().decode(work, parts, key, result_scale)
        self.keep(work, parts, key)


@register
@dataclass(frozen=True)
class Qsgd(ByForm):
    """Eight bits per element: unbiased, on a scale for each block and rank; owners average and round again.

    Args:
        bits: bits per element, 2 to 8: a sign and 2^(bits-1) - 1 levels.
        block: number of elements of a tensor that share a norm, a multiple of 64, at most 8192.
        norm: "max" for the largest magnitude of a block, or 2 for the 2-norm.
        coding: "packed" for codes of a fixed width, averaged by the owner of a chunk and rounded again, or
            "elias" for codes of variable length, which are gathered: for few bits, few ranks and slow links.
        rounding: "independent" for random bits of each rank's own; "correlated" spreads them over the ranks, so that
            errors cancel; "nearest" with feedback.
        feedback: "none", or "average" to add a fading average of earlier errors, those of owners too.
        beta: what share of that average stays in a step; 0 for plain error feedback. None for 0.8 with feedback.
        reset_every: after how many steps all errors are forgotten, 0 for never. None for 1024 with feedback.
        residual_bits: bits of an error that is kept, 2 to 8. None for 8 with feedback.
        error: the largest squared error of a rank's own payload, as a share of the squared norm of what it has, below
            1; 0 for no such bound. With ``coding="elias"``, ``rounding="nearest"`` and ``norm=2``: levels are as far
            apart as that allows, and the residual keeps what is lost.
    """

    bits: int = 8
    block: int = 512
    norm: Literal["max", 2] = "max"
    coding: Literal["packed", "elias"] = "packed"
    rounding: Literal["independent", "correlated", "nearest"] = "independent"
    feedback: Literal["none", "average"] = "none"
    beta: float | None = None
    reset_every: int | None = None
    residual_bits: int | None = None
    error: float = 0.0

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "2 to 8 bits: unbiased, on each rank's own scale"
    source: ClassVar[str] = "Alistarh et al., NeurIPS 2017, arXiv:1610.02132"
    page: ClassVar[str] = "quantising_methods.md#qsgd"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 8},
        {"bits": 4, "block": 64},
        {"bits": 5, "block": 320, "norm": 2},
        {"bits": 2, "block": 128},
        {"bits": 4, "norm": 2, "coding": "elias"},
        {"bits": 2, "block": 64, "coding": "elias"},
        {"bits": 4, "block": 64, "rounding": "correlated"},
        {"bits": 4, "rounding": "nearest", "feedback": "average"},
        {"bits": 3, "block": 64, "rounding": "nearest", "feedback": "average", "beta": 0.0, "reset_every": 3},
        {"norm": 2, "coding": "elias", "rounding": "nearest", "error": 0.1},
    )

    def __post_init__(self) -> None:
        if not whole(self.bits) or not 2 <= self.bits <= 8:
            raise ConfigError(f"bits should be a whole number from 2 to 8, got {self.bits!r}")
        if not whole(self.block) or not BLOCK_UNIT <= self.block <= MOST_BLOCK or self.block % BLOCK_UNIT:
            raise ConfigError(f"block should be a multiple of {BLOCK_UNIT}, at most {MOST_BLOCK}, got {self.block!r}")
        if self.norm != "max" and not (whole(self.norm) and self.norm == 2):
            raise ConfigError(f'norm should be "max" or 2, got {self.norm!r}')
        check_choice("coding", self.coding, "packed", "elias")
        check_choice("rounding", self.rounding, "independent", "correlated", "nearest")
        if type(self.error) not in (int, float) or not 0 <= self.error < 1:
            raise ConfigError(f"error should be a number below 1, or 0 for no bound, got {self.error!r}")
        object.__setattr__(self, "error", float(self.error))  # 0 and 0.0 are the same option in saved states
        if self.error:
            self._check_bounded()
            return
        check_feedback(self, "qsgd")
        if self.coding == "elias" and self.feedback != "none":
            raise ConfigError(
                'feedback="average" is for coding="packed", got "elias": leave feedback out, or leave coding out'
            )

    def _check_bounded(self) -> None:
        due: dict[str, Any] = {"norm": 2, "coding": "elias", "rounding": "nearest", "feedback": "none"}
        due |= dict.fromkeys(("beta", "reset_every", "residual_bits"))
        for name, needed in due.items():
            if getattr(self, name) != needed:
                raise ConfigError(
                    f"error= needs {name}={needed!r}, got {getattr(self, name)!r}: choose sparse_dithering, which "
                    "sets what it needs, or leave error out"
                )
        if self.error < (least := ops.least_error(self.bits, self.block)):
            raise ConfigError(
                f"error should be at least block / (2^(bits-1) - 1)^2 = {least:.4f}, where the levels suffice, got "
                f"{self.error!r}; choose a larger error, or a smaller block"
            )

    @cached_property
    def form(self) -> Quantised:
        rule = self.bits, self.block, self.norm, self.rounding == "correlated"
        if self.error:
            return Bounded(*rule, error=self.error)
        if average := average_of(self):
            return Averaged(*rule, average)
        return Packed(*rule) if self.coding == "packed" else Elias(*rule)
