"""1-bit Adam's compressed all-reduce: signs with errors kept on both sides (Tang et al., ICML 2021, arXiv:2102.02888).

    p = x + residual                                x: a gradient, or an update with momentum
    record of a block = its scale s, times c, and the signs of p   to the block's owner
    residual = p - s sign(p)                        on each rank
    a = mean over ranks of s sign(p) + server       on the owner
    record of a = its scale S, and the signs of a                  to everyone
    server = a - S sign(a)                          on the owner
    result = S sign(a)

    scale s: |p|_2 / sqrt(d), the paper's, which keeps the norm; or |p|_1 / d, the mean magnitude
    scale S: the mean of the ranks' scales; or that of a by the same rule as s, the paper's

Over the steps the sum of all results is that of the mean of x but for mean residual and server error, which
both wait here. Where an element has another owner, after a resume with another plan, what the old owner kept
goes into that rank's residual, times M as the mean over M ranks is taken of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .base import Algebra, ByForm, Codec, Law, Piece, Properties, check_choice, whole
from .registry import register
from .shared.signs import LARGE_STEP, check_step_scale, more_where_left_out
from .work import Counts, Cutting, Layout, Part, Work, per_element, slices, work_dtype

MOST_BLOCK = 1 << 16


@dataclass(frozen=True)
class InRecords(Codec):
    """What every round does."""

    scale: str
    block: int
    step_scale: float
    owner_scale: str

    name: ClassVar[str] = "onebit_adam"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "1 bit both ways: signs with scales of blocks, errors kept on both sides"
    folded: ClassVar[frozenset[str]] = frozenset({"server", "left"})
    exact_first: ClassVar[bool] = True

    def properties(self) -> Properties:
        c = self.step_scale
        l1 = f"|x|^2 - {c * (2 - c):g} |x|_1^2 / d"
        l2 = f"{1 + c * c:g} |x|^2 - {2 * c:g} |x|_1 |x| / sqrt(d)"
        law = Law(bound=f"of each record: {l1 if self.scale == 'l1' else l2}; what both sides lack is kept")
        return Properties(law, feedback="own", divides="before", has_private_state=True)

    # ---- layout ----

    @property
    def _record(self) -> int:
        return ops.record_bytes(self.block)

    def _number(self, tensor: TensorSpec) -> int:
        return -(-tensor.count // self.block)

    def _total(self, bucket: Bucket) -> int:
        return sum(self._number(tensor) for tensor in bucket.tensors)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        total = self._total(bucket)
        return Layout(
            {"records": (torch.uint8, total * self._record)},
            {"records": self._record},
            state=per_element(bucket, "residual", "server"),
            local={"scales": (torch.float32, total), "left": (work_dtype(bucket), bucket.padded)},
            cutting=Cutting([self.block] * len(bucket.tensors), self._needs),
            zero_groups=[self.block] * len(bucket.tensors),
        )

    def prepare(self, work: Work) -> None:
        work.memo["records"] = slices([self._number(tensor) for tensor in work.bucket.tensors])
        # What is written through here does not count as a change from outside, see _settle.
        work.memo["server"] = work.state["server"].data
        work.memo["settled"] = [-1] * len(work.bucket.tensors)

    def _owned(self, work: Work, position: int, rank: int) -> slice:
        """Return the elements of a tensor that a rank owns: none in a world of one, where nothing is folded."""
        total, own = self._total(work.bucket), work.memo["records"][position]
        if work.world == 1:
            return slice(0, 0)
        first, last = (min(max(total * r // work.world, own.start), own.stop) for r in (rank, rank + 1))
        count = work.bucket.tensors[position].count
        return slice(min((first - own.start) * self.block, count), min((last - own.start) * self.block, count))

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [self._submit(work, position, key) for position in positions]

    def _submit(self, work: Work, position: int, key: Key) -> int | Tensor:
        self._settle(work, position, key.rank)
        own = work.memo["records"][position]
        records = work.regions["records"][own.start * self._record : own.stop * self._record]
        given = (work.grad(position), work.residual_of(position), records, self.block)
        return ops.record_offer(*given, rule=self.scale)

    def _settle(self, work: Work, position: int, rank: int) -> None:
        """Move what this rank kept as the owner of elements that it does not own into its residual.

        They come with a checkpoint only: whatever was loaded counts as a change of the tensor.
        """
        server, settled = work.state["server"], work.memo["settled"]
        if settled[position] == server._version:
            return
        settled[position] = server._version
        kept, residual = work.memo["server"][work.span(position)], work.residual_of(position)
        assert residual is not None
        owned = self._owned(work, position, rank)
        for part in (slice(0, owned.start), slice(owned.stop, kept.numel())):
            if bool(kept[part].any()):
                residual[part].add_(kept[part].to(residual.device), alpha=work.world)
                kept[part].zero_()

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        scales = work.local["scales"]
        table = work.regions["records"].view(scales.numel(), self._record)
        for own, grad in zip(work.memo["records"], work.grads, strict=True):
            if grad is None:  # what an earlier step left
                table[own] = 0
        scales.copy_(table[:, :4].view(torch.float32).view(-1))
        for position in work.withheld:
            mine = scales[work.memo["records"][position]]
            more = more_where_left_out(work, position, self.block, mine.numel())
            mine.mul_(more if self.scale == "l1" else ops.take_roots(more))
        if self.step_scale != 1 or work.withheld:
            scales.mul_(self.step_scale).clamp_(max=torch.finfo(scales.dtype).max)
            table[:, :4] = scales.view(torch.uint8).view(-1, 4)

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        into, size = piece.values, self._record
        first, last = piece.start // size, (piece.start + into.numel()) // size
        payloads = [*others[: key.rank], into, *others[key.rank :]]
        for position, own in enumerate(work.memo["records"]):
            low, high = max(first, own.start), min(last, own.stop)
            if low >= high:
                continue
            span = work.span(position)
            begin = span.start + (low - own.start) * self.block
            elements = slice(begin, min(begin + (high - low) * self.block, span.stop))
            place = slice((low - first) * size, (high - first) * size)
            ops.record_fold(
                [payload[place] for payload in payloads],
                work.memo["server"][elements],
                work.local["left"][elements],
                into[place],
                self.block,
                rule="shared" if self.owner_scale == "shared" else self.scale,
            )

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        records = self._place(work, part)
        return {"records": (records.start * self._record, records.stop * self._record)}

    def _place(self, work: Work, part: Part) -> slice:
        """Return the records of a part."""
        first = work.memo["records"][part.position].start
        return slice(first + part.start // self.block, first - (-part.stop // self.block))

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for part in parts:
            self._decode(work, part, key, result_scale)

    def _decode(self, work: Work, part: Part, key: Key, result_scale: float) -> None:
        records = self._place(work, part)
        ops.record_decode(
            work.regions["records"][records.start * self._record : records.stop * self._record],
            work.local["scales"][records],
            work.grad(part.position)[part.start : part.stop],
            work.state["residual"][work.place(part)],
            self.block,
            scale=result_scale,
        )
        owned, first = self._owned(work, part.position, key.rank), work.span(part.position).start
        mine = slice(first + max(part.start, owned.start), first + min(part.stop, owned.stop))
        if mine.start < mine.stop:
            work.memo["server"][mine] = work.local["left"][mine]


@register
@dataclass(frozen=True)
class OneBitAdam(ByForm):
    """One bit per element to the owner of a chunk and one back, with error feedback on both sides.

    Args:
        scale: "l1" is the mean magnitude of a block; "l2" keeps its norm, as in the paper.
        block: number of elements that share a scale, a multiple of 64, at most 65536.
        step_scale: what a rank multiplies its scales by, above 0 and below 2; None for 1.5 with "l1", where residuals
            then follow their gradients sooner, and 1 with "l2".
        owner_scale: "shared" is the mean of the ranks' scales, so that what an owner rounds off does not change its
            scale; "own" is the scale of what the owner itself holds, as in the paper.
    """

    scale: Literal["l1", "l2"] = "l1"
    block: int = 512
    step_scale: float | None = None
    owner_scale: Literal["shared", "own"] = "shared"

    name: ClassVar[str] = "onebit_adam"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = InRecords.summary
    source: ClassVar[str] = "Tang et al., ICML 2021, arXiv:2102.02888"
    page: ClassVar[str] = "sign_methods.md#onebit_adam"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"scale": "l2", "block": 2048, "owner_scale": "own"},
        {"scale": "l1", "block": 64, "step_scale": 1.0, "owner_scale": "own"},
        {"scale": "l1", "block": 512, "owner_scale": "shared"},
    )

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, "l1", "l2")
        if not whole(self.block) or not 0 < self.block <= MOST_BLOCK or self.block % ops.RECORD_UNIT:
            raise ConfigError(
                f"block should be a multiple of {ops.RECORD_UNIT}, at most {MOST_BLOCK}, got {self.block!r}"
            )

        if self.step_scale is None:  # ranks and checkpoints compare what is in force
            object.__setattr__(self, "step_scale", LARGE_STEP if self.scale == "l1" else 1.0)
        check_step_scale(self.step_scale)
        check_choice("owner_scale", self.owner_scale, "shared", "own")

    @cached_property
    def form(self) -> InRecords:
        assert self.step_scale is not None  # see above
        return InRecords(self.scale, self.block, self.step_scale, self.owner_scale)
