"""What ranks leave word of for each other: why they stop, why they leave, and that they wait.

Ranks that fail leave notes, and these also say something of ranks that leave none. A rank that leaves by itself says
why, which the others may come to need: else they would take it for killed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, MismatchError
from .differences import difference, listed
from .purposes import purpose

if TYPE_CHECKING:  # `inspect` reads notes, and needs no torch
    from ...exchange.transports.transport import Transport

# ---- why a rank stops ----------------------------------------------------------------------------

#: The notes of all ranks that have left one, by rank.
Notes = Mapping[int, Mapping[str, Any]]


def note(where: str, place: tuple[int, int, int], finished: tuple[int, int] | None, **reason: Any) -> dict[str, Any]:
    """Return a rank's note, as plain data.

    Args:
        where: in a step it stopped, in words.
        place: the same, to be compared with others.
        finished: the last bucket whose result it had, as step and bucket.
        reason: ``why`` for one of its own, ``peer`` and ``late`` for a rank that it lost, ``ended`` for what it was
            told from outside, with ``stuck`` where its exchange did not fail by itself then; ``meets``, the name of
            what it met all ranks for, if it did.
    """
    return {"where": where, "place": place, "finished": finished, **reason}


def verdict(notes: Notes, world: int) -> str:
    """Return a sentence on who is to blame, by the notes of all ranks that have left one.

    That is a rank with a reason of its own; ranks that leave no note, as they did not see it coming; or those that
    live, and are behind all others or busy with something else.
    """
    if own := _with_reasons(notes):
        why = re.sub(r"^rank \d+: ", "", str(notes[own[0]]["why"]))  # its number in the job, or among these ranks
        return f"Rank {own[0]} stopped first: {why}."
    if silent := _silent(notes, world):
        return f"No sign of life from rank(s) {listed(silent)}: look at their output."
    if behind := _behind(notes):
        step, bucket, _ = notes[behind[0]]["place"]
        meets = {purpose(str(notes[rank].get("meets", ""))) for rank in behind}
        where = f", and waited in {meets.pop()}" if len(meets) == 1 and all(meets) else ""
        told = f"Rank(s) {listed(behind)} had not reached bucket {bucket} of step {step} yet{where}"
        return f"{told}: look at their output."
    if stuck := _stuck(notes):
        where = notes[stuck[0]]["where"]
        return f"Rank(s) {listed(stuck)} neither continued nor failed with the others in {where}: look at their output."
    said = (f"rank {other} {_of(found)}" for other, found in sorted(notes.items()))
    return f"Every rank has stopped: {', '.join(said)}."


def advice(notes: Notes) -> str:
    """Return what to do, in a sentence without its end."""
    again = "estart the job from a checkpoint; if a rank is only slow, raise timeout="
    if any(str(notes[rank]["why"]).endswith((_AT_ITS_END, _CLOSED)) for rank in _with_reasons(notes)[:1]):
        steps = f"f it has had fewer batches, or skipped some, give every rank the same number of steps; else r{again}"
        known = [found["finished"] for found in notes.values() if "finished" in found]
        if known and not any(known):
            return f"If it has trained without this compression, use it on every rank; i{steps}"
        return f"I{steps}"
    return f"R{again}"


def first(notes: Notes, world: int) -> list[int]:
    """Return the ranks that the verdict names, none if it names no one in particular."""
    return _with_reasons(notes)[:1] or _silent(notes, world) or _behind(notes) or _stuck(notes)


def _with_reasons(notes: Notes) -> list[int]:
    return [rank for rank, found in sorted(notes.items()) if "why" in found]


def _silent(notes: Notes, world: int) -> list[int]:
    return sorted(set(range(world)) - set(notes))


def _behind(notes: Notes) -> list[int]:
    """Return the ranks that are behind all others, if there are any such."""
    places = {rank: tuple(found["place"]) for rank, found in sorted(notes.items()) if "place" in found}
    last = min(places.values(), default=())
    return [rank for rank, place in places.items() if place == last and place != max(places.values())]


def _stuck(notes: Notes) -> list[int]:
    """Return the ranks whose exchange neither went on nor failed when the others' did: busy, or slow."""
    return [rank for rank, found in sorted(notes.items()) if found.get("stuck")]


def _of(found: Mapping[str, Any]) -> str:
    return f"waited for rank {found['peer']}" if "peer" in found else f"stopped because {found.get('ended', 'it ends')}"


def last_finished(notes: Notes, world: int) -> str:
    """Return a sentence on how far each rank has come."""
    ranks: dict[str, list[int]] = {}
    for rank in range(world):
        ranks.setdefault(_place(notes.get(rank)), []).append(rank)
    told = (f"rank{'s' * (len(who) > 1)} {listed(who)} {place}" for place, who in ranks.items())
    return f"Last finished: {'; '.join(told)}."


def _place(found: Mapping[str, Any] | None) -> str:
    if found is None or "finished" not in found:
        return "not known"
    if found["finished"] is None:
        return "nothing yet"
    step, bucket = found["finished"]
    return f"bucket {bucket} of step {step}"


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


# ---- why a rank leaves ---------------------------------------------------------------------------

_LEFT = "left"
_MOST = 300  # characters of an error's text


def leave_word(transport: Transport, why: str) -> None:
    """Tell the other ranks why this one leaves, before it closes its connections.

    Where another rank has left before, it is not told: this one may well end as that one did.
    """
    if not transport.said(_LEFT):
        transport.say(_LEFT, why)


def words(transport: Transport) -> dict[int, str]:
    """Return why ranks have left by themselves, by rank."""
    return dict(transport.said(_LEFT))


def with_words(notes: Notes, left: Mapping[int, str]) -> dict[int, Mapping[str, Any]]:
    """Return the notes of all ranks, and the words of those that have left by themselves.

    A rank that ends lives on for a moment, in which it hears of the others' failure as every rank does.
    """
    told = {rank: {"why": why} for rank, why in left.items()}
    return {**told, **{rank: note for rank, note in notes.items() if not (rank in told and "ended" in note)}}


#: How a compression may have come to be closed, and what to do, for whoever goes on with it.
CLOSED = (
    "by close(), or at the end of the program; call close() after the last step, and create model, compression and "
    "optimizer again to go on"
)
DROPPED = (
    "by Python's garbage collector, as nothing referred to it, its model or its optimizer any more; keep one of them, "
    "and create all again to go on"
)


def why_closed(how: str) -> str:
    """Return why a compression is closed, in words: on its way, an error may come by a ``finally``.

    Args:
        how: see above.
    """
    done = "dropped its compression, to which nothing referred any more" if how is DROPPED else _CLOSED
    return f"{done}{_because_of(sys.exc_info()[1])}"


_CLOSED = "closed its compression"
_AT_ITS_END = "came to the end of its program, or called sys.exit()"


def why_ended() -> str:
    """Return why this process ends, in words, at its end."""
    last = last_error()
    return f"ended{_because_of(last)}" if last else _AT_ITS_END


def last_error() -> BaseException | None:
    """Return the error that is on its way, as in a ``finally``, or that has ended this process, at its end."""
    if error := sys.exc_info()[1]:
        return error
    # A prompt goes on after errors, and keeps the last one.
    return None if hasattr(sys, "ps1") or sys.flags.interactive else getattr(sys, "last_value", None)


def _because_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    text = " ".join(str(error).split())
    return f" because of {type(error).__name__}" + (f": {text[:_MOST]}" if text else "")


# ---- uneven batches ------------------------------------------------------------------------------

ADVICE = (
    "hvd.join() with uneven batches is not supported. Give every rank the same number of steps, for example with "
    "drop_last=True, or stop all ranks as soon as one has no batch left: docs/limits.md has the code. hvd.join() after "
    "equal numbers of steps is fine"
)
_WAITS = "waits"


class Uneven:
    """Refuses uneven batches: a rank that calls ``hvd.join()`` while others have steps left.

    Horovod lets a joined rank add zeros to the others' all-reduces. An exchange of compressed gradients needs more of
    it: its engine, its residuals, a payload in each hop, for a number of steps that only the others know. So it is
    refused, and at once. A rank that has waited for a second leaves word of the step that it waits in. A rank that has
    nothing to exchange looks, every second, whether it is in ``hvd.join()``: if it is, and another rank waits in its
    next step, neither can ever go on, as ``hvd.join()`` returns when all ranks have called it.

    Args:
        in_join: returns whether this rank is in ``hvd.join()``.
    """

    def __init__(self, transport: Transport, in_join: Callable[[], bool]) -> None:
        self._transport, self._rank, self._in_join = transport, transport.rank, in_join
        self._resumed, self._said = 0, ""

    def resume(self) -> None:
        """Note that steps are counted anew, as they are on every rank."""
        self._resumed += 1

    def waits(self, step: int) -> None:
        """Leave word that this rank waits for a result of a step."""
        word = self._word(step)
        if word != self._said:
            self._transport.say(_WAITS, word)
            self._said = word

    def check(self, step: int) -> None:
        """Refuse to stay in ``hvd.join()`` while other ranks wait for this one.

        Args:
            step: the next one of this rank, of which it has not offered all gradients.

        Raises:
            ConfigError: says what to do.
        """
        if not self._in_join():
            return
        waiting = [rank for rank, word in self._transport.said(_WAITS).items() if word == self._word(step)]
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
