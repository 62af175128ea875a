"""Plain numbers: ``none``, ``fp16`` and ``bf16``.

    payload = cast(gradient)            each rank
    payload = payload + payload         hop by hop, rounded to the payload's type
    result  = payload / M

``none`` sends the gradient's own type, as Horovod does. ``fp16`` and ``bf16`` halve the bytes of
float32; fp16 overflows above 65504, bf16 has 8 bits of precision. They are also what the other
methods use for full-precision rounds and small tensors, then with the residual added and emptied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Law, Properties
from .registry import register
from .work import LAST, Counts, Cutting, Layout, Part, Work, dtype_of, per_element, work_dtype

#: Parts of a tensor start at whole cache lines and vector registers.
LANES = 64


@dataclass(frozen=True)
class Dense(Codec):
    """Exchange of plain numbers, of a type that the subclass chooses."""

    algebra: ClassVar[Algebra] = Algebra.SUM
    batched: ClassVar[bool] = True
    epsilon: ClassVar[float] = 2.0**-23
    #: What is sent; None for float32, or float64 for float64 gradients.
    sent: ClassVar[torch.dtype | None] = None

    def properties(self) -> Properties:
        law = Law(unbiased=True, conserves=True, epsilon=self.epsilon, bound="rounding only", zeros=True)
        return Properties(law)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        cutting = Cutting([LANES] * len(bucket.tensors), self._needs)
        return Layout({"values": (self.wire_dtype(bucket), bucket.padded)}, cutting=cutting)

    def wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self.sent or work_dtype(bucket)

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        values, residuals = work.remembered(
            "offered", positions, lambda: self._pieces(work, [work.span(position) for position in positions])
        )
        return ops.dense_offer_all([work.grad(position) for position in positions], residuals, values)

    def _pieces(self, work: Work, spans: Sequence[slice]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return what is sent of some elements of the bucket, and their residuals."""
        return [work.regions["values"][span] for span in spans], work.states_of("residual", spans)

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        own = work.place(part)
        return {"values": (own.start, own.stop)}

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        sums, residuals = work.remembered(
            "decoded", parts, lambda: self._pieces(work, [work.place(part) for part in parts])
        )
        grads, scale = work.grads_of(parts), result_scale / work.world
        ops.dense_decode_all(sums, grads, scale=scale, residuals=residuals)
        if residuals is not None and work.bucket.dtype == "float16":
            for grad, exact, kept in zip(grads, sums, residuals, strict=True):
                _keep_excess(grad, exact.to(torch.float32) * scale, kept, result_scale)


def _keep_excess(result: Tensor, exact: Tensor, kept: Tensor, result_scale: float) -> None:
    """Let a result that float16 cannot hold, with what had waited in it, be its largest number; the rest waits on."""
    most = torch.finfo(torch.float16).max
    result.clamp_(-most, most)
    # Divided by a tensor: CUDA multiplies by a number's reciprocal.
    kept.copy_((exact - exact.clamp(-most, most)).div_(exact.new_tensor(result_scale)))


@register
@dataclass(frozen=True)
class Uncompressed(Dense):
    """The gradient, unchanged."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no compression: the gradient's own type"

    def wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return dtype_of(bucket)


@register
@dataclass(frozen=True)
class Half(Dense):
    """IEEE half precision."""

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "16 bits: IEEE half precision"
    epsilon: ClassVar[float] = 2.0**-11
    sent: ClassVar[torch.dtype] = torch.float16


@register
@dataclass(frozen=True)
class BFloat(Dense):
    """bfloat16: the range of float32 with 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "16 bits: bfloat16"
    epsilon: ClassVar[float] = 2.0**-8
    sent: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class Momentum(Dense):
    """``u = momentum * u + gradient`` and the mean of u: for tensors beside a method with momentum.

    The next u goes on with each rank's own, or with the mean where momentum is global.
    """

    momentum: float = 0.9
    kind: Literal["local", "global"] = "local"

    name: ClassVar[str] = "momentum"
    summary: ClassVar[str] = "float32, or float64 for float64 gradients, with momentum"
    batched: ClassVar[bool] = False

    def properties(self) -> Properties:
        return Properties(Law(bound="result = mean of u, rounding only", zeros=True))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return replace(super().layout(bucket, world), state=per_element(bucket, self._name))

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [self._submit(work, position) for position in positions]

    def _submit(self, work: Work, position: int) -> int:
        out = work.regions["values"][work.span(position)]
        if self.kind == "global":
            torch.add(self._kept(work, position), work.grad(position), out=out)
        else:
            torch.mul(self._kept(work, position), self.momentum, out=out).add_(work.grad(position))
        nonfinite = int(ops.count_nonfinite(out))
        out.clamp_(-work.limit(), work.limit())
        return nonfinite

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        if self.kind == "global":
            super().decode(work, parts, key, result_scale)
            for part, grad in zip(parts, work.grads_of(parts), strict=True):
                last = self._kept(work, part.position)[part.start : part.stop]
                keep_last(last, grad, self.momentum, result_scale)
            return
        most = torch.finfo(work_dtype(work.bucket)).max / 4
        for part in parts:
            own = slice(part.start, part.stop)
            kept = self._kept(work, part.position)[own]
            kept.mul_(self.momentum).add_(work.grad(part.position)[own]).clamp_(-most, most)
        super().decode(work, parts, key, result_scale)

    def _kept(self, work: Work, position: int) -> Tensor:
        kept = work.state_of(self._name, position)
        assert kept is not None
        return kept

    @property
    def _name(self) -> str:
        return LAST if self.kind == "global" else "momentum"


def keep_last(last: Tensor, result: Tensor, momentum: float, result_scale: float) -> None:
    """Let what the next step goes on with be momentum times a mean over ranks, of which there is ``result_scale``."""
    last.copy_(result)
    if result_scale != 1:
        last.div_(last.new_tensor(result_scale))  # a GPU divides by numbers in a way of its own
    last.mul_(momentum)


@dataclass(frozen=True)
class FullPrecision(Dense):
    """float32 for gradients of 16 bits too: for rounds that empty a residual."""

    name: ClassVar[str] = "full precision"
    summary: ClassVar[str] = "float32, or float64 for float64 gradients"


@dataclass(frozen=True)
class ShortFullPrecision(FullPrecision):
    """The same in half of the bytes, by the same name: bfloat16 in place of float32."""

    summary: ClassVar[str] = "bfloat16, or float64 for float64 gradients"
    epsilon: ClassVar[float] = BFloat.epsilon

    def wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return super().wire_dtype(bucket) if bucket.dtype == "float64" else torch.bfloat16


# ---- a method's bucket --------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftPlain(Codec):
    """Every round is plain: it sends what waits in the residual too, which is empty from then on.

    What the method keeps stays its own, so the bucket can be compressed again in any later step.

    Args:
        codec: the method; one that may be plain, see :class:`~horovod_compress.codecs.base.Properties`.
        keeps: whether it keeps something for the elements of the bucket.
    """

    codec: Codec
    keeps: bool

    name: ClassVar[str] = "left plain"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "a method's bucket, uncompressed"

    def properties(self) -> Properties:
        return Properties(variants=(self.for_step(0),))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return Layout(state=self.codec.layout(bucket, world).state)

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        # Sent as the gradients are, a residual would be rounded to their type.
        return FullPrecision() if self.keeps else Uncompressed()

    def plain_when_empty(self, bucket: Bucket) -> bool:
        """Return whether rounds send gradients as they are while nothing waits, which is after any round."""
        return self.keeps and dtype_of(bucket) is work_dtype(bucket)
