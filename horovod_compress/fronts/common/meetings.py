"""What ranks meet for before and between steps, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.agreement.differences import listed

#: What ranks meet for, by the second word of its name.
_MEETINGS = {
    "handshake": "the handshake",
    "addresses": "the exchange of addresses, by which ranks connect",
    "connected": "the end of the handshake, where ranks report whether they are connected",
    "nccl": "the set-up of NCCL's connections",
    "linked": "the end of the set-up of NCCL's connections",
    "attach": "the comparison of ranks before the first gradient",
    "tuning": "the comparison of measured times, by which the schedule chooses buckets",
    "update": "the comparison of update-mode optimizers",
    "save": "the saving of a checkpoint folder",
    "load": "the loading of a checkpoint folder",
}


def why_not_all(name: str, rank: int, within: str | None, absent: Sequence[int]) -> str:
    """Return what is known of a meeting that did not take place.

    Args:
        name: of the gather.
        rank: of this one, as people know it.
        within: the time that ranks had to come, None if it was not that.
        absent: the ranks that are known not to have come, as people know them.
    """
    meeting = _MEETINGS.get(name.split(".")[1], name)
    what = f"not every rank came to {meeting} within {within}" if within else f"{meeting} did not take place"
    who = f" Rank(s) {listed(absent)} never came: look at their output." if absent else ""
    return (
        f"rank {rank}: {what}.{who} Usual causes: a rank failed before this point; a rank needs longer to load its "
        "data or model than timeout= allows; compression objects are not created, or used, in the same order on every "
        "rank"
    )
