"""The kinds of rounds of one bucket, and what the coming step does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...codecs.base import Codec, Divides, Held, TableMoves, variants_of, zero_groups_of
from ...codecs.dense import BFloat, Dense, LeftPlain, Uncompressed
from ...codecs.work import Work
from ...ops.keys import Key
from .memory import Memory, make_round
from .round import Round

_AS_IT_IS = Uncompressed()


@dataclass(frozen=True)
class Next:
    """What a bucket exchanges in the coming steps.

    Attributes:
        kind: "method" for the rounds of its method; "plain" for what is offered as it is, without the method and its
            state; "halved" likewise, with float32 sent as bfloat16. Beside a second moment that is held, "coded" for
            the rounds of a method that need it, without its own full-precision rounds, and "exact" for what the second
            moment is renewed by, in 16 bits: what a square is made of need not be known any better.
        index: stands for the step where a method's rounds differ by it; None for the step.
    """

    kind: Literal["method", "plain", "halved", "coded", "exact"] = "method"
    index: int | None = None


class Rounds:
    """Makes the rounds of a method, and chooses among them.

    Args:
        always_plain: never exchange anything but gradients as they are.
    """

    def __init__(self, codec: Codec, memory: Memory, *, always_plain: bool = False) -> None:
        self._codec, self._memory, self._always_plain = codec, memory, always_plain
        #: Where a second moment that is held divides in the compressed rounds.
        self.divides: Divides = codec.properties().divides
        self._empties = isinstance(codec, LeftPlain) and codec.plain_when_empty(memory.bucket)
        self.kinds = {kind: self._make(kind, label) for kind, label in _labels(variants_of(codec)).items()}
        self.next = Next()
        self._plain: Round | None = None
        self._last: tuple[int, Round] | None = None  # the step that was asked for last: every gradient asks
        self._nothing_waits = False  # see :meth:`note_emptied`
        if self._empties or always_plain:
            self._make_plain(halved=False)

    def _make(self, codec: Codec, label: str) -> Round:
        own = self._memory.layout(codec).state
        # Plain rounds send and empty whatever waits.
        kept = {n: kept for n, kept in self._memory.state.items() if n in own or isinstance(codec, Dense)}
        return make_round(self._memory, codec, label, self._memory.payload, kept)

    def _make_plain(self, halved: bool) -> None:
        halved = halved and not self._always_plain and self._memory.bucket.dtype == "float32"
        codec = BFloat() if halved else _AS_IT_IS
        payload = self._memory.payload_that_holds(codec)
        self._plain = make_round(self._memory, codec, codec.name, payload, {})
        self._memory.site.device.synchronize()  # between two steps nothing is under way

    def at(self, step: int) -> Round:
        """Return the round of a step."""
        if self._plain and (self._always_plain or self._is_plain or self._nothing_waits):
            return self._plain
        last = self._last
        if last is None or last[0] != step:
            index = step if self.next.index is None else self.next.index
            codec = self._codec.for_step(index, compressed=self.next.kind == "coded")
            last = self._last = step, self.kinds[codec]
        return last[1]

    def choose(self, coming: Next) -> None:
        """Choose what the coming steps exchange; between two steps, on every rank alike.

        A bucket has one round without the method: whether it is halved is decided by the first of these kinds.
        """
        if coming.kind in ("coded", "exact") and self.divides == "never":
            return  # a second moment that is held is nothing to this method
        if coming.kind in ("plain", "halved", "exact") and not self._plain:
            self._make_plain(halved=coming.kind != "plain")
        self.next, self._last = coming, None

    @property
    def _is_plain(self) -> bool:
        return self.next.kind in ("plain", "halved", "exact")

    def zero_groups(self) -> dict[str, int]:
        """Return, by tensor, which zeros stay zeros in the compressed rounds; see ``Layout.zero_groups``."""
        bucket, codec = self._memory.whole, self._codec
        groups = zero_groups_of(codec, bucket, self._memory.site.world)
        return {tensor.name: group for tensor, group in zip(bucket.tensors, groups, strict=True)}

    def note_emptied(self) -> None:
        """Take note that a round went well on every rank: nothing waits now, where every round sends all of it."""
        if self._is_plain or self._nothing_waits or not self._empties:
            return
        if all(grad is not None for grad in self._memory.grads):  # what was skipped may wait
            self._nothing_waits = True
            # A gradient of -0 plus this is -0: a job that goes on from a checkpoint, and adds it again, has equal bits.
            self._memory.state["residual"].fill_(-0.0)

    def resume(self) -> None:
        """Go on with whatever was loaded."""
        self._nothing_waits = False

    def carry(self) -> dict[str, Tensor]:
        """Return what merging keeps, by what it belongs to."""
        return {
            f"{round_.label} {name} {round_.collective.name}": carry.kept
            for round_ in self.kinds.values()
            for name, carry in round_.work.carry.items()
        }

    def read_tables(self, key: Key) -> dict[str, Held]:
        """Return what the tables of the bucket hold, by tensor."""
        tensors = self._memory.bucket.tensors
        held: list[Held] = [{} for _ in tensors]
        for moves, work in self._moves():
            held = [a | b for a, b in zip(held, moves.read(work, key), strict=True)]
        return {tensor.name: found for tensor, found in zip(tensors, held, strict=True)}

    def write_tables(self, held: Mapping[str, Held], key: Key) -> None:
        """Let the tables of a new bucket hold what those of earlier ones did, by tensor."""
        mine = [held[tensor.name] for tensor in self._memory.bucket.tensors]
        for moves, work in self._moves():
            moves.write(work, mine, key)

    @property
    def own_tables(self) -> bool:
        """Whether what tables hold is this rank's own; else it is equal on all."""
        return any(moves.scale for moves, _ in self._moves())

    def scale_tables(self, factor: float) -> None:
        """Multiply what the tables of the bucket hold."""
        own = [(moves.scale, work) for moves, work in self._moves() if moves.scale]
        if own:  # kinds of rounds share their tables
            scale, work = own[0]
            scale(work, factor)
            return
        for table in self._memory.tables.values():
            table.mul_(factor)

    def _moves(self) -> Iterator[tuple[TableMoves, Work]]:
        for round_ in self.kinds.values():
            if moves := round_.properties.moves_tables:
                yield moves, round_.work


def _labels(variants: Sequence[Codec]) -> dict[Codec, str]:
    """Return a label for each kind of round: its name, and a number from the second one of that name on."""
    labels: dict[Codec, str] = {}
    seen: dict[str, int] = {}
    for codec in variants:
        seen[codec.name] = number = seen.get(codec.name, 0) + 1
        labels[codec] = codec.name if number == 1 else f"{codec.name} {number}"
    return labels
