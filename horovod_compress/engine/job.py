"""The ranks that exchange, as the framework knows them: the one thing that differs between fronts before a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import NonFiniteError
from .agreement.handshake import Place
from .saved.manifests import RankGroup


@dataclass(frozen=True)
class Gathering:
    """How ranks show each other their data.

    Attributes:
        name: of what they meet for, such as "hvc.handshake".
        seconds: until they have to be there.
        by_name: the error is to name the ranks that are missing, where that takes an effort.
        under: what gathers are matched by, where that is not the name.
        failed: returns whether it is known that not every rank will come.
    """

    name: str
    seconds: float
    by_name: bool = False
    under: str | None = None
    failed: Callable[[], bool] = lambda: False


class Job(Protocol):
    """The ranks of one compression, in the run of the framework in which it was made."""

    @property
    def rank(self) -> int:
        """Return the number of this rank among those that take part."""

    @property
    def size(self) -> int:
        """Return how many ranks take part."""

    @property
    def row(self) -> Job | None:
        """Return the ranks, this one included, that have one model in parts; None where each has the whole."""

    def agree(self, mine: NonFiniteError | None, seconds: float) -> NonFiniteError | None:
        """Return the error that training can go on after, of this rank or of any other one of its row.

        Raises:
            ExchangeError: not all of them came within so many seconds.
        """

    @property
    def number(self) -> int:
        """Return the number of this rank in the whole job, as people know it."""

    def group_of_all(self) -> RankGroup | None:
        """Return the ranks of all rows, None where they are the whole job."""

    def running(self) -> bool:
        """Return whether the framework runs, so that ranks can meet."""

    def included(self) -> bool:
        """Return whether this rank takes part."""

    def forked(self) -> bool:
        """Return whether this process is a fork of the rank, and has none of its threads."""

    def check(self) -> None:
        """Refuse to go on in another run than that which the ranks connected in.

        Raises:
            ConfigError: the framework was started again, or this is a fork.
        """

    def place(self) -> Place:
        """Return where this rank is.

        Raises:
            ConfigError: there is no address, wherever the other ranks are.
        """

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        """Return the plain data of every rank, in rank order; tuples have become lists.

        All ranks wait for it at the same time: what one of them has given up is no answer to another.

        Raises:
            ExchangeError: not every rank came in time.
        """

    def gather_all(self, value: Any, asked: Gathering) -> list[Any]:
        """Return that of the ranks of all rows, row by row; where there are no rows, that of every rank.

        Raises:
            ExchangeError: likewise.
        """
