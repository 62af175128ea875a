"""What ranks that fail leave word of for the others, and what it says of those that leave none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ranks import listed

#: The notes of all ranks that have left one, by rank.
Notes = Mapping[int, Mapping[str, Any]]


#: How far a rank has come with a bucket: its gradients are awaited, all ranks meet first, it is being exchanged.
AWAITED, MEETING, EXCHANGED = range(3)
#: A step, a bucket, and how far the rank has come with it.
Place = tuple[int, int, int]


def note(where: str, place: Place, finished: tuple[int, int] | None, **reason: Any) -> dict[str, Any]:
    """Return a rank's note, as plain data.

    Args:
        where: in a step it stopped, in words.
        place: the same, to be compared with others.
        finished: the last bucket whose result it had, as step and bucket.
        reason: ``why`` for one of its own, ``peer`` and ``late`` for a rank that it lost, ``ended`` for what it was
            told from outside, with ``stuck`` where its exchange did not fail by itself then.
    """
    return {"where": where, "place": place, "finished": finished, **reason}


def verdict(notes: Notes, world: int) -> str:
    """Return a sentence on who is to blame, by the notes of all ranks that have left one.

    That is a rank with a reason of its own; ranks that leave no note, as they did not see it coming; or those that
    live, and are behind all others or busy with something else.
    """
    if own := _with_reasons(notes):
        why = str(notes[own[0]]["why"]).removeprefix(f"rank {own[0]}: ")
        return f"Rank {own[0]} stopped first: {why}."
    if silent := _silent(notes, world):
        return f"No sign of life from rank(s) {listed(silent)}: look at their output."
    if behind := _behind(notes):
        step, bucket, _ = notes[behind[0]]["place"]
        return f"Rank(s) {listed(behind)} had not reached bucket {bucket} of step {step} yet: look at their output."
    if stuck := _stuck(notes):
        where = notes[stuck[0]]["where"]
        return f"Rank(s) {listed(stuck)} neither continued nor failed with the others in {where}: look at their output."
    said = (f"rank {other} {_of(found)}" for other, found in sorted(notes.items()))
    return f"Every rank has stopped: {', '.join(said)}."


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
