"""Gathers of small plain data of all ranks, before and between steps: as bytes, and in words where ranks stay away.

A gather takes place among ranks that wait for it at the same time; what one has given up is no answer to another. What
ranks show each other is JSON after a header with its length and checksum. Nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.agreement.differences import listed
from ..engine.agreement.purposes import advice, different_purposes, purpose
from ..engine.job import Gathering, Job
from ..engine.saved import checksums
from ..errors import CorruptFrameError, ExchangeError
from ..exchange.device import Deadline

FORKED = (
    "this process is a fork of a rank: its compression has no threads here, and its connections belong to "
    "the rank; exchange gradients in the rank itself"
)
#: The names of all gathers by which the ranks of an elastic job go on together, and by which they commit or part.
ELASTIC, COMMIT = "hvc.elastic", "hvc.commit"


def why_not_all(name: str, rank: int, within: str | None, absent: Sequence[int]) -> str:
    """Return what is known of a gather that did not take place.

    Args:
        name: of the gather.
        rank: of this one, as people know it.
        within: the time that ranks had to come, None if it was not that.
        absent: the ranks that are known not to have come, as people know them.
    """
    for_what = purpose(name)
    what = f"not every rank came to {for_what} within {within}" if within else f"{for_what} did not take place"
    who = f" Rank(s) {listed(absent)} never came: look at their output." if absent else ""
    return (
        f"rank {rank}: {what}.{who} Usual causes: a rank failed before this point; a rank needs longer to load its "
        "data or model than timeout= allows; compression objects are not created, or used, in the same order on every "
        f"rank{advice(name)}"
    )


def why_apart(meant: Sequence[str], ranks: Sequence[int], rank: int) -> str | None:
    """Return what is wrong where ranks meet for different things, None where they do not.

    Args:
        meant: the names of what the ranks have come to.
        ranks: their numbers, and that of this one, as people know them.
    """
    if len(set(meant)) == 1:
        return None
    found: dict[str, list[int]] = {}
    for number, name in zip(ranks, meant, strict=True):
        found.setdefault(purpose(name), []).append(number)
    told = different_purposes(found, rank)
    return (
        f"{told}. One that joins an elastic job meets the others where hvd.elastic.run begins: save and load within "
        "the function that it wraps; docs/elastic.md says when"
    )


def why_not_together(shown: Sequence[Sequence[str]], rank: int) -> str | None:
    """Return what is wrong where ranks meet for one purpose, but not for the same; None where they do.

    Args:
        shown: by each rank, the name of its compression, which all ranks call it by, and what it meets for.
        rank: the number of this one, as people know it.
    """
    compressions, stages = ({*found} for found in zip(*shown, strict=True))
    for_what = purpose(shown[0][1])
    if len(compressions) > 1:
        return (
            f"rank {rank}: the ranks have come to {for_what} with different compressions; use them in the same order "
            "on every rank"
        )
    if len(stages) > 1:
        return (
            f"rank {rank}: the ranks are at different stages of {for_what}, as some have given it up and "
            "begun it again, or call something else; begin it again on every rank"
        )
    return None


# ---- waits, and what was given up ----

_LEAST_SECONDS = 0.0002
#: Seconds that ranks wait at least once they have seen each other: all were awake a moment ago.
CONFIRMING_SECONDS = 5.0


def pause(began: float, most: float) -> None:
    """Sleep between two looks at what others do: briefly at first, for most gathers are over in a few milliseconds.

    Args:
        began: when the wait did, by ``time.monotonic()``.
        most: seconds.
    """
    time.sleep(min(most, max(_LEAST_SECONDS, (time.monotonic() - began) / 10)))


def confirmed(value: Any, meet: Callable[[Any, Deadline], list[Any]], deadline: Deadline) -> list[Any]:
    """Return every rank's value, once all are known to wait for those of the others.

    A rank that gives up cannot take back what it has shown, which one that comes late would take for an answer. So all
    come again when they have seen the others: a rank that has gone does not, and one that has begun anew says so. They
    have some time for that, or it would take place for one rank only where another came just before its limit.

    Args:
        meet: shows something to all ranks, and returns what each shows. All ranks go through the same series of these,
            and take no part in the next one before the last one that they gave up has taken place.
    """
    has_seen = 0  # 1 takes as many bytes, and of one length Horovod knows a gather again
    while True:
        found = meet([has_seen, value], deadline)
        if all(seen for seen, _ in found):
            return [theirs for _, theirs in found]
        has_seen, deadline = 1, deadline.extended(CONFIRMING_SECONDS)  # in each round, as each time somebody is new


# ---- the stages of a start ----

#: What ranks meet for, in this order, and the one name that the framework knows these gathers by.
STAGES = ("handshake", "addresses", "connected", "nccl", "linked", "memory", "mapped")
_START = "hvc.start"
#: List at most this many ranks' problems; the others usually say the same.
_LISTED = 4


def gather_stage(stage: str, value: Any, job: Job, seconds: float) -> list[Any]:
    """Return every rank's value at a stage of the start.

    All stages have one name for the framework, so that ranks which are at different ones meet as well: after a start
    that was given up, by some ranks only perhaps, those that had come further give up too, and all begin again
    together. And where some cannot connect, those that are connected hear of it while they wait for their next
    addresses.

    Raises:
        ExchangeError: not every rank came, some have begun again, or some could not connect.
    """
    deadline, mine, left = Deadline(seconds), STAGES.index(stage), seconds
    while True:
        asked = Gathering(f"hvc.{stage}", left, by_name=stage == STAGES[0], under=_START)
        found = job.gather([mine, value], asked)
        left = round(max(deadline.left(), 0.01), 2)
        stages = [theirs for theirs, _ in found]
        if min(stages) == max(stages):
            return [theirs for _, theirs in found]
        if min(stages) > 0:  # all are in this start: who begins another one comes to its handshake first
            check_all([theirs if at == STAGES.index("connected") else None for at, theirs in found])
        if mine > min(stages):
            behind = [rank for rank, theirs in enumerate(stages) if theirs < mine]
            raise ExchangeError(
                f"rank {job.rank}: rank(s) {listed(behind)} have given up this start and begun another one; create "
                "the compression again on every rank"
            )


def check_all(problems: Sequence[str | None]) -> None:
    """Stop where some rank has a problem.

    Raises:
        ExchangeError: says which rank has which.
    """
    told = [f"rank {rank}: {text.removeprefix(f'rank {rank}: ')}" for rank, text in enumerate(problems) if text]
    if told:
        more = f"; and {len(told) - _LISTED} more" if len(told) > _LISTED else ""
        raise ExchangeError("; ".join(told[:_LISTED]) + more)


# ---- as bytes ----

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"HVCG"  # another one than before, where what is shown has another form: versions are compared by it


def pack(value: Any) -> bytes:
    """Return one rank's part."""
    text = json.dumps(value, separators=(",", ":")).encode()  # in its own order, in which differences are told
    return _HEADER.pack(_MAGIC, checksums.crc(text), len(text)) + text


def unpack(joined: bytes, ranks: int) -> list[Any]:
    """Return the values of all parts, one after the other.

    Raises:
        CorruptFrameError: these are not so many parts.
    """
    found, at = [], 0
    try:
        while at < len(joined):
            magic, crc, size = _HEADER.unpack_from(joined, at)
            at += _HEADER.size + size
            text = joined[at - size : at]
            if magic != _MAGIC or len(text) != size or checksums.crc(text) != crc:
                break
            found.append(json.loads(text))
    except (struct.error, ValueError, RecursionError):
        found = []
    if len(found) != ranks or at != len(joined):
        raise CorruptFrameError(
            f"{len(joined)} bytes came from {ranks} ranks, but are not a message of this package; check that every "
            "rank runs the same version of horovod-compress, and check the network"
        )
    return found
