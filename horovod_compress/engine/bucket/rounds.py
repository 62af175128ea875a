"""What a bucket exchanges in the coming steps, the names of its kinds of rounds, and what their tables hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...codecs.base import FULL_PRECISION_EVERY, Codec, Held
from ...codecs.dense import BFloat, FullPrecision, Uncompressed
from ...codecs.natural import Natural
from ...exchange.choose import Choose
from ...ops.keys import Key
from ...schedule.plan import Bucket
from .memory import Memory
from .round import Round

_SHORT = Natural(mantissa=2)
Kind = Literal["method", "compressed", "plain", "short", "coded", "exact", "first", "alone"]
#: Those without the method.
METHODLESS: frozenset[Kind] = frozenset(("plain", "short", "exact", "first", "alone"))
#: With which period, or a longer one, full-precision rounds are left out.
WITHOUT: dict[Kind, int] = {"compressed": FULL_PRECISION_EVERY, "coded": 2}
#: Those that only a method with a second moment that is held knows of.
HELD: frozenset[Kind] = frozenset(("coded", "exact", "first"))


@dataclass(frozen=True)
class Next:
    """What a bucket exchanges in the coming steps.

    Attributes:
        kind: "method" for the rounds of its method; "compressed" for the same without full-precision ones, unless
            somebody asked for more of these than usual; "plain" for what is offered as it is, without the method and
            its state; "short" likewise, in numbers of 8 bits that are right on average, but for buckets that the method
            sends as numbers anyway. Beside a second moment that is held, "coded" for the rounds of a method that need
            it, without its own full-precision rounds, and "exact" for what the second moment is renewed by, with
            float32 sent as bfloat16: what a square is made of need not be known any better. "first" for such rounds at
            the start, in the numbers of "short" ones: many make one square. "alone" for those of one rank, which has
            its gradients back with all that waits.
        index: stands for the step where a method's rounds differ by it; None for the step.
    """

    kind: Kind = "method"
    index: int | None = None


def without_method(kind: Kind, bucket: Bucket, choose: Choose) -> Codec:
    """Return what rounds of a kind without the method send.

    Short numbers have exponents: a second moment needs small numbers that are as right as large ones. They are averaged
    by owners, so an exchange that was asked for and has none gets longer numbers.
    """
    if kind == "alone":
        return FullPrecision()
    if kind in ("short", "first") and bucket.dtype != "float64" and choose.fits(_SHORT):
        return _SHORT
    return BFloat() if kind != "plain" and bucket.dtype == "float32" else Uncompressed()


def labels(variants: Sequence[Codec]) -> dict[Codec, str]:
    """Return a label for each kind of round: its name, and a number from the second one of that name on."""
    labels: dict[Codec, str] = {}
    seen: dict[str, int] = {}
    for codec in variants:
        seen[codec.name] = number = seen.get(codec.name, 0) + 1
        labels[codec] = codec.name if number == 1 else f"{codec.name} {number}"
    return labels


class Tables:
    """What the tables of a bucket hold, as far as its method can tell one tensor from another.

    Args:
        rounds: the kinds of the bucket, which share its tables.
    """

    def __init__(self, memory: Memory, rounds: Iterable[Round]) -> None:
        self._memory = memory
        self._moves = [(moves, round_.work) for round_ in rounds if (moves := round_.properties.moves_tables)]

    @property
    def own(self) -> bool:
        """Whether what they hold is this rank's own; else it is equal on all."""
        return any(moves.scale for moves, _ in self._moves)

    def of(self, position: int) -> dict[str, Tensor]:
        """Return what they hold for one tensor, by table, where each tensor has its part of them; these are views."""
        found: dict[str, Tensor] = {}
        for moves, work in self._moves:
            found |= moves.views(work, position)
        return found

    def read(self, key: Key) -> dict[str, Held]:
        """Return what they hold, by tensor."""
        tensors = self._memory.bucket.tensors
        held: list[Held] = [{name: (part,) for name, part in self.of(at).items()} for at in range(len(tensors))]
        for moves, work in self._moves:
            if moves.read:
                held = [a | b for a, b in zip(held, moves.read(work, key), strict=True)]
        return {tensor.name: found for tensor, found in zip(tensors, held, strict=True)}

    def write(self, held: Mapping[str, Held], key: Key) -> None:
        """Let those of a new bucket hold what those of earlier ones did, by tensor."""
        mine = [held[tensor.name] for tensor in self._memory.bucket.tensors]
        for position, found in enumerate(mine):  # without them the bucket was left uncompressed, and begins anew
            for name, part in self.of(position).items():
                if name in found:
                    part.copy_(found[name][0])
        for moves, work in self._moves:
            if moves.write:
                moves.write(work, mine, key)

    def scale(self, factor: float) -> None:
        """Multiply what they hold."""
        own = [(moves.scale, work) for moves, work in self._moves if moves.scale]
        if own:
            scale, work = own[0]
            scale(work, factor)
            return
        for table in self._memory.tables.values():
            table.mul_(factor)
