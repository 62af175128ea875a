"""The kinds of rounds of one bucket, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ...codecs.base import Codec, Divides, Held, TableMoves, variants_of, zero_groups_of
from ...codecs.dense import BFloat, Dense, LeftPlain, Uncompressed
from ...codecs.work import Work
from ...ops.keys import Key
from .building import make_round
from .memory import Memory
from .round import Round

_AS_IT_IS = Uncompressed()


class Rounds:
    """Makes the rounds of a method, and chooses among them."""

    def __init__(self, codec: Codec, memory: Memory) -> None:
        self._codec, self._memory = codec, memory
        self._divides = codec.properties().divides
        self._empties = isinstance(codec, LeftPlain) and codec.plain_when_empty(memory.bucket)
        self.kinds = {kind: self._make(kind, label) for kind, label in _labels(variants_of(codec)).items()}
        self._plain: Round | None = None
        self._round_index: int | None = None  # see :meth:`set_round`
        self._compressed = False  # see :meth:`hold`
        self._last: tuple[int, Round] | None = None  # the step that was asked for last: every gradient asks
        self._is_plain = False
        self._nothing_waits = False  # see :meth:`note_emptied`
        if self._empties:
            self._make_plain()

    def _make(self, codec: Codec, label: str) -> Round:
        own = self._memory.layout(codec).state
        # Plain rounds send and empty whatever waits.
        kept = {n: kept for n, kept in self._memory.state.items() if n in own or isinstance(codec, Dense)}
        return make_round(self._memory, codec, label, self._memory.payload, kept)

    def _make_plain(self, codec: Codec = _AS_IT_IS) -> None:
        payload = self._memory.payload_that_holds(codec)
        self._plain = make_round(self._memory, codec, codec.name, payload, {})
        self._memory.site.device.synchronize()  # between two steps nothing is under way

    def at(self, step: int) -> Round:
        """Return the round of a step."""
        if self._plain and (self._is_plain or self._nothing_waits):
            return self._plain
        last = self._last
        if last is None or last[0] != step:
            index = step if self._round_index is None else self._round_index
            last = self._last = step, self.kinds[self._codec.for_step(index, compressed=self._compressed)]
        return last[1]

    def set_round(self, number: int | None, plain: bool, halved: bool = False) -> None:
        """Choose what the coming steps exchange; between two steps, on every rank alike.

        Args:
            number: stands for the step where a method's rounds differ by it; None for the step.
            plain: exchange what is offered as it is, without this method and its state.
            halved: then float32 is sent as bfloat16; the same in every call.
        """
        if plain and not self._plain:
            self._make_plain(self._halved() if halved else _AS_IT_IS)
        self._last = None
        self._round_index, self._compressed, self._is_plain = number, False, plain

    def hold(self, exact: bool) -> None:
        """Choose what the coming step exchanges beside a second moment that is held; on every rank alike.

        Args:
            exact: it sends gradients without this method and its state, float32 as bfloat16: what a square of the
                second moment is made of need not be known any better.
        """
        if self._divides == "never":
            return
        if exact and not self._plain:
            self._make_plain(self._halved())
        self._last = None
        self._round_index, self._compressed, self._is_plain = None, True, exact

    def _halved(self) -> Codec:
        return BFloat() if self._memory.bucket.dtype == "float32" else _AS_IT_IS

    def divides(self) -> Divides:
        """Return where a second moment that is held divides in the compressed rounds."""
        return self._divides

    def zero_groups(self) -> dict[str, int]:
        """Return, by tensor, which zeros stay zeros in the compressed rounds; see ``Layout.zero_groups``."""
        bucket, codec = self._memory.bucket, self._codec
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
