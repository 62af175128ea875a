"""Bytes from rank to rank, and how a transfer under way ends."""

from __future__ import annotations

import threading
from typing import Protocol

from torch import Tensor

from ..deadline import Deadline


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: Deadline) -> None:
        """Return when the bytes have arrived, or have left.

        Raises:
            PeerError: the peer is gone, or the deadline passed.
        """


class Broken(threading.Event):
    """Set when the connection to a peer broke."""

    #: Whether the peer left a note before, and so has nothing more to send.
    noted = False


class Messages(Protocol):
    """Moves bytes between the ranks of one job, in one order for each pair of them."""

    rank: int
    size: int

    def send(self, data: Tensor, to: int) -> Pending:
        """Start to send ``uint8`` data, which must not change before the wait returns."""

    def receive(self, data: Tensor, frm: int) -> Pending:
        """Start to receive exactly ``data.numel()`` bytes into ``data``."""
