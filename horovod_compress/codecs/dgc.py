"""Deep Gradient Compression: top-k with momentum that is corrected and masked.

Lin, Han, Mao, Wang and Dally, arXiv:1712.01887, ICLR 2018.

    g = gradient, cut down to the length clip / sqrt(M), with clip; each tensor for itself, on each rank
    u = momentum * u + g;  v = v + u                each tensor has d elements
    T = the k largest |v|, exactly; k = ceil(density * d)
    payload = the positions of T, as gaps in Golomb code, and v there
    result  = mean over ranks of (the rank's values at its positions)
    v = 0 at T, or what rounding took, with value_bits below 32; u = 0 there too, with masking

Momentum is applied here, before values wait, so the optimizer should have none. In warm-up the
density falls from a quarter in steps of a quarter: 25 %, 6.25 %, 1.5625 % and so on.

What is kept under "residual" is v + momentum * u: the next v is that plus the gradient, so the
selection reads two arrays and not three. Where momentum is 0 that is v.

With ``momentum_kind="global"`` it is global momentum compression, Zhao, Xie, Gao and Li, arXiv:1905.12948:

    v = g + (a / b) (v + momentum * G)      G is the last result, a its learning rate and b that of this step
    T, payload and result as above;  v = 0 at T

The last result is equal on all ranks, so momentum is no rank's own, and v is in units of the rate as gradients are:
what weights move by and b times what waits make the heavy ball, w = w - b g + momentum * (what w moved by in the last
step), at any sequence of rates and density.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.dispatch import as_tensor
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .base import Law, Properties, check_choice
from .dense import Momentum, keep_last
from .registry import register
from .shared.forms import check_value_bits, own_bound, rounded, value_form
from .shared.sections import Sections
from .work import LAST, Counts, Layout, Part, Work, per_element, work_dtype

_FIRST, _FACTOR = 0.25, 4  # densities of the warm-up


@register
@dataclass(frozen=True)
class Dgc(Sections):
    """The largest 0.1 % of each tensor's elements, after momentum of their own; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        momentum: factor of the method's own momentum; give the optimizer none.
        masking: whether to reset the momentum to 0 where a value was sent.
        ramp_steps: number of steps in which the density falls from 25 % to ``density``; each density
            gets an equal share of them.
        clip: largest Euclidean length of a tensor's mean gradient; each of M ranks scales its own down to
            clip / sqrt(M), so that the mean has about that length if the ranks' gradients are independent. 0 for no
            limit.
        momentum_kind: "local" is each rank's own, of its gradients; "global" goes on with the last result, which all
            ranks have, follows the learning rate, and so does what waits; it has nothing to mask.
        value_bits: bits per value, as ``topk`` has them; what rounding takes stays in v.
    """

    density: float = 0.001
    momentum: float = 0.9
    masking: bool = True
    ramp_steps: int = 0
    clip: float = 0.0
    momentum_kind: Literal["local", "global"] = "local"
    value_bits: Literal[2, 4, 8, 16, 32] = 32

    name: ClassVar[str] = "dgc"
    summary: ClassVar[str] = "the largest values, after the method's own momentum, and their positions in Golomb code"
    source: ClassVar[str] = "Lin et al., ICLR 2018, arXiv:1712.01887"
    page: ClassVar[str] = "sparse_methods.md#deep-gradient-compression"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.05, "momentum": 0.5},
        {"density": 0.02, "momentum": 0.0},
        {"density": 0.1, "momentum": 0.5, "masking": False, "ramp_steps": 8},
        {"density": 0.05, "momentum": 0.5, "clip": 2.0},
        {"density": 0.05, "momentum": 0.5, "momentum_kind": "global"},
        {"density": 0.3, "momentum": 0.5, "value_bits": 4},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.momentum) not in (int, float) or not 0 <= self.momentum <= 0.999:
            raise ConfigError(f"momentum should be a number, 0 or more, at most 0.999, got {self.momentum!r}")
        check_choice("masking", self.masking, True, False)
        if type(self.ramp_steps) is not int or self.ramp_steps < 0:
            raise ConfigError(f"ramp_steps should be a whole number, 0 or more, got {self.ramp_steps!r}")
        if type(self.clip) not in (int, float) or not 0 <= self.clip <= sys.float_info.max:
            raise ConfigError(f"clip should be a number, 0 for none, got {self.clip!r}")
        check_choice("momentum_kind", self.momentum_kind, "local", "global")
        if self.momentum_kind == "global" and not self.masking:
            raise ConfigError(
                'masking=False is for momentum_kind="local": momentum that goes on from the last result has nothing to '
                'mask; leave out masking=, or take momentum_kind="local"'
            )
        check_value_bits(self.value_bits)

    def properties(self) -> Properties:
        return replace(
            super().properties(),
            law=Law(conserves=not self.momentum, bound=own_bound(self.value_bits, "v"), zeros=True),
            divides="never" if self.clip else "before",  # a length is in the units of gradients
            small_tensors=Momentum(float(self.momentum), self.momentum_kind) if self.momentum else None,
            variants=(*self._stages(), replace(self, ramp_steps=0)),
        )

    def layout(self, bucket: Bucket, world: int) -> Layout:
        found, names = super().layout(bucket, world), ["residual"]
        if self.momentum:
            names.append(LAST if self._goes_on else "momentum")
        if self._goes_on:
            found.scratch["waiting"] = (work_dtype(bucket), bucket.padded)
        return replace(found, state=per_element(bucket, *names))

    # ---- warm-up ----

    def _stages(self) -> list[Dgc]:
        """Return the codecs of the warm-up."""
        densities, density = [], _FIRST
        while self.ramp_steps and density > self.density:
            densities.append(density)
            density /= _FACTOR
        return [replace(self, density=density, ramp_steps=0) for density in densities[: self.ramp_steps]]

    def for_step(self, step: int, *, without: int = 0) -> Dgc:
        stages = self._stages()
        if step < self.ramp_steps and stages:
            return stages[step * len(stages) // self.ramp_steps]
        return replace(self, ramp_steps=0)

    # ---- clipping ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        if self.clip:  # in place, where other methods leave them: encoding and decoding read them again
            _cut_down([work.grad(position) for position in positions], self.clip / math.sqrt(work.world))
        return super().submit(work, positions, key)

    # ---- values ----

    def form(self, bucket: Bucket, tensor: TensorSpec) -> str:
        return value_form(self.value_bits, bucket, self.most(tensor))

    def _head(self, work: Work, position: int) -> Tensor | None:
        levels, form = super()._head(work, position), work.memo["forms"][position]
        if form != "full" and work.state_of("momentum", position) is not None:
            # Decoding leaves nothing of v where a value was sent: what rounding takes is put back.
            values, rest = self.values(work, position), work.memo["rest"].get(position)
            found = rounded(values, form, levels)
            lost = values - found
            work.memo["rest"][position] = lost if rest is None else rest + lost
            if levels is None:
                values.copy_(found)  # float64 would be rounded once, here it was by way of float32
        return levels

    # ---- momentum ----

    def keeps(self, work: Work, positions: Sequence[int]) -> dict[str, Any]:
        momentums = work.states_of("momentum", [work.span(position) for position in positions])
        if momentums is None:
            return {}
        return {"momentums": momentums, "factor": self.momentum, "masking": self.masking}

    @property
    def _goes_on(self) -> bool:
        """Whether momentum is that of the last result."""
        return self.momentum_kind == "global" and bool(self.momentum)

    def waiting(self, work: Work, position: int) -> Tensor | None:
        last, residual = work.state_of(LAST, position), super().waiting(work, position)
        if last is None or residual is None:
            return residual
        return torch.add(residual, last, out=work.local["waiting"][work.span(position)])

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        positions = [part.position for part in parts] if self._goes_on else []
        for span in map(work.span, positions):  # as it was chosen from
            work.state["residual"][span] = work.local["waiting"][span]
        super().decode(work, parts, key, result_scale)
        for position in positions:
            keep_last(work.state[LAST][work.span(position)], work.grad(position), self.momentum, result_scale)


def _cut_down(grads: Sequence[Tensor], most: float) -> None:
    """Scale gradients to at most a length; one that is not finite is left to be counted. Waits once on CUDA."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return
    squares = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    bad = ops.norm_offer_all(grads, list(squares.split(1)), [grad.numel() for grad in grads], power=2)
    found = torch.stack([squares, as_tensor(bad).to(squares)]).tolist()
    for grad, square, nonfinite in zip(grads, *found, strict=True):
        if nonfinite or (norm := math.sqrt(square)) <= most:
            continue
        if math.isinf(norm):  # its square is beyond float64
            norm = float(grad.div_(grad.abs().max()).norm())
        grad.mul_(most / norm)
