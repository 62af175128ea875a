"""Top-k: the elements of largest magnitude with their values.

Aji and Heafield, arXiv:1704.05021, EMNLP 2017; with the residual of Stich et al., *Sparsified SGD with Memory*,
arXiv:1809.07599, NeurIPS 2018.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = the k largest |x|, exactly; the lower position among equals, never a zero
    payload  = the positions of T, as gaps in Golomb code, and x there; with value_bits below 32 rounded
    result   = mean over ranks of (the rank's values at its positions)
    residual = decay (x - (the own values at the own positions))

With fewer than 32 bits the residual keeps what rounding took: see :mod:`.shared.forms` for codes of 2, 4 and 8. With
``positions="leader"`` all ranks send their values at the positions of one of them: see :mod:`.shared.led`.

With ``chunk=n`` the k are those of each n consecutive elements, k = ceil(density * n); with ``average="senders"`` a sum
is divided by the number of ranks that sent the element. Both, 2 bits and a decay of 0.95 are as in SparseLoCo, Sarfi et
al., arXiv:2508.15706, as deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.sizes import MOST_CHUNK, chosen_in_chunks
from ..schedule.plan import Bucket, TensorSpec
from .base import Codec, Law, Properties, check_choice, whole
from .registry import register
from .shared.forms import check_value_bits, own_bound, value_form
from .shared.led import Led
from .shared.sections import Sections, check_share, share
from .work import Layout, Work


@register
@dataclass(frozen=True)
class TopK(Sections):
    """The largest 1 % of each tensor's elements with their exact values; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        value_bits: bits per value: 32 (64 for float64 gradients); 16: float16 for float16 gradients, else bfloat16; 8,
            4 or 2: a sign and one of 128, 8 or 2 levels, which are fitted to each tensor's values in each step.
        positions: "own" for those of each rank's largest, which are gathered; "leader" for those of one rank's, another
            one in every step, where values of all ranks add: its bytes do not grow with the number of ranks.
        filter: with "leader", how much of what is new goes into the residual, above 0, at most 1. Less than 1 keeps
            large residuals from piling up at high learning rates, and loses some of what was not sent.
        chunk: choose within each chunk of so many consecutive elements of a tensor, 64 to 4096, so that every chunk
            sends the same number; 0 for the largest of the whole tensor.
        residual_decay: factor of the residual from round to round, above 0, at most 1. Below 1, old errors decay
            instead of returning all at once, and a part of what was not sent is lost.
        average: what sums are divided by: the number of all "ranks", or of the "senders" of each element, where one
            rank of M that sends an element counts M times as much.
    """

    value_bits: Literal[2, 4, 8, 16, 32] = 32
    positions: Literal["own", "leader"] = "own"
    filter: float = 1.0
    chunk: int = 0
    residual_decay: float = 1.0
    average: Literal["ranks", "senders"] = "ranks"

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "the largest values, exactly, and their positions in Golomb code"
    source: ClassVar[str] = "Aji and Heafield, EMNLP 2017, arXiv:1704.05021"
    page: ClassVar[str] = "sparse_methods.md#top-k"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.01},
        {"density": 0.3, "value_bits": 16},
        {"density": 0.3, "value_bits": 2},
        {"density": 0.5, "value_bits": 8},
        {"density": 0.1, "value_bits": 4, "chunk": 64, "residual_decay": 0.75},
        {"density": 0.05, "chunk": 100, "average": "senders"},
        {"density": 0.05, "positions": "leader"},
        {"density": 0.3, "positions": "leader", "filter": 0.5},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value_bits(self.value_bits)
        check_choice("positions", self.positions, "own", "leader")
        check_choice("average", self.average, "ranks", "senders")
        for name in ("filter", "residual_decay"):
            check_share(name, value := getattr(self, name))
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are the same option in saved states
        if not whole(self.chunk) or not (self.chunk == 0 or 64 <= self.chunk <= MOST_CHUNK):
            raise ConfigError(f"chunk should be 0, for whole tensors, or in [64, {MOST_CHUNK}], got {self.chunk!r}")
        if self.positions == "leader":
            self._check_led()
        elif self.filter != 1:
            raise ConfigError(f'filter is for positions="leader", got {self.filter!r} with "own"')

    def _check_led(self) -> None:
        if self.value_bits != 32:
            raise ConfigError(
                f'value_bits should be 32 with positions="leader", whose values add, got {self.value_bits}: '
                'rounded values and codes do not; use positions="own"'
            )
        if self.chunk:
            raise ConfigError(f'chunk should be 0 with positions="leader", those of whole tensors, got {self.chunk}')
        if self.residual_decay != 1:
            raise ConfigError(f'with positions="leader" use filter, not residual_decay, got {self.residual_decay!r}')
        if self.average != "ranks":
            raise ConfigError('average should be "ranks" with positions="leader": all ranks send every one of them')

    @cached_property
    def _led(self) -> Led | None:
        return Led(self.density, self.filter) if self.positions == "leader" else None

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        return self._led or self

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return self._led.layout(bucket, world) if self._led else super().layout(bucket, world)

    def properties(self) -> Properties:
        if self._led:
            return replace(self._led.properties(), variants=(self._led,))
        mean = self.average == "ranks"
        bound = own_bound(self.value_bits) if mean else "none"
        error = self._error if mean and self.residual_decay == 1 else None
        law = Law(conserves=mean and self.residual_decay == 1, bound=bound, error=error, zeros=True)
        return replace(super().properties(), law=law, stands_for_mean=mean)

    # ---- what is chosen, and how it is written ----

    @property
    def select(self) -> Callable[..., None]:
        if not self.chunk:
            return ops.top_select_all
        return partial(ops.chunk_select_all, chunk=self.chunk, k=share(self.density, self.chunk))

    def _last(self, count: int) -> int:
        """Return how many elements are chosen of a last chunk that is shorter."""
        return share(self.density, count % self.chunk)

    def most(self, tensor: TensorSpec) -> int:
        if not self.chunk:
            return super().most(tensor)
        of_chunk = share(self.density, self.chunk)
        return chosen_in_chunks(tensor.count, self.chunk, of_chunk, self._last(tensor.count))

    def given(self, work: Work, position: int) -> tuple[Any, ...]:
        grad, residual, k, *room = super().given(work, position)
        return grad, residual, self._last(grad.numel()) if self.chunk else k, *room

    def form(self, bucket: Bucket, tensor: TensorSpec) -> str:
        return value_form(self.value_bits, bucket, self.most(tensor))

    def keeps(self, work: Work, positions: Sequence[int]) -> dict[str, Any]:
        return {"decay": self.residual_decay, "by_senders": self.average == "senders"}

    def scale(self, work: Work, result_scale: float) -> float:
        return result_scale if self.average == "senders" else super().scale(work, result_scale)

    def _error(self, x: Sequence[Tensor]) -> float:
        total = 0.0
        for mine in x:
            parts = mine.abs().split(self.chunk or max(mine.numel(), 1))
            kept = [part.topk(share(self.density, part.numel())).values for part in parts]
            sent = sum(float(part.square().sum()) for part in kept)
            if self.value_bits <= 8:  # the nearest levels are no farther than the mean
                sent = float(sum(part.sum() for part in kept)) ** 2 / sum(part.numel() for part in kept)
            rounding = 2.0**-16 if self.value_bits < 32 else 0.0
            total += (1 + rounding) * float(mine.square().sum()) - sent
        return total / len(x)
