"""How far a rank has come: for its frames, for its note if it fails, and for what the ranks compare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .agreement.notes import AWAITED, EXCHANGED, MEETING, Place


class Progress:
    """Steps and buckets of one rank; written by its exchange and decoding threads."""

    def __init__(self) -> None:
        #: The step of the exchange thread.
        self.step = 0
        #: Steps exchanged, whatever their numbers.
        self.done = 0
        #: The last step and bucket whose result is there.
        self.finished: tuple[int, int] | None = None
        self._meets: float | None = None  # since when the training thread waits for all ranks to meet
        self._exchanges: float | None = None  # since when a bucket is exchanged
        self._at: Place = (0, 0, AWAITED)

    def awaits(self, bucket: int) -> None:
        """Note that the gradients of a bucket are awaited."""
        self._exchanges = None
        self._at = self.step, bucket, AWAITED

    def exchanges(self) -> None:
        """Note that this bucket is being exchanged."""
        self._at = self.step, self._at[1], EXCHANGED
        self._exchanges = time.monotonic()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Note that the training thread waits for all ranks to meet, before it offers gradients."""
        self._meets = time.monotonic()
        try:
            yield
        finally:
            self._meets = None

    def waits_since(self) -> float | None:
        """Return since when this rank has been in what needs all ranks, on the monotonic clock; None if it is not."""
        return self._exchanges if self._meets is None else self._meets

    def place(self) -> Place:
        """Return where the rank is, to be compared with others."""
        step, bucket, come = self._at
        return step, bucket, come if self._meets is None else max(come, MEETING)
