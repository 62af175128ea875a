"""Refuses uneven batches: a rank that calls ``hvd.join()`` while others have steps left.

Horovod lets a joined rank add zeros to the others' all-reduces. An exchange of compressed gradients needs more of it:
its engine, its residuals, a payload in each hop, for a number of steps that only the others know. So it is refused, and
at once. A rank that has waited for a second leaves word of the step that it waits in. A rank that has nothing to
exchange looks, every second, whether it is in ``hvd.join()``: if it is, and another rank waits in its next step,
neither can ever go on, as ``hvd.join()`` returns when all ranks have called it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from ...exchange.transports.transport import Transport
from .ranks import listed

ADVICE = (
    "hvd.join() with uneven batches is not supported. Give every rank the same number of steps, for example with "
    "drop_last=True, or stop all ranks as soon as one has no batch left: docs/limits.md has the code. hvd.join() after "
    "equal numbers of steps is fine"
)
_TOPIC = "waits"


class Uneven:
    """One rank's part in noticing that ranks do not make the same steps."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank = transport, transport.rank
        self._resumed, self._said = 0, ""
        #: Returns whether this rank is in ``hvd.join()``.
        self.in_join: Callable[[], bool] = lambda: False

    def resume(self) -> None:
        """Note that steps are counted anew, as they are on every rank."""
        self._resumed += 1

    def waits(self, step: int) -> None:
        """Leave word that this rank waits for a result of a step."""
        word = self._word(step)
        if word != self._said:
            self._transport.say(_TOPIC, word)
            self._said = word

    def check(self, step: int) -> None:
        """Refuse to stay in ``hvd.join()`` while other ranks wait for this one.

        Args:
            step: the next one of this rank, of which it has not offered all gradients.

        Raises:
            ConfigError: says what to do.
        """
        if not self.in_join():
            return
        waiting = [rank for rank, word in self._transport.said(_TOPIC).items() if word == self._word(step)]
        if waiting:
            raise ConfigError(
                f"rank {self._rank} called hvd.join() before step {step}, in which rank(s) {listed(sorted(waiting))} "
                f"are waiting for it; {ADVICE}"
            )

    def _word(self, step: int) -> str:
        return f"{self._resumed} {step}"


def refusal(notes: Mapping[int, Mapping[str, Any]]) -> ConfigError | None:
    """Return the error of a rank that has stopped for uneven batches, by the notes of those that have stopped."""
    return next((ConfigError(note["why"]) for note in notes.values() if ADVICE in note.get("why", "")), None)


def joined(token: float, values: list[float], averaged: bool) -> str | None:
    """Return which ranks took no part in a token's all-reduce, in words, or None if they all did.

    Args:
        token: what came back.
        values: of all ranks' tokens: that of rank 0, and another one, the same for all others.
        averaged: the sum was divided by the number of ranks.
    """
    world, (first, other) = len(values), (values[0], values[-1])
    total = token * (world if averaged else 1)
    for zero in (0, 1):
        others = (total - zero * first) / other
        if abs(others - round(others)) < 1e-3 and 0 <= round(others) < world and zero + round(others) < world:
            return _in_words(not zero, world - 1 - round(others), world)
    return None


def _in_words(zero: bool, others: int, world: int) -> str:
    """Return the ranks that have joined: perhaps rank 0, and a number of the others."""
    some = f"{others} of the ranks 1 to {world - 1}" if 0 < others < world - 1 else ""
    every = [str(rank) for rank in range(1, world)] if others == world - 1 else []
    named = ["0"] * zero + every
    return " and ".join(filter(None, [f"rank(s) {', '.join(named)}" if named else "", some]))
