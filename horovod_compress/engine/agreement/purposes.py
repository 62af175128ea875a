"""What ranks meet for before and between steps, in words, and the error of ranks that have come to different ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .differences import listed

#: By the second word of a gather's name.
_PURPOSES = {
    "start": "the start of a compression",
    "handshake": "the handshake",
    "addresses": "the exchange of addresses, by which ranks connect",
    "connected": "the end of the handshake, where ranks report whether they are connected",
    "nccl": "the set-up of NCCL's connections",
    "linked": "the end of the set-up of NCCL's connections",
    "register": "the comparison of modules, by which register() begins",
    "grid": "the comparison of shards, by which register() or DistributedUpdateOptimizer begins",
    "memory": "showing the memory that ranks of a host share",
    "mapped": "the end of the set-up of shared memory",
    "attach": "the comparison of ranks before the first gradient",
    "tuning": "the comparison of measured times, by which the schedule chooses buckets",
    "update": "the comparison of update-mode optimizers",
    "clip": "the comparison of the norms of updates",
    "save": "the saving of a checkpoint folder",
    "load": "the loading of a checkpoint folder",
    "elastic": "the meeting of an elastic job, in which its ranks go on together",
    "commit": "the meeting of an elastic job, in which its ranks commit or part",
}


#: Of all ranks of a job, among which a meeting takes place.
ALL = -1


@dataclass(frozen=True)
class MeetingUnderWay:
    """What a thread meets other ranks for.

    Attributes:
        number: of this one only, in its process.
        name: see :func:`purpose`.
        ranks: by their numbers in the job: a bit for each.
        trains: the thread is the one that trains, and does not go on meanwhile.
    """

    number: int
    name: str
    ranks: int = ALL
    trains: bool = True

    def needs(self, rank: int) -> bool:
        """Return whether it takes place only once a rank, by its number in the job, has come."""
        return bool(self.ranks >> rank & 1)

    def of_all(self) -> tuple[str, int]:
        """Return what is the same on all ranks that come to it."""
        return self.name, self.ranks

    def in_words(self) -> str:
        if self.ranks == ALL:
            return purpose(self.name)
        among = listed([rank for rank in range(self.ranks.bit_length()) if self.needs(rank)])
        return f"{purpose(self.name)} among rank(s) {among} of the job"


@dataclass
class ExchangeUnderWay:
    """A bucket of one compression that a process exchanges with other ranks.

    Attributes:
        step: its step.
        missing: the ranks that are known not to have come, by their numbers in the job: a bit for each.
        fetched: the main thread waits for a result of this compression, and does nothing else.
    """

    step: int
    missing: int = 0
    fetched: bool = False

    def keeps(self, rank: int) -> bool:
        """Return whether the process trains no further before a rank, by its number in the job, has come."""
        return self.fetched and bool(self.missing >> rank & 1)

    def in_words(self) -> str:
        return f"the exchange of step {self.step} of another compression"


def bits(ranks: Iterable[int] | None) -> int:
    """Return the ranks of a meeting, None for all."""
    return ALL if ranks is None else sum(1 << rank for rank in {*ranks})


class Meetings:
    """What threads of one process meet other ranks for, in all of its compressions: the first one first.

    Attributes:
        rank: its number in the job.
        exchanges: of compressions that exchange a bucket, by any object of their own.
        fetched: the compression of which the main thread waits for a result, by the same object.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._numbers = itertools.count()
        self._all: dict[int, MeetingUnderWay] = {}
        self.exchanges: dict[object, ExchangeUnderWay] = {}
        self.fetched: object = None

    def begin(self, name: str, ranks: int, trains: bool) -> MeetingUnderWay:
        """Note that a meeting begins."""
        made = MeetingUnderWay(next(self._numbers), name, ranks, trains)
        self._all[made.number] = made
        return made

    def end(self, meeting: MeetingUnderWay) -> None:
        del self._all[meeting.number]

    def under_way(self) -> tuple[MeetingUnderWay, ...]:
        return (*self._all.values(),)  # of another thread's, which changes it meanwhile

    def exchanged_beside(self, of: object) -> tuple[ExchangeUnderWay, ...]:
        """Return what other compressions exchange."""
        found = [*self.exchanges.items()]  # as other threads change it meanwhile
        return (*(replace(each, fetched=self.fetched is other) for other, each in found if other is not of),)


def purpose(name: str) -> str:
    """Return what ranks come to a gather for, by its name, such as "hvc.save"."""
    return _PURPOSES.get(name.split(".")[1], name) if "." in name else name


def advice(name: str | None) -> str:
    """Return what to do where not every rank comes to a gather, after a semicolon; empty where that is not known."""
    return "; call save() and load() on every rank, not on rank 0 alone" if name in ("hvc.save", "hvc.load") else ""


def is_known(name: str) -> bool:
    """Return whether this is the name of a gather."""
    return purpose(name) != name


def different_purposes(what: Mapping[str, Sequence[int]], rank: int) -> str:
    """Return what is wrong where ranks have come to different things.

    Args:
        what: in words, with the numbers of the ranks that have come to it.
        rank: the number of this one.
    """
    found = (f"rank(s) {listed(sorted(ranks))} to {each}" for each, ranks in what.items())
    return (
        f"rank {rank}: the ranks have come to different things: {', '.join(found)}; call save(), load() and the "
        "optimizers' steps in the same order on every rank: none of them is for rank 0 alone"
    )
