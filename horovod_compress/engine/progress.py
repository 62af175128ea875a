"""How far a rank has come: for its frames, for its note if it fails, and for what the ranks compare."""

from __future__ import annotations

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
        #: Whether the training thread waits for all ranks to meet, before it offers gradients.
        self.meeting = False
        self._at: Place = (0, 0, AWAITED)

    def awaits(self, bucket: int) -> None:
        """Note that the gradients of a bucket are awaited."""
        self._at = self.step, bucket, AWAITED

    def exchanges(self) -> None:
        """Note that this bucket is being exchanged."""
        self._at = *self._at[:2], EXCHANGED

    def place(self) -> Place:
        """Return where the rank is, to be compared with others."""
        step, bucket, come = self._at
        return step, bucket, max(come, MEETING) if self.meeting else come
