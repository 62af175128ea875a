"""Global-QSGD: quantised gradients on one scale for all ranks, so that codes can be added (arXiv:2305.18627,
ECAI 2025).

    N = the norm of a block over all ranks: the largest |x|, or (sum over ranks and elements of |x|^p)^(1/p)
    standard:     code = x / N * s rounded up or down at random without bias, s = (2^(bits-1) - 1) // M
                  codes are added as integers; result = N / (s M) * code
    exponential:  code = sign and exponent of x / N rounded to a power of two, likewise
                  two codes with exponents e1 <= e2, D = e2 - e1, become one:
                      equal signs:    e1 - 1 with probability 2^-D, else e1
                      opposite signs: zero where D = 0; e1 + 1 with probability 2^-(D-1), else e1
                  merged in a balanced tree over the ranks; result = N / M * code

N takes a small exchange of its own before the payload's. Both roundings are unbiased, so there is no
residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import ConfigError
from ..keys import DITHER, Key
from ..plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Regions, Work, work_dtype
from .registry import register

#: Blocks are whole chunks of the kernels; a scale of 32 bits then costs 1/8 bit per element at most.
BLOCK_UNIT = 256

#: Codes or a gradient, the scales, and how many elements share one.
Scaled = tuple[Tensor, Tensor, int]


@dataclass(frozen=True)
class _Dithering(Codec):
    """What both kinds of dithering share: the norms, and where codes lie."""

    bits: int
    norm: str | int
    block: int

    name: ClassVar[str] = "global_qsgd"

    # ---- layout ----

    @property
    def _power(self) -> int:
        return 0 if self.norm == "max" else int(self.norm)

    def _blocks(self, tensor: TensorSpec) -> int:
        return -(-tensor.count // self.block) if self.block else 1

    def _row(self, tensor: TensorSpec) -> int:
        return self.block or max(1, tensor.count)

    def _norms(self, bucket: Bucket) -> tuple[torch.dtype, int]:
        dtype = torch.float64 if self._power else work_dtype(bucket)
        return dtype, sum(self._blocks(tensor) for tensor in bucket.tensors) if self.block else 1

    def regions(self, bucket: Bucket) -> Regions:
        return {"codes": kernels.code_layout(self.bits, bucket.padded)}

    def preludes(self, bucket: Bucket) -> tuple[Regions, ...]:
        return ({"norms": self._norms(bucket)},)

    def local(self, bucket: Bucket) -> Regions:
        dtype, count = self._norms(bucket)
        parts = sum(self._blocks(tensor) for tensor in bucket.tensors)
        return {"parts": (dtype, parts), "scales": (work_dtype(bucket), count)}

    def prepare(self, work: Work) -> None:
        parts, start = [], 0
        for tensor in work.bucket.tensors:
            parts.append(slice(start, start + self._blocks(tensor)))
            start = parts[-1].stop
        work.memo["parts"] = parts

    def _scales(self, work: Work, position: int) -> Tensor:
        """Return the scales of one tensor: the bucket's only one, or one for each of its blocks."""
        own = work.memo["parts"][position] if self.block else slice(0, 1)
        return work.local["scales"][own]

    def _places(self, work: Work, position: int, start: int, stop: int) -> slice:
        """Return where the codes of elements ``start`` to ``stop`` of a tensor lie.

        Tensors and their parts start at whole bytes.
        """
        first, packed = work.span(position).start, 2 if self.bits == 4 else 1
        return slice((first + start) // packed, -(-(first + stop) // packed))

    # ---- norms ----

    def offer(self, work: Work, position: int, key: Key) -> int:
        tensor, own = work.bucket.tensors[position], work.memo["parts"][position]
        if not tensor.count:
            return 0
        row, parts = self._row(tensor), work.local["parts"][own]
        return int(kernels.norm_offer(work.grad(position), parts, row, power=self._power))

    def begin(self, number: int, work: Work, key: Key) -> None:
        parts, norms = work.local["parts"], work.shared["norms"]
        for position, own in enumerate(work.memo["parts"]):
            if work.grads[position] is None:
                parts[own] = 0  # what an earlier step left
        if self.block:
            norms.copy_(parts)
        else:
            norms[0] = _added(parts) if self._power else parts.max()

    def merge(
        self, region: str, start: int, into: Tensor, other: Tensor, weights: tuple[int, int], key: Key
    ) -> None:
        if region != "norms":
            self._merge_codes(start, into, other, key)
        elif self._power:
            kernels.dense_add(into, other)
        else:
            torch.maximum(into, other, out=into)

    def _merge_codes(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        raise NotImplementedError

    # ---- codes ----

    encodes_in_parts: ClassVar[bool] = True

    def encode_first(self, work: Work, key: Key) -> None:
        self._make_scales(work)

    def encode_part(self, work: Work, position: int, start: int, stop: int, key: Key) -> None:
        if start == stop:
            return
        codes = work.regions["codes"][self._places(work, position, start, stop)]
        given = self._scaled(work, position, start, stop)
        self._encode(given, codes, work.world, key.at(purpose=DITHER), work.span(position).start + start)

    def _scaled(self, work: Work, position: int, start: int, stop: int) -> Scaled:
        """Return elements ``start`` to ``stop`` of a gradient, and their scales."""
        row = self._row(work.bucket.tensors[position])
        scales = self._scales(work, position)[start // row : -(-stop // row)]
        return work.grad(position)[start:stop], scales, row

    def _make_scales(self, work: Work) -> None:
        """Take the root by square roots: NumPy's are right to the last bit on every machine, torch's are not."""
        norms = work.shared["norms"]
        for _ in range(self._power.bit_length() - 1):
            np.sqrt(norms.numpy(), out=norms.numpy())
        work.local["scales"].copy_(norms)

    def _encode(self, given: Scaled, codes: Tensor, world: int, key: Key, offset: int) -> None:
        raise NotImplementedError

    def granule(self, tensor: TensorSpec) -> int:
        return self.block if 0 < self.block < tensor.count else BLOCK_UNIT

    def needs(self, work: Work, position: int, start: int, stop: int) -> dict[str, tuple[int, int]]:
        codes = self._places(work, position, start, stop)
        return {"codes": (codes.start, codes.stop)}  # scales are known since the prelude

    def decode_part(self, work: Work, position: int, start: int, stop: int, key: Key, gain: float) -> None:
        if start == stop:
            return
        codes = work.regions["codes"][self._places(work, position, start, stop)]
        grad, scales, row = self._scaled(work, position, start, stop)
        self._decode((codes, scales, row), grad, work.world, gain)

    def _decode(self, given: Scaled, grad: Tensor, world: int, gain: float) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Standard(_Dithering):
    """Evenly spaced levels: codes are integers, and add."""

    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "integers on one scale for all ranks, added"

    def levels(self, world: int) -> int:
        """Return the code of the norm: sums over all ranks just fit."""
        return ((1 << (self.bits - 1)) - 1) // world

    def check_world(self, world: int) -> None:
        if self.levels(world) < 1:
            enough = next((bits for bits in (8, 16) if 1 << (bits - 1) > world), None)
            advice = f"bits={enough}" if enough else 'dithering="exponential", bits=8'
            raise ConfigError(
                f"global_qsgd with bits={self.bits} has no level left for each of {world} ranks, as sums "
                f"have to fit in {self.bits} bits; choose {advice}"
            )

    def _encode(self, given: Scaled, codes: Tensor, world: int, key: Key, offset: int) -> None:
        levels = self.levels(world)
        kernels.level_encode(*given, codes, key, bits=self.bits, levels=levels, offset=offset)

    def _merge_codes(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        kernels.level_add(into, other, bits=self.bits)

    def _decode(self, given: Scaled, grad: Tensor, world: int, gain: float) -> None:
        scale = gain / (self.levels(world) * world)
        kernels.level_decode(*given, grad, bits=self.bits, scale=scale)


@dataclass(frozen=True)
class Exponential(_Dithering):
    """Powers of two: codes are signs and exponents, and merge in a tree."""

    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "powers of two on one scale for all ranks, merged in a tree"

    def headroom(self, world: int) -> int:
        """Return the exponent of the norm: a tree over all ranks takes it down to 1 at most."""
        return 1 + (world - 1).bit_length()

    def check_world(self, world: int) -> None:
        most = 1 << ((1 << (self.bits - 1)) - 2)
        if world > most:
            raise ConfigError(
                f"global_qsgd with exponential dithering and bits={self.bits} serves at most {most} ranks, "
                f"got {world}; choose bits=8"
            )

    def _encode(self, given: Scaled, codes: Tensor, world: int, key: Key, offset: int) -> None:
        headroom = self.headroom(world)
        kernels.octave_encode(*given, codes, key, bits=self.bits, headroom=headroom, offset=offset)

    def fold(self, region: str, start: int, into: Tensor, others: Sequence[Tensor], key: Key) -> None:
        """Merge neighbours, then neighbours of these, and so on: ceil(log2 M) merges for each rank at most.

        Every merge may multiply the second moment by 9/8; in a ring that would happen M-1 times.
        """
        if region == "norms":
            super().fold(region, start, into, others, key)
            return
        ranks = [*others[: key.rank], into, *others[key.rank :]]
        step, node = 1, 0
        while step < len(ranks):
            for left in range(0, len(ranks) - step, 2 * step):
                self._merge_codes(start, ranks[left], ranks[left + step], key.at(hop=node))
                node += 1
            step *= 2
        if ranks[0] is not into:
            into.copy_(ranks[0])

    def _merge_codes(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        offset = start * (2 if self.bits == 4 else 1)
        kernels.octave_merge(into, other, key, bits=self.bits, offset=offset)

    def _decode(self, given: Scaled, grad: Tensor, world: int, gain: float) -> None:
        headroom = self.headroom(world)
        kernels.octave_decode(*given, grad, bits=self.bits, headroom=headroom, scale=gain / world)


@register
@dataclass(frozen=True)
class GlobalQsgd(Codec):
    """Unbiased quantisation on one scale for all ranks.

    Args:
        dithering: "standard" rounds to evenly spaced levels, whose codes add; "exponential" to
            powers of two, which keeps small values and needs the fold.
        bits: of a code: 8 or 4, and 16 with standard dithering.
        norm: "max" for the largest magnitude over all ranks, or p = 1, 2 or 4 for the p-norm of all
            ranks' elements together.
        block: how many elements share a scale, a multiple of 256; 0 for one scale per bucket.
    """

    dithering: str = "standard"
    bits: int = 8
    norm: str | int = "max"
    block: int = 2048

    name: ClassVar[str] = "global_qsgd"
    summary: ClassVar[str] = "4, 8 or 16 bits: unbiased, on one scale for all ranks"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"dithering": "standard", "bits": 4, "block": 0},
        {"dithering": "standard", "bits": 8, "block": 256},
        {"dithering": "standard", "bits": 16, "norm": 2},
        {"dithering": "exponential", "bits": 4},
        {"dithering": "exponential", "bits": 8, "block": 256},
    )

    def law(self) -> Law:
        standard = "d N^2 / (4 s^2 M), N the norm, s the levels"
        exponential = "M^0.17 |x|^2 / 8, and of values below the smallest power"
        return Law(unbiased=True, bound=standard if self.dithering == "standard" else exponential)

    def error_bound(self, x: Sequence[Tensor]) -> float | None:
        if self.dithering != "standard":
            return None
        world, count = len(x), x[0].numel()
        levels = ((1 << (self.bits - 1)) - 1) // world
        total = 0.0
        for start in range(0, count, self.block or max(1, count)):
            block = torch.stack([one[start : start + self.block] if self.block else one for one in x])
            power = 0 if self.norm == "max" else int(self.norm)
            norm = block.abs().max() if not power else block.abs().pow(power).sum().pow(1 / power)
            total += block.shape[1] * float(norm) ** 2 / (4 * levels**2 * world)
        return total

    def __post_init__(self) -> None:
        if self.dithering not in ("standard", "exponential"):
            raise ConfigError(f'dithering should be "standard" or "exponential", got {self.dithering!r}')
        if not _whole(self.bits) or self.bits not in (4, 8, 16):
            raise ConfigError(f"bits should be 4, 8 or 16, got {self.bits!r}")
        if self.dithering == "exponential" and self.bits == 16:
            raise ConfigError(
                "bits should be 4 or 8 with exponential dithering, as 8 bits already hold 96 octaves and a "
                'sign, got 16; for more precision choose dithering="standard"'
            )
        if self.norm != "max" and not (_whole(self.norm) and self.norm in (1, 2, 4)):
            raise ConfigError(f'norm should be "max", 1, 2 or 4, got {self.norm!r}')
        if not _whole(self.block) or self.block < 0 or self.block % BLOCK_UNIT:
            raise ConfigError(f"block should be 0 or a multiple of {BLOCK_UNIT}, got {self.block!r}")

    @property
    def _form(self) -> _Dithering:
        kind = Standard if self.dithering == "standard" else Exponential
        return kind(self.bits, self.norm, self.block)

    def at(self, step: int) -> Codec:
        return self._form

    def variants(self) -> tuple[Codec, ...]:
        return (self._form,)

    def check_world(self, world: int) -> None:
        self._form.check_world(world)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _added(parts: Tensor) -> float:
    """Add one by one: the order of torch's own sum depends on the machine."""
    total = 0.0
    for part in parts.tolist():
        total += part
    return total
