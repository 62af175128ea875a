"""Copies of what waits on a rank of an elastic job, which its neighbour holds from commit to commit.

Each rank sends its own to one on another host, where there is any. Where a rank dies, the one that has its copy adds
that to its own: residuals enter the mean over ranks, so it does not matter who has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.saved import checksums
from ...engine.saved.redistribute import added, of_one_rank
from .job import HorovodJob, to_another


class Neighbour:
    """What the rank before this one kept at the last commit.

    Attributes:
        rank: of that rank; -1 where nothing is held.
    """

    def __init__(self) -> None:
        self.rank, self._held, self._mine = -1, dict[str, Any](), bytearray()
        self._coming: tuple[int, dict[str, Any]] = -1, {}  # of a commit that is not done yet

    def prepare(self, mine: Mapping[str, Any]) -> int:
        """Write down what is this rank's own of a state; return its bytes, which ranks show each other."""
        self._mine = bytearray()
        for part in checksums.parts(on_host(of_one_rank(mine))):  # which look at each tensor several times
            self._mine += part
        return len(self._mine)

    def exchange(self, sizes: list[int], ahead: int, job: HorovodJob, seconds: float) -> None:
        """Send that to a rank so many places ahead, and hold what another has sent; all ranks call this.

        Args:
            sizes: what :meth:`prepare` has returned on each rank.
            ahead: the same on all ranks; at least 1, and less than there are.

        Raises:
            ExchangeError, HorovodInternalError: some rank did not come; what was held before still is.
        """
        if job.size > 1:
            before, number = (job.rank - ahead) % job.size, len(self._mine)
            self._mine += bytes(-number % 8)  # counts of elements have 32 bits
            found = to_another(torch.frombuffer(self._mine, dtype=torch.int64), ahead, "hvc.commit.copy", job, seconds)
            self._coming = before, checksums.parse(found.view(torch.uint8).numpy().data[: sizes[before]])
        else:
            self._coming = -1, {}
        self._mine = bytearray()

    def take(self) -> None:
        """Hold what was exchanged last: it is committed."""
        (self.rank, self._held), self._coming = self._coming, (-1, {})

    def forget(self) -> None:
        """Hold nothing."""
        (self.rank, self._held), self._coming = (-1, {}), (-1, {})

    def added_to(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state with what is held."""
        return added(mine, self._held)


def on_host(part: Any) -> Any:
    """Return a part of a state with its tensors in host memory."""
    if isinstance(part, Tensor):
        return part.cpu()
    if isinstance(part, dict):
        return {name: on_host(value) for name, value in part.items()}
    return [on_host(value) for value in part] if isinstance(part, list) else part
