"""What a rank that leaves by itself tells the others, which may come to need it: else they would take it for killed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...exchange.transports.transport import Transport
from .notes import Notes

_TOPIC = "left"
_MOST = 300  # characters of an error's text


def leave_word(transport: Transport, why: str) -> None:
    """Tell the other ranks why this one leaves, before it closes its connections; the first reason counts."""
    if transport.rank not in transport.said(_TOPIC):
        transport.say(_TOPIC, why)


def with_words(transport: Transport, notes: Notes) -> dict[int, Mapping[str, Any]]:
    """Return the notes of all ranks, with words in place of those of ranks that have left none, as they left before."""
    words = {rank: {"why": why} for rank, why in transport.said(_TOPIC).items()}
    return {**words, **notes}


def why_closed() -> str:
    """Return why a compression is closed, in words: on its way, an error may come by a ``finally``."""
    return f"closed its compression{_because_of(sys.exc_info()[1])}"


def why_ended() -> str:
    """Return why this process ends, in words, at its end."""
    # A prompt goes on after errors, and keeps the last one.
    last = None if hasattr(sys, "ps1") or sys.flags.interactive else getattr(sys, "last_value", None)
    return f"ended{_because_of(last)}" if last else "came to the end of its program, or called sys.exit()"


def _because_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    text = " ".join(str(error).split())
    return f" because of {type(error).__name__}" + (f": {text[:_MOST]}" if text else "")
