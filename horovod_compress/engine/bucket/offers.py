"""Which tensors of a bucket were offered in the step under way."""

from __future__ import annotations

from ...schedule.plan import Bucket


class Offers:
    """Counts a bucket's tensors in, twice: as they are claimed, and as their offers are done."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._claimed: list[bool] = []
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._claimed = [False] * len(self._bucket.tensors)
        self.waiting: list[int] = []  # offered, and to be handed to the codec with the last one
        self.refused: BaseException | None = None  # why the codec could not take them
        self.finish()

    def finish(self) -> None:
        """End a step: what comes now belongs to the next one."""
        self._started = self._done = 0
        #: Whether the exchange has begun.
        self.taken = False

    @property
    def full(self) -> bool:
        """Whether every tensor of the bucket was offered, and the bucket waits for its exchange."""
        return self._done == len(self._bucket.tensors) and not self.taken and not self.waiting

    @property
    def waits(self) -> bool:
        """Whether every tensor was offered, and the codec has not been given those that waited for the last one."""
        return self._done == len(self._bucket.tensors) and bool(self.waiting)

    @property
    def busy(self) -> bool:
        """Whether the bucket is anywhere between its first offer and its result."""
        return self._started > 0

    def claim(self, position: int) -> bool:
        """Announce an offer; return False if there was one for this tensor in this step already."""
        if self._claimed[position]:
            return False
        self._claimed[position] = True
        self._started += 1
        return True

    def count_in(self) -> None:
        """Finish an offer."""
        self._done += 1

    def missing(self) -> list[str]:
        """Return the tensors that were not offered in the step under way."""
        claimed = self._claimed if self.busy else [False] * len(self._claimed)
        return [tensor.name for tensor, came in zip(self._bucket.tensors, claimed, strict=True) if not came]
