"""The interface of a transport: bytes to one peer before a deadline, or an error."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from ..deadline import Deadline
from .link import NcclLink
from .messages import Messages, Pending


class Questions(Protocol):
    """Questions and answers between ranks, beside all messages."""

    def answer(self, call: Callable[[], str]) -> None:
        """Have other ranks' questions answered with what this returns, from a thread of its own, at any time."""

    def ask(self) -> dict[int, tuple[float, str]]:
        """Ask the other ranks, and return what each has answered last, and when, on the monotonic clock.

        It does not wait: what is answered to this is returned later. Ranks that are frozen never answer.
        """


class Transport(Messages, Protocol):
    """Moves bytes between the ranks of one job.

    Messages between two ranks arrive in the order in which they were sent, and are matched with
    receives in the order in which these were posted. Neither call blocks.
    """

    name: str

    @property
    def link(self) -> NcclLink | None:
        """What moves payloads from GPU to GPU; None where they travel as messages, from host memory."""

    @property
    def adds(self) -> Collection[torch.dtype]:
        """The types of numbers that :meth:`add_up` takes."""

    @property
    def aside(self) -> Messages:
        """The same connections for messages with an order to themselves, which never meet the others."""

    def add_up(self, data: Tensor, deadline: Deadline) -> Pending:
        """Start to write the sum over all ranks over ``data``, the same bits on every rank.

        Every rank has to call it, in the same order. It is no message: others go on beside it.
        """

    def abort(self, note: dict[str, Any]) -> None:
        """Break every connection, so that every peer that waits for this rank fails at once.

        Args:
            note: why, as plain data, for the other ranks' messages.
        """

    def notes(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the notes of the ranks that aborted, waiting at most ``seconds`` for more."""

    def on_abort(self, call: Callable[[], None]) -> None:
        """Have this called once another rank has aborted, from a thread of its own; it is a hint, and not certain."""

    def say(self, topic: str, text: str) -> None:
        """Leave word for the other ranks; the last one counts. It takes a moment, and is not certain."""

    def said(self, topic: str) -> dict[int, str]:
        """Return the last word of each rank that has left one, as far as it can be learned in a moment."""

    @property
    def questions(self) -> Questions:
        """What ranks ask each other while they wait."""

    def close(self) -> None:
        """Release the connections after the last exchange."""
