"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv:1905.13727).

A tensor of two or more dimensions is a matrix X of n rows, its first dimension, and m columns; r = min(rank, n, m).

    X = gradient + residual                         on each rank
    P = sum over ranks of X Q                       n r numbers; Q as the last step left it, the same everywhere
    P = orthonormal columns that span P             modified Gram-Schmidt, twice
    Q = mean over ranks of X^T P                    m r numbers
    result   = P Q^T
    residual = X - P Q^T

It is one step of a power iteration per round, which a Q that is kept lets go on from round to round. Both
exchanges add, so M ranks do what one rank would with their mean gradient. Tensors with fewer dimensions, and those
for which r (n + m) >= n m, travel as they are.

The columns of Q are multiplied by powers of two before they are used, which changes no bit of P's directions; a
column that is zero, as all are at first, or not finite is drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import FACTOR, Key
from ..schedule.plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Properties, TableMoves, check_choice, whole
from .registry import register
from .work import Counts, Layout, Part, Work, per_element, work_dtype


@dataclass(frozen=True)
class Share:
    """Where one tensor lies in the payload: a matrix has two factors, anything else its values.

    Attributes:
        rank: components of the factors; 0 where the tensor travels as it is.
        left, right: the factors, of ``rank`` lines each, among those of the bucket.
        values: the elements, among those of the bucket that travel as they are.
    """

    rows: int
    rank: int
    left: slice
    right: slice
    values: slice


@register
@dataclass(frozen=True)
class PowerSgd(Codec):
    """Each matrix as two factors of rank 4, exchanged one after the other by addition, with error feedback.

    Args:
        rank: number of columns of the two factors, at least 1.
        error_feedback: whether to keep what the product misses, and add it to the next gradient.
    """

    rank: int = 4
    error_feedback: bool = True

    name: ClassVar[str] = "powersgd"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "two factors of low rank, which add"
    source: ClassVar[str] = "Vogels et al., NeurIPS 2019, arXiv:1905.13727"
    page: ClassVar[str] = "powersgd.md"
    drains_residual: ClassVar[bool] = False  # of tensors that travel as they are nothing is kept
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"rank": 1}, {"rank": 2, "error_feedback": False})

    def __post_init__(self) -> None:
        if not whole(self.rank) or self.rank < 1:
            raise ConfigError(f"rank should be a whole number, at least 1, got {self.rank!r}")
        check_choice("error_feedback", self.error_feedback, True, False)

    def properties(self) -> Properties:
        return Properties(
            Law(conserves=self.error_feedback, bound="of one rank: |X|^2 - |P^T X|^2, P orthonormal"),
            feedback="own" if self.error_feedback else "none",
            divides="after",
            moves_tables=TableMoves(self._views),
        )

    # ---- layout ----

    def rank_of(self, tensor: TensorSpec) -> int:
        """Return the components of a tensor's factors; 0 where it travels as it is."""
        if len(tensor.shape) < 2 or not tensor.count:
            return 0
        rows, columns = tensor.shape[0], tensor.count // tensor.shape[0]
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def shares(self, bucket: Bucket) -> list[Share]:
        """Return the share of every tensor of a bucket."""
        found, left, right, values = [], 0, 0, 0
        for tensor in bucket.tensors:
            rank = self.rank_of(tensor)
            rows = tensor.shape[0] if rank else 0
            ends = (left + rank * rows, right + (rank * tensor.count // rows if rank else 0))
            plain = values if rank else values + tensor.count
            found.append(Share(rows, rank, slice(left, ends[0]), slice(right, ends[1]), slice(values, plain)))
            (left, right), values = ends, plain
        return found

    def layout(self, bucket: Bucket, world: int) -> Layout:
        last, dtype = self.shares(bucket)[-1], work_dtype(bucket)
        left, right, values = ((dtype, end.stop) for end in (last.left, last.right, last.values))
        return Layout(
            {"right": right, "values": values},
            preludes=({"left": left},) if last.left.stop else (),
            state=per_element(bucket, "residual") if self.error_feedback else {},
            tables={"factor": right} if last.right.stop else {},
            local={"start": right},
            zero_groups=[t.count // t.shape[0] if self.rank_of(t) else 1 for t in bucket.tensors],
        )

    def prepare(self, work: Work) -> None:
        work.memo["shares"] = self.shares(work.bucket)

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [self._submit(work, position, key) for position in positions]

    def _submit(self, work: Work, position: int, key: Key) -> int | Tensor:
        share: Share = work.memo["shares"][position]
        grad, residual = work.grad(position), work.residual_of(position)
        if not share.rank:
            return ops.dense_offer_all([grad], None, [work.regions["values"][share.values]])[0]
        start = work.local["start"][share.right]
        drawn = key.at(rank=0, purpose=FACTOR)
        ops.lowrank_start(work.tables["factor"][share.right], start, share.rank, drawn, offset=share.right.start)
        return ops.lowrank_left(grad, residual, share.rows, start, work.shared["left"][share.left])

    def before(self, number: int, work: Work, key: Key) -> None:
        for share, grad in zip(work.memo["shares"], work.grads, strict=True):
            if grad is None:  # what an earlier step left
                work.regions["right"][share.right] = 0
                work.regions["values"][share.values] = 0
                if share.rank:
                    work.shared["left"][share.left] = 0

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        for position in (part.position for part in parts):
            share: Share = work.memo["shares"][position]
            if share.rank:
                left, right = work.shared["left"][share.left], work.regions["right"][share.right]
                ops.lowrank_orthonormalise(left, share.rank)
                ops.lowrank_right(work.grad(position), work.residual_of(position), share.rows, left, right)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        work.regions["right"].mul_(1 / work.world)
        for position in (part.position for part in parts):
            share: Share = work.memo["shares"][position]
            if share.rank:
                self._decode_matrix(work, position, share, result_scale)
            else:
                values = work.regions["values"][share.values]
                ops.dense_decode_all([values], [work.grad(position)], scale=result_scale / work.world)

    def _decode_matrix(self, work: Work, position: int, share: Share, result_scale: float) -> None:
        left, right = work.shared["left"][share.left], work.regions["right"][share.right]
        if ops.count_nonfinite(right):  # sums beyond the largest number: these components are left out
            lines = right.view(share.rank, -1)
            lines[~lines.isfinite().all(dim=1)] = 0
        work.tables["factor"][share.right] = right
        grad, residual = work.grad(position), work.residual_of(position)
        ops.lowrank_decode(left, right, share.rows, grad, residual, scale=result_scale)

    # ---- other buckets ----

    def _views(self, work: Work, position: int) -> dict[str, Tensor]:
        share: Share = work.memo["shares"][position]
        return {"factor": work.tables["factor"][share.right]} if share.rank else {}
