"""Sparse Binary Compression: the positions of the largest values of one sign, and their mean (Sattler et al.,
arXiv:1805.08768, IJCNN 2019).

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

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import kernels
from ..errors import ConfigError, CorruptFrameError
from ..feedback import Feedback
from ..keys import Key
from ..plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Regions, Work, work_dtype
from .registry import register
from .sections import LENGTH_BYTES, check_density, cut, share, slices

#: The published settings: (local steps between exchanges, density).
PRESETS = {1: (1, 0.001), 2: (10, 0.01), 3: (100, 0.01)}

_DENSITY = 0.01  # if neither a density nor a preset is given


@register
@dataclass(frozen=True)
class SparseBinary(Codec):
    """A thousandth or a hundredth of the positions, one value for all of them.

    Args:
        density: which share of each tensor's elements is sent, above 0, at most 1; 0.01 if neither
            this nor a preset is given.
        preset: one of the published settings instead: 1 is density 0.001 in every step, 2 is 0.01
            after every 10th, 3 is 0.01 after every 100th; the delay holds for
            ``hvc.DistributedUpdateOptimizer`` only.
    """

    density: float | None = None
    preset: int | None = None

    name: ClassVar[str] = "sparse_binary"
    algebra: ClassVar[Algebra] = Algebra.GATHER
    summary: ClassVar[str] = "positions of the largest values of one sign, Golomb-coded, and their mean"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({"density": 0.01}, {"density": 0.3}, {"preset": 1})

    def __post_init__(self) -> None:
        density, preset = self.density, self.preset
        if preset is not None and (type(preset) is not int or preset not in PRESETS):
            raise ConfigError(f"preset should be 1, 2 or 3, got {preset!r}")
        if preset is not None and density is not None:
            raise ConfigError(f"give preset or density, not both: preset={preset} has density {PRESETS[preset][1]}")
        if density is not None:
            check_density(density)

    def check_bucket(self, bucket: Bucket) -> None:
        for tensor in bucket.tensors:
            if tensor.count >= 1 << 31:
                raise ConfigError(f"sparse_binary takes tensors of less than 2^31 elements, {tensor.name} has {tensor.count}")

    def law(self) -> Law:
        return Law(conserves=True, bound="own: (1 - k mean^2 / |x|^2) |x|^2")

    def feedback(self) -> Feedback:
        return "own"

    def communication_delay(self) -> int:
        return PRESETS[self.preset][0] if self.preset else 1

    def _density(self) -> float:
        if self.preset is not None:
            return PRESETS[self.preset][1]
        return _DENSITY if self.density is None else self.density

    # ---- layout ----

    def most(self, tensor: TensorSpec) -> int:
        """Return k: of how many elements of a tensor the positions are sent at most."""
        return share(self._density(), tensor.count)

    def parameter(self, tensor: TensorSpec) -> int:
        """Return the parameter of the Golomb code: how many bits of a gap are written plainly."""
        return kernels.golomb_parameter(self.most(tensor), tensor.count) if tensor.count else 0

    def _room(self, tensor: TensorSpec, value_bytes: int) -> int:
        """Return the most bytes of a tensor's section."""
        return kernels.golomb_bound(self.most(tensor), tensor.count, self.parameter(tensor), value_bytes)

    def regions(self, bucket: Bucket) -> Regions:
        value_bytes = work_dtype(bucket).itemsize
        room = sum(LENGTH_BYTES + self._room(tensor, value_bytes) for tensor in bucket.tensors)
        return {"payload": (torch.uint8, room)}

    def local(self, bucket: Bucket) -> Regions:
        positions = sum(self.most(tensor) for tensor in bucket.tensors)
        return {"positions": (torch.int32, positions), "means": (work_dtype(bucket), len(bucket.tensors))}

    def prepare(self, work: Work) -> None:
        work.memo["positions"] = slices([self.most(tensor) for tensor in work.bucket.tensors])
        work.memo["parameters"] = [self.parameter(tensor) for tensor in work.bucket.tensors]
        work.memo["kept"] = [0] * len(work.bucket.tensors)

    # ---- one round ----

    def offer(self, work: Work, position: int, key: Key) -> int:
        own = work.memo["positions"][position]
        kept, nonfinite = kernels.binary_select(
            work.grad(position),
            work.residual_of(position),
            own.stop - own.start,
            work.local["positions"][own],
            work.local["means"][position : position + 1],
        )
        work.memo["kept"][position] = kept
        work.local["means"][position].clamp_(-work.limit(), work.limit())  # the residual keeps the rest
        return nonfinite

    def encode(self, work: Work, key: Key) -> None:
        """Write one section per tensor behind a table of the sections' lengths."""
        payload, tensors = work.regions["payload"], work.bucket.tensors
        at = LENGTH_BYTES * len(tensors)
        lengths = payload[:at].view(torch.int32)
        lengths.zero_()  # sparse gradients, which Horovod reduces itself, have no section
        for position in work.present():
            own = work.memo["positions"][position]
            length = kernels.binary_encode(
                work.local["positions"][own],
                work.memo["kept"][position],
                work.local["means"][position : position + 1],
                work.memo["parameters"][position],
                tensors[position].count,
                payload[at:],
            )
            lengths[position] = length
            at += length
        work.used = at

    def decode(self, work: Work, key: Key, gain: float) -> None:
        sections = [cut(payload, len(work.bucket.tensors)) for payload in work.gathered]
        for position in work.present():
            wrong = kernels.binary_decode(
                [of_rank[position] for of_rank in sections],
                key.rank,
                work.memo["parameters"][position],
                work.grad(position),
                work.residual_of(position),
                gain / work.world,
            )
            if wrong:
                name = work.bucket.tensors[position].name
                raise CorruptFrameError(
                    f"rank {key.rank}: {wrong} malformed range(s) of positions for {name} (step {key.step}, bucket "
                    f"{key.bucket}); check that every rank runs the same version of horovod-compress"
                )
            work.saturate(position, gain)
            for momentum in work.momenta.get(position, ()):
                parameter = work.memo["parameters"][position]
                kernels.binary_clear(sections[key.rank][position], parameter, momentum)
