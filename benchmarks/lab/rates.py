"""Link rates as `tc` writes them, and what a limit of that rate needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

#: A token bucket lets this much time's worth of bytes pass at once. It has to cover the kernel's
#: timer. More would carry small messages over the link at no cost.
_BURST_SECONDS = 0.64e-3
#: At least ten full Ethernet frames.
_LEAST_BURST = 16 * 1024
#: What the network stack hands over as one piece, with room for the headers of its segments. A token
#: bucket cuts up pieces that are longer than its burst, frame by frame, which costs processor time that
#: the ranks need: at 300 Mbit/s a quarter of the rate was lost.
_PIECE_OF_BURST = 0.9
MOST_PIECE = 64 * 1024  # Linux's own limit
#: What a port holds before packets are dropped, in time, but at least the thousand full Ethernet
#: frames of a Linux interface's own queue.
_QUEUE_SECONDS = 25e-3
_LEAST_QUEUE = 1000 * 1514


@dataclass(frozen=True)
class Rate:
    """The limit of a link, the same in both directions.

    Attributes:
        text: as given, such as ``1gbit``.
        bits: per second.
    """

    text: str
    bits: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read a rate.

        Raises:
            ValueError: it is not a positive number with one of the units kbit, mbit, gbit.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
        if not found or not float(found[1]):
            raise ValueError(f"a rate is a number and kbit, mbit or gbit, such as 100mbit, got {text!r}")
        return cls(found[0], float(found[1]) * _UNITS[found[2]])

    @property
    def burst(self) -> int:
        """Bytes that pass at once after a pause."""
        return max(_LEAST_BURST, int(self.bits / 8 * _BURST_SECONDS))

    @property
    def piece(self) -> int:
        """Bytes that a host's network stack may hand to its link at once."""
        return min(MOST_PIECE, int(self.burst * _PIECE_OF_BURST))

    @property
    def queue(self) -> int:
        """Bytes that wait at a port before packets are dropped."""
        return max(_LEAST_QUEUE, int(self.bits / 8 * _QUEUE_SECONDS))


def parse_delay(text: str) -> float:
    """Return a delay such as ``500us`` or ``5ms`` in seconds.

    Raises:
        ValueError: it is not a number with one of the units us, ms, s.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if not found:
        raise ValueError(f"a delay is a number and us, ms or s, such as 5ms, got {text!r}")
    return float(found[1]) * _TIMES[found[2]]
