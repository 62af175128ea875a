"""What ranks compare before they exchange anything: at the start, and after each change that all have to make alike.

A rank that has loaded a state, or has frozen parameters, compares before its next exchange. One that has made no such
change would send a gradient instead, which the first would take for its answer. So these answers have an order of
messages to themselves (``Transport.aside``), and a rank leaves word before it waits for them: whoever sees that word
and has made no such change knows that the two would wait for each other, and stops both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import MismatchError
from ...exchange.transports.transport import Transport
from .operands import difference

_TOPIC = "start"


class CommonStart:
    """One rank's part in the comparisons."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank = transport, transport.rank
        self._held = 0
        #: Whether the next exchange begins with a comparison.
        self.due = True

    def begin(self, done: int) -> None:
        """Leave word of a comparison; every rank begins with the first one, so that needs none.

        Args:
            done: steps that this rank has exchanged so far.
        """
        if self._held:
            self._transport.say(_TOPIC, f"{self._held + 1} {done}")

    def held(self) -> None:
        """Note that the ranks were found to agree."""
        self._held += 1
        self.due = False

    def check(self, done: int) -> None:
        """Refuse to wait for ranks that compare before a step in which this one exchanges already.

        Args:
            done: steps that this rank has exchanged so far.

        Raises:
            MismatchError: names these ranks, and says what to do.
        """
        if self.due:
            return
        for rank, word in sorted(self._transport.said(_TOPIC).items()):
            number, at = map(int, word.split())
            if rank != self._rank and number > self._held and at <= done:
                raise MismatchError(
                    f"rank {self._rank}: rank {rank} loaded a state, or froze or unfroze parameters, or changed a "
                    f"mask, or added a parameter group, or left out a step of its optimizer, before a step in which "
                    f"rank {self._rank} did not; call load_state_dict(), requires_grad_() and step(), and prune masked "
                    "weights, on every rank, between the same two steps"
                )


def disagreement(notes: Mapping[int, Mapping[str, Any]]) -> MismatchError | None:
    """Return the error of a rank that has stopped as ranks disagree, by the notes of those that have stopped."""
    found = next((note for note in notes.values() if "differs" in note), None)
    # A rank that has not begun the step shows what it had in an earlier one, and one that has left shows nothing.
    of_step = {rank: note for rank, note in notes.items() if found and note.get("of_step", -1) == found.get("of_step")}
    told = found and difference({rank: note.get("operands", {}) for rank, note in of_step.items()})
    if found and told:
        step, bucket, *_ = found["place"]
        return MismatchError(f"{told}. Found before step {step} changed any gradient, in bucket {bucket}")
    return next((MismatchError(note["why"]) for note in notes.values() if note.get("mismatch")), None)


def note_of(failure: Exception) -> dict[str, Any]:
    """Return what a rank that stops for a reason of its own leaves for the others."""
    return {"why": str(failure)} | ({"mismatch": True} if isinstance(failure, MismatchError) else {})
