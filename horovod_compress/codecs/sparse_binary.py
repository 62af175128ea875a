"""Sparse Binary Compression: the positions of the largest values of one sign, and their mean.

Sattler et al., arXiv:1805.08768, IJCNN 2019.

    x = update + residual, for each tensor of d elements; k = ceil(density * d)
    P = the k largest x above 0; N = the k smallest below 0; fewer where there are fewer
    the side with the larger (sum of it)^2 / (its size) is sent: where both have k elements, that is
        the side with the larger mean, the paper's rule
    payload  = the mean, and the positions, as gaps in Golomb code
    result   = mean over ranks of (the rank's mean at its positions)
    residual = x - (the own mean at the own positions)

The other sign stays in the residual and wins in a later round. With ``hvc.DistributedUpdateOptimizer``
the update of several local steps is what is sent, and momentum is emptied where a value was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..schedule.plan import Bucket, TensorSpec
from .base import Law, Properties, check_choice
from .registry import register
from .shared.sections import Sections, check_share, numbers_of, parameter, residuals_of
from .work import Counts, Regions, Work, work_dtype

#: The published settings: (local steps between exchanges, density).
PRESETS = {1: (1, 0.001), 2: (10, 0.01), 3: (100, 0.01)}

_DENSITY = 0.01  # if neither a density nor a preset is given


@register
@dataclass(frozen=True)
class SparseBinary(Sections):
    """The largest 1 % of each tensor's elements, of one sign, with one value for all; the others wait.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1; None for 0.01, or the
            preset's.
        preset: one of the published settings instead: 1 is density 0.001 in every step, 2 is 0.01
            after every 10th step, 3 is 0.01 after every 100th; the delay applies to
            ``hvc.DistributedUpdateOptimizer`` only.
    """

    density: float | None = None  # type: ignore[assignment]
    preset: Literal[1, 2, 3] | None = None

    name: ClassVar[str] = "sparse_binary"
    summary: ClassVar[str] = "positions of the largest values of one sign, Golomb-coded, and their mean"
    source: ClassVar[str] = "Sattler et al., IJCNN 2019, arXiv:1805.08768"
    page: ClassVar[str] = "sparse_binary.md"
    said: ClassVar[str] = "positions"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({"density": 0.01}, {"density": 0.3}, {"preset": 1})

    def __post_init__(self) -> None:
        density, preset = self.density, self.preset
        if preset is not None:
            check_choice("preset", preset, *PRESETS)
        if preset is not None and density is not None:
            raise ConfigError(f"give preset or density, not both: preset={preset} has density {PRESETS[preset][1]}")
        if density is not None:
            check_share("density", density)

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: (1 - k mean^2 / |x|^2) |x|^2", zeros=True)
        delay = PRESETS[self.preset][0] if self.preset else 1
        return replace(super().properties(), law=law, communication_delay=delay)

    @property
    def select(self) -> Callable[..., None]:
        return ops.binary_select_all

    def share_sent(self) -> float:
        if self.preset is not None:
            return PRESETS[self.preset][1]
        return _DENSITY if self.density is None else self.density

    # ---- layout ----

    def _room(self, tensor: TensorSpec, bucket: Bucket) -> int:
        most, count = self.most(tensor), tensor.count
        return ops.golomb_bound(most, count, parameter(most, count), work_dtype(bucket).itemsize)

    def _scratch(self, bucket: Bucket) -> Regions:
        positions = sum(self.most(tensor) for tensor in bucket.tensors)
        means = work_dtype(bucket), len(bucket.tensors)
        return {"positions": (torch.int32, positions), "means": means} | numbers_of(bucket)

    # ---- one round ----

    def _room_of(self, work: Work, position: int, own: slice) -> tuple[Tensor, Tensor]:
        """Return where the positions go that are chosen of a tensor, and their mean."""
        return work.local["positions"][own], work.local["means"][position : position + 1]

    def settle(self, work: Work, positions: Sequence[int]) -> None:
        self.learn(work, positions)
        work.local["means"].clamp_(-work.limit(), work.limit())  # the residual keeps the rest

    def write(self, work: Work, positions: Sequence[int], ends: Tensor) -> None:
        rooms = [work.memo["rooms"][position] for position in positions]
        ops.binary_encode_all(
            [chosen_at for chosen_at, _ in rooms],
            [work.memo["kept"][position] for position in positions],
            [mean for _, mean in rooms],
            [work.memo["parameters"][position] for position in positions],
            [work.bucket.tensors[position].count for position in positions],
            ends,
            work.regions["payload"],
        )

    def read(
        self, work: Work, positions: Sequence[int], sections: Sequence[list[Tensor]], rank: int, scale: float
    ) -> Counts:
        parameters = [work.memo["parameters"][position] for position in positions]
        grads = [work.grad(position) for position in positions]
        return ops.binary_decode_all(sections, rank, parameters, grads, residuals_of(work, positions), scale)

    def _clear(self, work: Work, position: int, momenta: list[Tensor], section: Tensor) -> None:
        for momentum in momenta:
            ops.binary_clear(section, work.memo["parameters"][position], momentum)
