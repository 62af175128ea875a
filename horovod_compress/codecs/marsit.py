"""Marsit: one sign bit per element on every hop (Wu et al., DAC 2022, arXiv:2204.06787).

    x = gradient + residual
    payload = [x >= 0], one bit each, and the mean of |x| of each step group
    merge: where two partial payloads of a and b ranks differ, take the second's bit with
           probability b / (a + b); the final bit is 1 with probability (ranks with bit 1) / M
    result G = step * (2 bit - 1)
    residual = x - G                      global compensation, or
               decay (x - own sign's step)  ordinary error feedback with a fading memory

Every ``full_precision_every`` rounds, from round 0 on, x itself is averaged instead and the residual is
emptied. The paper's step is one fixed number; here it is by default measured anew in every round,
as the mean over ranks of the mean of |x|, per tensor or per output row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..errors import ConfigError
from ..feedback import RULES, Feedback
from ..keys import ZERO_SIGN, Key
from ..plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Regions, Work
from .dense import FullPrecision
from .registry import register

#: A step group covers at least so many elements: its 32 bits then cost 1/8 bit per element at most.
MIN_STEP_GROUP = 256
#: Elements of one 64-bit word of the payload.
WORD = 64


@register
@dataclass(frozen=True)
class Marsit(Codec):
    """One bit per element, merged without bias.

    Args:
        full_precision_every: K; rounds 0, K, 2K, ... are exchanged in full precision; 0 never.
        step_size: "tensor" or "row" for a measured step per tensor or per output row (short rows
            are joined until they hold 256 elements), or the paper's fixed global step.
        compensation: the residual rule, "global", "own" or "none".
        residual_decay: what part of an "own" residual lives on, in (0, 1]. Below 1, old errors fade
            instead of coming back all at once, which high learning rates with momentum need; 1 is
            ordinary error feedback. "global" keeps all, as its conservation law asks for.
        zeros: what exact zeros send: a "random" bit, or "positive" as in the paper. Gradients of
            unused embedding rows are exact zeros, and would all drift the same way.
    """

    full_precision_every: int = 50
    step_size: str | float = "row"
    compensation: Feedback = "own"
    zeros: str = "random"
    residual_decay: float = 0.9

    name: ClassVar[str] = "marsit"
    algebra: ClassVar[Algebra] = Algebra.MERGE
    summary: ClassVar[str] = "1 bit: sign bits, merged without bias on every hop"

    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "row", "full_precision_every": 0, "zeros": "random"},
        {"step_size": "tensor", "full_precision_every": 3, "compensation": "global"},
        {"step_size": "tensor", "full_precision_every": 0, "compensation": "none"},
        {"step_size": 0.125, "full_precision_every": 0, "zeros": "positive"},
    )

    def __post_init__(self) -> None:
        every = self.full_precision_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"full_precision_every should be 0 (never) or a period, got {every!r}")
        if self.step_size not in ("tensor", "row"):
            _check_step(self.step_size)
        if self.compensation not in RULES:
            raise ConfigError(f"compensation should be one of {RULES}, got {self.compensation!r}")
        decay = self.residual_decay
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise ConfigError(f"residual_decay should be a number above 0, at most 1, got {decay!r}")
        if self.zeros not in ("random", "positive"):
            raise ConfigError(f'zeros should be "random" or "positive", got {self.zeros!r}')

    def law(self) -> Law:
        return Law(conserves=self.compensation == "global", bound="E[result] = step * mean of signs")

    def feedback(self) -> Feedback:
        return self.compensation

    def at(self, step: int) -> Codec:
        every = self.full_precision_every
        return FullPrecision() if every and step % every == 0 else self

    def variants(self) -> tuple[Codec, ...]:
        return (self, FullPrecision()) if self.full_precision_every else (self,)

    # ---- layout ----

    def step_group(self, tensor: TensorSpec) -> int:
        """Return how many elements of a tensor share one step."""
        if self.step_size != "row" or len(tensor.shape) < 2 or tensor.count == 0:
            return max(1, tensor.count)
        row = tensor.count // tensor.shape[0]
        return row * math.ceil(MIN_STEP_GROUP / row)

    def _groups(self, tensor: TensorSpec) -> int:
        return -(-tensor.count // self.step_group(tensor))

    def _measured(self) -> bool:
        return isinstance(self.step_size, str)

    def regions(self, bucket: Bucket) -> Regions:
        regions: Regions = {"bits": (torch.int64, bucket.padded // WORD)}
        if self._measured():
            groups = sum(self._groups(tensor) for tensor in bucket.tensors)
            regions["steps"] = (torch.float32, groups)
        return regions

    def local(self, bucket: Bucket) -> Regions:
        groups = sum(self._groups(tensor) for tensor in bucket.tensors)
        if self._measured():
            return {"sums": (torch.float64, groups), "sizes": (torch.float64, groups)}
        return {"fixed": (torch.float32, groups)}

    def prepare(self, work: Work) -> None:
        steps, start = [], 0
        for tensor in work.bucket.tensors:
            steps.append(slice(start, start + self._groups(tensor)))
            start = steps[-1].stop
        work.memo["steps"] = steps
        if not self._measured():
            work.local["fixed"].fill_(float(self.step_size))
            return
        # How many elements each step covers, times the number of ranks: dividing by it gives this
        # rank's share in the mean over ranks, so that the exchange only has to add.
        for tensor, own in zip(work.bucket.tensors, steps):
            group, sizes = self.step_group(tensor), work.local["sizes"][own]
            sizes.fill_(group * work.world)
            if sizes.numel():
                sizes[-1] = (tensor.count - group * (sizes.numel() - 1)) * work.world

    # ---- one round ----

    def offer(self, work: Work, position: int, key: Key) -> int:
        tensor, span = work.bucket.tensors[position], work.span(position)
        steps = work.memo["steps"][position]
        return kernels.sign_offer(
            work.grad(position),
            work.residual_of(position),
            work.regions["bits"][_words(span)],
            work.local["sums"][steps] if self._measured() else None,
            self.step_group(tensor),
            key=self._zero_key(key),
            word_offset=span.start // WORD,
        )

    def encode(self, work: Work, key: Key) -> None:
        if self._measured():
            work.regions["steps"].copy_(work.local["sums"].div_(work.local["sizes"]))

    def merge(
        self, region: str, start: int, into: Tensor, other: Tensor, weights: tuple[int, int], key: Key
    ) -> None:
        if region == "steps":
            kernels.dense_add(into, other)
        else:
            kernels.merge_bits(into, other, *weights, key, word_offset=start)

    def granule(self, tensor: TensorSpec) -> int:
        group = self.step_group(tensor)
        return WORD if group >= tensor.count else math.lcm(WORD, group)

    def needs(self, work: Work, position: int, start: int, stop: int) -> dict[str, tuple[int, int]]:
        words, steps = self._parts(work, position, start, stop)
        found = {"bits": (words.start, words.stop)}
        return found | {"steps": (steps.start, steps.stop)} if self._measured() else found

    def _parts(self, work: Work, position: int, start: int, stop: int) -> tuple[slice, slice]:
        """Return where the words and the steps of elements ``start`` to ``stop`` of a tensor lie."""
        first, step = work.span(position).start, work.memo["steps"][position].start
        group = self.step_group(work.bucket.tensors[position])
        return _words(slice(first + start, first + stop)), slice(step + start // group, step - (-stop // group))

    def decode_part(self, work: Work, position: int, start: int, stop: int, key: Key, gain: float) -> None:
        words, own = self._parts(work, position, start, stop)
        steps = work.regions["steps"] if self._measured() else work.local["fixed"]
        part, residual = slice(start, stop), work.residual_of(position)
        kernels.sign_decode(
            work.regions["bits"][words],
            steps[own],
            self.step_group(work.bucket.tensors[position]),
            work.grad(position)[part],
            None if residual is None else residual[part],
            feedback=self.compensation,
            decay=self.residual_decay if self.compensation == "own" else 1.0,
            scale=gain,
            key=self._zero_key(key),
            word_offset=words.start,
        )

    def _zero_key(self, key: Key) -> Key | None:
        return key.at(purpose=ZERO_SIGN) if self.zeros == "random" else None


def _words(span: slice) -> slice:
    """Return the words that hold the bits of a tensor; tensors start at whole words."""
    return slice(span.start // WORD, -(-span.stop // WORD))


def _check_step(step: object) -> None:
    number = isinstance(step, (int, float)) and not isinstance(step, bool)
    if not number or not math.isfinite(step) or step <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f'step_size should be "tensor", "row" or a positive number, got {step!r}')
